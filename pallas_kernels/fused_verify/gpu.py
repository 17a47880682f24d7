"""The statistics of every row on a Hopper GPU: one read of the head, tile by tile; no logits leave the chip's memory.

Thread blocks deal the vocabulary's tiles out among them, and the warpgroups of a block have one job each: the first
copies, the second multiplies and leaves a tile of logits in shared memory, the others, 64 rows each, take the last tile
into their statistics meanwhile. All running values are kept by block and by column modulo 8, which is what a
warpgroup's registers hold, so that nothing is reduced across threads.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fused_verify.reference import Head, Query, RowStatistics
from pallas_kernels.noise import Key, uniform

DEPTH = 3  # candidates kept of each class
ROWS = 64  # of a warpgroup's matrix instruction
TOKENS = 128  # of a tile
WIDTH = 64  # of the hidden states that one step multiplies: 128 bytes, the widest swizzle
COLUMNS = 8  # of a tile that a warpgroup takes at a time
STEPS = 4  # tiles of hidden states and head on their way
SPLITS = 128  # thread blocks that share the vocabulary: what an H100's 132 processors run at once
LOWEST = float(jnp.finfo(jnp.float32).min)
STATISTICS = 4  # arrays beside the candidates: the peak, two sums, the token's logit
COPY, MULTIPLY, FIRST_READER = range(3)  # warpgroups


def unsupported(hidden_NxH: jax.Array, head: Head) -> str | None:
    """Why this kernel cannot take these hidden states and this head; None when it can."""
    (num_rows, width), dtype = hidden_NxH.shape, hidden_NxH.dtype
    if num_rows > 2 * ROWS:
        # Each 128 rows would copy the head again: by what blocks copy, XLA's logits in memory then cost less.
        return f"{num_rows} rows are more than {2 * ROWS}"
    if dtype != jnp.bfloat16 or head.weight.dtype != jnp.bfloat16:
        return f"hidden states in {dtype} and a head in {head.weight.dtype}: both must be bfloat16"
    if head.vocab_size % TOKENS:
        return f"a vocabulary of {head.vocab_size} is no multiple of {TOKENS}"
    if width % WIDTH:
        return f"a width of {width} is no multiple of {WIDTH}"
    return None


def row_statistics(hidden_NxH: jax.Array, head: Head, query: Query, splits: int = SPLITS) -> RowStatistics:
    """As the reference, with DEPTH candidates of each of 8 · `splits` classes, for what `unsupported` lets through."""
    splits = min(splits, head.vocab_size // TOKENS)
    outs = _over_vocabulary(hidden_NxH, head, query, splits)
    by_class = [jnp.swapaxes(a, 0, 1)[: len(hidden_NxH)].reshape(len(hidden_NxH), -1) for a in outs]
    peak, total, total_warped, token_logit = by_class[:STATISTICS]
    candidates = by_class[STATISTICS:]
    top = jnp.max(peak, axis=-1, keepdims=True)
    inverse = 1 / query.temperature_N.astype(jnp.float32)[:, None]
    sum_total = jnp.sum(total * jnp.exp(peak - top), axis=-1)
    sum_warped = jnp.sum(total_warped * jnp.exp((peak - top) * inverse), axis=-1)
    score, logit, ids = (jnp.concatenate(candidates[i::3], axis=-1) for i in range(3))
    return RowStatistics(
        log_total_N=jnp.log(sum_total) + top[:, 0],
        log_total_warped_N=jnp.log(sum_warped) + (top * inverse)[:, 0],
        token_logit_N=jnp.max(token_logit, axis=-1),
        score_NxC=score,
        logit_NxC=logit,
        id_NxC=ids,
        classes=COLUMNS * splits,
    )


def copied_bytes(num_rows: int, head: Head) -> int:
    """What the blocks copy, from memory or from the cache before it, and what they leave."""
    rows, tiles = _padded(num_rows), head.vocab_size // TOKENS
    copied = tiles * (TOKENS + rows) * head.weight.size // head.vocab_size * head.weight.dtype.itemsize
    return copied + rows * min(SPLITS, tiles) * COLUMNS * sum(jnp.dtype(t).itemsize for t in _dtypes())


def _padded(num_rows: int) -> int:
    return ROWS if num_rows <= ROWS else 2 * ROWS


def _over_vocabulary(hidden_NxH: jax.Array, head: Head, query: Query, splits: int) -> list[jax.Array]:
    """By block and column `[S, N, COLUMNS]`: the statistics, then score, logit and id of each candidate, best first."""
    num_rows = len(hidden_NxH)
    rows = _padded(num_rows)

    def per_row(a: jax.Array, dtype: jnp.dtype) -> jax.Array:
        wide = jnp.pad(a.astype(dtype), (0, rows - num_rows))
        return jnp.broadcast_to(wide[:, None], (rows, COLUMNS))

    by_class = [jax.ShapeDtypeStruct((splits, rows, COLUMNS), dtype) for dtype in _dtypes()]
    swizzled = (plgpu.TilingTransform((8, WIDTH)), plgpu.SwizzleTransform(128))
    head_tile = (WIDTH, TOKENS) if head.transposed else (TOKENS, WIDTH)
    readers = rows // ROWS
    call = plgpu.kernel(
        functools.partial(_kernel, head=head),
        out_type=by_class,
        scratch_types={
            "hidden_smem": plgpu.SMEM((STEPS, rows, WIDTH), jnp.bfloat16, transforms=swizzled),
            "head_smem": plgpu.SMEM((STEPS, *head_tile), jnp.bfloat16, transforms=swizzled),
            "logits_smem": plgpu.SMEM((2, TOKENS // COLUMNS, rows, COLUMNS), jnp.bfloat16),
            "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=STEPS),
            "multiplied": plgpu.Barrier(num_barriers=STEPS),
            "ready": plgpu.Barrier(num_barriers=2),
            "taken": plgpu.Barrier(num_arrivals=readers, num_barriers=2),
        },
        grid=(splits,),
        grid_names=("split",),
        num_threads=FIRST_READER + readers,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name=f"fused_verify_rows{rows}",
    )
    return call(
        jnp.pad(hidden_NxH, ((0, rows - num_rows), (0, 0))),
        head.weight,
        per_row(query.token_N, jnp.int32),
        per_row(1 / query.temperature_N, jnp.float32),
        per_row(query.noisy_N, jnp.int32),
        *(per_row(word, jnp.uint32) for word in query.key_N),
    )


def _dtypes() -> list[jnp.dtype]:
    return [jnp.float32] * STATISTICS + [jnp.float32, jnp.float32, jnp.int32] * DEPTH


def _kernel(
    hidden_ref, head_ref, token_ref, inverse_ref, noisy_ref, key0_ref, key1_ref, *out_refs, head: Head,
    hidden_smem, head_smem, logits_smem, loaded, multiplied, ready, taken,
):  # fmt: skip
    """One block: its tiles of the vocabulary for all rows."""
    warpgroup, split = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("split")
    splits, rows, _ = out_refs[0].shape
    num_tiles = jax.lax.div(head.vocab_size // TOKENS - split + (splits - 1), splits)
    num_steps = hidden_ref.shape[1] // WIDTH

    def first_token(i: jax.Array) -> jax.Array:
        return (split + i * splits) * TOKENS

    @pl.when(warpgroup == MULTIPLY)
    def multiply():
        # Of two tiles of rows the products alone take 128; the readers keep what all start with.
        plgpu.set_max_registers(216, action="increase")

        @pl.loop(0, num_tiles)
        def _(i):
            def product(acc_ref):
                @pl.loop(0, num_steps)
                def _(k):
                    slot = jax.lax.rem(i * num_steps + k, STEPS)
                    plgpu.barrier_wait(loaded.at[slot])
                    b = head_smem.at[slot] if head.transposed else plgpu.transpose_ref(head_smem.at[slot], (1, 0))
                    plgpu.wgmma(acc_ref, hidden_smem.at[slot], b)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(multiplied.at[slot])

                return acc_ref[...]

            # XLA's logits are rounded to the model's dtype: the same ties, and the same tokens, on either path.
            logits = pl.run_scoped(product, plgpu.ACC((rows, TOKENS), jnp.float32)).astype(jnp.bfloat16)
            half = jax.lax.rem(i, 2)

            @pl.when(i >= 2)
            def _():
                plgpu.barrier_wait(taken.at[half])

            for j in range(TOKENS // COLUMNS):
                logits_smem[half, j] = logits[:, j * COLUMNS : (j + 1) * COLUMNS]
            plgpu.barrier_arrive(ready.at[half])

        _drain(taken, num_tiles, 2)

    @pl.when(warpgroup >= FIRST_READER)
    def read():
        own_rows = pl.ds((warpgroup - FIRST_READER) * ROWS, ROWS)
        token, inverse, noisy = token_ref[own_rows], inverse_ref[own_rows], noisy_ref[own_rows]
        key = key0_ref[own_rows], key1_ref[own_rows]
        column = jax.lax.broadcasted_iota(jnp.int32, (ROWS, COLUMNS), 1)

        def one_tile(i, state):
            half = jax.lax.rem(i, 2)
            plgpu.barrier_wait(ready.at[half])

            # Not unrolled: the time that JAX takes to lay out a kernel's arrays grows with their square.
            def one_group(j, state):
                logit = logits_smem[half, j, own_rows].astype(jnp.float32)
                ids = first_token(i) + j * COLUMNS + column
                return take(state, logit, ids, token, inverse, noisy, key, head)

            state = jax.lax.fori_loop(0, TOKENS // COLUMNS, one_group, state)
            plgpu.barrier_arrive(taken.at[half])
            return state

        state = jax.lax.fori_loop(0, num_tiles, one_tile, initial((ROWS, COLUMNS)))
        for ref, value in zip(out_refs, state, strict=True):
            ref[split, own_rows] = value

    @pl.when(warpgroup == COPY)
    def copy():
        plgpu.set_max_registers(40, action="decrease")
        total = num_tiles * num_steps

        @pl.loop(0, total)
        def _(step):
            slot, i, k = jax.lax.rem(step, STEPS), jax.lax.div(step, num_steps), jax.lax.rem(step, num_steps)

            @pl.when(step >= STEPS)
            def _():
                plgpu.barrier_wait(multiplied.at[slot])

            tokens, width = pl.ds(first_token(i), TOKENS), pl.ds(k * WIDTH, WIDTH)
            head_tile = head_ref.at[width, tokens] if head.transposed else head_ref.at[tokens, width]
            plgpu.copy_gmem_to_smem(head_tile, head_smem.at[slot], loaded.at[slot])
            hidden_tile = hidden_ref.at[:, width]
            plgpu.copy_gmem_to_smem(hidden_tile, hidden_smem.at[slot], loaded.at[slot])

        _drain(multiplied, total, STEPS)


def _drain(barriers, used: jax.Array, slots: int) -> None:
    """Waits for what is still under way: nobody leaves a block while others work on what it has given them."""

    @pl.loop(jnp.maximum(used - slots, 0), used)
    def _(step):
        plgpu.barrier_wait(barriers.at[jax.lax.rem(step, slots)])


State = tuple[jax.Array, ...]  # the statistics, then score, logit and id of each candidate, best first


def initial(shape: tuple[int, ...]) -> State:
    """Before any token. The peak is finite: what it is compared with may be -inf."""
    full = lambda value: jnp.full(shape, value, jnp.float32)  # noqa: E731
    candidates = (full(-jnp.inf), full(-jnp.inf), jnp.zeros(shape, jnp.int32)) * DEPTH
    return full(LOWEST), full(0), full(0), full(-jnp.inf), *candidates


def take(
    state: State, logit: jax.Array, ids: jax.Array, token: jax.Array, inverse: jax.Array, noisy: jax.Array, key: Key,
    head: Head,
) -> State:  # fmt: skip
    """One more token for every entry of the state. `inverse`: of the temperature; `token`: the drafted one."""
    peak, total, total_warped, token_logit, *kept = state
    if head.softcap:
        logit = (head.softcap * jnp.tanh(logit / head.softcap)).astype(jnp.bfloat16).astype(jnp.float32)
    logit = jnp.where(ids < min(head.num_tokens, head.vocab_size), logit, -jnp.inf)
    token_logit = jnp.where(ids == token, logit, token_logit)
    # Of the two terms, the old sum and the new token, the one with the higher peak has weight 1: one exponential.
    lower, higher = jnp.minimum(peak, logit) - jnp.maximum(peak, logit), logit > peak
    weight, weight_warped = jnp.exp(lower), jnp.exp(lower * inverse)
    total = jnp.where(higher, total * weight + 1, total + weight)
    total_warped = jnp.where(higher, total_warped * weight_warped + 1, total_warped + weight_warped)
    score = logit * inverse
    score = jnp.where(noisy != 0, score + gumbel(key, ids), score)
    kept = _insert(kept, (score, logit, ids))
    return jnp.maximum(peak, logit), total, total_warped, token_logit, *kept


def gumbel(key: Key, ids: jax.Array) -> jax.Array:
    """`noise.gumbel` to rounding. Mosaic has no log1p: the error of 1 - u is divided out of its logarithm again."""
    u = uniform(key, ids)
    rest = jax.lax.optimization_barrier(1 - u)  # rounded: compilers must not take rest - 1 for -u
    exponential = jnp.where(rest == 1, u, jnp.log(rest) * u / (rest - 1))
    return -jnp.log(exponential)


def _insert(kept: list[jax.Array], new: tuple[jax.Array, ...]) -> list[jax.Array]:
    """The best of each class by score, best first; of equal ones the older first, whose id is smaller."""
    out = []
    for d in range(DEPTH):
        old = kept[3 * d : 3 * d + 3]
        better = new[0] > old[0]
        out += [jnp.where(better, a, b) for a, b in zip(new, old, strict=True)]
        # What does not stand here goes on.
        new = [jnp.where(better, b, a) for a, b in zip(new, old, strict=True)]
    return out
