"""Anchor attention on a TPU: no score leaves the chip's memory, forward or backward.

The grid is a list of steps, made on the device: a step is a tile of blocks and one tile of the context that some of
them see. Scores lie as `[keys, queries]`, so that all that belongs to a query (its peak, its sum, which rows it sees)
is one row of lanes. Going backward, the gradient of a pack's whole context stays in place until its last tile.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.anchor_attention.tiled import Options

LANES = 128
QUERIES = 512  # of a tile, about: slots of its blocks times heads of a group
CONTEXT = 512  # rows of a context tile at most
VMEM = 96 << 20
RESIDENT = 24 << 20  # bytes that the gradient of one pack's context may take; two copies fit a v5p's 64 MB
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite: the difference of two is no NaN


class Sizes(NamedTuple):
    """Static sizes of one call."""

    blocks: int  # of a pack
    slots: int  # queries of a block
    keys: int
    group: int  # query heads of a key-value head
    size: int  # blocks of a tile
    tiles: int  # of a pack
    context: int  # rows of a context tile

    @staticmethod
    def of(q_BxNxKxHxD: jax.Array, k_context_BxSxKVxD: jax.Array, k_block_BxNxJxKVxD: jax.Array) -> "Sizes":
        _, blocks, slots, heads, _ = q_BxNxKxHxD.shape
        length, num_kv = k_context_BxSxKVxD.shape[1:3]
        group = heads // num_kv
        size = min(max(QUERIES // (slots * group), 1), blocks)
        context = next((c for c in (CONTEXT, CONTEXT // 2) if length % c == 0), LANES)
        return Sizes(blocks, slots, k_block_BxNxJxKVxD.shape[2], group, size, -(-blocks // size), context)

    @property
    def queries(self) -> int:
        """Rows `[M]` of a tile's queries, whole rows of lanes."""
        return -(-self.size * self.slots * self.group // LANES) * LANES

    @property
    def own_keys(self) -> int:
        return -(-self.size * self.keys // 16) * 16


class Arrays(NamedTuple):
    """U tiles of all packs, V key-value heads; W keys of a tile's own blocks."""

    q_UxVxMxD: jax.Array
    k_UxVxWxD: jax.Array
    v_UxVxWxD: jax.Array
    k_BxVxSxD: jax.Array
    v_BxVxSxD: jax.Array


class Steps(NamedTuple):
    """The work of one call, in scalar memory."""

    tile_T: jax.Array  # of each step
    first_U: jax.Array  # first step of each tile
    context_U: jax.Array  # the first context tile it sees
    count_U: jax.Array  # how many it sees


def unsupported(q_BxNxKxHxD: jax.Array, k_context_BxSxKVxD: jax.Array) -> str | None:
    """Why this kernel cannot take these arrays; None when it can."""
    length, dim = k_context_BxSxKVxD.shape[1], q_BxNxKxHxD.shape[-1]
    if q_BxNxKxHxD.dtype not in (jnp.bfloat16, jnp.float32) or k_context_BxSxKVxD.dtype != q_BxNxKxHxD.dtype:
        return f"queries in {q_BxNxKxHxD.dtype}, keys in {k_context_BxSxKVxD.dtype}: both bfloat16, or both float32"
    if dim % LANES:
        return f"head dim {dim} is no multiple of {LANES}"
    if 2 * 4 * length * dim > RESIDENT:
        return f"the gradient of {length} rows of context does not fit into vector memory"
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
    sizes = Sizes.of(q_BxNxKxHxD, k_context_BxSxKVxD, k_block_BxNxJxKVxD)
    batch, _, _, heads, dim = q_BxNxKxHxD.shape
    tiled = functools.partial(_tiled, sizes)
    q = tiled(q_BxNxKxHxD).reshape(batch * sizes.tiles, sizes.size, sizes.slots, -1, sizes.group, dim)
    q_UxVxMxD = _rows(q.transpose(0, 3, 1, 2, 4, 5), sizes.queries)
    own = (_rows(tiled(a).transpose(0, 3, 1, 2, 4), sizes.own_keys) for a in (k_block_BxNxJxKVxD, v_block_BxNxJxKVxD))
    rows = -k_context_BxSxKVxD.shape[1] % sizes.context
    context = (
        jnp.pad(a.swapaxes(1, 2), ((0, 0), (0, 0), (0, rows), (0, 0))) for a in (k_context_BxSxKVxD, v_context_BxSxKVxD)
    )
    seen_Ux2xM = _seen(sizes, options, anchor_BxN, keep_BxN, start_BxN)
    out_UxVxMxD = _attend(sizes, options, Arrays(q_UxVxMxD, *own, *context), seen_Ux2xM)
    out = out_UxVxMxD[:, :, : sizes.size * sizes.slots * sizes.group]
    out = out.reshape(len(out), -1, sizes.size, sizes.slots, sizes.group, dim).transpose(0, 2, 3, 1, 4, 5)
    out = out.reshape(batch, -1, sizes.slots, heads, dim)[:, : sizes.blocks]
    return jnp.where(keep_BxN[..., None, None, None], out, 0)


def _tiled(sizes: Sizes, a: jax.Array) -> jax.Array:
    """`[B, N, ...]` to `[U, G, ...]`; blocks that fill a pack's last tile are empty."""
    a = jnp.pad(a, [(0, 0), (0, sizes.tiles * sizes.size - sizes.blocks)] + [(0, 0)] * (a.ndim - 2))
    return a.reshape(-1, sizes.size, *a.shape[2:])


def _rows(a: jax.Array, count: int) -> jax.Array:
    """`[U, V, ..., D]` to `[U, V, count, D]`."""
    rows = a.reshape(*a.shape[:2], -1, a.shape[-1])
    return jnp.pad(rows, ((0, 0), (0, 0), (0, count - rows.shape[2]), (0, 0)))


def _seen(
    sizes: Sizes, options: Options, anchor_BxN: jax.Array, keep_BxN: jax.Array, start_BxN: jax.Array
) -> jax.Array:
    """`[U, 2, M]`: the first context row that each query sees, and the one behind the last."""
    anchor_UxGx1, keep, start = (_tiled(sizes, a)[..., None] for a in (anchor_BxN, keep_BxN, start_BxN))
    first = jnp.broadcast_to(start, (*start.shape[:2], sizes.slots))
    if options.window:
        slot = jnp.arange(sizes.keys - sizes.slots, sizes.keys)
        behind = jnp.full(sizes.slots, -options.window) if options.from_anchor else slot - options.window + 1
        first = jnp.maximum(first, anchor_UxGx1 + behind)
    seen = jnp.stack([first, jnp.broadcast_to(anchor_UxGx1, first.shape)], axis=1)  # [U, 2, G, K]
    seen = jnp.where(keep[:, None], seen, 0)
    rows = jnp.repeat(seen.reshape(len(seen), 2, -1), sizes.group, axis=-1)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, sizes.queries - rows.shape[-1]))).astype(jnp.int32)


def _steps(seen_Ux2xM: jax.Array, context: int, most: int) -> tuple[Steps, jax.Array]:
    """The steps of all tiles and how many there are: every tile has one, which sees to its blocks, or more."""
    first, end = seen_Ux2xM[:, 0], seen_Ux2xM[:, 1]
    some = first < end
    low_U = jnp.min(jnp.where(some, first, jnp.iinfo(jnp.int32).max), axis=-1) // context
    high_U = jnp.max(jnp.where(some, pl.cdiv(end, context), 0), axis=-1)
    count_U = jnp.maximum(high_U - low_U, 0)
    end_U = jnp.cumsum(jnp.maximum(count_U, 1))
    tile_T = jnp.minimum(jnp.searchsorted(end_U, jnp.arange(len(end_U) * most), side="right"), len(end_U) - 1)
    scalars = tile_T, end_U - jnp.maximum(count_U, 1), jnp.where(count_U > 0, low_U, 0), count_U
    return Steps(*(a.astype(jnp.int32) for a in scalars)), end_U[-1]


def _own_bias(sizes: Sizes, options: Options) -> np.ndarray:
    """`[W, M]` what is added to scores within a tile: 0 where the query sees the key, which is of its own block."""
    query, key = np.arange(sizes.queries) // sizes.group, np.arange(sizes.own_keys)[:, None]
    slot, place = query % sizes.slots + sizes.keys - sizes.slots, key % sizes.keys
    visible = key // sizes.keys == query // sizes.slots
    if options.causal:
        visible &= place <= slot
    if options.window and not options.from_anchor:
        visible &= place > slot - options.window
    nobody = query >= sizes.size * sizes.slots
    return np.where(np.where(nobody, key == 0, visible), 0, MASKED).astype(np.float32)


# ------------------------------------------------------------------------------------------------ forward and backward


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(sizes: Sizes, options: Options, arrays: Arrays, seen_Ux2xM: jax.Array) -> jax.Array:
    return _forward(sizes, options, arrays, seen_Ux2xM)[0]


def _forward(sizes: Sizes, options: Options, arrays: Arrays, seen_Ux2xM: jax.Array) -> tuple[jax.Array, Any]:
    dim = arrays.q_UxVxMxD.shape[-1]
    row = pltpu.VMEM((1, sizes.queries), jnp.float32)
    log_total = jax.ShapeDtypeStruct((*arrays.q_UxVxMxD.shape[:2], 1, sizes.queries), jnp.float32)
    outs = {"out": arrays.q_UxVxMxD, "log_total": log_total}
    scratch = {"peak": row, "total": row, "sum": pltpu.VMEM((dim, sizes.queries), jnp.float32)}
    out, log_total = _call(_forward_kernel, sizes, options, arrays, seen_Ux2xM, {}, outs, scratch)
    return out, (arrays, seen_Ux2xM, out, log_total)


def _backward(sizes: Sizes, options: Options, saved: tuple[Any, ...], d_out: jax.Array) -> tuple[Arrays, None]:
    arrays, seen_Ux2xM, out, log_total = saved
    shift = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)[:, :, None]
    given = {"d_out": d_out, "log_total": log_total, "shift": shift}
    wide = lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32)  # noqa: E731
    outs = {
        "d_q": arrays.q_UxVxMxD, "d_k": arrays.k_UxVxWxD, "d_v": arrays.v_UxVxWxD,
        "d_k_context": wide(arrays.k_BxVxSxD), "d_v_context": wide(arrays.v_BxVxSxD),
    }  # fmt: skip
    scratch = {"sum": pltpu.VMEM(arrays.q_UxVxMxD.shape[2:], jnp.float32)}
    grads = _call(_backward_kernel, sizes, options, arrays, seen_Ux2xM, given, outs, scratch)
    return Arrays(*(g.astype(a.dtype) for g, a in zip(grads, arrays, strict=True))), None


_attend.defvjp(_forward, _backward)


def _call(
    kernel: Callable[..., None],
    sizes: Sizes,
    options: Options,
    arrays: Arrays,
    seen_Ux2xM: jax.Array,
    given: dict[str, jax.Array],
    outs: dict[str, Any],
    scratch: dict[str, Any],
) -> list[jax.Array]:
    """Runs a kernel over the heads and the steps, with references by name."""
    num_kv, length, dim = arrays.k_BxVxSxD.shape[1:]
    most = length // sizes.context
    steps, num_steps = _steps(seen_Ux2xM, sizes.context, most)
    ins = arrays._asdict() | {"seen": seen_Ux2xM, "bias": jnp.asarray(_own_bias(sizes, options))} | given

    def at_tile(a: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *a.shape[2:]), lambda v, i, steps: (steps.tile_T[i], v, 0, 0))

    def context_of(v: jax.Array, i: jax.Array, steps: Steps) -> tuple[Any, ...]:
        tile = steps.tile_T[i]
        place = jnp.minimum(steps.context_U[tile] + i - steps.first_U[tile], most - 1)
        return jax.lax.div(tile, sizes.tiles), v, place, 0

    specs = {
        "k_BxVxSxD": pl.BlockSpec((None, None, sizes.context, dim), context_of),
        "v_BxVxSxD": pl.BlockSpec((None, None, sizes.context, dim), context_of),
        "seen": pl.BlockSpec((None, *seen_Ux2xM.shape[1:]), lambda v, i, steps: (steps.tile_T[i], 0, 0)),
        "bias": pl.BlockSpec((sizes.own_keys, sizes.queries), lambda v, i, steps: (0, 0)),
    }
    whole = pl.BlockSpec(
        (None, None, length, dim), lambda v, i, steps: (jax.lax.div(steps.tile_T[i], sizes.tiles), v, 0, 0)
    )

    def named(steps: Steps, *refs: Any) -> None:
        kernel(steps, dict(zip([*ins, *outs, *scratch], refs, strict=True)), sizes, options.scale)

    return pl.pallas_call(
        named,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_kv, num_steps),
            in_specs=[specs.get(name) or at_tile(a) for name, a in ins.items()],
            out_specs=[whole if name.endswith("context") else at_tile(a) for name, a in outs.items()],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in outs.values()],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 2, vmem_limit_bytes=VMEM),
        cost_estimate=_cost(sizes, arrays, ins, outs),
        name=f"anchor_attention{kernel.__name__}",
    )(steps, *ins.values())


def _cost(sizes: Sizes, arrays: Arrays, ins: dict[str, jax.Array], outs: dict[str, Any]) -> pl.CostEstimate:
    """For XLA's schedule and the report: at most, when every tile sees the whole context."""
    tiles, num_kv, queries, dim = arrays.q_UxVxMxD.shape
    length = arrays.k_BxVxSxD.shape[2]
    scores = tiles * num_kv * queries * (length + sizes.own_keys)
    size = lambda a: math.prod(a.shape) * a.dtype.itemsize  # noqa: E731
    again = 2 * (tiles - len(arrays.k_BxVxSxD)) * size(arrays.k_BxVxSxD) // len(arrays.k_BxVxSxD)
    return pl.CostEstimate(
        flops=2 * scores * dim * (5 if "d_out" in ins else 2),
        transcendentals=scores,
        bytes_accessed=again + sum(map(size, (*ins.values(), *outs.values()))),
    )


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    axes = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)


class _Step(NamedTuple):
    """Where a step stands."""

    done: jax.Array  # steps of its tile before it
    context: jax.Array  # of the context tile
    on_context: jax.Array  # whether there is one
    last: jax.Array  # whether it is its tile's last
    tile: jax.Array

    @staticmethod
    def of(steps: Steps) -> "_Step":
        i = pl.program_id(1)
        tile = steps.tile_T[i]
        done, count = i - steps.first_U[tile], steps.count_U[tile]
        return _Step(done, steps.context_U[tile] + done, done < count, done + 1 >= count, tile)


def _context_scores(step: _Step, refs: dict[str, Any], scale: float) -> jax.Array:
    """`[C, M]` of all queries on a context tile."""
    scores = _dot(refs["k_BxVxSxD"][...], refs["q_UxVxMxD"][...], (1, 1)) * scale
    row = step.context * scores.shape[0] + jax.lax.broadcasted_iota(jnp.int32, (scores.shape[0], 1), 0)
    return jnp.where((row >= refs["seen"][:1]) & (row < refs["seen"][1:]), scores, MASKED)


def _own_scores(refs: dict[str, Any], scale: float) -> jax.Array:
    """`[W, M]` of all queries on the tile's own blocks."""
    return _dot(refs["k_UxVxWxD"][...], refs["q_UxVxMxD"][...], (1, 1)) * scale + refs["bias"][...]


def _forward_kernel(steps: Steps, refs: dict[str, Any], sizes: Sizes, scale: float) -> None:
    step, peak_ref, total_ref, sum_ref = _Step.of(steps), refs["peak"], refs["total"], refs["sum"]
    dtype = refs["q_UxVxMxD"].dtype

    @pl.when(step.done == 0)
    def _():
        scores = _own_scores(refs, scale)
        peak_ref[...] = jnp.max(scores, axis=0, keepdims=True)  # a score: every query sees itself
        weights = jnp.exp(scores - peak_ref[...])
        total_ref[...] = jnp.sum(weights, axis=0, keepdims=True)
        sum_ref[...] = _dot(refs["v_UxVxWxD"][...], weights.astype(dtype), (0, 0))

    @pl.when(step.on_context)
    def _():
        scores = _context_scores(step, refs, scale)
        peak = jnp.maximum(peak_ref[...], jnp.max(scores, axis=0, keepdims=True))
        weights, shrink = jnp.exp(scores - peak), jnp.exp(peak_ref[...] - peak)
        peak_ref[...] = peak
        total_ref[...] = total_ref[...] * shrink + jnp.sum(weights, axis=0, keepdims=True)
        sum_ref[...] = sum_ref[...] * shrink + _dot(refs["v_BxVxSxD"][...], weights.astype(dtype), (0, 0))

    @pl.when(step.last)
    def _():
        refs["out"][...] = (sum_ref[...] / total_ref[...]).T.astype(dtype)
        refs["log_total"][...] = peak_ref[...] + jnp.log(total_ref[...])


def _backward_kernel(steps: Steps, refs: dict[str, Any], sizes: Sizes, scale: float) -> None:
    step, sum_ref, q, d_out = _Step.of(steps), refs["sum"], refs["q_UxVxMxD"][...], refs["d_out"][...]
    d_context = refs["d_k_context"], refs["d_v_context"]

    def of_keys(scores: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Gradients of the queries, and of these keys and values."""
        weights = jnp.exp(scores - refs["log_total"][...])
        d_scores = (weights * (_dot(v, d_out, (1, 1)) - refs["shift"][...]) * scale).astype(q.dtype)
        return _dot(d_scores, k, (0, 0)), _dot(d_scores, q, (1, 0)), _dot(weights.astype(q.dtype), d_out, (1, 0))

    @pl.when((step.done == 0) & (jax.lax.rem(step.tile, sizes.tiles) == 0))
    def _():
        for ref in d_context:
            ref[...] = jnp.zeros(ref.shape, jnp.float32)

    @pl.when(step.done == 0)
    def _():
        scores = _own_scores(refs, scale)
        sum_ref[...], d_k, d_v = of_keys(scores, refs["k_UxVxWxD"][...], refs["v_UxVxWxD"][...])
        refs["d_k"][...], refs["d_v"][...] = d_k.astype(q.dtype), d_v.astype(q.dtype)

    @pl.when(step.on_context)
    def _():
        scores = _context_scores(step, refs, scale)
        d_q, *d_keys = of_keys(scores, refs["k_BxVxSxD"][...], refs["v_BxVxSxD"][...])
        sum_ref[...] += d_q
        rows = pl.ds(pl.multiple_of(step.context * sizes.context, sizes.context), sizes.context)
        for ref, d in zip(d_context, d_keys, strict=True):
            ref[rows] += d

    @pl.when(step.last)
    def _():
        refs["d_q"][...] = sum_ref[...].astype(q.dtype)
