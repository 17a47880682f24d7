"""One draft of every request on a Hopper GPU: base logits and table are read once; no logits leave the chip's memory.

Thread blocks deal the vocabulary's tiles out among them. In each the last warpgroup copies, and the others, the
readers, make the logits of a tile for 16 requests each and take them into what they know of the best. Words are the
rows of the matrix instruction, of which there are always 64, and requests its columns: so noise, which costs more
arithmetic than all else, is made for hardly more requests than there are. Where these leave readers over, several of
them take the tiles of the same requests in turn.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.draft_law import Speech
from pallas_kernels.fused_verify.gpu import gumbel
from pallas_kernels.markov_sampler.reference import Best
from pallas_kernels.noise import Key

WORDS = 64  # of a tile: the rows of a warpgroup's matrix instruction
REQUESTS = 16  # of a reader
READERS = 4  # warpgroups of a block, beside the one that copies
ROWS = 8  # requests are copied in such numbers: of a swizzled tile
WIDTH = 64  # of a factor's part that swizzles as one: 128 bytes
MAX_RANK = 256  # of which STEPS tiles fit the shared memory
STEPS = 4  # tiles on their way
SPLITS = 132  # thread blocks that share the vocabulary: an H100's processors
LOWEST = float(jnp.finfo(jnp.float32).min)
KEY, INVERSE, NOISY = 0, 2, 3  # rows of what is asked for each request
LAST = jnp.iinfo(jnp.int32).max


def unsupported(speech: Speech) -> str | None:
    """Why this kernel cannot draw from these logits; None when it can. The head's factor has their dtype."""
    (_, requests, vocab), rank = speech.base_KxRxVd.shape, speech.correction_Vdxr.shape[1]
    dtypes = speech.base_KxRxVd.dtype, speech.correction_Vdxr.dtype
    if requests == 1:
        return "of one request XLA moves fewer bytes: here it would be copied as eight"
    if requests > READERS * REQUESTS:
        return f"{requests} requests are more than {READERS * REQUESTS}"
    if any(dtype != jnp.bfloat16 for dtype in dtypes):
        return f"base logits in {dtypes[0]} and a table in {dtypes[1]}: both must be bfloat16"
    if vocab % WORDS:
        return f"a draft vocabulary of {vocab} is no multiple of {WORDS}"
    if rank % WIDTH or rank > MAX_RANK:
        return f"a rank of {rank} is no multiple of {WIDTH} up to {MAX_RANK}"
    return None


def best_draft(
    speech: Speech, k: jax.Array, factor_Rxr: jax.Array, temperature_R: jax.Array, noisy_R: jax.Array, key_R: Key
) -> Best:
    """As the reference, in float32, for what `unsupported` lets through."""
    requests = len(factor_Rxr)
    if missing := -requests % ROWS:  # a copy of one draft's base logits, which are few where requests are
        own = jax.lax.dynamic_slice_in_dim(speech.base_KxRxVd, k, 1)
        speech, k = speech.replace(base_KxRxVd=jnp.pad(own, ((0, 0), (0, missing), (0, 0)))), jnp.int32(0)
    groups = _groups(requests)

    def by_group(a: jax.Array, dtype: jnp.dtype) -> jax.Array:
        wide = jnp.pad(a.astype(dtype), [(0, groups * REQUESTS - requests)] + [(0, 0)] * (a.ndim - 1))
        return wide.reshape(groups, REQUESTS, *a.shape[1:])

    asked = *key_R, jax.lax.bitcast_convert_type(1 / temperature_R.astype(jnp.float32), jnp.uint32), noisy_R
    noisy_GxQ = by_group(noisy_R, jnp.int32)
    call = _over_vocabulary(speech, groups, min(SPLITS, len(speech.token_ids_Vd) // WORDS))
    each = Best(*call(
        jnp.concatenate([jnp.reshape(k, 1).astype(jnp.int32), jnp.any(noisy_GxQ != 0, axis=1).astype(jnp.int32)]),
        speech.base_KxRxVd,
        by_group(factor_Rxr, jnp.bfloat16),
        speech.correction_Vdxr,
        speech.token_ids_Vd.astype(jnp.int32),
        by_group(jnp.stack(asked, axis=1), jnp.uint32).swapaxes(1, 2),
    ))  # fmt: skip
    return jax.tree.map(lambda a: a[:requests], join(jax.tree.map(lambda a: a.reshape(len(a), -1), each)))


def copied_bytes(speech: Speech) -> int:
    """What the blocks copy for a draft, from memory or from the cache before it, and what they leave."""
    (_, requests, vocab), rank = speech.base_KxRxVd.shape, speech.correction_Vdxr.shape[1]
    groups, splits = _groups(requests), min(SPLITS, vocab // WORDS)
    tiles = vocab * ((rank + requests + -requests % ROWS) * 2 + 4)
    return tiles + splits * (groups * REQUESTS * rank * 2 + READERS * REQUESTS * 5 * 4)


def _groups(requests: int) -> int:
    """Of requests: a divisor of the readers."""
    return 1 << (pl.cdiv(requests, REQUESTS) - 1).bit_length()


def _over_vocabulary(speech: Speech, groups: int, splits: int) -> Callable[..., list[jax.Array]]:
    """The kernel: `Best` of each reader's words, `[S, G, REQUESTS]`."""
    parts, rank = READERS // groups, speech.correction_Vdxr.shape[1]
    swizzled = (plgpu.TilingTransform((8, WIDTH)), plgpu.SwizzleTransform(128))
    each = (splits * parts, groups, REQUESTS)
    return plgpu.kernel(
        functools.partial(_kernel, groups=groups, num_tokens=speech.num_tokens),
        out_type=[jax.ShapeDtypeStruct(each, t) for t in (jnp.float32, jnp.int32, *(jnp.float32,) * 3)],
        scratch_types={
            "factor_smem": plgpu.SMEM((groups, REQUESTS, rank), jnp.bfloat16, transforms=swizzled),
            "correction_smem": plgpu.SMEM((STEPS, WORDS, rank), jnp.bfloat16, transforms=swizzled),
            "base_smem": plgpu.SMEM((STEPS, groups * REQUESTS, WORDS), jnp.bfloat16, transforms=swizzled),
            "ids_smem": plgpu.SMEM((STEPS, WORDS), jnp.int32),
            "asked_smem": plgpu.SMEM((groups, 4, REQUESTS), jnp.uint32),
            "requests": plgpu.Barrier(num_arrivals=2),
            "loaded": plgpu.Barrier(num_arrivals=3, num_barriers=STEPS),
            "taken": plgpu.Barrier(num_arrivals=groups, num_barriers=STEPS),
            "joined": plgpu.Barrier(num_barriers=READERS),
        },
        grid=(splits,),
        grid_names=("split",),
        num_threads=READERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name=f"markov_sampler_groups{groups}",
    )


def _kernel(
    scalar_ref, base_ref, factor_ref, correction_ref, token_ids_ref, asked_ref, *out_refs, groups: int, num_tokens: int,
    factor_smem, correction_smem, base_smem, ids_smem, asked_smem, requests, loaded, taken, joined,
):  # fmt: skip
    """One block: its tiles of the vocabulary for all requests."""
    warpgroup, split, splits = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("split"), jax.lax.axis_size("split")
    parts, copied, shape = READERS // groups, base_ref.shape[1], (WORDS, REQUESTS)
    num_tiles = jax.lax.div(len(token_ids_ref) // WORDS - split + (splits - 1), splits)

    def first_word(i: jax.Array) -> jax.Array:
        return (split + i * splits) * WORDS

    @pl.when(warpgroup == READERS)
    def copy():
        plgpu.set_max_registers(32, action="decrease")  # all start with 96
        plgpu.copy_gmem_to_smem(factor_ref, factor_smem, requests)
        plgpu.copy_gmem_to_smem(asked_ref, asked_smem, requests)

        @pl.loop(0, num_tiles)
        def _(i):
            slot, words = jax.lax.rem(i, STEPS), pl.ds(first_word(i), WORDS)

            @pl.when(i >= STEPS)
            def _():
                plgpu.barrier_wait(taken.at[slot])

            plgpu.copy_gmem_to_smem(correction_ref.at[words], correction_smem.at[slot], loaded.at[slot])
            base_tile = base_smem.at[slot, pl.ds(0, copied)]
            plgpu.copy_gmem_to_smem(base_ref.at[scalar_ref[0], :, words], base_tile, loaded.at[slot])
            plgpu.copy_gmem_to_smem(token_ids_ref.at[words], ids_smem.at[slot], loaded.at[slot])

        # Nobody leaves a block while others work on what it has given them.
        @pl.loop(jnp.maximum(num_tiles - STEPS, 0), num_tiles)
        def _(i):
            plgpu.barrier_wait(taken.at[jax.lax.rem(i, STEPS)])

    @pl.when(warpgroup < READERS)
    def read():
        plgpu.set_max_registers(112, action="increase")
        group, part = jax.lax.rem(warpgroup, groups), jax.lax.div(warpgroup, groups)

        def asked(what: int) -> jax.Array:
            """Read again for each tile: registers are what is short."""
            return _of_columns(asked_smem[group, what], shape)

        any_noisy = scalar_ref[1 + group] != 0
        row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        plgpu.barrier_wait(requests)

        def one_tile(j, best):
            i = part + j * parts
            slot = jax.lax.rem(i, STEPS)
            plgpu.barrier_wait(loaded.at[slot])
            ids = jax.lax.broadcast_in_dim(ids_smem[slot], shape, (0,))
            silence = functools.partial(jnp.zeros, shape, jnp.float32)
            noise = jax.lax.cond(any_noisy, lambda: gumbel((asked(KEY), asked(KEY + 1)), ids), silence)

            def product(acc_ref):
                plgpu.wgmma(acc_ref, correction_smem.at[slot], plgpu.transpose_ref(factor_smem.at[group], (1, 0)))
                return acc_ref[...]

            bias = pl.run_scoped(product, plgpu.ACC(shape, jnp.float32)).astype(jnp.bfloat16).astype(jnp.float32)
            own = plgpu.transpose_ref(base_smem.at[slot, pl.ds(group * REQUESTS, REQUESTS)], (1, 0))
            base = plgpu.layout_cast(own[...], plgpu.Layout.WGMMA_TRANSPOSED)
            base = plgpu.layout_cast(base, plgpu.Layout.WGMMA).astype(jnp.float32)
            plgpu.commit_smem()  # what registers read, before copies write it
            plgpu.barrier_arrive(taken.at[slot])
            # Rounded where XLA's operations round: the same ties, and the same tokens, on either path.
            logit = (base + bias).astype(jnp.bfloat16).astype(jnp.float32)
            inverse = jax.lax.bitcast_convert_type(asked(INVERSE), jnp.float32)
            warped = jnp.where(ids < num_tokens, logit * inverse, -jnp.inf)
            return take(best, warped, jnp.where(asked(NOISY) != 0, warped + noise, warped), first_word(i) + row)

        best = jax.lax.fori_loop(0, jax.lax.div(num_tiles - part + (parts - 1), parts), one_tile, nothing(shape))

        # One reader after the other: Mosaic lends all of them the same memory to reduce in.
        @pl.when(warpgroup > 0)
        def _():
            plgpu.barrier_wait(joined.at[warpgroup - 1])

        best = join(best)
        plgpu.barrier_arrive(joined.at[warpgroup])
        for ref, value in zip(out_refs, jax.tree.leaves(best), strict=True):
            _leave(ref.at[split * parts + part, group], value)


def _leave(ref: Any, value: jax.Array) -> None:
    """Less than a line of the cache: newer JAX wants that said, older JAX has no word for it."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def nothing(shape: tuple[int, ...]) -> Best:
    """Before any word. The peak is finite: what it is compared with may be -inf."""
    full = lambda value: jnp.full(shape, value, jnp.float32)  # noqa: E731
    return Best(full(-jnp.inf), jnp.zeros(shape, jnp.int32), full(-jnp.inf), full(LOWEST), full(0))


def take(best: Best, warped: jax.Array, score: jax.Array, index: jax.Array) -> Best:
    """One more word for every entry."""
    better = score > best.score_R  # of equal scores the first, as everywhere
    # Of the two terms, the old sum and the new word, the one with the higher peak has weight 1: one exponential.
    higher, peak = warped > best.peak_R, jnp.maximum(best.peak_R, warped)
    weight = jnp.exp(jnp.minimum(best.peak_R, warped) - peak)
    return Best(
        jnp.where(better, score, best.score_R),
        jnp.where(better, index, best.index_R),
        jnp.where(better, warped, best.logit_R),
        peak,
        jnp.where(higher, best.total_R * weight + 1, best.total_R + weight),
    )


def join(each: Best) -> Best:
    """The best of what lies along the first axis, and the sum of all."""
    shape = each.score_R.shape
    score, peak = jnp.max(each.score_R, axis=0), jnp.max(each.peak_R, axis=0)
    best = each.score_R == _of_columns(score, shape)
    index = jnp.min(jnp.where(best, each.index_R, LAST), axis=0)
    best &= each.index_R == _of_columns(index, shape)
    logit = jnp.max(jnp.where(best, each.logit_R, -jnp.inf), axis=0)
    total = jnp.sum(each.total_R * jnp.exp(each.peak_R - _of_columns(peak, shape)), axis=0)
    return Best(score, index, logit, peak, total)


def _of_columns(a: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.broadcast_in_dim(a, shape, (1,))
