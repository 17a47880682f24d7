"""The chunks on a Hopper GPU: one read of the head makes a chunk's draft logits, target law and log-sum-exps.

Every block of threads goes over tiles of 128 rows and 128 tokens. One warpgroup copies; two multiply, each 64 of the
drafter's rows and 64 of the target's, which share the head's tile, and finish both in registers: soft cap, in-block
correction, exponential, statistics. Rows that share a source have its law computed once. XLA reduces logits and law to
the losses, makes the slopes of them in one pass, and multiplies these.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.nn import logsumexp

from pallas_kernels.distribution_loss.chunks import Given, OfRows, Trained, by_source, lanes, nothing, pick, put
from pallas_kernels.distribution_loss.reference import RowLosses, Rows, RowWeights, Targets, Vocabulary
from pallas_kernels.distribution_loss.tiled import gradients

ROWS = 64  # of a warpgroup's matrix instruction
MULTIPLIERS = 2  # warpgroups that multiply
TOKENS = 128  # of a tile
WIDTH = 64  # of the hidden states that one step multiplies: 128 bytes, the widest swizzle
STEPS = 4  # tiles of hidden states and head on their way
BLOCKS = 132  # an H100's processors: one block fills the shared memory of each
COPY, FIRST = range(2)  # warpgroups


def unsupported(trained: Trained, vocabulary: Vocabulary) -> str | None:
    """Why this kernel cannot take these hidden states and tables; None when it can."""
    (vocab, width), factor = vocabulary.head_VdxH.shape, trained.factor_Mxr
    arrays = (trained.hidden_MxH, vocabulary.head_VdxH, factor, vocabulary.correction_Vdxr)
    if any(a.dtype != jnp.bfloat16 for a in arrays if a is not None):
        return "hidden states and tables must be bfloat16"
    if vocab % TOKENS:
        return f"a vocabulary of {vocab} is no multiple of {TOKENS}"
    if width % WIDTH:
        return f"a width of {width} is no multiple of {WIDTH}"
    if factor is not None and factor.shape[1] % WIDTH:
        return f"the in-block head's rank of {factor.shape[1]} is no multiple of {WIDTH}"
    return None


def over_chunks(chunk: int, trained: Trained, given: Given, differentiate: bool) -> tuple[OfRows, jax.Array | None]:
    """As `tiled.over_chunks`, for what `unsupported` lets through."""
    rows, targets, vocabulary, weights = given
    order, tile = by_source(rows.source_M), MULTIPLIERS * ROWS
    chunk = -(-chunk // tile) * tile

    def body(i: jax.Array, carry: tuple[OfRows, jax.Array | None]) -> tuple[OfRows, jax.Array | None]:
        of_rows, of_correction = carry
        lane, used = lanes(order, i, chunk)
        at, place = order.row_M[lane], order.place_M[lane]
        some_rows, some_weights = pick(at, used, rows, weights)
        sources = order.source_M[jnp.minimum(place[0] + jnp.arange(chunk), len(order.source_M) - 1)]
        some_targets = jax.tree.map(lambda a: a[jnp.minimum(sources, len(a) - 1)], targets)
        new, more = _chunk(some_rows, some_targets, place - place[0], vocabulary, some_weights, differentiate)
        return put(of_rows, new, at, used), None if more is None else of_correction + more

    start = nothing(given, trained, differentiate)
    return jax.lax.fori_loop(0, (order.num_rows + chunk - 1) // chunk, body, start)


def moved_bytes(rows: Rows, targets: Targets, vocabulary: Vocabulary) -> int:
    """What the kernel reads and leaves of a chunk without base losses whose every row has a target of its own.

    Each array once, as XLA counts its own products: the head's tiles are copied again for every MULTIPLIERS · ROWS
    rows, and the rows for every tile, but from the cache.
    """
    out = jax.eval_shape(lambda *given: over_vocabulary(*given, 0, False), rows, targets, vocabulary)
    arrays = (rows.hidden_MxH, rows.factor_Mxr, targets, vocabulary, out)
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(arrays))


def _chunk(
    rows: Rows, targets: Targets, slot_C: jax.Array, vocabulary: Vocabulary, weights: RowWeights, differentiate: bool
) -> tuple[OfRows, jax.Array | None]:
    """A chunk's losses, and the gradients of their weighted sum. `slot_C`: which of `targets` is a row's."""
    out = over_vocabulary(rows, targets, vocabulary, slot_C[-1] + 1, weights.base_ce_M is not None)
    known = rows.label_M >= 0

    def cross_entropy(kind: str) -> tuple[jax.Array, jax.Array]:
        """And the softmax."""
        logits = out[kind]
        log_total = logsumexp(out[f"{kind}_peak"] + jnp.log(out[f"{kind}_total"]), axis=0)
        said = jnp.take_along_axis(logits, jnp.maximum(rows.label_M, 0)[:, None], axis=1)[:, 0]
        return jnp.where(known, log_total - said, 0), jnp.exp(logits - log_total[:, None])

    (ce, q), p = cross_entropy("draft"), out["law"][slot_C]
    base_ce, base_q = (None, None) if weights.base_ce_M is None else cross_entropy("base" if "base" in out else "draft")
    missed = jnp.maximum(1 - jnp.sum(p, axis=-1), 0) if vocabulary.reduced else 0
    losses = RowLosses(ce, 0.5 * (jnp.sum(jnp.abs(q - p), axis=-1) + missed), base_ce)
    if not differentiate:
        return OfRows(losses, None, None), None
    base = out.get("base", out["draft"])
    of_hidden, of_factor, of_correction = gradients(rows, weights, q, p, base, base_q, vocabulary)
    return OfRows(losses, of_hidden, of_factor), of_correction


def over_vocabulary(
    rows: Rows, targets: Targets, vocabulary: Vocabulary, num_sources: jax.Array | int, base: bool
) -> dict[str, jax.Array]:
    """The logits `draft` and the `law` of the first targets `[C, Vd]`; by tile of tokens `[Vd / TOKENS, C]` the logits'
    peak, and the sum of exponentials relative to it. Where there is a correction and they are needed, the same of
    `base`: the logits without it. C, of targets too, is a multiple of MULTIPLIERS · ROWS.
    """
    count, vocab = len(rows.label_M), len(vocabulary.head_VdxH)
    row_tiles = count // (MULTIPLIERS * ROWS)
    kinds = ("draft", "base") if rows.factor_Mxr is not None and (base or vocabulary.softcap) else ("draft",)
    wide = jax.ShapeDtypeStruct((count, vocab), jnp.float32)
    by_tile = jax.ShapeDtypeStruct((vocab // TOKENS, count), jnp.float32)
    outs = dict.fromkeys((*kinds, "law"), wide) | {f"{k}_{s}": by_tile for k in kinds for s in ("peak", "total")}
    ins = {
        "hidden": rows.hidden_MxH, "target": targets.hidden_TxH, "head": vocabulary.head_VdxH,
        "factor": rows.factor_Mxr, "correction": vocabulary.correction_Vdxr,
        "log_total": targets.log_total_T.reshape(row_tiles, -1),
        "source_tiles": jnp.reshape(pl.cdiv(num_sources, MULTIPLIERS * ROWS), (1,)).astype(jnp.int32),
    }  # fmt: skip
    ins = {name: a for name, a in ins.items() if a is not None}
    blocks = min(BLOCKS // row_tiles, vocab // TOKENS) * row_tiles
    return dict(zip(outs, _call(ins, outs, blocks, vocabulary.softcap)(*ins.values()), strict=True))


def _call(ins: dict[str, Any], outs: dict[str, Any], blocks: int, softcap: float) -> Callable[..., list[jax.Array]]:
    swizzled = (plgpu.TilingTransform((8, WIDTH)), plgpu.SwizzleTransform(128))
    tiles = plgpu.SMEM((STEPS, MULTIPLIERS * ROWS, WIDTH), jnp.bfloat16, transforms=swizzled)
    return plgpu.kernel(
        functools.partial(_kernel, names=(*ins, *outs), softcap=softcap),
        out_type=list(outs.values()),
        scratch_types={
            "hidden_smem": tiles,
            "target_smem": tiles,
            "head_smem": plgpu.SMEM((STEPS, TOKENS, WIDTH), jnp.bfloat16, transforms=swizzled),
            "log_total_smem": plgpu.SMEM(ins["log_total"].shape, jnp.float32),
            "totals": plgpu.Barrier(),
            "loaded": plgpu.Barrier(num_arrivals=3, num_barriers=STEPS),
            "multiplied": plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=STEPS),
        },
        grid=(blocks,),
        grid_names=("block",),
        num_threads=FIRST + MULTIPLIERS,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name=f"distribution_loss_rows{ins['hidden'].shape[0]}",
    )


def _kernel(*refs: Any, names: tuple[str, ...], softcap: float, **scratch: Any) -> None:
    """One block: every `blocks`th tile. Tiles of the same tokens are neighbours: the cache has the head's."""
    work = _Work(dict(zip(names, refs, strict=True)) | scratch, jax.lax.axis_index("block"))
    warpgroup = jax.lax.axis_index("warpgroup")

    @pl.when(warpgroup == COPY)
    def copy():
        plgpu.set_max_registers(40, action="decrease")
        _copy(work)

    @pl.when(warpgroup >= FIRST)
    def multiply():
        plgpu.set_max_registers(232, action="increase")
        _multiply(work, (warpgroup - FIRST) * ROWS, softcap)


class _Work:
    """A block's tiles, and the references by name."""

    def __init__(self, ref: dict[str, Any], block: jax.Array):
        (count, width), vocab, blocks = ref["hidden"].shape, ref["head"].shape[0], jax.lax.axis_size("block")
        self.ref, self.block, self.blocks = ref, block, blocks
        self.row_tiles = count // (MULTIPLIERS * ROWS)
        self.num_tiles = jax.lax.div(vocab // TOKENS * self.row_tiles - block + (blocks - 1), blocks)
        self.head_steps = width // WIDTH
        self.steps = self.head_steps + (ref["factor"].shape[1] // WIDTH if "factor" in ref else 0)

    def place(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Which rows a tile has and which tokens, in tiles. Each block has all rows in turn: the last lack targets."""
        tile = self.block + i * self.blocks
        return jax.lax.rem(tile + i, self.row_tiles), jax.lax.div(tile, self.row_tiles)

    def has_target(self, row_tile: jax.Array) -> jax.Array:
        return row_tile < self.ref["source_tiles"][0]


def _copy(work: _Work) -> None:
    """Keeps STEPS steps on their way: of a tile those of the head, then those of the correction."""
    ref, loaded, multiplied = work.ref, work.ref["loaded"], work.ref["multiplied"]
    plgpu.copy_gmem_to_smem(ref["log_total"], ref["log_total_smem"], ref["totals"])
    used = work.num_tiles * work.steps

    @pl.loop(0, used)
    def _(step):
        slot, k = jax.lax.rem(step, STEPS), jax.lax.rem(step, work.steps)
        row_tile, token_tile = work.place(jax.lax.div(step, work.steps))
        rows, tokens = pl.ds(row_tile * MULTIPLIERS * ROWS, MULTIPLIERS * ROWS), pl.ds(token_tile * TOKENS, TOKENS)

        @pl.when(step >= STEPS)
        def _():
            plgpu.barrier_wait(multiplied.at[slot])

        def load(name: str, smem: str, some: Any, at: jax.Array) -> None:
            part = ref[name].at[some, pl.ds(at * WIDTH, WIDTH)]
            plgpu.copy_gmem_to_smem(part, ref[smem].at[slot], loaded.at[slot])

        has_target = (k < work.head_steps) & work.has_target(row_tile)

        @pl.when(has_target)
        def _():
            load("target", "target_smem", rows, k)

        @pl.when(~has_target)
        def _():
            plgpu.barrier_arrive(loaded.at[slot])  # in its place

        @pl.when(k < work.head_steps)
        def _():
            load("hidden", "hidden_smem", rows, k)
            load("head", "head_smem", tokens, k)

        if "factor" in ref:

            @pl.when(k >= work.head_steps)
            def _():
                load("factor", "hidden_smem", rows, k - work.head_steps)
                load("correction", "head_smem", tokens, k - work.head_steps)

    _drain(multiplied, used)


def _multiply(work: _Work, half: jax.Array, softcap: float) -> None:
    """The ROWS rows of every tile that begin at its row `half`."""
    ref, own, acc = work.ref, pl.ds(half, ROWS), plgpu.ACC((ROWS, TOKENS), jnp.float32)
    plgpu.barrier_wait(ref["totals"])

    @pl.loop(0, work.num_tiles)
    def _(i):
        first = i * work.steps
        row_tile, token_tile = work.place(i)
        rows, tokens = pl.ds(row_tile * MULTIPLIERS * ROWS + half, ROWS), pl.ds(token_tile * TOKENS, TOKENS)

        def by_head(*accs: Any) -> tuple[jax.Array, ...]:
            pairs = tuple(zip(accs, (ref["hidden_smem"], ref["target_smem"]), strict=False))
            _products(work, own, first, work.head_steps, pairs)
            return tuple(_capped(acc[...], softcap) for acc in accs)

        def by_correction(acc: Any) -> jax.Array:
            rest = work.steps - work.head_steps
            _products(work, own, first + work.head_steps, rest, ((acc, ref["hidden_smem"]),))
            return acc[...]

        def with_target() -> jax.Array:
            draft, target = pl.run_scoped(by_head, acc, acc)
            ref["law"][rows, tokens] = jnp.exp(target - _along_rows(ref["log_total_smem"][row_tile, own]))
            return draft

        def leave(kind: str, logits: jax.Array) -> None:
            peak = jnp.max(logits, axis=1)
            ref[kind][rows, tokens] = logits
            ref[f"{kind}_peak"][token_tile, rows] = peak
            ref[f"{kind}_total"][token_tile, rows] = jnp.sum(jnp.exp(logits - _along_rows(peak)), axis=1)

        draft = jax.lax.cond(work.has_target(row_tile), with_target, lambda: pl.run_scoped(by_head, acc)[0])
        if "base" in ref:
            leave("base", draft)
        if "factor" in ref:
            draft += pl.run_scoped(by_correction, acc)
        leave("draft", draft)


def _products(work: _Work, own: Any, first: jax.Array, count: int, pairs: tuple[tuple[Any, Any], ...]) -> None:
    """Adds up `count` steps. A step's buffers are free when the next one's products are under way."""
    ref = work.ref

    @pl.loop(0, count)
    def _(k):
        slot = jax.lax.rem(first + k, STEPS)
        plgpu.barrier_wait(ref["loaded"].at[slot])
        for acc, smem in pairs:
            plgpu.wgmma(acc, smem.at[slot, own], plgpu.transpose_ref(ref["head_smem"].at[slot], (1, 0)))
        plgpu.wgmma_wait(len(pairs))

        @pl.when(k > 0)
        def _():
            plgpu.barrier_arrive(ref["multiplied"].at[jax.lax.rem(first + k - 1, STEPS)])

    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(ref["multiplied"].at[jax.lax.rem(first + count - 1, STEPS)])


def _capped(logits: jax.Array, cap: float) -> jax.Array:
    return cap * jnp.tanh(logits / cap) if cap else logits


def _along_rows(a_M: jax.Array) -> jax.Array:
    return jax.lax.broadcast_in_dim(a_M, (ROWS, TOKENS), (0,))


def _drain(barriers, used: jax.Array) -> None:
    """Waits for what is still under way: nobody leaves a block while others work on what it has given them."""

    @pl.loop(jnp.maximum(used - STEPS, 0), used)
    def _(step):
        plgpu.barrier_wait(barriers.at[jax.lax.rem(step, STEPS)])
