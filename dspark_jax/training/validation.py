"""Rows that are never trained on, and what a drafter does with them: always the same rows, batches and anchors."""

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from dspark_jax.data.batches import PAD_TO, Batch, Sample, learnt_length, learnt_part, loss_mask
from dspark_jax.data.packing import MicroBatch, micro_batches
from dspark_jax.errors import UserError
from dspark_jax.models.drafter import Borrowed
from dspark_jax.models.eagle3 import Eagle3
from dspark_jax.models.layers import Params
from dspark_jax.training.checkpoints import BestWeights
from dspark_jax.training.features import CachedFeatures, FeatureSource
from dspark_jax.training.metrics import MetricLog, means
from dspark_jax.training.parts import filled_up
from dspark_jax.training.step import Setup
from dspark_jax.training.update import arrays_of, divisors, part_measures

Rows = Sequence[Mapping[str, Any]]
NO_EPOCH = 2**31  # in whose place anchors of validation are drawn


def split_rows(rows: Rows, part: float) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Rows to train on and rows held out, about `part` of them; both keep every row's place, empty in one of the two.

    A hash of the conversation's id alone decides, so that a row stays on its side when others come or go, and all
    turns of a conversation are on one side. UserError when `part` is no part.
    """
    check_part(part)
    held = [is_held_out(row.get("conversation", row["id"]), part) if part else False for row in rows]
    empty = {"prompt_ids": [], "answer_ids": []}
    pick = lambda side: [row if h is side else {"id": row["id"], **empty} for row, h in zip(rows, held, strict=True)]  # noqa: E731
    return pick(False), pick(True)


def check_part(part: float) -> None:
    """Raises UserError where `part` cannot be held out of anything."""
    if not 0 <= part < 1:
        raise UserError(f"data.validation={part}: it is the part of the rows that is held out, from 0 to below 1")


def is_held_out(key: str, part: float) -> bool:
    """Whether the row of this id is among the `part` that is held out."""
    return int.from_bytes(hashlib.sha256(f"validation/{key}".encode()).digest()[:8], "big") < part * 2**64


def fixed_batches(rows: Rows, batch_size: int, max_length: int) -> list[Batch]:
    """Every row that can be learnt once, sorted by length. The last batch is filled up with rows that do not count."""
    lengths = [learnt_length(row, max_length) for row in rows]
    order = sorted((n for n, length in enumerate(lengths) if length), key=lambda n: lengths[n])
    batches = []
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        length_B = np.array([lengths[n] for n in chosen] + [lengths[chosen[0]]] * (batch_size - len(chosen)), np.int32)
        row_B = np.array(chosen + chosen[:1] * (batch_size - len(chosen)))
        shape = (batch_size, -(-int(length_B.max()) // PAD_TO) * PAD_TO)
        token_BxS, mask_BxS = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for i, (number, length) in enumerate(zip(row_B, length_B, strict=True)):
            token_BxS[i, :length] = (rows[number]["prompt_ids"] + rows[number]["answer_ids"])[:length]
            if i < len(chosen):
                mask_BxS[i, :length] = loss_mask(rows[number])[:length]
        batches.append(Batch(token_BxS, mask_BxS, length_B, row_B))
    return batches


def fixed_packs(config: ConfigDict, rows: Rows, devices: int) -> list[MicroBatch]:
    """Every row that can be learnt once, in packs of one shape, with the same anchors always."""
    t, max_length = config.train, config.data.max_length
    samples = [Sample(n, NO_EPOCH, *learnt_part(row, max_length)) for n, row in enumerate(rows)]
    samples = [sample for sample in samples if sample.token_ids]
    count = -(-len(samples) // (t.batch_size // t.micro_steps))
    return micro_batches(samples, count, t.num_anchors, t.blocks_at_once, config.seed, devices) if samples else []


class Validation:
    """Measures a drafter on the rows held out, and keeps its best weights. UserError when there is no row to learn.

    `summary`: of the last time, for the progress bar.
    """

    def __init__(
        self, config: ConfigDict, setup: Setup, borrowed: Borrowed, source: FeatureSource | CachedFeatures, rows: Rows
    ):
        self._every, self._steps = config.train.validate_every, config.train.steps
        self._setup, self._borrowed, self._source = setup, borrowed, source
        self._best, self.summary = BestWeights(config.workdir), ""
        devices = source.target.mesh.size if source.target.mesh else 1
        if isinstance(setup.drafter, Eagle3):
            batches = fixed_batches(rows, config.train.batch_size, config.data.max_length)
            self._batches = [filled_up(batch, devices) for batch in batches]
        else:
            self._batches = fixed_packs(config, rows, devices)
        if not self._batches:
            raise UserError(
                f"data.validation={config.data.validation} holds out none of {len(rows)} rows: raise it, or set it 0"
            )
        if self._every < 1:
            raise UserError(f"train.validate_every={self._every}: it is a number of steps")

    def after(self, step: int, weights: Params, log: MetricLog, stopped: Callable[[], bool]) -> None:
        """Validates after every `train.validate_every`-th step and the last, unless that step's is in the log."""
        due = step > 0 and (step % self._every == 0 or step == self._steps)
        row = self.measure(weights, stopped) if due and step not in log.validated else None
        if row is None:
            return
        tau = row["tau_probabilistic"]
        self._best.offer(step, tau, weights)
        log.write_validation(step, row)  # after the weights are safe: what is in the log is not done again
        self.summary = f"  validation {tau:.3f} (best {self._best.tau:.3f}, step {self._best.step})"

    def best_weights(self, last: Params) -> Params:
        """The weights to export; says on stderr of which step they are."""
        best = self._best
        if not best.step:
            return last
        if jax.process_index() == 0:
            print(f"best on validation: step {best.step}, {best.tau:.3f} tokens per round", file=sys.stderr, flush=True)
        return best.restore(last)

    def measure(self, weights: Params, stopped: Callable[[], bool]) -> dict[str, Any] | None:
        """The means over all rows held out. None when `stopped` says so in between."""
        window = []
        for batch in self._batches:
            if stopped():
                return None
            features = self._source(batch)
            (whole,) = divisors(self._setup, self._borrowed, weights, lambda _, f=features: f, [batch])
            # As after the last step, so that the losses of a curriculum can be compared.
            args = (weights, self._steps, features, arrays_of(batch), whole)
            window.append(jax.device_get(part_measures(self._setup, self._borrowed, *args)))
        return means(window)
