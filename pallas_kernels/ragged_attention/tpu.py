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
    view = _View(sizes.group, sizes.tile, sizes.tiles, causal, window, from_anchor)
    steps, num_steps = _plan(sizes, view, rows, prefix, layer)
    kernel = functools.partial(_kernel, view=view, scale=scale, softcap=softcap)
    out_UxKVxMxD = _call(kernel, steps, num_steps, q_UxKVxMxD, k_RxKVxQxD, v_RxKVxQxD, prefix, sizes, window)
    out = out_UxKVxMxD[:, :, : sizes.tile * sizes.group].reshape(len(q), num_kv, sizes.tile, sizes.group, dim)
    out_RxQxHxD = out.transpose(0, 2, 1, 3, 4).reshape(requests, -1, *q_NxHxD.shape[1:])
    return out_RxQxHxD[rows.slot_N, rows.offset_N]


def _padded(a: jax.Array, multiple: int) -> jax.Array:
    """`[.., rows, D]` with rows up to a multiple of what a memory tile holds."""
    return jnp.pad(a, ((0, 0), (0, 0), (0, -a.shape[2] % multiple), (0, 0)))


def _plan(sizes: _Sizes, view: "_View", rows: Rows, prefix: Prefix, layer: jax.Array | int) -> tuple[_Steps, jax.Array]:
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


class _View(NamedTuple):
    """What the rows of a tile may see (static). Keys are counted from the block's first row; cached ones are below 0.

    Query `m` of a tile is head `m % group` of the block's row `base + m // group`.
    """

    group: int
    tile: int
    tiles: int
    causal: bool
    window: int
    from_anchor: bool

    def oldest(self, base: jax.Array) -> jax.Array:
        """The first key that the tile from row `base` on sees."""
        if not self.window:
            return jnp.full_like(base, jnp.iinfo(jnp.int32).min // 2)
        return jnp.full_like(base, -self.window) if self.from_anchor else base - self.window + 1

    def mask(self, key: jax.Array, m: jax.Array, base: jax.Array, count: jax.Array, cached: bool) -> jax.Array:
        """Which keys `[1, C]` the queries `[M, 1]` see, `[M, C]` or `[1, C]`."""
        visible = key < (0 if cached else count)
        # Rows are compared times the group, which saves a division: a <= m // group where a * group <= m.
        if self.causal and not cached:
            visible = visible & ((key - base) * self.group <= m)
        if self.window and not self.from_anchor:
            visible = visible & ((key - base + self.window) * self.group > m)
        if self.window and self.from_anchor and cached:
            visible = visible & (key >= -self.window)
        return visible


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
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_steps,),
            in_specs=[at_tile, at_request, at_request, in_hbm, in_hbm],
            out_specs=at_tile,
            scratch_shapes=[
                pages, pages, pltpu.SemaphoreType.DMA((2,)),
                pltpu.VMEM((num_kv, m, 1), jnp.float32), pltpu.VMEM((num_kv, m, 1), jnp.float32),
                pltpu.VMEM((num_kv, m, dim), jnp.float32),
            ],
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
    steps: _Steps, q_ref, k_block_ref, v_block_ref, k_pool, v_pool, out_ref, k_buffer, v_buffer, arrived, peak_ref,
    total_ref, sum_ref, *, view: _View, scale: float, softcap: float,
) -> None:  # fmt: skip
    """One step: a tile of queries `[KV, M, D]` and the pages of one chunk; `peak`, `total`, `sum`: online softmax."""
    i, num_steps = pl.program_id(0), pl.num_programs(0)
    num_kv, m, dim = q_ref.shape
    num_pages, page_size = k_buffer.shape[1], k_buffer.shape[3]
    width = steps.table_RC.shape[0] // steps.length_R.shape[0]
    tile = steps.tile_T[i]
    request, base = jax.lax.div(tile, view.tiles), jax.lax.rem(tile, view.tiles) * view.tile
    done = (i - steps.first_U[tile]) * num_pages
    pages = jnp.minimum(steps.pages_U[tile] - done, num_pages)

    def copies(step: jax.Array, act: Callable[[Any], None]) -> None:
        """Starts or awaits the copies of a step's pages."""
        tile = steps.tile_T[step]
        done = (step - steps.first_U[tile]) * num_pages
        first = jax.lax.div(tile, view.tiles) * width + steps.page_U[tile] + done

        def one(j: jax.Array, _: None) -> None:
            page = steps.table_RC[first + j]
            for pool, buffer in ((k_pool, k_buffer), (v_pool, v_buffer)):
                source, target = pool.at[steps.layer_1[0], page], buffer.at[step & 1, j]
                act(pltpu.make_async_copy(source, target, arrived.at[step & 1]))

        jax.lax.fori_loop(0, jnp.minimum(steps.pages_U[tile] - done, num_pages), one, None)

    @pl.when(i == 0)
    def _():
        # What no copy has filled is masked, but the weight 0 times anything must be 0.
        v_buffer[...] = jnp.zeros_like(v_buffer)
        copies(i, lambda copy: copy.start())

    @pl.when(i + 1 < num_steps)
    def _():
        copies(i + 1, lambda copy: copy.start())

    def attend(head: int, k: jax.Array, v: jax.Array, visible: jax.Array) -> None:
        scores = _dot(q_ref[head], k, ((1,), (1,))) * scale
        scores = softcap * jnp.tanh(scores / softcap) if softcap else scores
        scores = jnp.where(visible, scores, MASKED)
        before = peak_ref[head]
        peak = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights, shrink = jnp.exp(scores - peak), jnp.exp(before - peak)
        peak_ref[head] = peak
        total_ref[head] = total_ref[head] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        sum_ref[head] = sum_ref[head] * shrink + _dot(weights.astype(v.dtype), v, ((1,), (0,)))

    def visible(first: jax.Array, size: int, cached: bool) -> jax.Array:
        key = first + jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
        query = jax.lax.broadcasted_iota(jnp.int32, (m, 1), 0)
        return view.mask(key, query, base, steps.count_R[request], cached)

    @pl.when(done == 0)
    def _():
        # The block comes first: every real row sees itself, so that from here on no peak is a masked score.
        peak_ref[...] = jnp.full_like(peak_ref, MASKED)
        total_ref[...], sum_ref[...] = jnp.zeros_like(total_ref), jnp.zeros_like(sum_ref)

        @pl.when(base < steps.count_R[request])
        def _():
            mask = visible(0, k_block_ref.shape[1], cached=False)
            for head in range(num_kv):
                attend(head, k_block_ref[head], v_block_ref[head], mask)

    @pl.when(pages > 0)
    def _():
        copies(i, lambda copy: copy.wait())
        rows = num_pages * page_size
        mask = visible((steps.page_U[tile] + done) * page_size - steps.length_R[request], rows, cached=True)
        for head in range(num_kv):
            k, v = (buffer[i & 1, :, head].reshape(rows, dim) for buffer in (k_buffer, v_buffer))
            attend(head, k, v, mask)

    @pl.when(done + num_pages >= steps.pages_U[tile])
    def _():
        total = total_ref[...]
        out_ref[...] = (sum_ref[...] / jnp.where(total > 0, total, 1)).astype(out_ref.dtype)


def _dot(a: jax.Array, b: jax.Array, contract: tuple[tuple[int], tuple[int]]) -> jax.Array:
    return jax.lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=jnp.float32)
