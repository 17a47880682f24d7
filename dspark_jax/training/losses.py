"""The block drafters' loss, 0.1 CE + 0.9 L1 + BCE(confidence) for DSpark, and the metrics of training (spec 4)."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import optax

from dspark_jax.models.drafter import Borrowed
from dspark_jax.models.layers import soft_cap
from dspark_jax.training.features import Features
from dspark_jax.training.position_weights import decay_weights, dpace_weights


@dataclasses.dataclass(frozen=True)
class LossWeights:
    """Weights of the terms; slot k of a block counts exp(-k / decay_gamma), or 1 where that is 0.

    `curriculum`: steps over which the cross entropy moves linearly from the backbone's logits to the head's; 0: the
    head's from the first step on. Domino takes the whole run (arXiv 2605.29707). `dpace`: D-PACE's alpha, whose weights
    then replace the decay in the cross entropy alone; 0: the decay.
    """

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay_gamma: float = 4.0
    curriculum: int = 0
    dpace: float = 0.0

    def base_share(self, step: jax.Array | int) -> jax.Array | float:
        """The part of the cross entropy that the backbone's logits have at a step, 1 at step 0 (lambda)."""
        return jnp.maximum(1 - step / self.curriculum, 0) if self.curriculum else 0.0


@flax.struct.dataclass
class LossTerms:
    """Sums over slots and their weights, so that batches and hosts can be added before dividing."""

    ce: jax.Array
    base_ce: jax.Array  # of the backbone's logits; 0 where the curriculum is off
    ce_weight: jax.Array
    l1: jax.Array
    confidence: jax.Array
    weight: jax.Array

    def total(self, weights: LossWeights, base_share: jax.Array | float = 0.0) -> jax.Array:
        """The scalar loss."""
        ce = (1 - base_share) * self.ce + base_share * self.base_ce
        return weights.ce * ce / (self.ce_weight + 1e-6) + (
            weights.l1 * self.l1 + weights.confidence * self.confidence
        ) / (self.weight + 1e-6)


def target_log_prob(features: Features, borrowed: Borrowed, softcap: float) -> jax.Array:
    """`[B, S, Vd]` the target's log-probabilities of the draft vocabulary, in at least float32."""
    logits = soft_cap(features.last_hidden_BxSxH @ borrowed.head_VdxH.T, softcap)
    wide = jnp.promote_types(logits.dtype, jnp.float32)
    return logits.astype(wide) - features.log_total_BxS[..., None]


def total_variation(draft_logits: jax.Array, target_log_prob: jax.Array, reduced: bool) -> jax.Array:
    """½‖q - p‖₁ over the last axis, in at least float32.

    With a reduced vocabulary `target_log_prob` covers part of the target's mass; the rest can never be drafted and
    counts as missed.
    """
    wide = jnp.promote_types(draft_logits.dtype, jnp.float32)
    p = jnp.exp(target_log_prob.astype(wide))
    distance = jnp.sum(jnp.abs(jax.nn.softmax(draft_logits.astype(wide), axis=-1) - p), axis=-1)
    missed = jnp.maximum(1 - jnp.sum(p, axis=-1), 0) if reduced else 0
    return 0.5 * (distance + missed)


def loss_terms(
    draft_logits: jax.Array,
    confidence_logits: jax.Array,
    target_log_prob: jax.Array,
    label: jax.Array,
    eval_mask: jax.Array,
    weights: LossWeights,
    reduced: bool = False,
    base_logits: jax.Array | None = None,
) -> tuple[LossTerms, jax.Array]:
    """Terms of slots `[..., K]` and each slot's acceptance rate c* = 1 - TV (no gradient).

    `draft_logits`, `target_log_prob` and `base_logits`, which only the curriculum reads, are `[..., K, Vd]`; `label`
    indexes Vd, -1 where the drafter has no such token.
    """
    w = eval_mask * decay_weights(eval_mask.shape[-1], weights.decay_gamma)
    said = label >= 0

    def cross_entropies(logits: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(label, 0))

    ce = cross_entropies(draft_logits)
    # A label that cannot be said is never drafted: its slot has no loss, and those behind it are reached less often.
    known = said * (dpace_weights(said * jnp.exp(-ce), eval_mask > 0, weights.dpace) if weights.dpace else w)
    distance = total_variation(draft_logits, target_log_prob, reduced)
    accept = jax.lax.stop_gradient(jnp.clip(1 - distance, 0, 1))
    bce = optax.sigmoid_binary_cross_entropy(confidence_logits, accept) if weights.confidence else jnp.zeros_like(w)
    terms = LossTerms(
        ce=jnp.sum(known * ce),
        base_ce=jnp.sum(known * cross_entropies(base_logits)) if weights.curriculum else jnp.zeros(()),
        ce_weight=jnp.sum(known),
        l1=jnp.sum(w * 2 * distance),
        confidence=jnp.sum(w * bce),
        weight=jnp.sum(w),
    )
    return terms, accept


def metric_sums(
    terms: LossTerms, accept: jax.Array, confidence_logits: jax.Array, eval_mask: jax.Array
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Each metric as (numerator, denominator), to be summed over steps and hosts. `accept_rate` is per slot."""
    c = jax.nn.sigmoid(confidence_logits)
    alive = jnp.any(eval_mask, axis=-1)
    # Expected tokens of a round that starts at this anchor: the bonus and every surviving draft.
    expected = 1 + jnp.sum(jnp.cumprod(accept * eval_mask, axis=-1), axis=-1)
    axes = tuple(range(eval_mask.ndim - 1))
    count = jnp.sum(eval_mask)
    return {
        "ce_loss": (terms.ce, terms.ce_weight),
        "l1_loss": (terms.l1, terms.weight),
        "confidence_loss": (terms.confidence, terms.weight),
        "accept_rate": (jnp.sum(accept * eval_mask, axis=axes), jnp.sum(eval_mask, axis=axes)),
        "tau_probabilistic": (jnp.sum(expected * alive), jnp.sum(alive)),
        "confidence_abs_error": (jnp.sum(jnp.abs(c - accept) * eval_mask), count),
        "confidence_bias": (jnp.sum((c - accept) * eval_mask), count),
    }
