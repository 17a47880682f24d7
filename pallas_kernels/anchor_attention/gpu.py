"""Anchor attention on a Hopper GPU: no score of blocks on context leaves the chip's memory, forward or backward.

A row is one head of one slot, with limits of its own. Of the rows of a key-value head each 128 that lie together are a
tile, wherever blocks end. A block of threads has one and walks over the context that its rows see, read as it lies.
Going backward a second kernel does so again for the queries' gradient; in a third it is the keys that make tiles, which
walk over the rows that see them: every sum is then one warpgroup's, in float32 and in one order. A block's own few keys
are seen to in XLA.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.anchor_attention.gpu_kernels import ROWS, TILE, Seen, Walk, attend, pull
from pallas_kernels.anchor_attention.tiled import Options


class Arrays(NamedTuple):
    """V key-value heads; M rows: blocks, then slots, then heads of a group."""

    q_BxVxMxD: jax.Array
    k_BxVxNxJxD: jax.Array
    v_BxVxNxJxD: jax.Array
    k_BxSxVxD: jax.Array
    v_BxSxVxD: jax.Array


def unsupported(q_BxNxKxHxD: jax.Array, k_context_BxSxKVxD: jax.Array) -> str | None:
    """Why this kernel cannot take these arrays; None when it can."""
    dim = q_BxNxKxHxD.shape[-1]
    if q_BxNxKxHxD.dtype != jnp.bfloat16 or k_context_BxSxKVxD.dtype != jnp.bfloat16:
        return f"queries in {q_BxNxKxHxD.dtype} and keys in {k_context_BxSxKVxD.dtype}: both must be bfloat16"
    if dim not in (64, 128):
        return f"head dim {dim} is neither 64 nor 128"
    return None


def anchor_attention(
    q_BxNxKxHxD: jax.Array,
    k_context_BxSxKVxD: jax.Array,
    v_context_BxSxKVxD: jax.Array,
    k_block_BxNxJxKVxD: jax.Array,
    v_block_BxNxJxKVxD: jax.Array,
    anchor_BxN: jax.Array,
    keep_BxN: jax.Array,
    start_BxN: jax.Array,
    options: Options,
) -> jax.Array:
    """As `reference.anchor_attention`, for what `unsupported` lets through."""
    batch, blocks, slots, heads, dim = q_BxNxKxHxD.shape
    num_kv, keys = k_block_BxNxJxKVxD.shape[3], k_block_BxNxJxKVxD.shape[2]
    group = heads // num_kv
    padded = functools.partial(_padded, _whole(slots * group))
    q = padded(q_BxNxKxHxD).reshape(batch, -1, slots, num_kv, group, dim).transpose(0, 3, 1, 2, 4, 5)
    own = (padded(a).transpose(0, 3, 1, 2, 4) for a in (k_block_BxNxJxKVxD, v_block_BxNxJxKVxD))
    context = (_padded(TILE, a) for a in (k_context_BxSxKVxD, v_context_BxSxKVxD))
    arrays = Arrays(q.reshape(batch, num_kv, -1, dim), *own, *context)
    seen = _seen(options, (slots, keys, group), *(padded(a) for a in (anchor_BxN, keep_BxN, start_BxN)))
    out = _attend(options, slots, arrays, seen).reshape(q.shape).transpose(0, 2, 3, 1, 4, 5)
    out = out.reshape(batch, -1, slots, heads, dim)[:, :blocks]
    return jnp.where(keep_BxN[..., None, None, None], out, 0)


def copied_bytes(q_BxNxKxHxD: jax.Array, k_context_BxSxKVxD: jax.Array) -> int:
    """What the blocks of threads copy and leave, with gradients, when every slot sees the whole context."""
    batch, blocks, slots, heads, dim = q_BxNxKxHxD.shape
    length, num_kv = k_context_BxSxKVxD.shape[1:3]
    of_block, vector, number = slots * heads // num_kv, 2 * dim, 4
    rows = pl.cdiv(blocks, _whole(of_block)) * _whole(of_block) * of_block
    keys = pl.cdiv(length, TILE) * TILE
    held = rows * (5 * vector + 7 * number) + keys * 4 * vector
    streamed = rows // TILE * keys * 4 * vector + keys // TILE * rows * (2 * vector + 4 * number)
    return batch * num_kv * (held + streamed)


def _whole(rows: int) -> int:
    """Blocks of so many rows that fill whole tiles."""
    return TILE // math.gcd(rows, TILE)


def _padded(size: int, a: jax.Array) -> jax.Array:
    """`[B, N, ...]` with N a multiple of `size`."""
    return jnp.pad(a, [(0, 0), (0, -a.shape[1] % size)] + [(0, 0)] * (a.ndim - 2))


def _seen(
    options: Options, sizes: tuple[int, ...], anchor_BxN: jax.Array, keep_BxN: jax.Array, start_BxN: jax.Array
) -> Seen:
    """Blocks that are not kept see nothing."""
    slots, keys, group = sizes
    first_BxNxK = jnp.broadcast_to(start_BxN[..., None], (*start_BxN.shape, slots))
    if options.window:
        slot = jnp.arange(keys - slots, keys)
        behind = jnp.full(slots, -options.window) if options.from_anchor else slot - options.window + 1
        first_BxNxK = jnp.maximum(first_BxNxK, anchor_BxN[..., None] + behind)
    end_BxNxK = jnp.broadcast_to(anchor_BxN[..., None], first_BxNxK.shape)
    kept = (jnp.where(keep_BxN[..., None], a, 0) for a in (first_BxNxK, end_BxNxK))
    return Seen(*(jnp.repeat(a.reshape(len(a), -1), group, axis=1).astype(jnp.int32) for a in kept))


def _walk_of_rows(seen: Seen) -> Walk:
    """Over ROWS keys a step, for each tile of rows."""
    first, end = (a.reshape(len(a), -1, TILE) for a in seen)
    some = first < end
    low = jnp.min(jnp.where(some, first, jnp.iinfo(jnp.int32).max), axis=-1) // ROWS
    high = jnp.max(jnp.where(some, pl.cdiv(end, ROWS), 0), axis=-1)
    return _longest_first(low, jnp.maximum(high - low, 0))


def _walk_of_keys(seen: Seen, length: int) -> Walk:
    """Over ROWS rows a step, for each tile of keys: from the first that sees one to the last."""
    first, end = (a.reshape(len(a), -1, 1, ROWS) for a in seen)
    key = jnp.arange(0, length, TILE)[:, None]
    sees_BxTxU = jnp.any((first < end) & (first < key + TILE) & (end > key), axis=-1)
    low = jnp.argmax(sees_BxTxU, axis=1)
    high = sees_BxTxU.shape[1] - jnp.argmax(sees_BxTxU[:, ::-1], axis=1)
    return _longest_first(low, jnp.where(jnp.any(sees_BxTxU, axis=1), high - low, 0))


def _longest_first(first_BxU: jax.Array, count_BxU: jax.Array) -> Walk:
    """Blocks of threads start in this order: one that walks far must not be the last."""
    order = jnp.argsort(-count_BxU, axis=-1)
    ordered = (jnp.take_along_axis(a, order, axis=-1) for a in (first_BxU, count_BxU))
    return Walk(*(a.astype(jnp.int32) for a in (order, *ordered)))


# ------------------------------------------------------------------------------------------------ forward and backward


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(options: Options, slots: int, arrays: Arrays, seen: Seen) -> jax.Array:
    return _forward(options, slots, arrays, seen)[0]


def _forward(options: Options, slots: int, arrays: Arrays, seen: Seen) -> tuple[jax.Array, Any]:
    context = arrays.q_BxVxMxD, arrays.k_BxSxVxD, arrays.v_BxSxVxD
    on_context_BxVxMxD, log_context_BxVxM = attend(*context, seen, _walk_of_rows(seen), options.scale)
    scores = _own_scores(options, slots, arrays)
    log_own = jax.nn.logsumexp(scores, axis=-1).reshape(log_context_BxVxM.shape)
    log_total = jnp.logaddexp(log_context_BxVxM, log_own)
    weights = jnp.exp(scores - log_total.reshape(*scores.shape[:-1], 1)).astype(jnp.bfloat16)
    on_own = _dot("bvnmj,bvnjd->bvnmd", weights, arrays.v_BxVxNxJxD).reshape(on_context_BxVxMxD.shape)
    out = on_own + on_context_BxVxMxD * jnp.exp(log_context_BxVxM - log_total)[..., None]
    out = out.astype(jnp.bfloat16)
    return out, (arrays, seen, out, log_total)


def _backward(options: Options, slots: int, saved: tuple[Any, ...], d_out: jax.Array) -> tuple[Arrays, None]:
    arrays, seen, out, log_total = saved
    shift_BxVxM = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    walks = _walk_of_rows(seen), _walk_of_keys(seen, arrays.k_BxSxVxD.shape[1])
    context = arrays.q_BxVxMxD, arrays.k_BxSxVxD, arrays.v_BxSxVxD
    d_q, *d_context = pull(*context, seen, d_out, log_total, shift_BxVxM, walks, options.scale)
    scores = _own_scores(options, slots, arrays)
    by_block = lambda a: a.reshape(*scores.shape[:4], -1)  # noqa: E731
    weights = jnp.exp(scores - by_block(log_total))
    d_weights = _dot("bvnmd,bvnjd->bvnmj", by_block(d_out), arrays.v_BxVxNxJxD)
    d_scores = (weights * (d_weights - by_block(shift_BxVxM)) * options.scale).astype(jnp.bfloat16)
    d_q_own = _dot("bvnmj,bvnjd->bvnmd", d_scores, arrays.k_BxVxNxJxD).reshape(d_q.shape)
    d_k = _dot("bvnmj,bvnmd->bvnjd", d_scores, by_block(arrays.q_BxVxMxD))
    d_v = _dot("bvnmj,bvnmd->bvnjd", weights.astype(jnp.bfloat16), by_block(d_out))
    grads = d_q + d_q_own, d_k, d_v, *d_context
    return Arrays(*(a.astype(jnp.bfloat16) for a in grads)), None


_attend.defvjp(_forward, _backward)


def _own_scores(options: Options, slots: int, arrays: Arrays) -> jax.Array:
    """`[B, V, N, M/N, J]` of all rows on their own block. A slot always sees itself."""
    batch, num_kv, blocks, keys, dim = arrays.k_BxVxNxJxD.shape
    q = arrays.q_BxVxMxD.reshape(batch, num_kv, blocks, -1, dim)
    slot = np.arange(q.shape[3])[:, None] // (q.shape[3] // slots) + keys - slots
    key = np.arange(keys)
    visible = key <= slot if options.causal else np.full((len(slot), keys), True)
    if options.window and not options.from_anchor:
        visible &= key > slot - options.window
    return jnp.where(visible, _dot("bvnmd,bvnjd->bvnmj", q, arrays.k_BxVxNxJxD) * options.scale, -jnp.inf)


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
