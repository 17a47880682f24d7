"""The block drafters' loss, 0.1 CE + 0.9 L1 + BCE(confidence) for DSpark, and the metrics of training (spec 4)."""

import dataclasses
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import optax

from dspark_jax.models.drafter import Borrowed
from dspark_jax.models.layers import soft_cap
from dspark_jax.training.features import Features
from dspark_jax.training.position_weights import decay_weights, dpace_weights
from pallas_kernels.distribution_loss import Rows, RowWeights, Targets, Vocabulary, distribution_loss

MEANS = ("tokens", "reference")


@dataclasses.dataclass(frozen=True)
class LossWeights:
    """Weights of the terms; slot k of a block counts exp(-k / decay_gamma), or 1 where that is 0.

    `curriculum`: steps over which the cross entropy moves linearly from the backbone's logits to the head's; 0: the
    head's from the first step on. Domino takes the whole run (arXiv 2605.29707).

    `mean`: how the micro-steps of one update are put together. "tokens": sums over all of them are divided, one mean
    over the batch's slots. "reference": the mean of each micro-step's own mean (spec 4), where a slot weighs the more
    the fewer its micro-step has. Either way sums run over all devices first.

    `dpace`: D-PACE's alpha, whose weights then replace the decay in the cross entropy alone; 0: the decay.
    """

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay_gamma: float = 4.0
    curriculum: int = 0
    mean: str = "tokens"
    dpace: float = 0.0

    def base_share(self, step: jax.Array | int) -> jax.Array | float:
        """The part of the cross entropy that the backbone's logits have at a step, 1 at step 0 (lambda)."""
        return jnp.maximum(1 - step / self.curriculum, 0) if self.curriculum else 0.0


@flax.struct.dataclass
class SlotWeights:
    """What slots count, as `[..., K]` or summed. They depend on masks and labels alone (D-PACE's: see `weigh`), so they
    are known before the loss is.
    """

    ce: jax.Array  # 0 where the drafter has no such token
    slot: jax.Array

    def sum(self) -> "SlotWeights":
        return jax.tree.map(jnp.sum, self)


@flax.struct.dataclass
class LossTerms:
    """Sums over slots and their weights, so that batches and hosts can be added before dividing.

    Of those only `confidence` has gradients.
    """

    ce: jax.Array
    base_ce: jax.Array  # of the backbone's logits; 0 where the curriculum is off
    ce_weight: jax.Array
    l1: jax.Array
    confidence: jax.Array
    weight: jax.Array


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


def slot_weights(label: jax.Array, eval_mask: jax.Array, decay_gamma: float) -> SlotWeights:
    """Of slots `[..., K]`; `label` indexes the draft vocabulary, -1 where it lacks the token."""
    decay = decay_weights(eval_mask.shape[-1], decay_gamma)
    return SlotWeights(eval_mask * decay * (label >= 0), eval_mask * decay)


def weigh(
    rows: Rows, targets: Targets, vocabulary: Vocabulary, eval_mask: jax.Array, weights: LossWeights, kernels: str
) -> SlotWeights:
    """What the slots of `block_loss` weigh, as `[..., K]`; with D-PACE that takes a pass over their logits."""
    label = rows.label_M.reshape(eval_mask.shape)
    each = slot_weights(label, eval_mask, weights.decay_gamma)
    if not weights.dpace:
        return each
    nothing = jnp.zeros(len(rows.label_M))
    rows = jax.lax.stop_gradient(_learnt(rows, eval_mask))
    vocabulary = jax.lax.stop_gradient(vocabulary)
    _, losses = distribution_loss(rows, targets, vocabulary, RowWeights(nothing, nothing, None), kernels)
    # A label that cannot be said is never drafted: its slot has no loss, and those behind it are reached less often.
    said = label >= 0
    probability = said * jnp.exp(-losses.ce_M.reshape(eval_mask.shape))
    return each.replace(ce=said * dpace_weights(probability, eval_mask, weights.dpace))


def _learnt(rows: Rows, eval_mask: jax.Array) -> Rows:
    """Rows of which only those that are to be learnt count."""
    return rows.replace(source_M=jnp.where(eval_mask.reshape(-1), rows.source_M, -1))


def wholes(each: Sequence[SlotWeights], mean: str) -> list[SlotWeights]:
    """What each micro-step's sums are divided by, so that the losses add up. `each`: what their own slots weigh."""
    if mean == "reference":
        return [jax.tree.map(lambda a: a * len(each), own) for own in each]
    return [jax.tree.map(lambda *parts: sum(parts), *each)] * len(each)


def block_loss(
    rows: Rows,
    targets: Targets,
    vocabulary: Vocabulary,
    confidence_logits: jax.Array,
    eval_mask: jax.Array,
    weights: LossWeights,
    base_share: jax.Array | float = 0.0,
    whole: SlotWeights | None = None,
    kernels: str = "xla",
) -> tuple[jax.Array, LossTerms, jax.Array]:
    """The scalar loss, its terms and each slot's acceptance rate c* = 1 - TV (no gradient; 0 outside `eval_mask`).

    `confidence_logits` and `eval_mask` are `[..., K]`; `rows` are the same slots, flat. `base_share` is the backbone's
    logits' share of the cross entropy while there is a curriculum. `whole`: what all slots of the mean weigh; None: all
    are these.
    """
    each = weigh(rows, targets, vocabulary, eval_mask, weights, kernels)
    divisor = jax.tree.map(lambda a: a + 1e-6, each.sum() if whole is None else whole)
    ce = weights.ce * each.ce.reshape(-1) / divisor.ce
    row_weights = RowWeights(ce, 2 * weights.l1 * each.slot.reshape(-1) / divisor.slot, None)
    if weights.curriculum:
        row_weights = row_weights.replace(ce_M=(1 - base_share) * ce, base_ce_M=base_share * ce)
    loss, of_row = distribution_loss(_learnt(rows, eval_mask), targets, vocabulary, row_weights, kernels)
    of_slot = jax.tree.map(lambda a: a.reshape(eval_mask.shape), of_row)
    accept = jnp.where(eval_mask, jnp.clip(1 - of_slot.distance_M, 0, 1), 0)
    confidence = jnp.zeros(())
    if weights.confidence:
        confidence = jnp.sum(each.slot * optax.sigmoid_binary_cross_entropy(confidence_logits, accept))
    terms = LossTerms(
        ce=jnp.sum(each.ce * of_slot.ce_M),
        base_ce=jnp.sum(each.ce * of_slot.base_ce_M) if weights.curriculum else jnp.zeros(()),
        ce_weight=jnp.sum(each.ce),
        l1=jnp.sum(each.slot * 2 * of_slot.distance_M),
        confidence=confidence,
        weight=jnp.sum(each.slot),
    )
    return loss + weights.confidence * confidence / divisor.slot, terms, accept


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
