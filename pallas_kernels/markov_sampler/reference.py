"""One draft of every request in jnp, with its logits in memory."""

import flax.struct
import jax
import jax.numpy as jnp

from pallas_kernels.draft_law import Factored, Speech
from pallas_kernels.noise import Key, gumbel


@flax.struct.dataclass
class Best:
    """What is left of each request's warped logits over some words."""

    score_R: jax.Array  # the largest logit plus noise
    index_R: jax.Array  # whose it is
    logit_R: jax.Array  # and without noise
    peak_R: jax.Array  # the largest logit
    total_R: jax.Array  # sum of exp(logit - peak)


def best_draft(
    speech: Speech, k: jax.Array, factor_Rxr: jax.Array, temperature_R: jax.Array, noisy_R: jax.Array, key_R: Key
) -> Best:
    """Of draft k, as `markov_sampler.draw_draft` has it."""
    law = Factored(speech, factor_Rxr[:, None], temperature_R)
    here = law.replace(speech=speech.replace(base_KxRxVd=jax.lax.dynamic_slice_in_dim(speech.base_KxRxVd, k, 1)))
    warped = here.row(jnp.zeros_like(noisy_R, jnp.int32))
    noise = gumbel(tuple(word[:, None] for word in key_R), speech.token_ids_Vd).astype(warped.dtype)
    score, peak_R = jnp.where(noisy_R[:, None], warped + noise, warped), jnp.max(warped, axis=-1)
    index_R = jnp.argmax(score, axis=-1).astype(jnp.int32)
    logit_R = jnp.take_along_axis(warped, index_R[:, None], axis=-1)[:, 0]
    total_R = jnp.sum(jnp.exp(warped - jnp.maximum(peak_R, jnp.finfo(peak_R.dtype).min)[:, None]), axis=-1)
    return Best(jnp.max(score, axis=-1), index_R, logit_R, peak_R, total_R)
