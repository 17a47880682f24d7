"""What `bench.peers` measures: the other side's process, the turns, the table."""

import functools
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import rich.console
import rich.table
from ml_collections import ConfigDict
from safetensors.numpy import save_file

from dspark_jax.data.conversations import read_prompts
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.requests import prompt_token_ids
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.demo import PROMPTS
from dspark_jax.errors import UserError
from dspark_jax.evaluation.bench import warn_if_busy
from dspark_jax.evaluation.equality import first_difference
from dspark_jax.evaluation.measurements import compiled_programs, usable_threads
from dspark_jax.evaluation.report import describe_device, environment
from dspark_jax.evaluation.timing import Clock, CpuUse, Timing
from dspark_jax.evaluation.transformers_step import hf_settings, hf_tensors
from dspark_jax.interop.target_io import Target
from dspark_jax.progress import Progress
from dspark_jax.serving import chat_prompt, load_models, make_engine

PLAIN, LOOKUP, OFF, DRAFTED = "transformers", "transformers, lookup", "dspark_jax, off", "dspark_jax, drafted"
OTHER_SIDE = Path(__file__).parent / "transformers_side.py"
Answers = list[list[int]]  # token ids, an answer per prompt


def measure(
    config: ConfigDict, python: Path, prompts: str | None, limit: int | None, tokens: int, turns: int
) -> dict[str, Any]:
    """The report of all four ways. `python`: the other side's interpreter; `prompts`: a JSONL, the demo's if None."""
    if jax.default_backend() != "cpu":
        raise UserError("the comparison is of CPUs: set JAX_PLATFORMS=cpu")
    with config.unlocked():
        config.target.dtype = "float32"
    rows = read_prompts(prompts or PROMPTS)[:limit]
    target, drafter = load_models(config)
    if drafter is None:
        raise UserError("ours is measured with a drafter too: set serve.drafter")
    engines = {
        OFF: make_engine(config, target, None, strategy="off", max_slots=1),
        DRAFTED: make_engine(config, target, drafter, max_slots=1),
    }
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=tokens)
    asked = [chat_prompt(config, target, row.messages) for row in rows]
    prompt_ids = [prompt_token_ids(prompt, target.tokenizer, target.config.vocab_size) for prompt in asked]
    with Peer(python, target) as peer:
        report = compare(target, peer, engines, prompt_ids, params, turns)
    return report | {"drafter": drafter.name, "strategy": config.serve.strategy}


class Peer:
    """The other side's process, with a target's weights. A context: it ends with it. `versions`: what it runs."""

    def __init__(self, python: Path, target: Target):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "settings.json").write_text(json.dumps(hf_settings(target)))
            tensors = {name: np.ascontiguousarray(a, np.float32) for name, a in hf_tensors(target).items()}
            save_file(tensors, Path(folder) / "model.safetensors")
            command = [python, OTHER_SIDE, folder, str(usable_threads())]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.versions = self._read()  # the files are read by then
        self._cpu_before = self._cpu_now = self.versions.pop("cpu_seconds")

    @property
    def cpu_seconds(self) -> float:
        """Seconds of CPU that its answers have taken."""
        return self._cpu_now - self._cpu_before

    def answer(self, prompts: Answers, max_tokens: int, eos: Sequence[int], lookup: bool) -> tuple[float, Answers]:
        """Seconds of answering the prompts one after another, and the answers."""
        asked = {"prompts": prompts, "max_tokens": max_tokens, "eos": list(eos), "lookup": lookup}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        self._cpu_now = answer["cpu_seconds"]
        return answer["seconds"], answer["answers"]

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise UserError(f"the process of transformers ended with code {self._process.wait()}: see its words above")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # closes its input, by which it ends


def compare(
    target: Target, peer: Peer, engines: Mapping[str, Engine], prompts: Answers, params: SamplingParams, turns: int
) -> dict[str, Any]:
    """All ways in turn: a row for each, with its seconds, tokens, and texts compared with those of the first."""
    answers: dict[str, Answers] = {}

    def theirs(name: str, lookup: bool) -> float:
        seconds, answers[name] = peer.answer(prompts, params.max_tokens, target.config.eos_token_ids, lookup)
        return seconds

    def ours(name: str) -> float:
        engines[name].pages.forget()  # or the prompts of the turn before would not be read again
        start = time.perf_counter()
        answers[name] = [completion.token_ids for completion in engines[name].generate(prompts, params)]
        return time.perf_counter() - start

    calls: dict[str, Callable[[], float]] = {
        PLAIN: functools.partial(theirs, PLAIN, False), OFF: functools.partial(ours, OFF),
        LOOKUP: functools.partial(theirs, LOOKUP, True), DRAFTED: functools.partial(ours, DRAFTED),
    }  # fmt: skip
    clock, used = Clock(turns, compiled_programs), CpuUse()
    with Progress("turns", len(calls) * (turns + 1)) as progress:

        def counted(name: str) -> float:
            seconds = calls[name]()
            progress.advance(1, f"{name}: {seconds:.1f} s")
            return seconds

        times = clock.in_turn({name: functools.partial(counted, name) for name in calls}, settle=False)
    others = used.others_percent(peer.cpu_seconds)
    rows = [_row(name, times[name], answers[name], answers[PLAIN]) for name in (PLAIN, LOOKUP, OFF, DRAFTED)]
    return {
        **environment(), **peer.versions, "threads": usable_threads(), "others_cpu_percent": others, "turns": turns,
        "target": target.name, "dtype": str(target.dtype), "prompts": len(prompts), "max_tokens": params.max_tokens,
        "rows": rows, "differences": _differences(target, prompts, answers, params),
        "compilations_after_warm_up": clock.compilations,
    }  # fmt: skip


def _row(name: str, timing: Timing, answers: Answers, reference: Answers) -> dict[str, Any]:
    tokens, seconds = sum(map(len, answers)), timing.median / 1e3
    same = sum(a == b for a, b in zip(answers, reference, strict=True))
    spread = timing.entries("")["_iqr_ms"] / 1e3
    return {
        "way": name, "seconds": seconds, "iqr_seconds": spread, "tokens": tokens, "tokens_per_second": tokens / seconds,
        "same_texts": same,
    }  # fmt: skip


def _differences(target: Target, prompts: Answers, answers: Mapping[str, Answers], params: SamplingParams) -> list[str]:
    """Where a way's text parts from that of plain `transformers`, and how close the two tokens were there."""
    lines = []
    for name, given in answers.items():
        for number, (prompt, a, b) in enumerate(zip(prompts, answers[PLAIN], given, strict=True), start=1):
            difference = first_difference(target, prompt, a, b, params)
            lines += [f"prompt {number}, {name}: {difference}"] if difference else []
    return lines


def print_report(report: dict[str, Any]) -> None:
    """The table, and under it what could make its numbers worth less."""
    versions = f"torch {report['torch']}, transformers {report['transformers']}"
    print(f"{describe_device(report)}, {versions}, {report['threads']} threads")
    print(f"{report['target']}, {report['dtype']}; drafter {report['drafter']}, strategy {report['strategy']}")
    words = f"{report['prompts']} prompts one after another, {report['max_tokens']} tokens at most, greedy"
    print(f"{words}; medians of {report['turns']} turns ± half the interquartile range")
    table = rich.table.Table("way")
    for name in ("seconds", "tokens", "tokens/s", "ratio", "same texts"):
        table.add_column(name, justify="right")
    for row in report["rows"]:
        seconds = f"{row['seconds']:.2f} ±{row['iqr_seconds'] / 2:.2f}"
        ratio = row["tokens_per_second"] / report["rows"][0]["tokens_per_second"]
        same = f"{row['same_texts']} of {report['prompts']}"
        speed = f"{row['tokens_per_second']:.1f}"
        table.add_row(row["way"], seconds, str(row["tokens"]), speed, f"{ratio:.2f}", same)
    rich.console.Console().print(table)
    for line in report["differences"]:
        print(line)
    others = report["others_cpu_percent"]
    print(f"programs compiled after the warm-up: {report['compilations_after_warm_up']}")
    print("other processes' share of the CPUs: " + ("unknown" if others is None else f"{others:.0f} %"))
    warn_if_busy(report)
