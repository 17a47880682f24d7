"""The statistics of every row on a TPU: one read of the head, tile by tile; no logits leave the chip's memory.

All running values are kept by lane (the residue class of an id modulo 128), so that nothing is reduced across lanes
until the vocabulary is through. The candidates come for free with it.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.fused_verify.reference import DEPTH, LANES, Head, Query, RowStatistics
from pallas_kernels.noise import gumbel

_ROWS = 256  # of hidden states held at a time; more rows read the head again
_GROUP = 16  # rows worked on at a time: what is kept of them fits the registers
_TILE_BYTES = 4 << 20  # of the head's tile, of which two are held
_VMEM_BYTES = 64 << 20
_CANDIDATE = (jnp.float32, jnp.float32, jnp.int32)  # score, logit, id
_LOWEST = float(jnp.finfo(jnp.float32).min)


def row_statistics(hidden_NxH: jax.Array, head: Head, query: Query) -> RowStatistics:
    """As the reference, in float32. Any N, H and V; hidden states and head in float32 or bfloat16."""
    head = _as_stored(head)
    peak, total, total_warped, token_logit, score, logit, ids = _over_vocabulary(hidden_NxH, head, query)
    top = jnp.max(peak, axis=-1, keepdims=True)
    inverse = 1 / query.temperature_N.astype(jnp.float32)[:, None]
    sum_total = jnp.sum(total * jnp.exp(peak - top), axis=-1)
    sum_warped = jnp.sum(total_warped * jnp.exp((peak - top) * inverse), axis=-1)
    return RowStatistics(
        log_total_N=jnp.log(sum_total) + top[:, 0],
        log_total_warped_N=jnp.log(sum_warped) + (top * inverse)[:, 0],
        token_logit_N=jnp.max(token_logit, axis=-1),
        score_NxC=score,
        logit_NxC=logit,
        id_NxC=ids,
    )


def _as_stored(head: Head) -> Head:
    """A TPU stores an `[H, V]` whose V is no multiple of its lanes, but whose H is, as `[V, H]`: a call that wants rows
    of V would copy it. A mesh divides heads so.
    """
    if head.transposed and head.vocab_size % LANES and head.weight.shape[0] % LANES == 0:
        return head.replace(weight=head.weight.T, transposed=False)
    return head


def _over_vocabulary(hidden_NxH: jax.Array, head: Head, query: Query) -> list[jax.Array]:
    """By lane `[N, LANES]`: the largest logit, the two sums relative to it, the token's logit; then the candidates."""
    num_rows, width = hidden_NxH.shape
    row_tiles = -(-num_rows // _ROWS)
    rows = _round_up(-(-num_rows // row_tiles), _GROUP)
    tile = _tile_size(head, width)
    by_lane = jax.ShapeDtypeStruct((row_tiles * rows, LANES), jnp.float32)
    shapes = [by_lane] * 4 + [jax.ShapeDtypeStruct((row_tiles * rows, DEPTH * LANES), t) for t in _CANDIDATE]

    def pad(a: jax.Array, dtype: jnp.dtype) -> jax.Array:
        return jnp.pad(a.reshape(num_rows, -1).astype(dtype), ((0, row_tiles * rows - num_rows), (0, 0)))

    def per_row(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((rows, size), lambda i, j, first: (i, 0))

    head_block = (width, tile) if head.transposed else (tile, width)
    outs = pl.pallas_call(
        functools.partial(_kernel, head=head.replace(weight=None, first=None), vocab=head.vocab_size, tile=tile),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(row_tiles, pl.cdiv(head.vocab_size, tile)),
            in_specs=[
                per_row(width),
                pl.BlockSpec(head_block, lambda i, j, first: (0, j) if head.transposed else (j, 0)),
                *[per_row(1)] * 5,
            ],
            out_specs=[per_row(shape.shape[1]) for shape in shapes],
            scratch_shapes=[pltpu.VMEM((rows, tile), jnp.float32)],
        ),
        out_shape=shapes,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
        ),
        cost_estimate=_cost(hidden_NxH, head, row_tiles, shapes),
        name=f"fused_verify_rows{rows}_tile{tile}",
    )(
        head.ids[:1],
        pad(hidden_NxH, hidden_NxH.dtype),
        head.weight,
        pad(query.token_N, jnp.int32),
        pad(1 / query.temperature_N, jnp.float32),
        pad(query.noisy_N, jnp.int32),
        *(pad(word, jnp.uint32) for word in query.key_N),
    )
    return [a[:num_rows] for a in outs]


def _cost(hidden_NxH: jax.Array, head: Head, row_tiles: int, outs: list[jax.ShapeDtypeStruct]) -> pl.CostEstimate:
    """What XLA's scheduler and cost analysis are told."""
    logits = hidden_NxH.shape[0] * head.vocab_size
    size = lambda a: math.prod(a.shape) * a.dtype.itemsize  # noqa: E731
    read = row_tiles * size(head.weight) + size(hidden_NxH)
    return pl.CostEstimate(
        flops=2 * logits * hidden_NxH.shape[1],
        transcendentals=6 * logits,
        bytes_accessed=read + sum(size(out) for out in outs),
    )


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _tile_size(head: Head, width: int) -> int:
    """Tokens of a tile of the head."""
    fitting = _TILE_BYTES // (width * head.weight.dtype.itemsize) // LANES * LANES
    return min(max(fitting, LANES), 8 * LANES, _round_up(head.vocab_size, LANES))


def _kernel(
    first_ref, hidden_ref, head_ref, token_ref, inverse_ref, noisy_ref, key0_ref, key1_ref,
    peak_ref, total_ref, total_warped_ref, token_logit_ref, score_ref, logit_ref, id_ref, tile_ref,
    *, head: Head, vocab: int, tile: int,
):  # fmt: skip
    """One tile of the vocabulary for one tile of rows."""

    @pl.when(pl.program_id(1) == 0)
    def start():
        peak_ref[...] = jnp.full(peak_ref.shape, _LOWEST, jnp.float32)  # finite: exp(-inf - peak) is then 0
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        total_warped_ref[...] = jnp.zeros(total_warped_ref.shape, jnp.float32)
        token_logit_ref[...] = jnp.full(token_logit_ref.shape, -jnp.inf, jnp.float32)
        score_ref[...] = jnp.full(score_ref.shape, -jnp.inf, jnp.float32)
        logit_ref[...] = jnp.full(logit_ref.shape, -jnp.inf, jnp.float32)
        id_ref[...] = jnp.zeros(id_ref.shape, jnp.int32)

    contracted = ((1,), (0 if head.transposed else 1,))
    logits = jax.lax.dot_general(
        hidden_ref[...], head_ref[...], (contracted, ((), ())), preferred_element_type=jnp.float32
    )
    # XLA's logits are rounded to the model's dtype: the same ties, and the same tokens, on either path.
    tile_ref[...] = logits.astype(hidden_ref.dtype).astype(jnp.float32)
    first = first_ref[0]
    first_id, end_id = first + pl.program_id(1) * tile, jnp.minimum(head.num_tokens, first + vocab)
    depths = [slice(LANES * d, LANES * (d + 1)) for d in range(DEPTH)]
    lane = jax.lax.broadcasted_iota(jnp.int32, (_GROUP, LANES), 1)

    def group(g, _):
        rows = pl.ds(pl.multiple_of(g * _GROUP, _GROUP), _GROUP)
        inverse, noisy, key = inverse_ref[rows], noisy_ref[rows], (key0_ref[rows], key1_ref[rows])
        kept = [
            [ref[rows, LANES * d : LANES * (d + 1)] for ref in (score_ref, logit_ref, id_ref)] for d in range(DEPTH)
        ]
        peak, total, total_warped = peak_ref[rows], total_ref[rows], total_warped_ref[rows]
        token, token_logit = token_ref[rows], token_logit_ref[rows]
        for chunk in range(tile // LANES):
            ids = first_id + chunk * LANES + lane
            logit = tile_ref[rows, LANES * chunk : LANES * (chunk + 1)]
            if head.softcap:
                logit = (head.softcap * jnp.tanh(logit / head.softcap)).astype(hidden_ref.dtype).astype(jnp.float32)
            logit = jnp.where(ids < end_id, logit, -jnp.inf)
            token_logit = jnp.where(ids == token, logit, token_logit)
            higher = jnp.maximum(peak, logit)
            total = total * jnp.exp(peak - higher) + jnp.exp(logit - higher)
            total_warped = total_warped * jnp.exp((peak - higher) * inverse) + jnp.exp((logit - higher) * inverse)
            peak = higher
            score = logit * inverse
            score = jnp.where(noisy != 0, score + gumbel(key, ids), score)
            kept = _insert(kept, [score, logit, ids])
        peak_ref[rows], total_ref[rows], total_warped_ref[rows] = peak, total, total_warped
        token_logit_ref[rows] = token_logit
        for place, values in zip(depths, kept, strict=True):
            for ref, value in zip((score_ref, logit_ref, id_ref), values, strict=True):
                ref[rows, place] = value
        return 0

    jax.lax.fori_loop(0, hidden_ref.shape[0] // _GROUP, group, 0)


def _insert(kept: list[list[jax.Array]], new: list[jax.Array]) -> list[list[jax.Array]]:
    """The best of each lane by score, best first; of equal ones the older first, whose id is smaller."""
    better = [new[0] > old[0] for old in kept]  # behind its place as well
    out = [[jnp.where(better[0], a, b) for a, b in zip(new, kept[0], strict=True)]]
    for d in range(1, len(kept)):
        # The one before moves down, unless it stays; then the new one may stand here.
        moved = [jnp.where(better[d - 1], a, b) for a, b in zip(kept[d - 1], new, strict=True)]
        out.append([jnp.where(better[d], a, b) for a, b in zip(moved, kept[d], strict=True)])
    return out
