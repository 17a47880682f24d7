"""Ragged attention on TPU: the pages that a request uses go from the pool into on-chip memory, once, by its page table.

The grid is a list of steps, made on the device: a step is one tile of a request's rows and one chunk of its pages, so
that the work follows the prefixes' lengths and not the table's width. While a step computes, the pages of the next one
arrive, whichever request they belong to. The online softmax lives in scratch from a tile's first step to its last.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_attention.reference import Prefix, Rows
from pallas_kernels.ragged_attention.view import View

TILE = 512  # query rows times heads of a group that one tile may hold: what keeps the matrix unit busy, and fits
CHUNK = 512  # cached rows of one step: at bandwidth about 2 µs, several times the cost of a grid step
LANES = 128
SCALARS = 512 * 1024  # bytes of scalar memory for page table and step list, half of a chip's
VMEM = 48 * 1024 * 1024
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite: the difference of two is no NaN


def unsupported(q_NxHxD: jax.Array, rows: Rows, prefix: Prefix | None) -> str | None:
    """Why this kernel cannot take these arrays; None when it can."""
    if prefix is None:
        return "there is no cached prefix"
    page_size, dim = prefix.k_LxPxKVxSxD.shape[3:]
    dtype, steps = prefix.k_LxPxKVxSxD.dtype, _Sizes.of(q_NxHxD, rows, prefix).max_steps
    if dtype not in (jnp.bfloat16, jnp.float32) or q_NxHxD.dtype != dtype:
        return f"queries in {q_NxHxD.dtype} and pages in {dtype}: both must be bfloat16 or both float32"
    if dim % LANES:
        return f"head dim {dim} is no multiple of {LANES}"
    if page_size % (32 // dtype.itemsize):
        return f"pages of {page_size} rows are no whole tiles of {32 // dtype.itemsize}"
    if 4 * (prefix.table_RxC.size + steps) > SCALARS:
        return f"a page table of {prefix.table_RxC.shape} does not fit into scalar memory"
    return None


class _Sizes(NamedTuple):
    """Static sizes of one call."""

    group: int  # query heads of a key-value head
    tile: int  # block rows of a tile
    tiles: int  # of a request
    pages: int  # of a chunk
    max_steps: int

    @staticmethod
    def of(q_NxHxD: jax.Array, rows: Rows, prefix: Prefix) -> "_Sizes":
        num_kv, page_size = prefix.k_LxPxKVxSxD.shape[2:4]
        requests, width = prefix.table_RxC.shape
        group = q_NxHxD.shape[1] // num_kv
        tile = min(rows.block, max(1, TILE // group))
        tiles, pages = pl.cdiv(rows.block, tile), min(max(1, CHUNK // page_size), width)
        return _Sizes(group, tile, tiles, pages, requests * tiles * max(1, pl.cdiv(width, pages)))


class _Steps(NamedTuple):
    """The work of one call, in scalar memory. U tiles, R requests of C pages at most."""

    tile_T: jax.Array  # tile of each step
    first_U: jax.Array  # first step of each tile
    page_U: jax.Array  # first page that a tile reads
    pages_U: jax.Array  # pages it reads
    length_R: jax.Array
    count_R: jax.Array
    table_RC: jax.Array
    layer_1: jax.Array

    @property
    def width(self) -> int:
        return self.table_RC.shape[0] // self.length_R.shape[0]


def ragged_attention(
    q_NxHxD: jax.Array,
    k_NxKVxD: jax.Array,
    v_NxKVxD: jax.Array,
    rows: Rows,
    prefix: Prefix,
    layer: jax.Array | int,
    *,
    causal: bool,
    scale: float,
    window: int = 0,
    from_anchor: bool = False,
    softcap: float = 0.0,
) -> jax.Array:
    """As the package's `ragged_attention` says, for what `unsupported` lets through."""
    num_kv, dim = k_NxKVxD.shape[1:]
    sizes = _Sizes.of(q_NxHxD, rows, prefix)
    requests, packed = len(rows.count_R), 32 // q_NxHxD.dtype.itemsize
    # The few rows of the blocks are regrouped by request here, heads first; the prefixes are not touched.
    index = jnp.clip(rows.first_R[:, None] + jnp.arange(sizes.tiles * sizes.tile), 0, len(rows.slot_N) - 1)
    q = q_NxHxD[index].reshape(requests * sizes.tiles, sizes.tile, num_kv, sizes.group, dim)
    q_UxKVxMxD = _padded(q.transpose(0, 2, 1, 3, 4).reshape(len(q), num_kv, -1, dim), packed)
    k_RxKVxQxD, v_RxKVxQxD = (_padded(a[index].swapaxes(1, 2), packed) for a in (k_NxKVxD, v_NxKVxD))
    view = View(sizes.group, sizes.tile, sizes.tiles, causal, window, from_anchor)
    steps, num_steps = _plan(sizes, view, rows, prefix, layer)
    kernel = functools.partial(_kernel, view=view, scale=scale, softcap=softcap)
    out_UxKVxMxD = _call(kernel, steps, num_steps, q_UxKVxMxD, k_RxKVxQxD, v_RxKVxQxD, prefix, sizes, window)
    out = out_UxKVxMxD[:, :, : sizes.tile * sizes.group].reshape(len(q), num_kv, sizes.tile, sizes.group, dim)
    out_RxQxHxD = out.transpose(0, 2, 1, 3, 4).reshape(requests, -1, *q_NxHxD.shape[1:])
    return out_RxQxHxD[rows.slot_N, rows.offset_N]


def _padded(a: jax.Array, multiple: int) -> jax.Array:
    """`[.., rows, D]` with rows up to a multiple of what a memory tile holds."""
    return jnp.pad(a, ((0, 0), (0, 0), (0, -a.shape[2] % multiple), (0, 0)))


def _plan(sizes: _Sizes, view: View, rows: Rows, prefix: Prefix, layer: jax.Array | int) -> tuple[_Steps, jax.Array]:
    """The steps of all tiles and how many there are: every tile has one, which sees to its block, or more."""
    page_size, width = prefix.k_LxPxKVxSxD.shape[3], prefix.table_RxC.shape[1]
    base = jnp.arange(sizes.tiles) * sizes.tile
    first = prefix.length_R[:, None] + view.oldest(base)
    first_page = jnp.maximum(first, 0) // page_size
    last_page = jnp.minimum(pl.cdiv(prefix.length_R, page_size), width)[:, None]
    pages_U = jnp.where(base < rows.count_R[:, None], jnp.maximum(last_page - first_page, 0), 0).reshape(-1)
    steps_U = jnp.maximum(pl.cdiv(pages_U, sizes.pages), 1)
    end_U = jnp.cumsum(steps_U)
    tile_T = jnp.searchsorted(end_U, jnp.arange(sizes.max_steps), side="right")
    scalars = (
        jnp.minimum(tile_T, len(end_U) - 1), end_U - steps_U, first_page.reshape(-1), pages_U, prefix.length_R,
        rows.count_R, prefix.table_RxC.reshape(-1), jnp.reshape(layer, (1,)),
    )  # fmt: skip
    return _Steps(*(a.astype(jnp.int32) for a in scalars)), end_U[-1]


class _Scratch(NamedTuple):
    """What outlives a step: two chunks of pages, and the online softmax of a tile."""

    k_buffer: Any  # [2, P, KV, S, D]
    v_buffer: Any
    arrived: Any  # a semaphore for each chunk
    peak: Any  # [KV, M, 1]
    total: Any
    sum: Any  # [KV, M, D]


def _call(
    kernel: Callable[..., None],
    steps: _Steps,
    num_steps: jax.Array,
    q_UxKVxMxD: jax.Array,
    k_RxKVxQxD: jax.Array,
    v_RxKVxQxD: jax.Array,
    prefix: Prefix,
    sizes: _Sizes,
    window: int,
) -> jax.Array:
    _, num_kv, m, dim = q_UxKVxMxD.shape
    at_tile = pl.BlockSpec((None, num_kv, m, dim), lambda i, steps: (steps.tile_T[i], 0, 0, 0))
    at_request = pl.BlockSpec(
        (None, *k_RxKVxQxD.shape[1:]), lambda i, steps: (jax.lax.div(steps.tile_T[i], sizes.tiles), 0, 0, 0)
    )
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    pages = pltpu.VMEM((2, sizes.pages, *prefix.k_LxPxKVxSxD.shape[2:]), prefix.k_LxPxKVxSxD.dtype)
    row, rows = (pltpu.VMEM((num_kv, m, width), jnp.float32) for width in (1, dim))
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_steps,),
            in_specs=[at_tile, at_request, at_request, in_hbm, in_hbm],
            out_specs=at_tile,
            scratch_shapes=[_Scratch(pages, pages, pltpu.SemaphoreType.DMA((2,)), row, row, rows)],
        ),
        out_shape=jax.ShapeDtypeStruct(q_UxKVxMxD.shape, q_UxKVxMxD.dtype),
        # Checks of every copy's bounds would double the time that issuing it takes; the tests' interpreter has its own.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM, disable_bounds_checks=True
        ),
        cost_estimate=_cost(q_UxKVxMxD, k_RxKVxQxD, prefix, window),
        name="ragged_attention",
    )(steps, q_UxKVxMxD, k_RxKVxQxD, v_RxKVxQxD, prefix.k_LxPxKVxSxD, prefix.v_LxPxKVxSxD)  # fmt: skip


def _cost(q_UxKVxMxD: jax.Array, k_RxKVxQxD: jax.Array, prefix: Prefix, window: int) -> pl.CostEstimate:
    """For XLA's schedule and the report: at most, when every prefix fills its table or its window."""
    num_kv, page_size, dim = prefix.k_LxPxKVxSxD.shape[2:]
    pages = prefix.table_RxC.shape[1]
    pages = min(pages, pl.cdiv(window, page_size) + 1) if window else pages
    weights = q_UxKVxMxD.size // dim * pages * page_size
    pages_read = 2 * len(q_UxKVxMxD) * pages * num_kv * page_size * dim
    values = pages_read + 2 * q_UxKVxMxD.size + 2 * k_RxKVxQxD.size
    return pl.CostEstimate(
        flops=4 * weights * dim, transcendentals=weights, bytes_accessed=values * q_UxKVxMxD.dtype.itemsize
    )


def _kernel(
    steps: _Steps, q_ref, k_block_ref, v_block_ref, k_pool, v_pool, out_ref, scratch: _Scratch, *, view: View,
    scale: float, softcap: float,
) -> None:  # fmt: skip
    """One step: a tile of queries `[KV, M, D]` and one chunk of pages; the tile's first step sees to its block too."""
    i, num_steps = pl.program_id(0), pl.num_programs(0)
    num_kv, m, dim = q_ref.shape
    num_pages, page_size = scratch.k_buffer.shape[1], scratch.k_buffer.shape[3]
    tile = steps.tile_T[i]
    request, base = jax.lax.div(tile, view.tiles), jax.lax.rem(tile, view.tiles) * view.tile
    done = (i - steps.first_U[tile]) * num_pages
    copy_pages = functools.partial(_copy_pages, steps, view=view, pools=(k_pool, v_pool), scratch=scratch)
    attend = functools.partial(_attend, scratch=scratch, scale=scale, softcap=softcap)

    def visible(first: jax.Array, size: int, end: jax.Array, cached: bool) -> jax.Array:
        key = first + jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
        return view.mask(key, jax.lax.broadcasted_iota(jnp.int32, (m, 1), 0), base, end, cached)

    @pl.when(i == 0)
    def _():
        # Rows that no copy has filled have weight 0, and 0 times them must be 0.
        scratch.v_buffer[...] = jnp.zeros_like(scratch.v_buffer)
        copy_pages(i, lambda copy: copy.start())

    @pl.when(i + 1 < num_steps)
    def _():
        copy_pages(i + 1, lambda copy: copy.start())

    @pl.when(done == 0)
    def _():
        scratch.peak[...] = jnp.full_like(scratch.peak, MASKED)
        scratch.total[...], scratch.sum[...] = jnp.zeros_like(scratch.total), jnp.zeros_like(scratch.sum)

        @pl.when(base < steps.count_R[request])
        def _():
            # Every real row sees itself: once its block is done, its peak is a score and no mask.
            mask = visible(0, k_block_ref.shape[1], steps.count_R[request], cached=False)
            _each_head(num_kv, m, lambda head: attend(head, q_ref[head], k_block_ref[head], v_block_ref[head], mask))

    @pl.when(done < steps.pages_U[tile])
    def _():
        copy_pages(i, lambda copy: copy.wait())
        size, length = num_pages * page_size, steps.length_R[request]
        end = jnp.minimum(steps.width * page_size - length, 0)
        mask = visible((steps.page_U[tile] + done) * page_size - length, size, end, cached=True)

        def one(head: jax.Array | int) -> None:
            k, v = (a[i & 1, :, head].reshape(size, dim) for a in (scratch.k_buffer, scratch.v_buffer))
            attend(head, q_ref[head], k, v, mask)

        _each_head(num_kv, m, one)

    @pl.when(done + num_pages >= steps.pages_U[tile])
    def _():
        total = scratch.total[...]
        out_ref[...] = (scratch.sum[...] * (1 / jnp.where(total > 0, total, 1))).astype(out_ref.dtype)


def _each_head(num_kv: int, m: int, act: Callable[[Any], None]) -> None:
    """Few queries leave the units idle unless the compiler may mix heads; many fill them, and compile sooner."""
    if m <= LANES:
        for head in range(num_kv):
            act(head)
    else:
        jax.lax.fori_loop(0, num_kv, lambda head, _: act(head), None)


def _copy_pages(
    steps: _Steps, step: jax.Array, act: Callable[[Any], None], *, view: View, pools: tuple, scratch: _Scratch
) -> None:
    """Starts or awaits (`act`) the copies of a step's pages."""
    tile, num_pages, half = steps.tile_T[step], scratch.k_buffer.shape[1], step & 1
    done = (step - steps.first_U[tile]) * num_pages
    first = jax.lax.div(tile, view.tiles) * steps.width + steps.page_U[tile] + done

    def one(j: jax.Array, _: None) -> None:
        page = steps.table_RC[first + j]
        for pool, buffer in zip(pools, (scratch.k_buffer, scratch.v_buffer), strict=True):
            act(pltpu.make_async_copy(pool.at[steps.layer_1[0], page], buffer.at[half, j], scratch.arrived.at[half]))

    jax.lax.fori_loop(0, jnp.minimum(steps.pages_U[tile] - done, num_pages), one, None)


def _attend(
    head: int, q_MxD: jax.Array, k_CxD: jax.Array, v_CxD: jax.Array, visible: jax.Array, *, scratch: _Scratch,
    scale: float, softcap: float,
) -> None:  # fmt: skip
    """Takes C more keys into the online softmax of one head."""
    scores = _dot(q_MxD, k_CxD, ((1,), (1,))) * scale
    scores = softcap * jnp.tanh(scores / softcap) if softcap else scores
    scores = jnp.where(visible, scores, MASKED)
    before = scratch.peak[head]
    peak = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    weights, shrink = jnp.exp(scores - peak), jnp.exp(before - peak)
    scratch.peak[head] = peak
    scratch.total[head] = scratch.total[head] * shrink + jnp.sum(weights, axis=1, keepdims=True)
    scratch.sum[head] = scratch.sum[head] * shrink + _dot(weights.astype(v_CxD.dtype), v_CxD, ((1,), (0,)))


def _dot(a: jax.Array, b: jax.Array, contract: tuple[tuple[int], tuple[int]]) -> jax.Array:
    return jax.lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=jnp.float32)
