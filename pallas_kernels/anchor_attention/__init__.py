"""Training attention of packed draft blocks: a block sees the context before its anchor and itself, by indices."""

import jax
import jax.numpy as jnp

from pallas_kernels.anchor_attention import reference, tiled

SMALL = 1 << 20  # scores up to this many are computed at once: fewer operations, and a shorter compilation


def anchor_attention(
    q_BxNxKxHxD: jax.Array,
    k_context_BxSxKVxD: jax.Array,
    v_context_BxSxKVxD: jax.Array,
    k_block_BxNxKxKVxD: jax.Array,
    v_block_BxNxKxKVxD: jax.Array,
    anchor_BxN: jax.Array,
    keep_BxN: jax.Array,
    scale: float,
    *,
    start_BxN: jax.Array | None = None,
    causal: bool = False,
    window: int = 0,
    from_anchor: bool = False,
    backend: str = "auto",
) -> jax.Array:
    """Block n of a pack attends to context rows `start <= j < anchor` (the anchor's own features are not known when
    serving) and to its own K slots, both ways unless `causal`; never to another block (spec 1.7). Returns
    `[B, N, K, H, D]`; blocks not kept give zeros.

    `start` None: the pack is one document. `window`, `from_anchor`: as in `ragged_attention`. Fewer queries than keys:
    they are the last slots'. `backend`: "dense" (all scores in memory), "tiled", or "auto" by their number. Any order
    of the blocks is right; increasing anchors are fastest.
    """
    start_BxN = jnp.zeros_like(anchor_BxN) if start_BxN is None else start_BxN
    arrays = (q_BxNxKxHxD, k_context_BxSxKVxD, v_context_BxSxKVxD, k_block_BxNxKxKVxD, v_block_BxNxKxKVxD, anchor_BxN,
              keep_BxN, start_BxN)  # fmt: skip
    scores = q_BxNxKxHxD.size // q_BxNxKxHxD.shape[-1] * k_context_BxSxKVxD.shape[1]
    if backend == "dense" or (backend == "auto" and scores <= SMALL):
        return reference.anchor_attention(*arrays, scale, causal=causal, window=window, from_anchor=from_anchor)
    return tiled.anchor_attention(*arrays, tiled.Options(scale, causal, window, from_anchor))


__all__ = ["anchor_attention"]
