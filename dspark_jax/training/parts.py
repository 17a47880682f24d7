"""A step's data in its micro-batches, as a config asks for them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from dspark_jax.data.batches import Batch, Batches
from dspark_jax.data.packing import MicroBatch, micro_batches
from dspark_jax.errors import UserError

Parts = Callable[[int], list[Batch] | list[MicroBatch]]  # parts(step)


def step_parts(config: ConfigDict, rows: Sequence[Mapping[str, Any]], devices: int = 1) -> Parts:
    """`parts(step)` gives the micro-batches of a step: packs with their anchors, or padded sequences for Eagle3.

    A pure function of rows, seed and step; `devices` divide every micro-batch. Raises UserError where the batch cannot
    be divided as the config says.
    """
    t = config.train
    check_division(config)
    padded = config.drafter.kind == "eagle3"
    batches = Batches(rows, t.batch_size, config.data.max_length, config.seed, pads=padded)
    if padded:
        return lambda step: [filled_up(part, devices) for part in divide(batches(step), t.micro_steps)]
    return lambda step: micro_batches(
        batches.samples(step), t.micro_steps, t.num_anchors, t.blocks_at_once, config.seed, devices
    )


def check_division(config: ConfigDict) -> None:
    """Raises UserError where a step cannot be divided as the config says."""
    t = config.train
    if min(t.batch_size, t.micro_steps, t.blocks_at_once) < 1 or t.batch_size % t.micro_steps:
        raise UserError(
            f"train.micro_steps={t.micro_steps} has to divide train.batch_size={t.batch_size}, and "
            f"train.blocks_at_once={t.blocks_at_once} to be at least 1"
        )


def divide(batch: Batch, count: int) -> list[Batch]:
    """Every count-th sequence of a batch, all padded alike."""
    return [jax.tree.map(lambda a, i=i: a[i::count], batch) for i in range(count)]


def filled_up(batch: Batch, devices: int) -> Batch:
    """A batch that `devices` divide: empty sequences behind the others."""
    more = -len(batch.length_B) % devices
    return jax.tree.map(lambda a: np.pad(a, [(0, more)] + [(0, 0)] * (a.ndim - 1)), batch) if more else batch
