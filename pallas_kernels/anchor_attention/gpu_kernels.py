"""The Hopper kernels of anchor attention: of the output, of the queries' gradient, and of the context's.

A block of threads has a tile of rows, or of keys, and goes step by step over what belongs to it on the other side. Its
first warpgroup copies; the others multiply, each with half of the tile.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # of a warpgroup's matrix instruction; a step has as many keys, or rows
READERS = 2  # warpgroups that multiply
TILE = READERS * ROWS  # rows, or keys, of a block of threads
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite: the difference of two is no NaN
COPY, FIRST_READER = range(2)  # warpgroups


class Seen(NamedTuple):
    """The context rows that each row sees: from `first` to before `end`."""

    first_BxM: jax.Array
    end_BxM: jax.Array


class Walk(NamedTuple):
    """Of each block of threads: its tile, the first step and how many there are."""

    tile_BxU: jax.Array
    first_BxU: jax.Array
    count_BxU: jax.Array


class Plan(NamedTuple):
    """What a kernel works with (static); arrays by name."""

    held: tuple[str, ...]  # stay for a tile
    streamed: tuple[str, ...]  # come step by step
    made: tuple[str, ...]  # by a warpgroup, for its next matrix product
    depth: int  # steps on their way


OF_KEYS = "k", "v", "d_k", "d_v"  # lie by packs, keys and heads, as the context does
OF_ROWS = "log_total", "shift", "first", "end"
FORWARD = Plan(("q", "first", "end"), ("k", "v"), ("weights",), 4)
TO_QUERIES = Plan(("q", "d_out", *OF_ROWS), ("k", "v"), ("d_scores",), 4)
# With its two sums there is no register over, not even for the remainder of a division by three.
TO_KEYS = Plan(("k", "v"), ("q", "d_out", *OF_ROWS), ("weights", "d_scores"), 2)


def attend(
    q_BxVxMxD: jax.Array, k_BxSxVxD: jax.Array, v_BxSxVxD: jax.Array, seen: Seen, walk: Walk, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Attention to the context `[B, V, M, D]` and its log-sum-exp `[B, V, M]`, MASKED where a row sees nothing."""
    ins = {"q": q_BxVxMxD, "k": k_BxSxVxD, "v": v_BxSxVxD, **_limits(seen)}
    outs = {"out": q_BxVxMxD, "log_total": jax.ShapeDtypeStruct(q_BxVxMxD.shape[:3], jnp.float32)}
    return _call(_attend, FORWARD, ins, outs, walk, scale)


def pull(
    q_BxVxMxD: jax.Array,
    k_BxSxVxD: jax.Array,
    v_BxSxVxD: jax.Array,
    seen: Seen,
    d_out_BxVxMxD: jax.Array,
    log_total_BxVxM: jax.Array,
    shift_BxVxM: jax.Array,
    walks: tuple[Walk, Walk],
    scale: float,
) -> tuple[jax.Array, ...]:
    """The gradients of the queries, the keys and the values. `log_total`, `shift`: of attention to all keys.

    `walks`: of tiles of rows and of tiles of keys.
    """
    ins = {"q": q_BxVxMxD, "k": k_BxSxVxD, "v": v_BxSxVxD, **_limits(seen)}
    ins |= {"d_out": d_out_BxVxMxD, "log_total": log_total_BxVxM, "shift": shift_BxVxM}
    d_q = _call(_pull_to_queries, TO_QUERIES, ins, {"d_q": q_BxVxMxD}, walks[0], scale)
    d_context = _call(_pull_to_keys, TO_KEYS, ins, {"d_k": k_BxSxVxD, "d_v": v_BxSxVxD}, walks[1], scale)
    return *d_q, *d_context


def _limits(seen: Seen) -> dict[str, jax.Array]:
    return {"first": seen.first_BxM, "end": seen.end_BxM}


class Block(NamedTuple):
    """What a block of threads works with; arrays by name."""

    plan: Plan
    gmem: dict[str, Any]
    smem: dict[str, Any]
    held: Any  # barrier: what stays is there
    loaded: Any  # barriers: a step is there
    used: Any  # barriers: it is no longer needed
    head: jax.Array
    tile: jax.Array
    pack: jax.Array
    first: jax.Array  # step
    count: jax.Array  # of steps

    def of(self, name: str, rows: Any) -> Any:
        """Where these rows, or keys, of an array lie."""
        ref = self.gmem[name]
        if name in ("first", "end"):
            return ref.at[self.pack, rows]
        return ref.at[self.pack, rows, self.head] if name in OF_KEYS else ref.at[self.pack, self.head, rows]

    def own(self, reader: Any) -> Any:
        """The rows, or keys, of the tile that are this warpgroup's."""
        return pl.ds((self.tile * READERS + reader) * ROWS, ROWS)

    def steps(self, one: Callable[[jax.Array, jax.Array, Any], Any], state: Any = None) -> Any:
        """`one(slot, step, state)` for all steps; `step` counts from the array's first."""

        def waited(i: jax.Array, state: Any) -> Any:
            slot = jax.lax.rem(i, self.plan.depth)
            plgpu.barrier_wait(self.loaded.at[slot])
            state = one(slot, self.first + i, state)
            plgpu.barrier_arrive(self.used.at[slot])
            return state

        return jax.lax.fori_loop(0, self.count, waited, state)


def _call(
    read: Callable[[Block, jax.Array, float], None],
    plan: Plan,
    ins: dict[str, jax.Array],
    outs: dict[str, Any],
    walk: Walk,
    scale: float,
) -> Sequence[jax.Array]:
    """Runs a kernel over heads, tiles and packs."""

    def kernel(*refs: Any, held: Any, loaded: Any, used: Any, **smem: Any) -> None:
        gmem = dict(zip([*ins, *Walk._fields, *outs], refs, strict=True))
        head, place, pack = (jax.lax.axis_index(name) for name in ("head", "place", "pack"))
        tile, first, count = (gmem[name][pack, place] for name in Walk._fields)
        block = Block(plan, gmem, smem, held, loaded, used, head, tile, pack, first, count)
        warpgroup = jax.lax.axis_index("warpgroup")

        # With fewer registers for the readers the two sums of keys would be spilled.
        @pl.when(warpgroup == COPY)
        def _():
            plgpu.set_max_registers(24, action="decrease")
            _copy(block)

        @pl.when(warpgroup >= FIRST_READER)
        def _():
            plgpu.set_max_registers(240, action="increase")
            plgpu.barrier_wait(block.held)
            read(block, warpgroup - FIRST_READER, scale)

    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in outs.values()],
        scratch_types=_scratch(plan, ins),
        grid=(ins["q"].shape[1], walk.first_BxU.shape[1], len(walk.first_BxU)),
        grid_names=("head", "place", "pack"),
        num_threads=FIRST_READER + READERS,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name=f"anchor_attention{read.__name__}",
    )(*ins.values(), *walk)


def _scratch(plan: Plan, ins: dict[str, jax.Array]) -> dict[str, Any]:
    def matrices(count: int, width: int) -> Any:
        swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM((count, ROWS, width), jnp.bfloat16, transforms=swizzled)

    def space(count: int, a: jax.Array) -> Any:
        return matrices(count, a.shape[-1]) if a.ndim == 4 else plgpu.SMEM((count, ROWS), a.dtype)

    arrays = {name: space(READERS, ins[name]) for name in plan.held}
    arrays |= {name: space(plan.depth, ins[name]) for name in plan.streamed}
    arrays |= {name: matrices(READERS, ROWS) for name in plan.made}
    return arrays | {
        "held": plgpu.Barrier(num_arrivals=READERS * len(plan.held)),
        "loaded": plgpu.Barrier(num_arrivals=len(plan.streamed), num_barriers=plan.depth),
        "used": plgpu.Barrier(num_arrivals=READERS, num_barriers=plan.depth),
    }


def _copy(block: Block) -> None:
    depth = block.plan.depth
    for name in block.plan.held:
        for reader in range(READERS):
            plgpu.copy_gmem_to_smem(block.of(name, block.own(reader)), block.smem[name].at[reader], block.held)

    @pl.loop(0, block.count)
    def _(i):
        slot = jax.lax.rem(i, depth)

        @pl.when(i >= depth)
        def _():
            plgpu.barrier_wait(block.used.at[slot])

        rows = pl.ds((block.first + i) * ROWS, ROWS)
        for name in block.plan.streamed:
            plgpu.copy_gmem_to_smem(block.of(name, rows), block.smem[name].at[slot], block.loaded.at[slot])

    # Nobody leaves a block while others work on what it has given them.
    @pl.loop(jnp.maximum(block.count - depth, 0), block.count)
    def _(i):
        plgpu.barrier_wait(block.used.at[jax.lax.rem(i, depth)])


def _attend(block: Block, reader: jax.Array, scale: float) -> None:
    rows, q = block.own(reader), block.smem["q"].at[reader]
    weights_smem, dim = block.smem["weights"].at[reader], q.shape[-1]
    limits = [block.smem[name][reader] for name in ("first", "end")]

    def one(slot: jax.Array, step: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        peak, total, values = part
        scores = _product(q, plgpu.transpose_ref(block.smem["k"].at[slot], (1, 0))) * scale
        scores = jnp.where(_visible(limits, step * ROWS), scores, MASKED)
        new = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights, shrink = jnp.exp(scores - _along_rows(new, ROWS)), jnp.exp(peak - new)
        weights_smem[...] = weights.astype(jnp.bfloat16)
        plgpu.commit_smem()
        more = _product(weights_smem, block.smem["v"].at[slot])
        return new, total * shrink + jnp.sum(weights, axis=1), values * _along_rows(shrink, dim) + more

    nothing = jnp.zeros((ROWS,), jnp.float32)
    peak, total, values = block.steps(one, (nothing + MASKED, nothing, jnp.zeros((ROWS, dim), jnp.float32)))
    total = jnp.where(total > 0, total, 1)
    block.gmem["log_total"][block.pack, block.head, rows] = peak + jnp.log(total)
    _leave(values / _along_rows(total, dim), q, block.of("out", rows))


def _pull_to_queries(block: Block, reader: jax.Array, scale: float) -> None:
    rows, (q, d_out) = block.own(reader), (block.smem[name].at[reader] for name in ("q", "d_out"))
    d_scores_smem = block.smem["d_scores"].at[reader]
    first, end, log_total, shift = (block.smem[name][reader] for name in ("first", "end", "log_total", "shift"))

    def total(d_q_acc: Any) -> jax.Array:
        def one(slot: jax.Array, step: jax.Array, _: None) -> None:
            k, v = (block.smem[name].at[slot] for name in ("k", "v"))
            weights = _weights(q, k, _visible((first, end), step * ROWS), log_total, scale)
            d_scores_smem[...] = _slopes(weights, d_out, v, shift).astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.wgmma(d_q_acc, d_scores_smem, k)
            plgpu.wgmma_wait(0)

        block.steps(one)
        return d_q_acc[...]

    _leave(pl.run_scoped(total, plgpu.ACC(q.shape, jnp.float32)) * scale, q, block.of("d_q", rows))


def _pull_to_keys(block: Block, reader: jax.Array, scale: float) -> None:
    keys, (k, v) = block.own(reader), (block.smem[name].at[reader] for name in ("k", "v"))
    weights_smem, d_scores_smem = (block.smem[name].at[reader] for name in ("weights", "d_scores"))
    first_key = (block.tile * READERS + reader) * ROWS

    def totals(d_k_acc: Any, d_v_acc: Any) -> tuple[jax.Array, jax.Array]:
        def one(slot: jax.Array, _: jax.Array, __: None) -> None:
            q, d_out = (block.smem[name].at[slot] for name in ("q", "d_out"))
            visible = _visible([block.smem[name][slot] for name in ("first", "end")], first_key)
            weights = _weights(q, k, visible, block.smem["log_total"][slot], scale)
            weights_smem[...] = weights.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.wgmma(d_v_acc, plgpu.transpose_ref(weights_smem, (1, 0)), d_out)  # waited for with the slopes'
            d_scores = _slopes(weights, d_out, v, block.smem["shift"][slot])
            d_scores_smem[...] = d_scores.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.wgmma(d_k_acc, plgpu.transpose_ref(d_scores_smem, (1, 0)), q)
            plgpu.wgmma_wait(0)

        block.steps(one)
        return d_k_acc[...], d_v_acc[...]

    acc = plgpu.ACC(k.shape, jnp.float32)
    d_k, d_v = pl.run_scoped(totals, acc, acc)
    _leave(d_v, v, block.of("d_v", keys))
    _leave(d_k * scale, k, block.of("d_k", keys))


def _weights(q: Any, k: Any, visible: jax.Array, log_total: jax.Array, scale: float) -> jax.Array:
    """The softmax's, `[ROWS, keys]`."""
    scores = _product(q, plgpu.transpose_ref(k, (1, 0))) * scale
    return jnp.where(visible, jnp.exp(scores - _along_rows(log_total, ROWS)), 0)


def _slopes(weights: jax.Array, d_out: Any, v: Any, shift: jax.Array) -> jax.Array:
    """The gradient of the scaled scores."""
    return weights * (_product(d_out, plgpu.transpose_ref(v, (1, 0))) - _along_rows(shift, ROWS))


def _visible(limits: Sequence[jax.Array], first_key: jax.Array) -> jax.Array:
    """`[ROWS, ROWS]` which of the keys from `first_key` on the rows see."""
    key = jax.lax.broadcasted_iota(jnp.int32, (ROWS, ROWS), 1)
    first, end = (_along_rows(a - first_key, ROWS) for a in limits)
    return (key >= first) & (key < end)


def _product(a: Any, b: Any) -> jax.Array:
    def product(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(product, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def _along_rows(a_M: jax.Array, width: int) -> jax.Array:
    return jax.lax.broadcast_in_dim(a_M, (len(a_M), width), (0,))


def _leave(values: jax.Array, smem: Any, gmem: Any) -> None:
    """Writes a result by way of shared memory that is no longer needed."""
    smem[...] = values.astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, gmem)
    plgpu.wait_smem_to_gmem(0)
