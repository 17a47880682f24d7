"""The answers of an evaluation: every set at every temperature, with whole blocks, and beside plain decoding in turn.

A folder of one run holds

    answers/SET.tT.jsonl   a line per answered turn: the text, and every round's drafts and confidences
    speed.jsonl            a line per set and temperature: the same prompts answered plainly and with drafts
    *.run.json             what was run, on what

Lines are appended as answers end, keyed by id, so the same command goes on where it was stopped. All that is reported
is computed from these files.
"""

import collections
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from dspark_jax.data.conversations import PromptRow
from dspark_jax.data.generate import WAVE, WaveAnswer, answer_wave, seed_of
from dspark_jax.data.jsonl import ResumableJsonl
from dspark_jax.data.turns import Line, Turn, open_turns, thinking_variables, turn_ids
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.profiling import drafter_fingerprint
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.errors import UserError
from dspark_jax.evaluation.benchmarks import fingerprint
from dspark_jax.evaluation.measurements import compiled_programs
from dspark_jax.evaluation.report import environment, generation_report
from dspark_jax.evaluation.timing import CpuUse
from dspark_jax.interop.drafter_io import Drafter
from dspark_jax.interop.target_io import Target
from dspark_jax.progress import Progress
from dspark_jax.serving import load_models, make_engine

TRIES = 3  # a timed batch in which something had to be compiled is run again
SPEEDS = "speed.jsonl"
SETTINGS = f"{SPEEDS}.run.json"


class Setting(NamedTuple):
    """A set at a temperature."""

    name: str
    rows: list[PromptRow]  # all that the full run has
    asked: list[PromptRow]  # those that this run asks
    temperature: float

    @property
    def key(self) -> str:
        return setting_key(self.name, self.temperature)


def setting_key(name: str, temperature: float) -> str:
    """Name of a set at a temperature, as "gsm8k.t0"."""
    return f"{name}.t{temperature:g}"


def answer_sets(
    config: ConfigDict,
    sets: Mapping[str, list[PromptRow]],
    temperatures: Sequence[float],
    limit: int | None,
    plain: int,
    out: Path,
) -> None:
    """Answers what `out` lacks: the first `limit` prompts of every set, all turns, at every temperature.

    `plain`: prompts of a set whose first turns are also answered without drafting, timed in turn with drafting; 0
    leaves that out. UserError where the config has no drafter, and where `out` is of another run.
    """
    target, drafter = load_models(config)
    if drafter is None:
        raise UserError("an evaluation is of a drafter: set serve.drafter in the config")
    if target.tokenizer is None:
        raise UserError(f"{target.name} has no tokenizer: the evaluation's prompts are texts")
    block = f"fixed:{drafter.config.num_drafts}"
    engine = make_engine(config, target, drafter, strategy=block)
    run = _identity(config, target, drafter, engine)
    baseline = (
        make_engine(config, target, None, strategy="off", max_slots=min(plain, engine.max_slots)) if plain else None
    )
    settings = [Setting(name, rows, rows[:limit], t) for name, rows in sets.items() for t in temperatures]
    with (
        ResumableJsonl(out / SPEEDS, run) as speeds,
        Progress("answers", sum(len(turn_ids(s.asked)) for s in settings)) as progress,
    ):
        for setting in settings:
            asked = {"prompts": fingerprint(setting.rows), "temperature": setting.temperature}
            with ResumableJsonl(out / "answers" / f"{setting.key}.jsonl", run | asked) as file:
                job = _Job(config, engine, setting, file, progress, run["has_confidence"])
                progress.advance(len(job.ids & file.done), setting.key)
                if baseline:
                    job.compare(baseline, plain, speeds)
                job.answer()


def _identity(config: ConfigDict, target: Target, drafter: Drafter, engine: Engine) -> dict[str, Any]:
    """What two starts must share for their answers to stand in one report."""
    sampling = {name: value for name, value in config.sampling.to_dict().items() if name != "temperature"}
    has_confidence, known = bool(getattr(drafter.config, "confidence", False)), engine.temperatures
    fitted = known.fitted if known and has_confidence else {}
    return {
        **environment(), "target": target.name, "fingerprint": target.fingerprint, "dtype": str(target.dtype),
        "drafter": drafter.name, "drafter_fingerprint": drafter_fingerprint(drafter),
        "drafts": drafter.config.num_drafts, "has_confidence": has_confidence, "fitted_temperatures": dict(fitted),
        "sampler": config.serve.sampler, "max_slots": engine.max_slots, "context": engine.context,
        "sampling": sampling, "seed": config.seed, "thinking": _thinking(config),
    }  # fmt: skip


def _thinking(config: ConfigDict) -> str:
    """The reference's prompts are without thinking unless the config says otherwise."""
    return config.serve.thinking or "off"


class _Job:
    """A setting while it is answered."""

    def __init__(
        self,
        config: ConfigDict,
        engine: Engine,
        setting: Setting,
        file: ResumableJsonl,
        progress: Progress,
        has_confidence: bool,
    ):
        self.config, self.engine, self.setting, self.file, self.progress = config, engine, setting, file, progress
        self.has_confidence = has_confidence
        self.variables = thinking_variables(_thinking(config))
        self.ids = turn_ids(setting.asked)

    def answer(self) -> None:
        """All turns that the file lacks, each after the target's own answers to the ones before."""
        todo = collections.deque(open_turns(self.setting.asked, self.file.rows))
        while todo:
            wave = [todo.popleft() for _ in range(min(WAVE, len(todo)))]
            params = [self._params(turn) for turn in wave]
            for answer in answer_wave(self.engine, wave, params, self.variables):
                following = wave[answer.place].after(self._keep(wave[answer.place], params[answer.place], answer))
                if following:
                    todo.append(following)

    def compare(self, baseline: Engine, count: int, speeds: ResumableJsonl) -> None:
        """Times the first turns of `count` prompts plainly and with drafts, unless that has been done."""
        turns = [Turn(row) for row in self.setting.asked[:count]]
        key = f"{self.setting.key} x{len(turns)}"
        if key in speeds.done:
            return
        params = [self._params(turn) for turn in turns]
        used = CpuUse()
        plain, _ = _timed(baseline, turns, params, self.variables)
        drafted, answers = _timed(self.engine, turns, params, self.variables)
        for answer in answers:
            if turns[answer.place].id not in self.file.done:
                self._keep(turns[answer.place], params[answer.place], answer)
        row = {"id": key, "setting": self.setting.key, "prompts": len(turns), "plain": plain, "drafted": drafted}
        speeds.append(row | {"others_cpu_percent": used.others_percent()})

    def _params(self, turn: Turn) -> SamplingParams:
        seed = seed_of(f"{self.config.seed}/evaluate/{self.setting.name}/{turn.id}")
        given = {"temperature": self.setting.temperature, "seed": seed}
        return SamplingParams(**(self.config.sampling.to_dict() | given))

    def _keep(self, turn: Turn, params: SamplingParams, answer: WaveAnswer) -> Line:
        done = answer.completion
        if done.finish_reason == "error":
            line = turn.failed(done.error)
        else:
            line = turn.line(
                {"content": done.text}, done.finish_reason, token_ids=done.token_ids,
                prompt_tokens=len(answer.prompt_ids), seed=params.seed, verified=done.verified, accepted=done.accepted,
            )  # fmt: skip
            if self.has_confidence:  # what stands in for one is not measured here
                line["confidence"] = [[round(z, 5) for z in logits] for logits in done.confidence]
        self.file.append(line)
        self.progress.advance(1, self.setting.key)
        return line


def _timed(
    engine: Engine, turns: Sequence[Turn], params: Sequence[SamplingParams], variables: Mapping[str, Any]
) -> tuple[dict[str, float], list[WaveAnswer]]:
    """Tokens per second of a batch and of a user in it, the prompts' prefill included, and its answers."""
    for _ in range(TRIES):
        engine.pages.forget()  # else the prompts would be cached the second time
        programs, start = compiled_programs(), time.monotonic()
        answers = list(answer_wave(engine, turns, params, variables))
        seconds = time.monotonic() - start
        if compiled_programs() == programs:
            break
    done = [answer.completion for answer in answers if answer.completion.finish_reason != "error"]
    report = generation_report(done, seconds)
    names = ("tokens", "seconds", "tokens_per_second", "tokens_per_second_per_user")
    return {name: report[name] for name in names if name in report}, answers
