"""The DSpark loss, 0.1 CE + 0.9 L1 + BCE(confidence), and the metrics of training (spec 4)."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class LossWeights:
    """Weights of the terms; slot k of a block counts exp(-k / decay_gamma), or 1 where that is 0."""

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay_gamma: float = 4.0


@flax.struct.dataclass
class LossTerms:
    """Sums over slots and their weights, so that batches and hosts can be added before dividing."""

    ce: jax.Array
    ce_weight: jax.Array
    l1: jax.Array
    confidence: jax.Array
    weight: jax.Array

    def total(self, weights: LossWeights) -> jax.Array:
        """The scalar loss."""
        return weights.ce * self.ce / (self.ce_weight + 1e-6) + (
            weights.l1 * self.l1 + weights.confidence * self.confidence
        ) / (self.weight + 1e-6)


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
) -> tuple[LossTerms, jax.Array]:
    """Terms of slots `[..., K]` and each slot's acceptance rate c* = 1 - TV (no gradient).

    `draft_logits` and `target_log_prob` are `[..., K, Vd]`; `label` indexes Vd, -1 where the drafter has no such token.
    """
    slots = eval_mask.shape[-1]
    decay = jnp.exp(-jnp.arange(slots) / weights.decay_gamma) if weights.decay_gamma > 0 else jnp.ones(slots)
    w = eval_mask * decay
    known = w * (label >= 0)
    ce = optax.softmax_cross_entropy_with_integer_labels(draft_logits, jnp.maximum(label, 0))
    distance = total_variation(draft_logits, target_log_prob, reduced)
    accept = jax.lax.stop_gradient(jnp.clip(1 - distance, 0, 1))
    bce = optax.sigmoid_binary_cross_entropy(confidence_logits, accept) if weights.confidence else jnp.zeros_like(w)
    terms = LossTerms(
        ce=jnp.sum(known * ce),
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
