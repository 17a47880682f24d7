"""What a drafter is trained on, as a config asks for it: rows found, written or answered, or a cache of features."""

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from dspark_jax.data.conversations import read_prompts
from dspark_jax.data.generate import write_answers, write_prompts
from dspark_jax.data.reference_cache import ReferenceCache
from dspark_jax.data.target_cache import TargetCache
from dspark_jax.decoding.engine import Engine
from dspark_jax.errors import UserError
from dspark_jax.interop.target_io import Target
from dspark_jax.training.features import open_cache


def features_cache(config: ConfigDict, target: Target) -> TargetCache | ReferenceCache | None:
    """The cache to train from, whose rows are then the training rows; None: features are computed online."""
    if config.data.features == "online":
        return None
    if config.data.features != "cache":
        raise UserError(f"data.features={config.data.features!r}: it is online or cache")
    cache = open_cache(config.data.cache, target, target.tap_layers)
    if config.drafter.kind == "eagle3" and cache.lacks_last_rows:
        raise UserError(
            f"{config.data.cache} was written while answers were generated, without the last tokens' features, which "
            "Eagle3 learns from: write another with prepare-features"
        )
    return cache


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
