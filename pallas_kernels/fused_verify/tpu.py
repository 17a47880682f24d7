"""The statistics of every row on a TPU: one read of the head, tile by tile; no logits leave the chip's memory.

All running values are kept by lane (the residue class of an id modulo 128), so that nothing is reduced across lanes
until the vocabulary is through. The candidates come for free with it.
"""

import functools

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
_LOWEST = float(jnp.finfo(jnp.float32).min)


def row_statistics(hidden_NxH: jax.Array, head: Head, query: Query) -> RowStatistics:
    """As the reference, in float32. Any N, H and V; hidden states and head in float32 or bfloat16."""
    num_rows, width = hidden_NxH.shape
    row_tiles = -(-num_rows // _ROWS)
    rows = _round_up(-(-num_rows // row_tiles), _GROUP)
    column = lambda a, dtype: _pad_rows(a.astype(dtype), row_tiles * rows)[:, None]  # noqa: E731
    tile = _tile_size(head, width)
    per_row = pl.BlockSpec((rows, 1), lambda i, j: (i, 0))
    out_of = lambda size, dtype: jax.ShapeDtypeStruct((row_tiles * rows, size), dtype)  # noqa: E731
    shapes = [out_of(LANES, jnp.float32)] * 4 + [out_of(DEPTH * LANES, t) for t in (jnp.float32, jnp.float32, jnp.int32)]
    head_block = (width, tile) if head.transposed else (tile, width)
    outs = pl.pallas_call(
        functools.partial(_kernel, head=head, tile=tile),
        grid=(row_tiles, pl.cdiv(head.vocab_size, tile)),
        in_specs=[
            pl.BlockSpec((rows, width), lambda i, j: (i, 0)),
            pl.BlockSpec(head_block, (lambda i, j: (0, j)) if head.transposed else (lambda i, j: (j, 0))),
            *[per_row] * 5,
        ],
        out_specs=[pl.BlockSpec((rows, shape.shape[1]), lambda i, j: (i, 0)) for shape in shapes],
        out_shape=shapes,
        scratch_shapes=[pltpu.VMEM((rows, tile), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
        ),
        name=f"fused_verify_rows{rows}_tile{tile}",
    )(
        _pad_rows(hidden_NxH, row_tiles * rows),
        head.weight,
        column(query.token_N, jnp.int32),
        column(1 / query.temperature_N, jnp.float32),
        column(query.noisy_N, jnp.int32),
        *(column(word, jnp.uint32) for word in query.key_N),
    )
    peak, total, total_warped, token_logit, score, logit, ids = (a[:num_rows] for a in outs)
    top = jnp.max(peak, axis=-1, keepdims=True)
    inverse = (1 / query.temperature_N.astype(jnp.float32))[:, None]
    over_lanes = lambda sums, scale: jnp.log(jnp.sum(sums * jnp.exp((peak - top) * scale), axis=-1))  # noqa: E731
    return RowStatistics(
        log_total_N=over_lanes(total, 1.0) + top[:, 0],
        log_total_warped_N=over_lanes(total_warped, inverse) + (top * inverse)[:, 0],
        token_logit_N=jnp.max(token_logit, axis=-1),
        score_NxC=score,
        logit_NxC=logit,
        id_NxC=ids,
    )


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _pad_rows(a: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(a, ((0, rows - a.shape[0]), *((0, 0),) * (a.ndim - 1)))


def _tile_size(head: Head, width: int) -> int:
    """Tokens of a tile of the head."""
    fitting = _TILE_BYTES // (width * head.weight.dtype.itemsize) // LANES * LANES
    return min(max(fitting, LANES), 8 * LANES, _round_up(head.vocab_size, LANES))


def _kernel(
    hidden_ref, head_ref, token_ref, inverse_ref, noisy_ref, key0_ref, key1_ref,
    peak_ref, total_ref, total_warped_ref, token_logit_ref, score_ref, logit_ref, id_ref, tile_ref,
    *, head: Head, tile: int,
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
    first_id = pl.program_id(1) * tile
    lane = jax.lax.broadcasted_iota(jnp.int32, (_GROUP, LANES), 1)

    def group(g, _):
        rows = pl.ds(pl.multiple_of(g * _GROUP, _GROUP), _GROUP)
        inverse, noisy, key = inverse_ref[rows], noisy_ref[rows], (key0_ref[rows], key1_ref[rows])
        kept = [[ref[rows, LANES * d : LANES * (d + 1)] for ref in (score_ref, logit_ref, id_ref)] for d in range(DEPTH)]
        peak, total, total_warped = peak_ref[rows], total_ref[rows], total_warped_ref[rows]
        token, token_logit = token_ref[rows], token_logit_ref[rows]
        for chunk in range(tile // LANES):
            ids = first_id + chunk * LANES + lane
            logit = tile_ref[rows, LANES * chunk : LANES * (chunk + 1)]
            if head.softcap:
                logit = (head.softcap * jnp.tanh(logit / head.softcap)).astype(hidden_ref.dtype).astype(jnp.float32)
            logit = jnp.where(ids < min(head.num_tokens, head.vocab_size), logit, -jnp.inf)
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
        for d in range(DEPTH):
            for ref, value in zip((score_ref, logit_ref, id_ref), kept[d], strict=True):
                ref[rows, LANES * d : LANES * (d + 1)] = value
        return 0

    jax.lax.fori_loop(0, hidden_ref.shape[0] // _GROUP, group, 0)


def _insert(kept: list[list[jax.Array]], new: list[jax.Array]) -> list[list[jax.Array]]:
    """The best of each lane by score, best first; of equal ones the older, whose id is smaller."""
    out = []
    for old in kept:
        better = new[0] > old[0]
        out.append([jnp.where(better, a, b) for a, b in zip(new, old, strict=True)])
        new = [jnp.where(better, b, a) for a, b in zip(new, old, strict=True)]
    return out
