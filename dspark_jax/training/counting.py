"""Floating-point operations that a training step cannot do without, from the config's arithmetic.

A product of an [n, a] and an [a, b] matrix is 2·n·a·b. Only matrix products count: norms, softmax, rotary and the
optimizer are a small part of any model that is worth the trouble. The backward pass of a product costs two more of its
size where both sides learn, and one where one of them is frozen.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dspark_jax.data.packing import MicroBatch
from dspark_jax.interop.drafter_tensors import abstract_drafter
from dspark_jax.models.config import DecoderConfig, DrafterConfig

LEARNT, FROZEN = 3, 2  # times the forward's operations


def target_flops(config: DecoderConfig, lengths: Sequence[int]) -> int:
    """The target's forward over documents, and its head for the distributions' normalisers."""
    h = config.hidden_size
    per_token = config.vocab_size * h
    seen = 0
    for kind in (config.attention[k] for k in config.layer_kinds):
        width = kind.head_dim * (2 * config.num_heads + (1 if kind.keys_as_values else 2) * kind.num_kv_heads)
        per_token += h * width + 3 * h * config.intermediate_size
        rows = sum(_causal(length, kind.window) for length in lengths)
        seen += 2 * config.num_heads * kind.head_dim * rows  # scores, and values by weights
    return 2 * (sum(lengths) * per_token + seen)


def _causal(length: int, window: int) -> int:
    """Pairs of a row and one that it sees."""
    whole = length * (length + 1) // 2
    beyond = max(length - window, 0) if window else 0
    return whole - beyond * (beyond + 1) // 2


def drafter_flops(config: DrafterConfig, parts: Sequence[MicroBatch]) -> dict[str, int]:
    """Forward and backward of a step's blocks: context, blocks, attention, and the heads over the draft vocabulary.

    The target's distribution of a position is computed once, however many blocks read it.
    """
    c, blocks, sources, attention = config.decoder, 0, 0, 0
    for pack, _ in parts:
        anchors = pack.anchor_DxCxN[pack.keep_DxCxN]
        blocks += len(anchors)
        sources += len(np.unique(anchors[:, None] + np.arange(config.num_drafts)))
        seen = pack.position_DxT[0, anchors]
        for kind in (c.attention[k] for k in c.layer_kinds):
            context = seen.clip(max=kind.window) if kind.window else seen
            pairs = config.block_size * int(context.sum() + len(anchors) * config.block_size)
            attention += LEARNT * 2 * 2 * c.num_heads * kind.head_dim * pairs
    tokens = sum(document.length for part in parts for document in part.documents)
    sizes = _matrices(abstract_drafter(config))
    # A layer's k and v projections also serve the context.
    shared = sum(size for name, size in sizes.items() if "layers" in name and name[-2] in ("k_proj", "v_proj"))
    layers = sum(size for name, size in sizes.items() if "layers" in name)
    fc = math.prod((config.tap_width, c.hidden_size))
    rows, slots = blocks * config.block_size, blocks * config.num_drafts
    head = sum(size for name, size in sizes.items() if "markov_head" in name and name[-1] not in _LOOKED_UP)
    vocabulary = config.draft_vocab_size * c.hidden_size
    return {
        "context": 2 * tokens * (FROZEN * fc + LEARNT * shared),
        "blocks": 2 * rows * LEARNT * layers,
        "attention": attention,
        "heads": 2 * (slots * (LEARNT * head + FROZEN * vocabulary) + sources * vocabulary),
    }


_LOOKED_UP = ("markov_w1",)  # tables of which a slot takes a row


def _matrices(params: Any) -> dict[tuple[str, ...], int]:
    """Sizes of the parameters that rows are multiplied with, by their path; stacked layers count together."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    named = {tuple(str(getattr(k, "key", getattr(k, "idx", k))) for k in path): leaf for path, leaf in leaves}
    return {name: math.prod(leaf.shape) for name, leaf in named.items() if len(leaf.shape) - ("layers" in name) >= 2}
