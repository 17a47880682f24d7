"""One draft of every request on a TPU: bias, noise, largest score and log-sum-exp in one pass over the vocabulary.

The base logits and the head's table are read, and a few numbers of each request are written.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.draft_law import Speech
from pallas_kernels.markov_sampler.reference import Best
from pallas_kernels.noise import Key, gumbel

LANES = 128
_TILE = 32 * LANES  # tokens at most, and fewer of many requests:
_WORK = 1 << 18  # logits of a tile
_VMEM_BYTES = 64 << 20
_LOWEST = float(jnp.finfo(jnp.float32).min)


def best_draft(
    speech: Speech, k: jax.Array, factor_Rxr: jax.Array, temperature_R: jax.Array, noisy_R: jax.Array, key_R: Key
) -> Best:
    """As the reference, in float32, for float32 and bfloat16 drafters."""
    _, requests, vocab = speech.base_KxRxVd.shape
    rank = speech.correction_Vdxr.shape[1]
    tile = min(max(_WORK // requests // LANES * LANES, LANES), _TILE, -(-vocab // LANES) * LANES)
    column = pl.BlockSpec((requests, 1), lambda j, k: (0, 0))
    outs = [jax.ShapeDtypeStruct((requests, 1), dtype) for dtype in (*(jnp.float32,) * 4, jnp.int32)]
    peak, total, score, logit, index = pl.pallas_call(
        functools.partial(_kernel, vocab=vocab, tile=tile, num_tokens=speech.num_tokens),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(vocab, tile),),
            in_specs=[
                pl.BlockSpec((None, requests, tile), lambda j, k: (k[0], 0, j)),
                pl.BlockSpec((requests, rank), lambda j, k: (0, 0)),
                pl.BlockSpec((tile, rank), lambda j, k: (j, 0)),
                pl.BlockSpec((1, tile), lambda j, k: (0, j)),
                *[column] * 4,
            ],
            out_specs=[column] * len(outs),
        ),
        out_shape=outs,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=_VMEM_BYTES),
        cost_estimate=_cost(speech, factor_Rxr),
        name=f"markov_sampler_requests{requests}_tile{tile}",
    )(
        jnp.reshape(k, 1).astype(jnp.int32),
        speech.base_KxRxVd,
        factor_Rxr,
        speech.correction_Vdxr,
        speech.token_ids_Vd[None].astype(jnp.int32),
        1 / temperature_R.astype(jnp.float32)[:, None],
        noisy_R.astype(jnp.int32)[:, None],
        *(word[:, None] for word in key_R),
    )
    return Best(*(a[:, 0] for a in (score, index, logit, peak, total)))


def _cost(speech: Speech, factor_Rxr: jax.Array) -> pl.CostEstimate:
    """What XLA's scheduler and cost analysis are told: a draft's part of the base logits is read."""
    drafts, requests, vocab = speech.base_KxRxVd.shape
    size = lambda a: math.prod(a.shape) * a.dtype.itemsize  # noqa: E731
    return pl.CostEstimate(
        flops=2 * requests * speech.correction_Vdxr.size,
        transcendentals=4 * requests * vocab,
        bytes_accessed=size(speech.base_KxRxVd) // drafts + size(speech.correction_Vdxr) + size(speech.token_ids_Vd)
        + size(factor_Rxr),
    )  # fmt: skip


def _kernel(
    k_ref, base_ref, factor_ref, correction_ref, token_ids_ref, inverse_ref, noisy_ref, key0_ref, key1_ref,
    peak_ref, total_ref, score_ref, logit_ref, index_ref, *, vocab: int, tile: int, num_tokens: int,
):  # fmt: skip
    """One tile of the vocabulary."""

    @pl.when(pl.program_id(0) == 0)
    def start():
        peak_ref[...] = jnp.full(peak_ref.shape, _LOWEST, jnp.float32)  # finite: exp(-inf - peak) is then 0
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        score_ref[...] = jnp.full(score_ref.shape, -jnp.inf, jnp.float32)
        logit_ref[...] = jnp.full(logit_ref.shape, -jnp.inf, jnp.float32)
        index_ref[...] = jnp.zeros(index_ref.shape, jnp.int32)

    over_ranks = (((1,), (1,)), ((), ()))
    bias = jax.lax.dot_general(factor_ref[...], correction_ref[...], over_ranks, preferred_element_type=jnp.float32)
    # Rounded where XLA's operations round: the same ties, and the same tokens, on either path.
    dtype = base_ref.dtype
    logit = (base_ref[...].astype(jnp.float32) + bias.astype(dtype).astype(jnp.float32)).astype(dtype)
    index = pl.program_id(0) * tile + jax.lax.broadcasted_iota(jnp.int32, logit.shape, 1)
    speakable = (index < vocab) & (token_ids_ref[...] < num_tokens)
    warped = jnp.where(speakable, logit.astype(jnp.float32) * inverse_ref[...], -jnp.inf)
    higher = jnp.maximum(peak_ref[...], jnp.max(warped, axis=1, keepdims=True))
    tile_total = jnp.sum(jnp.exp(warped - higher), axis=1, keepdims=True)
    total_ref[...] = total_ref[...] * jnp.exp(peak_ref[...] - higher) + tile_total
    peak_ref[...] = higher
    noise = gumbel((key0_ref[...], key1_ref[...]), token_ids_ref[...])
    score = jnp.where(noisy_ref[...] != 0, warped + noise, warped)
    best = jnp.max(score, axis=1, keepdims=True)
    at = jnp.min(jnp.where(score == best, index, jnp.iinfo(jnp.int32).max), axis=1, keepdims=True)
    better = best > score_ref[...]  # of equal scores the first, as everywhere
    score_ref[...] = jnp.where(better, best, score_ref[...])
    index_ref[...] = jnp.where(better, at, index_ref[...])
    drawn = jnp.max(jnp.where(index == at, warped, -jnp.inf), axis=1, keepdims=True)
    logit_ref[...] = jnp.where(better, drawn, logit_ref[...])
