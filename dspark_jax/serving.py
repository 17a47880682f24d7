"""Batch serving, behind `serve.py`: prompts in, answers and a report out, resumable by request id."""

import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from dspark_jax.data.conversations import Messages, PromptRow, read_prompts
from dspark_jax.data.generate import seed_of
from dspark_jax.data.jsonl import ResumableJsonl, check_run
from dspark_jax.data.parts import give_part, part_path, parts_of, take_parts, written_rows
from dspark_jax.data.turns import thinking_variables
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.profiling import drafter_fingerprint, stamp_of
from dspark_jax.decoding.requests import Completion, Prompt
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.errors import UserError
from dspark_jax.evaluation.report import environment, generation_report
from dspark_jax.interop.drafter_io import Drafter, load_drafter
from dspark_jax.interop.target_io import Target, load_target
from dspark_jax.parallel import describe_mesh, parse_mesh, start_processes
from dspark_jax.progress import Progress
from dspark_jax.scheduling.calibration import FILE_NAME as TEMPERATURES
from dspark_jax.scheduling.calibration import load_temperatures
from dspark_jax.scheduling.cost_model import load_table
from dspark_jax.scheduling.json_files import write_json


def load_models(config: ConfigDict) -> tuple[Target, Drafter | None]:
    """The target and, where the config names one, its drafter. Warns where it was trained on other chats."""
    thinking_variables(config.serve.thinking)  # a fault of the config is no request's
    target = load_target(config.target.path, dtype=config.target.dtype or None, mesh=parse_mesh(config.mesh))
    drafter = load_drafter(config.serve.drafter, target) if config.serve.drafter else None
    warning = drafter and foreign_chats(config, target, drafter)
    if warning:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    return target, drafter


def foreign_chats(config: ConfigDict, target: Target, drafter: Drafter) -> str | None:
    """Says how the chats a drafter was trained on differ from those it is served with; None where they do not.

    The answers are the target's own all the same.
    """
    trained, tokenizer, now = drafter.trained_on, target.tokenizer, config.serve.thinking
    serves = thinking_variables(now)
    if not trained or tokenizer is None or tokenizer.chat_template is None:
        return None
    fewer = "fewer drafts are accepted"
    if trained.get("template") != tokenizer.template_hash:
        return f"{drafter.name} was trained with another chat template than {target.name} has here: {fewer}"
    question, before = [{"role": "user", "content": "?"}], trained.get("thinking", "")
    # A template that does not know of thinking writes the same for all.
    if tokenizer.render(question, **thinking_variables(before)) != tokenizer.render(question, **serves):
        words = {"on": "with thinking on", "off": "with thinking off", "": "as the chat template thinks by itself"}
        advice = f'set serve.thinking="{before}", or expect that {fewer}'
        return f"{drafter.name} was trained {words[before]} and is served {words[now]}: {advice}"
    return None


def chat_prompt(config: ConfigDict, target: Target, messages: Messages) -> Prompt:
    """The messages, rendered where the config says whether the model is to think. UserError as the template's."""
    variables = thinking_variables(config.serve.thinking)
    if not variables or target.tokenizer is None:
        return messages
    return target.tokenizer.chat_ids(messages, **variables)


def make_engine(config: ConfigDict, target: Target, drafter: Drafter | None, **overrides: Any) -> Engine:
    """The engine that a config's `serve` section describes."""
    s = config.serve
    options = {
        "strategy": s.strategy,
        "sampler": s.sampler,
        "max_slots": s.max_slots,
        "max_length": s.max_length or None,
    }
    if drafter and "cost_table" not in overrides and cost_table_path(config).exists():
        options["cost_table"] = load_table(cost_table_path(config), stamp_of(target, drafter))
    if drafter and getattr(drafter.config, "confidence", False) and (Path(drafter.name) / TEMPERATURES).exists():
        options["temperatures"] = load_temperatures(drafter.name, drafter_fingerprint(drafter))
    return Engine(target, drafter, **(options | overrides))


def cost_table_path(config: ConfigDict) -> Path:
    """Where `profile` writes the cost table of a config, and where it is looked for."""
    return Path(config.serve.cost_table or Path(config.workdir) / "costs.json")


def sampling_params(config: ConfigDict, row: PromptRow) -> SamplingParams:
    """A request's parameters: the config's, overridden by the row's own; its seed follows from its id unless given."""
    given = {"seed": seed_of(f"{config.seed}/serve/{row.id}")} | row.options
    return SamplingParams(**(config.sampling.to_dict() | given))


def serve_file(config: ConfigDict, prompts: str | Path, out: str | Path) -> dict[str, Any]:
    """Answers every prompt of a JSONL and appends the answers to `out` as they end. Returns the report.

    Several processes (`serve.processes`), started with the same files, share the prompts, each on devices of its own;
    the first gathers all answers in `out` when they are done, the report of another is on its share. Started again
    after an interruption, by however many processes, it answers only what is missing. The report is written beside the
    answers and covers what this start generated. A prompt that cannot be answered (too long, impossible parameters)
    gets a line that says why, and the run goes on. Raises UserError before anything is generated on a broken file of
    prompts or a foreign `out`.
    """
    rows = read_prompts(prompts)
    sampling_params(config, PromptRow("config", []))  # a fault of the config is everybody's
    # No process writes before all of them have read this, so they all share out the same prompts.
    before = {row["id"] for path in (*parts_of(out), Path(out)) for row in written_rows(path)}
    index, count = start_processes(config.serve.processes)
    target, drafter = load_models(config)
    engine = make_engine(config, target, drafter)
    run, start, todo = _run_identity(config, engine, drafter), time.monotonic(), [r for r in rows if r.id not in before]
    if index == 0:
        for part in parts_of(out):
            check_run(part, run)
    with ResumableJsonl(part_path(out, index), run) as file, Progress("answers", len(rows)) as progress:
        progress.update(len(rows) - len(todo))
        _answer(config, engine, todo[index::count], file, progress)
        if index == 0:
            take_parts(file, [row.id for row in rows], count, progress)
    completions = [_completion(row) for row in file.rows if row["id"] not in before]
    report = {**environment(), "processes": count, "mesh": describe_mesh(target.mesh), "target": target.name,
              "drafter": drafter.name if drafter else None, "strategy": config.serve.strategy,
              "sampler": config.serve.sampler, **generation_report(completions, time.monotonic() - start)}  # fmt: skip
    if index == 0:
        write_json(f"{out}.report.json", report)
    else:
        give_part(file.path, out, [row.id for row in rows])
    return report


def _answer(
    config: ConfigDict, engine: Engine, todo: list[PromptRow], file: ResumableJsonl, progress: Progress
) -> None:
    """Generates and writes the answers of some prompts, or why they have none."""
    ready = []
    for row in todo:
        try:
            ready.append((row, sampling_params(config, row), chat_prompt(config, engine.target, row.messages)))
        except UserError as error:
            file.append({"id": row.id, "finish_reason": "error", "error": str(error)})
            progress.advance(1)
    requests = engine.stream_completions([prompt for _, _, prompt in ready], [params for _, params, _ in ready])
    for index, completion in requests:
        row, params, _ = ready[index]
        file.append(answer_row(row, params, completion))
        progress.advance(1)


def answer_row(row: PromptRow, params: SamplingParams, completion: Completion) -> dict[str, Any]:
    """A line of the output file."""
    if completion.finish_reason == "error":
        return {"id": row.id, "finish_reason": "error", "error": completion.error}
    logprobs = {"logprobs": [dataclasses.asdict(one) for one in completion.logprobs]} if completion.logprobs else {}
    return {
        "id": row.id, "text": completion.text, "token_ids": completion.token_ids, **logprobs,
        "finish_reason": completion.finish_reason, "seed": params.seed, "temperature": params.temperature,
        "rounds": len(completion.accepted), "tokens_per_round": completion.tokens_per_round,
        "drafted": completion.drafted, "verified": completion.verified, "accepted": completion.accepted,
        "first_token_seconds": completion.first_token_seconds, "seconds": completion.seconds,
    }  # fmt: skip


def _completion(row: dict[str, Any]) -> Completion:
    """What the report reads of an answer, from its line in the file."""
    lists = [row.get(name, []) for name in ("drafted", "verified", "accepted")]
    times = {name: row.get(name) for name in ("first_token_seconds", "seconds")}
    return Completion(row.get("token_ids", []), row.get("text", ""), row["finish_reason"], *lists, **times)


def stream_prompt(config: ConfigDict, prompt: str) -> Iterator[str | dict[str, Any]]:
    """Yields the answer's text as it is generated, and the report at the end."""
    target, drafter = load_models(config)
    engine = make_engine(config, target, drafter, max_slots=1)
    row = PromptRow("prompt", [{"role": "user", "content": prompt}])
    asked = chat_prompt(config, target, row.messages) if config.serve.thinking else prompt
    requests = engine.requests([asked], sampling_params(config, row))
    start = time.monotonic()
    for _, event in engine.run(requests, rounds=1):
        if event.finish_reason == "error":
            raise UserError(requests[0].completion.error)
        yield event.text_delta
    yield generation_report([requests[0].completion], time.monotonic() - start)


def _run_identity(config: ConfigDict, engine: Engine, drafter: Drafter | None) -> dict[str, Any]:
    """What two starts must share for their answers to belong into one file."""
    return {
        "target": engine.target.fingerprint, "drafter": dataclasses.asdict(drafter.config) if drafter else None,
        "strategy": config.serve.strategy, "sampler": config.serve.sampler, "sampling": config.sampling.to_dict(),
        "seed": config.seed, "thinking": config.serve.thinking or None,
    }  # fmt: skip
