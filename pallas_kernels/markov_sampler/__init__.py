"""The in-block loop's step: a draft's logits, which are the base's plus a bias, are neither written nor read.

What makes the bias's factor of the token before is the in-block head's own business (`models/heads.py`), and small.
"""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels.draft_law import Speech
from pallas_kernels.markov_sampler import reference, tpu
from pallas_kernels.markov_sampler.reference import Best
from pallas_kernels.mesh import dividing
from pallas_kernels.noise import Key


@flax.struct.dataclass
class Drawn:
    """A token of each request and what acceptance and schedule need of the law q that it was drawn from."""

    index_R: jax.Array  # draft ids
    log_q_R: jax.Array  # log q(token)
    log_largest_R: jax.Array  # log of the largest q, which is known before the token is


def draw_draft(
    speech: Speech,
    k: jax.Array,
    factor_Rxr: jax.Array,
    temperature_R: jax.Array,
    noisy_R: jax.Array,
    key_R: Key,
    backend: str = "tpu",
) -> Drawn:
    """Draft k of every request: argmax of (base + factor · correction) / temperature, plus noise where `noisy_R`.

    `temperature_R`: above 0, or 1 without noise. `key_R`: of the noise, which goes by target ids. Tokens are those that
    the engine picks from logits in memory, but for ties within rounding. `backend`: "tpu", "gpu" (a Hopper, for what
    `gpu.unsupported` lets through) or "xla". On a mesh that is set (`jax.set_mesh`) each device looks at its own words,
    and five numbers of each request are what they exchange.
    """
    best = _best_draft(backend)
    asked, axes = (k, factor_Rxr, temperature_R, noisy_R, key_R), dividing(len(speech.token_ids_Vd))
    if not axes:
        return _drawn(best(speech, *asked))

    def local(speech: Speech, *asked: jax.Array) -> Best:
        own = best(speech, *asked)
        first = jax.lax.axis_index(axes).astype(jnp.int32) * len(speech.token_ids_Vd)
        return _of_all_words(own.replace(index_R=first + own.index_R), axes)

    own_words = speech.replace(base_KxRxVd=P(None, None, axes), correction_Vdxr=P(axes), token_ids_Vd=P(axes))
    # What a kernel returns says nothing of the axes over which it is the same everywhere.
    split = jax.shard_map(local, in_specs=(own_words, *(P(),) * len(asked)), out_specs=P(), check_vma=False)
    return _drawn(split(speech, *asked))


def _best_draft(backend: str) -> Callable[..., Best]:
    if backend == "gpu":
        from pallas_kernels.markov_sampler import gpu  # what it imports may change with any JAX: nobody else needs it

        return gpu.best_draft
    return (tpu if backend == "tpu" else reference).best_draft


def _of_all_words(best: Best, axes: tuple[str, ...]) -> Best:
    """The best over all devices' words of each device's own."""
    each: Best = jax.tree.map(lambda a: jax.lax.all_gather(a, axes), best)
    winner_R = jnp.argmax(each.score_R, axis=0)  # of equals the first: the lower id, as on one device
    won = jax.tree.map(lambda a: jnp.take_along_axis(a, winner_R[None], axis=0)[0], each)
    peak_R = jnp.max(each.peak_R, axis=0)
    return won.replace(peak_R=peak_R, total_R=jnp.sum(each.total_R * jnp.exp(each.peak_R - peak_R), axis=0))


def _drawn(best: Best) -> Drawn:
    log_total_R = best.peak_R + jnp.log(best.total_R)
    return Drawn(best.index_R, best.logit_R - log_total_R, best.peak_R - log_total_R)


__all__ = ["Drawn", "draw_draft"]
