"""Warps of a distribution: temperature, top-k, top-p and min-p, the same for drafter, target, plain decoding, kernels.

Each of top-k, top-p, min-p keeps the tokens at or above some logit, so all three together are one threshold a row.
"""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Warp:
    """One request's (or row's) warp in each entry. Temperature 0 is greedy; top_k 0, top_p 1, min_p 0 are off.

    The static part promises what no entry asks for, so that a program need not be able to do it.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    sampled: bool = flax.struct.field(pytree_node=False, default=True)  # False: all are greedy
    limited: bool = flax.struct.field(pytree_node=False, default=True)  # False: no top-k, top-p, min-p

    @classmethod
    def temperatures(cls, temperature_N: jax.Array) -> "Warp":
        """Nothing but temperatures."""
        off = jnp.zeros_like(temperature_N)
        return cls(temperature_N, off.astype(jnp.int32), off + 1, off)

    def rows(self, index_N: jax.Array) -> "Warp":
        return jax.tree.map(lambda a: a[index_N], self)


def scaled(logits_NxV: jax.Array, warp: Warp) -> jax.Array:
    """Logits over temperature, in at least float32; greedy rows are left as they are."""
    wide = jnp.promote_types(logits_NxV.dtype, jnp.float32)
    temperature = jnp.where(warp.temperature > 0, warp.temperature, 1).astype(wide)
    return logits_NxV.astype(wide) / temperature[:, None]


def apply(logits_NxV: jax.Array, warp: Warp) -> jax.Array:
    """Warped logits: over temperature, and -inf outside top-k, top-p, min-p. Ties at the edge are kept."""
    logits = scaled(logits_NxV, warp)
    if not (warp.sampled and warp.limited):
        return logits
    limited = (warp.temperature > 0) & ((warp.top_k > 0) | (warp.top_p < 1) | (warp.min_p > 0))
    limit = jax.lax.cond(
        jnp.any(limited), thresholds, lambda x, _: jnp.full(x.shape[:1], -jnp.inf, x.dtype), logits, warp
    )
    return jnp.where(logits >= jnp.where(limited, limit, -jnp.inf)[:, None], logits, -jnp.inf)


def thresholds(logits_NxV: jax.Array, warp: Warp) -> jax.Array:
    """`[N]` the smallest kept logit of each row; top-p acts on what top-k leaves, as in `transformers`.

    No sort: each threshold is found by bisection on the bit pattern of a float32, 32 passes over the row.
    """
    bits = _ordered_bits(logits_NxV)
    vocab = logits_NxV.shape[-1]
    k = jnp.where(warp.top_k > 0, jnp.minimum(warp.top_k, vocab), vocab)
    top_k = _largest(lambda edge: jnp.sum(bits >= edge[:, None], axis=-1) >= k, len(k))
    weight = jnp.where(bits >= top_k[:, None], jnp.exp(logits_NxV - jnp.max(logits_NxV, axis=-1, keepdims=True)), 0)
    # Never 0: whatever top_p is, the largest logits stay.
    wanted = jnp.maximum(warp.top_p * jnp.sum(weight, axis=-1), jnp.finfo(weight.dtype).tiny)
    top_p = _largest(lambda edge: jnp.sum(jnp.where(bits >= edge[:, None], weight, 0), axis=-1) >= wanted, len(k))
    # top_p 1 must keep everything, whatever the rounding of the sums.
    edge = jnp.where(warp.top_p < 1, jnp.maximum(top_k, top_p), top_k)
    kept_min = jnp.min(jnp.where(bits >= edge[:, None], logits_NxV, jnp.inf), axis=-1)
    min_p = jnp.where(warp.min_p > 0, jnp.max(logits_NxV, axis=-1) + jnp.log(warp.min_p), -jnp.inf)
    return jnp.maximum(kept_min, min_p.astype(logits_NxV.dtype))


def _ordered_bits(x: jax.Array) -> jax.Array:
    """uint32 that sort as the float32 values do."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest(holds, rows: int) -> jax.Array:
    """`[N]` the largest uint32 for which a falling predicate holds, bit by bit from the top."""

    def body(i, edge):
        candidate = edge | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, edge)

    return jax.lax.fori_loop(0, 32, body, jnp.zeros(rows, jnp.uint32))
