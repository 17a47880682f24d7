"""The rows a drafter is trained on, as a config asks for them: found, written or answered, then kept in the workdir."""

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from dspark_jax.data.conversations import read_prompts
from dspark_jax.data.generate import write_answers, write_prompts
from dspark_jax.decoding.engine import Engine
from dspark_jax.interop.target_io import Target


def training_rows(config: ConfigDict, target: Target) -> list[dict[str, Any]]:
    """Prompts (from a file, or written by the target) with the target's answers; an interrupted run is continued."""
    data, folder = config.data, Path(config.workdir)
    engine = Engine(target, max_slots=data.max_slots, cache_tokens=data.max_slots * data.max_length)
    if data.prompts:
        prompts = read_prompts(data.prompts)[: data.num_prompts]
    else:
        prompts = write_prompts(
            engine,
            folder / "prompts.jsonl",
            data.num_prompts,
            data.openings,
            temperature=data.prompt_temperature,
            max_tokens=data.max_prompt_tokens,
            seed=config.seed,
        )
    return write_answers(
        engine,
        prompts,
        folder / "answers.jsonl",
        data.temperatures,
        max_tokens=data.max_answer_tokens,
        seed=config.seed,
    )
