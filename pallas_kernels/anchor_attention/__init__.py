"""Training attention of packed draft blocks: a block sees the context before its anchor and itself, by indices."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.anchor_attention import reference, tiled, tpu

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
    backend: str = "xla",
) -> jax.Array:
    """Block n of a pack attends to context rows `start <= j < anchor` (the anchor's own features are not known when
    serving) and to its own K slots, both ways unless `causal`; never to another block (spec 1.7). Returns
    `[B, N, K, H, D]`; blocks not kept give zeros.

    `start` None: the pack is one document. `window`, `from_anchor`: as in `ragged_attention`. Fewer queries than keys:
    they are the last slots'. Any order of the blocks is right; increasing anchors are fastest.

    `backend`: "dense" (all scores in memory) and "tiled" in XLA's operations, "xla" by the number of scores one of
    these, "tpu" and "gpu" the kernel where it can take these arrays, else as "xla". "auto": "tpu" where the program is
    compiled for a TPU, else "xla"; not for what is differentiated, which would keep for the gradient what either way
    needs.
    """
    start_BxN = jnp.zeros_like(anchor_BxN) if start_BxN is None else start_BxN
    arrays = (q_BxNxKxHxD, k_context_BxSxKVxD, v_context_BxSxKVxD, k_block_BxNxKxKVxD, v_block_BxNxKxKVxD, anchor_BxN,
              keep_BxN, start_BxN)  # fmt: skip
    scores = q_BxNxKxHxD.size // q_BxNxKxHxD.shape[-1] * k_context_BxSxKVxD.shape[1]
    options = tiled.Options(scale, causal, window, from_anchor)
    in_xla = functools.partial(tiled.anchor_attention, options=options)
    if backend == "dense" or (backend != "tiled" and scores <= SMALL):
        in_xla = functools.partial(
            reference.anchor_attention, scale=scale, causal=causal, window=window, from_anchor=from_anchor
        )
    if backend == "gpu":
        from pallas_kernels.anchor_attention import gpu  # what it imports may change with any JAX: nobody else needs it

        if gpu.unsupported(q_BxNxKxHxD, k_context_BxSxKVxD):
            return in_xla(*arrays)
        return gpu.anchor_attention(*arrays, options)
    if backend not in ("tpu", "auto") or tpu.unsupported(q_BxNxKxHxD, k_context_BxSxKVxD):
        return in_xla(*arrays)
    kernel = functools.partial(tpu.anchor_attention, options=options)
    return kernel(*arrays) if backend == "tpu" else jax.lax.platform_dependent(*arrays, tpu=kernel, default=in_xla)


__all__ = ["anchor_attention"]
