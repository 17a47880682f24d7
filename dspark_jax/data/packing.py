"""Packs: documents of many sequences one after another, and which of their positions get a draft block.

A step's sequences are dealt to a fixed number of packs of one length, so that a step is a few programs of few shapes
however long its sequences are. A pack is what one device computes at a time; sums over packs make the step, and so it
does not matter how many devices share them, nor that some have an empty one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import flax.struct
import jax
import numpy as np

from dspark_jax.data.batches import Document, Sample

ALIGN = 16  # documents begin at multiples of this: the target attends in chunks of so many rows, none across documents


@flax.struct.dataclass
class Pack:
    """D packs of T tokens with C·N block slots each, of which N are computed at a time. Kept blocks come first.

    Padding has token 0, mask 0 and position 0; `t - position` is the first token of token t's document.
    """

    token_DxT: np.ndarray
    loss_mask_DxT: np.ndarray
    position_DxT: np.ndarray  # of a token in its document
    anchor_DxCxN: np.ndarray  # token of the pack, increasing; 0 where not kept
    keep_DxCxN: np.ndarray


class MicroBatch(NamedTuple):
    """Packs for the device, and what lies where in them for the host."""

    pack: Pack
    documents: list[Document]

    @property
    def token_BxS(self) -> np.ndarray:
        return self.pack.token_DxT


def draw_anchors(seed: int, sample: Sample, count: int) -> np.ndarray:
    """Up to `count` positions of a document, increasing: uniform without replacement among those that are to be learnt
    together with their successor (spec 1.7).

    A function of the seed, the epoch and the row alone: batches, packs and devices have no part in it.
    """
    learnt = np.asarray(sample.loss_mask) > 0
    candidates = np.flatnonzero(learnt[:-1] & learnt[1:])
    if len(candidates) <= count:
        return candidates
    rng = np.random.default_rng((seed, sample.epoch, sample.row))
    return np.sort(rng.choice(candidates, count, replace=False))


def micro_batches(
    samples: Sequence[Sample], count: int, num_anchors: int, blocks_at_once: int, seed: int, devices: int = 1
) -> list[MicroBatch]:
    """A step's samples in `count` micro-batches of a pack for each device, all of the same shape.

    Which samples a micro-batch has does not depend on the devices. With fewer samples than those, some packs are empty.
    """
    dealt = [_deal(part, devices) for part in _deal(samples, count)]
    packs = [pack for part in dealt for pack in part]
    length = bucket(max(sum(_aligned(sample) for sample in pack) for pack in packs))
    slots = max(len(pack) for pack in packs) * num_anchors  # the most there can be: one shape for the whole run
    at_once = min(slots, blocks_at_once)
    layout = (length, -(-slots // at_once), at_once, num_anchors, seed)
    return [_together([_micro_batch(pack, *layout) for pack in part]) for part in dealt]


def _together(parts: Sequence[MicroBatch]) -> MicroBatch:
    """Packs as one micro-batch."""
    documents = [document._replace(pack=i) for i, part in enumerate(parts) for document in part.documents]
    arrays = zip(*(jax.tree.leaves(part.pack) for part in parts), strict=True)
    return MicroBatch(Pack(*map(np.concatenate, arrays)), documents)


def _deal(samples: Sequence[Sample], num_packs: int) -> list[list[Sample]]:
    """Samples by length, dealt to and fro: packs get equally many, and about equally many tokens."""
    dealt = [[] for _ in range(num_packs)]
    for i, sample in enumerate(sorted(samples, key=lambda sample: -len(sample.token_ids))):
        turn = i % (2 * num_packs)
        dealt[min(turn, 2 * num_packs - 1 - turn)].append(sample)
    return dealt


def _micro_batch(
    samples: Sequence[Sample], length: int, chunks: int, at_once: int, num_anchors: int, seed: int
) -> MicroBatch:
    token_T, mask_T = np.zeros(length, np.int32), np.zeros(length, np.float32)
    position_T = np.zeros(length, np.int32)
    anchors, documents, start = [], [], 0
    for sample in samples:
        size = len(sample.token_ids)
        span = slice(start, start + size)
        token_T[span], mask_T[span], position_T[span] = sample.token_ids, sample.loss_mask, np.arange(size)
        anchors.append(start + draw_anchors(seed, sample, num_anchors))
        documents.append(Document(sample.row, 0, start, size))
        start += _aligned(sample)
    kept = np.concatenate(anchors) if anchors else np.zeros(0, np.int32)
    anchor, keep = np.zeros(chunks * at_once, np.int32), np.arange(chunks * at_once) < len(kept)
    anchor[: len(kept)] = kept
    arrays = (token_T, mask_T, position_T, anchor.reshape(chunks, at_once), keep.reshape(chunks, at_once))
    return MicroBatch(Pack(*(array[None] for array in arrays)), documents)


def _aligned(sample: Sample) -> int:
    return -(-len(sample.token_ids) // ALIGN) * ALIGN


def bucket(length: int) -> int:
    """The next of 64, 80, 96, 112, 128, 160, …: four lengths an octave, so that few programs are compiled."""
    unit = ALIGN
    while 8 * unit < length:
        unit *= 2
    return max(-(-length // unit), 4) * unit
