"""Training batches: a pure function of (rows, seed, step), so that a resumed run sees what an unbroken one would."""

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import flax.struct
import numpy as np

from dspark_jax.errors import UserError

PAD_TO = 64  # sequence lengths are multiples of this: few shapes, little padding
MIN_LEARNT = 8  # answers shorter than this teach a block drafter nothing
SORTED_BATCHES = 16  # rows are sorted by length within this many batches, so that a batch pads little


def draft_vocabulary(
    rows: Iterable[Mapping[str, Any]], size: int, always: Iterable[int], vocab_size: int
) -> np.ndarray:
    """The `size` most frequent answer tokens as increasing ids; `always` (stop tokens) are among them.

    Ids never seen fill up a vocabulary that the answers do not; ties go to the lower id.
    """
    counts = collections.Counter(
        token
        for row in rows
        for token, learnt in zip(row["prompt_ids"] + row["answer_ids"], loss_mask(row), strict=True)
        if learnt
    )
    first = list(dict.fromkeys(always))
    ranked = [t for t, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if t not in first]
    unseen = (t for t in range(vocab_size) if t not in counts and t not in first)
    chosen = (first + ranked)[:size]
    while len(chosen) < size:
        chosen.append(next(unseen))
    return np.sort(np.asarray(chosen, np.int32))


def learnt_length(row: Mapping[str, Any], max_length: int) -> int:
    """How many tokens of a row, prompt and answer, are trained on; 0 if the answer's part of them is too short."""
    length = min(len(row["prompt_ids"]) + len(row["answer_ids"]), max_length)
    return length if length - len(row["prompt_ids"]) >= MIN_LEARNT else 0


@flax.struct.dataclass
class Batch:
    """B sequences, zero-padded. The loss mask is 1 on the answer: the prompt and padding are not learnt."""

    token_BxS: np.ndarray
    loss_mask_BxS: np.ndarray
    length_B: np.ndarray
    row_B: np.ndarray  # which training row each sequence is


class Batches:
    """`batches(step)` gives the batch of a step."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], batch_size: int, max_length: int, seed: int):
        lengths = [learnt_length(row, max_length) for row in rows]
        self.numbers = np.flatnonzero(lengths)  # of the rows that are used
        self.sequences = [
            ((row["prompt_ids"] + row["answer_ids"])[:length], loss_mask(row)[:length])
            for row, length in zip(rows, lengths, strict=True)
            if length
        ]
        self.batch_size, self.seed = batch_size, seed
        if len(self.sequences) < batch_size:
            raise UserError(
                f"{len(self.sequences)} usable training rows are fewer than a batch of {batch_size}: "
                "give more prompts, a smaller train.batch_size, or a longer data.max_length"
            )
        self._epoch: tuple[int, list[np.ndarray]] = (-1, [])

    @property
    def per_epoch(self) -> int:
        return len(self.sequences) // self.batch_size

    def _plan(self, epoch: int) -> list[np.ndarray]:
        """The epoch's batches, as row numbers: shuffled, sorted by length in stretches, and shuffled again."""
        if self._epoch[0] != epoch:
            rng = np.random.default_rng((self.seed, epoch))
            order = rng.permutation(len(self.sequences))[: self.per_epoch * self.batch_size]
            stretch = SORTED_BATCHES * self.batch_size
            lengths = np.array([len(ids) for ids, _ in self.sequences])
            parts = [order[i : i + stretch] for i in range(0, len(order), stretch)]
            order = np.concatenate([part[np.argsort(lengths[part], kind="stable")] for part in parts])
            batches = order.reshape(-1, self.batch_size)
            self._epoch = (epoch, list(batches[rng.permutation(len(batches))]))
        return self._epoch[1]

    def __call__(self, step: int) -> Batch:
        epoch, index = divmod(step, self.per_epoch)
        rows = self._plan(epoch)[index]
        chosen = [self.sequences[i] for i in rows]
        lengths = np.array([len(ids) for ids, _ in chosen], np.int32)
        shape = (self.batch_size, -(-int(lengths.max()) // PAD_TO) * PAD_TO)
        tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for i, (ids, learnt) in enumerate(chosen):
            tokens[i, : len(ids)] = ids
            mask[i, : len(ids)] = learnt
        return Batch(tokens, mask, lengths, self.numbers[rows])


def loss_mask(row: Mapping[str, Any]) -> np.ndarray:
    """0 for each token of the prompt, 1 for each of the answer; or what the row itself says (`loss_mask`)."""
    parts = [0] * len(row["prompt_ids"]) + [1] * len(row["answer_ids"])
    return np.asarray(row.get("loss_mask", parts), np.uint8)
