"""How much each slot of a block counts in the cross entropy: a fixed decay, or by what the drafter can do already."""

import jax
import jax.numpy as jnp


def decay_weights(slots: int, gamma: float) -> jax.Array:
    """`[K]` exp(-k / gamma); ones where gamma is 0."""
    return jnp.exp(-jnp.arange(slots) / gamma) if gamma > 0 else jnp.ones(slots)


def dpace_weights(confidence_xK: jax.Array, learnt_xK: jax.Array, alpha: float) -> jax.Array:
    """D-PACE (arXiv 2605.18810, equations 7 and 8): `[..., K]` weights without a gradient, 0 where not to be learnt.

    With q_i the drafter's probability of slot i's label, smoothed to s_i = (1 - alpha) q_i + alpha, slot j weighs
    the sum over m >= j of s_1 ... s_m: how likely it is reached and accepted, and how many tokens may follow. Early
    slots count most while the drafter is bad, later ones as it improves; alpha = 1 counts the slots that are left.

    Known from descriptions of the paper, not from the paper itself. Implementations differ in the divisor: here it is
    the weights' sum, as in the rest of the loss.
    """
    smoothed_xK = jnp.where(learnt_xK, (1 - alpha) * confidence_xK + alpha, 0)
    reached_xK = jnp.cumprod(smoothed_xK, axis=-1)
    return jax.lax.stop_gradient(jax.lax.cumsum(reached_xK, axis=reached_xK.ndim - 1, reverse=True))
