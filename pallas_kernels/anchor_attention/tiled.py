"""Anchor attention in XLA's operations, tile by tile: no scores or masks of blocks × context are ever in memory.

A tile of blocks walks over the context tiles that any of its blocks sees, with a running softmax (FlashAttention, arXiv
2205.14135), so the work grows with what is seen: least where blocks come in the order of their anchors. Both directions
are loops of dynamic length, hence the gradient by hand.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

ROWS = 128  # slots of a tile of blocks
CONTEXT = 256  # rows of a context tile


@dataclasses.dataclass(frozen=True)
class Options:
    """Static settings, as in `reference.anchor_attention`."""

    scale: float
    causal: bool
    window: int
    from_anchor: bool


class Tile(NamedTuple):
    """G blocks of one pack. Heads are V groups of E that share a key-value head."""

    q_VxExGxKxD: jax.Array
    k_GxJxVxD: jax.Array
    v_GxJxVxD: jax.Array
    anchor_G: jax.Array
    keep_G: jax.Array
    start_G: jax.Array
    pack: jax.Array  # whose context the blocks see


def anchor_attention(
    q_BxNxKxHxD: jax.Array,
    k_context_BxSxKVxD: jax.Array,
    v_context_BxSxKVxD: jax.Array,
    k_block_BxNxKxKVxD: jax.Array,
    v_block_BxNxKxKVxD: jax.Array,
    anchor_BxN: jax.Array,
    keep_BxN: jax.Array,
    start_BxN: jax.Array,
    options: Options,
) -> jax.Array:
    """As `reference.anchor_attention`. Memory beyond arguments and gradients is that of one tile."""
    batch, blocks, slots, heads, dim = q_BxNxKxHxD.shape
    kv = k_context_BxSxKVxD.shape[2]
    size = min(max(ROWS // slots, 1), blocks)
    count = -(-blocks // size)

    def tiles(array: jax.Array) -> jax.Array:
        """`[B, N, ...]` to `[B·tiles, G, ...]`; blocks that fill the last tile are not kept."""
        padded = jnp.pad(array, [(0, 0), (0, count * size - blocks)] + [(0, 0)] * (array.ndim - 2))
        return padded.reshape(batch * count, size, *array.shape[2:])

    q = tiles(q_BxNxKxHxD).reshape(batch * count, size, slots, kv, heads // kv, dim)
    stack = Tile(
        jnp.transpose(q, (0, 3, 4, 1, 2, 5)), tiles(k_block_BxNxKxKVxD), tiles(v_block_BxNxKxKVxD), tiles(anchor_BxN),
        tiles(keep_BxN), tiles(start_BxN), jnp.repeat(jnp.arange(batch, dtype=jnp.int32), count),
    )  # fmt: skip
    context = tuple(jnp.swapaxes(a, 1, 2) for a in (k_context_BxSxKVxD, v_context_BxSxKVxD))  # [B, V, S, D]
    out = jnp.transpose(_attend(options, stack, *context), (0, 3, 4, 1, 2, 5))
    return out.reshape(batch, count * size, slots, heads, dim)[:, :blocks]


# ---------------------------------------------------------------------------------------------------- what a tile sees


def _first_visible(options: Options, tile: Tile) -> jax.Array:
    """`[G, K]` the first context row that each slot sees."""
    keys, slots = tile.k_GxJxVxD.shape[1], tile.q_VxExGxKxD.shape[3]
    start_GxK = jnp.broadcast_to(tile.start_G[:, None], (len(tile.start_G), slots))
    if not options.window:
        return start_GxK
    slot = jnp.arange(keys - slots, keys)
    first = jnp.full(slots, -options.window) if options.from_anchor else slot - options.window + 1
    return jnp.maximum(start_GxK, tile.anchor_G[:, None] + first)


def _walk(options: Options, tile: Tile, length: int) -> tuple[jax.Array, jax.Array]:
    """The first context row that any kept block sees, and how many context tiles there are from it on."""
    low = jnp.min(jnp.where(tile.keep_G[:, None], _first_visible(options, tile), length))
    high = jnp.max(jnp.where(tile.keep_G, tile.anchor_G, 0))
    trips = jnp.maximum(-(-(high - low) // min(CONTEXT, length)), 0)
    return low.astype(jnp.int32), trips.astype(jnp.int32)  # whatever integers the caller has: slices want one kind


def _context_scores(
    options: Options, tile: Tile, k_BxVxSxD: jax.Array, first_row: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scores `[V, E, G, K, C]` on the context tile from `first_row` on, its keys, and where they begin.

    The last tile ends with the context: rows before `first_row` in it were another tile's and are not seen again.
    """
    length = k_BxVxSxD.shape[2]
    at = jnp.minimum(first_row, length - min(CONTEXT, length))
    k_VxCxD = _context_rows(k_BxVxSxD, tile.pack, at)
    row = at + jnp.arange(k_VxCxD.shape[1])
    visible = (row >= jnp.maximum(_first_visible(options, tile), first_row)[..., None]) & (
        row < tile.anchor_G[:, None, None]
    )
    scores = _dot("vegkd,vcd->vegkc", tile.q_VxExGxKxD, k_VxCxD) * options.scale
    return jnp.where(visible, scores, -jnp.inf), k_VxCxD, at


def _block_scores(options: Options, tile: Tile) -> jax.Array:
    """Scores `[V, E, G, K, J]` of every slot on its own block. A slot always sees itself."""
    scores = _dot("vegkd,gjvd->vegkj", tile.q_VxExGxKxD, tile.k_GxJxVxD) * options.scale
    key = jnp.arange(scores.shape[-1])
    slot = key[-scores.shape[-2] :, None]
    visible = key <= slot if options.causal else jnp.full((len(slot), len(key)), True)
    if options.window and not options.from_anchor:
        visible &= key > slot - options.window
    return jnp.where(visible, scores, -jnp.inf)


def _context_rows(array_BxVxSxD: jax.Array, pack: jax.Array, at: jax.Array) -> jax.Array:
    _, kv, length, dim = array_BxVxSxD.shape
    zero = jnp.zeros_like(at)
    return jax.lax.dynamic_slice(array_BxVxSxD, (pack, zero, at, zero), (1, kv, min(CONTEXT, length), dim))[0]


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A product summed in at least float32."""
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


# ------------------------------------------------------------------------------------------------ forward and backward


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: Options, tiles: Tile, k_BxVxSxD: jax.Array, v_BxVxSxD: jax.Array) -> jax.Array:
    return _forward(options, tiles, k_BxVxSxD, v_BxVxSxD)[0]


def _forward(
    options: Options, tiles: Tile, k_BxVxSxD: jax.Array, v_BxVxSxD: jax.Array
) -> tuple[jax.Array, tuple[Any, ...]]:
    def one(tile: Tile) -> tuple[jax.Array, jax.Array]:
        dtype = tile.q_VxExGxKxD.dtype

        def absorb(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            largest, total, out = state
            scores, _, at = _context_scores(options, tile, k_BxVxSxD, low + i * step)
            new = jnp.maximum(largest, jnp.max(scores, axis=-1))
            weights, kept = jnp.exp(scores - new[..., None]), jnp.exp(largest - new)
            more = _dot("vegkc,vcd->vegkd", weights.astype(dtype), _context_rows(v_BxVxSxD, tile.pack, at))
            return new, total * kept + jnp.sum(weights, axis=-1), out * kept[..., None] + more

        scores = _block_scores(options, tile)
        largest = jnp.max(scores, axis=-1)
        weights = jnp.exp(scores - largest[..., None])
        state = largest, jnp.sum(weights, axis=-1), _dot("vegkj,gjvd->vegkd", weights.astype(dtype), tile.v_GxJxVxD)
        low, trips = _walk(options, tile, k_BxVxSxD.shape[2])
        largest, total, out = jax.lax.fori_loop(0, trips, absorb, state)
        out = jnp.where(tile.keep_G[:, None, None], out / total[..., None], 0)
        return out.astype(dtype), largest + jnp.log(total)

    step = min(CONTEXT, k_BxVxSxD.shape[2])
    out, log_total = jax.lax.map(one, tiles)
    return out, (tiles, k_BxVxSxD, v_BxVxSxD, out, log_total)


def _backward(options: Options, saved: tuple[Any, ...], grad: jax.Array) -> tuple[Tile, jax.Array, jax.Array]:
    """Gradients of the tiles' queries, keys and values, and of the context's, which all tiles add to."""
    tiles, k_BxVxSxD, v_BxVxSxD, out, log_total = saved
    wide, step = log_total.dtype, min(CONTEXT, k_BxVxSxD.shape[2])

    def one(context: tuple[jax.Array, jax.Array], xs: Any) -> tuple[Any, tuple[jax.Array, ...]]:
        tile, d_out, out, log_total = xs
        dtype = d_out.dtype
        d_out = jnp.where(tile.keep_G[:, None, None], d_out, 0)
        shift = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1)

        def weights_and_scores(scores: jax.Array, equation: str, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            """The softmax's weights and the gradient of the scores, of products already scaled."""
            weights = jnp.exp(scores - log_total[..., None])
            d_scores = weights * (_dot(equation, d_out, v) - shift[..., None]) * options.scale
            return weights.astype(dtype), d_scores.astype(dtype)

        def absorb(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            d_q, d_k_context, d_v_context = state
            scores, k, at = _context_scores(options, tile, k_BxVxSxD, low + i * step)
            v = _context_rows(v_BxVxSxD, tile.pack, at)
            weights, d_scores = weights_and_scores(scores, "vegkd,vcd->vegkc", v)
            d_k = _dot("vegkc,vegkd->vcd", d_scores, tile.q_VxExGxKxD)
            d_v = _dot("vegkc,vegkd->vcd", weights, d_out)
            d_q = d_q + _dot("vegkc,vcd->vegkd", d_scores, k)
            return d_q, _add_rows(d_k_context, tile.pack, at, d_k), _add_rows(d_v_context, tile.pack, at, d_v)

        weights, d_scores = weights_and_scores(_block_scores(options, tile), "vegkd,gjvd->vegkj", tile.v_GxJxVxD)
        d_q = _dot("vegkj,gjvd->vegkd", d_scores, tile.k_GxJxVxD)
        d_k_block = _dot("vegkj,vegkd->gjvd", d_scores, tile.q_VxExGxKxD)
        d_v_block = _dot("vegkj,vegkd->gjvd", weights, d_out)
        low, trips = _walk(options, tile, k_BxVxSxD.shape[2])
        d_q, *context = jax.lax.fori_loop(0, trips, absorb, (d_q, *context))
        return tuple(context), tuple(a.astype(dtype) for a in (d_q, d_k_block, d_v_block))

    zeros = tuple(jnp.zeros(a.shape, wide) for a in (k_BxVxSxD, v_BxVxSxD))
    (d_k, d_v), blocks = jax.lax.scan(one, zeros, (tiles, grad, out, log_total))
    return Tile(*blocks, None, None, None, None), d_k.astype(k_BxVxSxD.dtype), d_v.astype(v_BxVxSxD.dtype)


def _add_rows(array_BxVxSxD: jax.Array, pack: jax.Array, at: jax.Array, rows_VxCxD: jax.Array) -> jax.Array:
    rows = _context_rows(array_BxVxSxD, pack, at) + rows_VxCxD
    zero = jnp.zeros_like(at)
    return jax.lax.dynamic_update_slice(array_BxVxSxD, rows[None], (pack, zero, at, zero))


_attend.defvjp(_forward, _backward)
