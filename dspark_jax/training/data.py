"""The rows a drafter is trained on, as a config asks for them: found, written or answered, then kept in the workdir."""

import dataclasses
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from dspark_jax.data.conversations import PromptRow
from dspark_jax.data.generate import write_answers, write_prompts
from dspark_jax.data.keep_out import KeepOut
from dspark_jax.data.prompts import training_prompts
from dspark_jax.decoding.engine import Engine
from dspark_jax.interop.target_io import Target
from dspark_jax.scheduling.json_files import write_json


def training_rows(config: ConfigDict, target: Target) -> list[dict[str, Any]]:
    """Prompts with the target's answers; an interrupted run is continued."""
    data = config.data
    engine = Engine(target, max_slots=data.max_slots, cache_tokens=data.max_slots * data.max_length)
    return write_answers(
        engine,
        find_prompts(config, engine),
        Path(config.workdir) / "answers.jsonl",
        data.temperatures,
        max_tokens=data.max_answer_tokens,
        seed=config.seed,
    )


def find_prompts(config: ConfigDict, engine: Engine) -> list[PromptRow]:
    """The config's prompts, read or written by the target, without evaluation questions.

    What was left out is said on stderr, and in full in WORKDIR/prompts.report.json.
    """
    data, folder = config.data, Path(config.workdir)
    keep_out = KeepOut.of_folder(data.keep_out) if data.keep_out else None
    if data.prompts:
        rows, report = training_prompts(data.prompts, data.num_prompts, keep_out)
        report.print()
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "prompts.report.json", dataclasses.asdict(report))
        return rows
    return write_prompts(
        engine,
        folder / "prompts.jsonl",
        data.num_prompts,
        data.openings,
        temperature=data.prompt_temperature,
        max_tokens=data.max_prompt_tokens,
        seed=config.seed,
        keep_out=keep_out,
    )
