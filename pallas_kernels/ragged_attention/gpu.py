"""Ragged attention on a Hopper GPU: each block of threads walks the cached pages of one tile of queries and one head.

One warpgroup copies the next pages while the other multiplies, with a running softmax. Where requests are few, several
blocks share the pages of a tile. The rows that are not cached yet, a block's own few, are seen to in XLA, and so is the
sum of all parts.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_attention.reference import Prefix, Rows
from pallas_kernels.ragged_attention.view import View

ROWS = 64  # queries of a tile, of all heads of a group: one warpgroup's matrix instruction
KEYS = 64  # cached rows of a step
STEPS = 4  # steps whose pages are on their way
BLOCKS = 264  # that a call should have at least: two for each of an H100's processors
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite: the difference of two is no NaN
COPY, ATTEND = range(2)  # warpgroups


def unsupported(q_NxHxD: jax.Array, prefix: Prefix | None) -> str | None:
    """Why this kernel cannot take these arrays; None when it can."""
    if prefix is None:
        return "there is no cached prefix"
    num_kv, page_size, dim = prefix.k_LxPxKVxSxD.shape[2:]
    if q_NxHxD.dtype != jnp.bfloat16 or prefix.k_LxPxKVxSxD.dtype != jnp.bfloat16:
        return f"queries in {q_NxHxD.dtype} and pages in {prefix.k_LxPxKVxSxD.dtype}: both must be bfloat16"
    if dim not in (64, 128):
        return f"head dim {dim} is neither 64 nor 128"
    if KEYS % page_size or page_size % 8:
        return f"pages of {page_size} rows: {KEYS} must be a multiple of it, and it of 8"
    if q_NxHxD.shape[1] // num_kv > ROWS:
        return f"{q_NxHxD.shape[1] // num_kv} query heads for each head of keys are more than {ROWS}"
    return None


def copied_bytes(q_NxHxD: jax.Array, block: int, prefix: Prefix) -> int:
    """What the blocks of threads copy and leave when every prefix fills its table, which no window narrows."""
    num_kv, page_size, dim = prefix.k_LxPxKVxSxD.shape[2:]
    requests, width = prefix.table_RxC.shape
    tiles = requests * pl.cdiv(block, min(block, ROWS * num_kv // q_NxHxD.shape[1])) * num_kv
    pages, splits = KEYS // page_size, _splits(tiles, width, page_size)
    copied = pl.cdiv(width, pages) * pages * page_size * 2 + splits * ROWS
    return tiles * (copied * dim * prefix.k_LxPxKVxSxD.dtype.itemsize + splits * ROWS * (dim + 2) * 4)


def _splits(num_tiles: int, width: int, page_size: int) -> int:
    """Blocks of threads that share a tile's pages."""
    return max(1, min(pl.cdiv(BLOCKS, num_tiles), pl.cdiv(width * page_size, KEYS)))


class Part(NamedTuple):
    """Attention over some of the keys, to be added to others: weights are exp(score - peak)."""

    peak: jax.Array  # [.., M]
    total: jax.Array  # [.., M] of the weights
    sum: jax.Array  # [.., M, D] of values times weights


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
    requests, group = len(rows.count_R), q_NxHxD.shape[1] // num_kv
    tile = min(rows.block, ROWS // group)
    tiles = pl.cdiv(rows.block, tile)
    view = View(group, tile, tiles, causal, window, from_anchor)
    index = jnp.clip(rows.first_R[:, None] + jnp.arange(tiles * tile), 0, len(rows.slot_N) - 1)
    q = q_NxHxD[index].reshape(requests * tiles, tile, num_kv, group, dim).transpose(0, 2, 1, 3, 4)
    q_UxKVxMxD = q.reshape(requests * tiles, num_kv, tile * group, dim)
    # Of its own block a tile sees keys [0, rows.block).
    k_RxQxKVxD, v_RxQxKVxD = k_NxKVxD[index[:, : rows.block]], v_NxKVxD[index[:, : rows.block]]
    own = _own_block(q_UxKVxMxD, k_RxQxKVxD, v_RxQxKVxD, rows, view, scale, softcap)
    cached = _over_pages(q_UxKVxMxD, rows, prefix, layer, view, scale, softcap)
    out_UxKVxMxD = _joined(own, cached).astype(q_NxHxD.dtype)
    out = out_UxKVxMxD.reshape(requests, tiles, num_kv, tile, group, dim).transpose(0, 1, 3, 2, 4, 5)
    return out.reshape(requests, tiles * tile, num_kv * group, dim)[rows.slot_N, rows.offset_N]


def _joined(own: Part, cached: Part) -> jax.Array:
    """The attention of `own` and of `cached` `[.., S, ..]`, whose S parts are those of several blocks of threads."""
    peak = jnp.maximum(own.peak, jnp.max(cached.peak, axis=2))
    own_weight, weight = jnp.exp(own.peak - peak), jnp.exp(cached.peak - peak[:, :, None])
    total = own.total * own_weight + jnp.sum(cached.total * weight, axis=2)
    values = own.sum * own_weight[..., None] + jnp.sum(cached.sum * weight[..., None], axis=2)
    return values / jnp.where(total > 0, total, 1)[..., None]


def _own_block(
    q_UxKVxMxD: jax.Array, k_RxQxKVxD: jax.Array, v_RxQxKVxD: jax.Array, rows: Rows, view: View, scale: float,
    softcap: float,
) -> Part:  # fmt: skip
    """Attention to the rows of the queries' own block."""
    requests, num_rows = k_RxQxKVxD.shape[:2]
    q = q_UxKVxMxD.reshape(requests, view.tiles, *q_UxKVxMxD.shape[1:])
    scores = jnp.einsum("rtkmd,rqkd->rtkmq", q, k_RxQxKVxD, preferred_element_type=jnp.float32)
    m = jnp.arange(q.shape[3])[:, None]
    base = jnp.arange(view.tiles)[:, None, None, None] * view.tile
    end = rows.count_R[:, None, None, None, None]
    visible = view.mask(jnp.arange(num_rows)[None], m, base, end, cached=False)
    scores = jnp.where(visible, _capped(scores * scale, softcap), MASKED)
    peak = jnp.max(scores, axis=-1)
    weights = jnp.exp(scores - peak[..., None])
    values = jnp.einsum(
        "rtkmq,rqkd->rtkmd", weights.astype(v_RxQxKVxD.dtype), v_RxQxKVxD, preferred_element_type=jnp.float32
    )
    return Part(*(a.reshape(-1, *a.shape[2:]) for a in (peak, jnp.sum(weights, axis=-1), values)))


def _capped(scores: jax.Array, softcap: float) -> jax.Array:
    return softcap * jnp.tanh(scores / softcap) if softcap else scores


def _over_pages(
    q_UxKVxMxD: jax.Array, rows: Rows, prefix: Prefix, layer: jax.Array | int, view: View, scale: float, softcap: float
) -> Part:
    """Attention to the cached rows, in S parts: `[U, KV, S, M]`."""
    num_tiles, num_kv, m, dim = q_UxKVxMxD.shape
    page_size, width = prefix.k_LxPxKVxSxD.shape[3], prefix.table_RxC.shape[1]
    pages = KEYS // page_size
    splits = _splits(num_tiles * num_kv, width, page_size)
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    by_row = jax.ShapeDtypeStruct((num_tiles, num_kv, splits, ROWS), jnp.float32)
    call = plgpu.kernel(
        functools.partial(_kernel, view=view, scale=scale, softcap=softcap),
        out_type=[by_row, by_row, jax.ShapeDtypeStruct((*by_row.shape, dim), jnp.float32)],
        scratch_types={
            "q_smem": plgpu.SMEM((ROWS, dim), jnp.bfloat16, transforms=swizzled),
            "k_smem": plgpu.SMEM((STEPS, KEYS, dim), jnp.bfloat16, transforms=swizzled),
            "v_smem": plgpu.SMEM((STEPS, KEYS, dim), jnp.bfloat16, transforms=swizzled),
            "weights_smem": plgpu.SMEM((ROWS, KEYS), jnp.bfloat16, transforms=swizzled),
            "queries": plgpu.Barrier(),
            "loaded": plgpu.Barrier(num_arrivals=2 * pages, num_barriers=STEPS),
            "attended": plgpu.Barrier(num_barriers=STEPS),
        },
        # Heads of one tile are neighbours: their pages lie side by side.
        grid=(num_kv, num_tiles, splits),
        grid_names=("head", "tile", "split"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name="ragged_attention",
    )
    first_page_U, pages_U = _pages_of_tiles(rows, prefix, view)
    words = (first_page_U, pages_U, prefix.length_R, prefix.table_RxC, jnp.reshape(layer, (1,)))
    q = jnp.pad(q_UxKVxMxD, ((0, 0), (0, 0), (0, ROWS - m), (0, 0)))
    pools = prefix.k_LxPxKVxSxD, prefix.v_LxPxKVxSxD
    peak, total, values = call(*(a.astype(jnp.int32) for a in words), q, *pools)
    return Part(peak[..., :m], total[..., :m], values[..., :m, :])


def _pages_of_tiles(rows: Rows, prefix: Prefix, view: View) -> tuple[jax.Array, jax.Array]:
    """`[U]` the first page that each tile of queries sees, and how many it reads."""
    page_size, width = prefix.k_LxPxKVxSxD.shape[3], prefix.table_RxC.shape[1]
    base = jnp.arange(view.tiles) * view.tile
    first_page = jnp.maximum(prefix.length_R[:, None] + view.oldest(base), 0) // page_size
    last_page = jnp.minimum(pl.cdiv(prefix.length_R, page_size), width)[:, None]
    pages = jnp.where(base < rows.count_R[:, None], jnp.maximum(last_page - first_page, 0), 0)
    return first_page.reshape(-1), pages.reshape(-1)


def _kernel(
    first_page_ref, pages_ref, length_ref, table_ref, layer_ref, q_ref, k_pool, v_pool, peak_ref, total_ref, sum_ref, *,
    view: View, scale: float, softcap: float, q_smem, k_smem, v_smem, weights_smem, queries, loaded, attended,
):  # fmt: skip
    """One block: every `splits`th step of one tile's pages, for one head of keys."""
    head, tile, split = (jax.lax.axis_index(name) for name in ("head", "tile", "split"))
    request, base = jax.lax.div(tile, view.tiles), jax.lax.rem(tile, view.tiles) * view.tile
    splits, page_size, width = peak_ref.shape[2], k_pool.shape[3], table_ref.shape[1]
    pages = KEYS // page_size
    first_page, num_pages = first_page_ref[tile], pages_ref[tile]
    num_steps = jax.lax.div(jax.lax.div(num_pages + pages - 1, pages) - split + (splits - 1), splits)

    @pl.when(jax.lax.axis_index("warpgroup") == COPY)
    def copy():
        plgpu.copy_gmem_to_smem(q_ref.at[tile, head], q_smem, queries)

        @pl.loop(0, num_steps)
        def _(step):
            slot = jax.lax.rem(step, STEPS)

            @pl.when(step >= STEPS)
            def _():
                plgpu.barrier_wait(attended.at[slot])

            for j in range(pages):
                # Behind the last page it is copied again: its rows are masked there, and finite.
                place = jnp.minimum((split + step * splits) * pages + j, num_pages - 1)
                page = table_ref[request, first_page + place]
                for pool, smem in ((k_pool, k_smem), (v_pool, v_smem)):
                    rows = smem.at[slot, pl.ds(j * page_size, page_size)]
                    plgpu.copy_gmem_to_smem(pool.at[layer_ref[0], page, head], rows, loaded.at[slot])

        _drain(attended, num_steps)

    @pl.when(jax.lax.axis_index("warpgroup") == ATTEND)
    def attend():
        length = length_ref[request]
        end = jnp.minimum(width * page_size - length, 0)
        plgpu.barrier_wait(queries)
        row = jax.lax.broadcasted_iota(jnp.int32, (ROWS, KEYS), 0)
        column = jax.lax.broadcasted_iota(jnp.int32, (ROWS, KEYS), 1)

        def one(step, part):
            slot = jax.lax.rem(step, STEPS)
            plgpu.barrier_wait(loaded.at[slot])

            def product(acc_ref):
                plgpu.wgmma(acc_ref, q_smem, plgpu.transpose_ref(k_smem.at[slot], (1, 0)))
                return acc_ref[...]

            scores = pl.run_scoped(product, plgpu.ACC((ROWS, KEYS), jnp.float32)) * scale
            key = (first_page + (split + step * splits) * pages) * page_size - length + column
            visible = view.mask(key, row, base, end, cached=True)
            peak, weights, shrink = weigh(_capped(scores, softcap), visible, part.peak)
            weights_smem[...] = weights.astype(jnp.bfloat16)
            plgpu.commit_smem()

            def values(acc_ref):
                plgpu.wgmma(acc_ref, weights_smem, v_smem.at[slot])
                return acc_ref[...]

            new = pl.run_scoped(values, plgpu.ACC((ROWS, v_smem.shape[-1]), jnp.float32))
            plgpu.barrier_arrive(attended.at[slot])
            total = part.total * shrink + jnp.sum(weights, axis=1)
            return Part(peak, total, part.sum * _along_rows(shrink, new.shape) + new)

        nothing = jnp.zeros((ROWS,), jnp.float32)
        part = Part(nothing + MASKED, nothing, jnp.zeros((ROWS, v_smem.shape[-1]), jnp.float32))
        part = jax.lax.fori_loop(0, num_steps, one, part)
        for ref, value in zip((peak_ref, total_ref, sum_ref), part, strict=True):
            ref[tile, head, split] = value


def weigh(scores: jax.Array, visible: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The softmax's new peaks, the weights of some keys `[M, C]`, and what older sums are to be multiplied with."""
    scores = jnp.where(visible, scores, MASKED)
    peak = jnp.maximum(before, jnp.max(scores, axis=1))
    return peak, jnp.exp(scores - _along_rows(peak, scores.shape)), jnp.exp(before - peak)


def _along_rows(a_M: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.broadcast_in_dim(a_M, shape, (0,))


def _drain(barriers, used: jax.Array) -> None:
    """Waits for what is still under way: nobody leaves a block while others work on what it has given them."""

    @pl.loop(jnp.maximum(used - STEPS, 0), used)
    def _(step):
        plgpu.barrier_wait(barriers.at[jax.lax.rem(step, STEPS)])
