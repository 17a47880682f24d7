"""Training batches: a pure function of (rows, seed, step), so that a resumed run sees what an unbroken one would."""

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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


def learnt_part(row: Mapping[str, Any], max_length: int) -> tuple[list[int], np.ndarray]:
    """The tokens of a row that are trained on, and their loss mask; nothing if its answer's part is too short."""
    length = learnt_length(row, max_length)
    return (row["prompt_ids"] + row["answer_ids"])[:length], loss_mask(row)[:length]


class Document(NamedTuple):
    """Where a training row lies in a batch: in which of its sequences or packs, and from which token on."""

    row: int
    pack: int
    start: int
    length: int


@flax.struct.dataclass
class Batch:
    """B sequences, zero-padded. The loss mask is 1 on the answer: the prompt and padding are not learnt."""

    token_BxS: np.ndarray
    loss_mask_BxS: np.ndarray
    length_B: np.ndarray
    row_B: np.ndarray  # which training row each sequence is

    @property
    def documents(self) -> list[Document]:
        parts = zip(self.row_B, self.length_B, strict=True)
        return [Document(int(row), b, 0, int(length)) for b, (row, length) in enumerate(parts) if length]


class Sample(NamedTuple):
    """A training row in one epoch."""

    row: int
    epoch: int
    token_ids: list[int]
    loss_mask: np.ndarray


class Batches:
    """`batches(step)` gives the batch of a step, `batches.samples(step)` its sequences one by one.

    `pads`: sequences of about the same length go into a batch; False, for packs: no order but chance.
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], batch_size: int, max_length: int, seed: int, pads: bool = True
    ):
        parts = [learnt_part(row, max_length) for row in rows]
        self.numbers = np.flatnonzero([len(ids) for ids, _ in parts])  # of the rows that are used
        self.sequences = [part for part in parts if part[0]]
        self.batch_size, self.seed, self.pads = batch_size, seed, pads
        if len(self.sequences) < batch_size:
            raise UserError(
                f"{len(self.sequences)} usable training rows are fewer than a batch of {batch_size}: "
                "give more prompts, a smaller train.batch_size, or a longer data.max_length"
            )
        self._orders: dict[int, np.ndarray] = {}

    def _order(self, epoch: int) -> np.ndarray:
        """The epoch's sequences: each once, shuffled; those of a batch of about the same length where batches pad."""
        if epoch not in self._orders:
            rng = np.random.default_rng((self.seed, epoch))
            order = rng.permutation(len(self.sequences))
            if self.pads:
                # The first few fill the batch that the epoch before began, the last few begin one.
                first = -epoch * len(order) % self.batch_size
                last = first + (len(order) - first) // self.batch_size * self.batch_size
                order[first:last] = self._by_length(order[first:last].copy(), rng)
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1} | {epoch: order}
        return self._orders[epoch]

    def _by_length(self, order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Whole batches: sorted by length in stretches, and shuffled again."""
        stretch = SORTED_BATCHES * self.batch_size
        lengths = np.array([len(ids) for ids, _ in self.sequences])
        for i in range(0, len(order), stretch):
            part = order[i : i + stretch]
            order[i : i + stretch] = part[np.argsort(lengths[part], kind="stable")]
        return rng.permutation(order.reshape(-1, self.batch_size)).reshape(-1)

    def samples(self, step: int) -> list[Sample]:
        """A step's samples. Epochs follow one another without a gap: every row is seen once in each."""
        places = (divmod(step * self.batch_size + i, len(self.sequences)) for i in range(self.batch_size))
        chosen = [(epoch, self._order(epoch)[at]) for epoch, at in places]
        return [Sample(int(self.numbers[i]), epoch, *self.sequences[i]) for epoch, i in chosen]

    def __call__(self, step: int) -> Batch:
        chosen = self.samples(step)
        lengths = np.array([len(sample.token_ids) for sample in chosen], np.int32)
        shape = (self.batch_size, -(-int(lengths.max()) // PAD_TO) * PAD_TO)
        tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for i, sample in enumerate(chosen):
            tokens[i, : lengths[i]] = sample.token_ids
            mask[i, : lengths[i]] = sample.loss_mask
        return Batch(tokens, mask, lengths, np.array([sample.row for sample in chosen]))


def loss_mask(row: Mapping[str, Any]) -> np.ndarray:
    """0 for each token of the prompt, 1 for each of the answer; or what the row itself says (`loss_mask`)."""
    parts = [0] * len(row["prompt_ids"]) + [1] * len(row["answer_ids"])
    return np.asarray(row.get("loss_mask", parts), np.uint8)
