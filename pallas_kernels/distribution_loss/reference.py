"""What training asks of a drafter's distributions, in jnp, with the logits in memory (spec 4)."""

import flax.struct
import jax
import jax.numpy as jnp
from jax.nn import logsumexp


@flax.struct.dataclass
class Rows:
    """M slots of draft blocks, in any order."""

    hidden_MxH: jax.Array  # the drafter's, after its final norm
    factor_Mxr: jax.Array | None  # the in-block head's; None: there is no such head
    label_M: jax.Array  # index of the next token in the draft vocabulary; -1: it is not there
    source_M: jax.Array  # which target row the slot is to equal; -1: none, the slot counts for nothing


@flax.struct.dataclass
class Targets:
    """T rows of the frozen target."""

    hidden_TxH: jax.Array  # after its final norm
    log_total_T: jax.Array  # log of the sum of exp(logit) over its whole vocabulary


@flax.struct.dataclass
class Vocabulary:
    """The tables of Vd draft tokens: logits = soft cap of hidden · head, the drafter's + factor · correction.

    `reduced`: Vd is a part of the target's vocabulary. The rest of the target's mass counts as missed.
    """

    head_VdxH: jax.Array  # frozen, shared by drafter and target
    correction_Vdxr: jax.Array | None
    softcap: float = flax.struct.field(pytree_node=False, default=0.0)
    reduced: bool = flax.struct.field(pytree_node=False, default=False)


@flax.struct.dataclass
class RowWeights:
    """What each row's losses count in the sum."""

    ce_M: jax.Array
    distance_M: jax.Array
    base_ce_M: jax.Array | None  # None: not asked for


@flax.struct.dataclass
class RowLosses:
    """Of each row, without gradients and in at least float32; all 0 where the source is -1."""

    ce_M: jax.Array  # cross entropy of the label; 0 where there is none
    distance_M: jax.Array  # total variation ½‖q - p‖₁; acceptance is 1 - that
    base_ce_M: jax.Array | None  # of the logits without the correction


def wide_matmul(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """a · b over one axis of each, accumulated and left in at least float32."""
    axes = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, axes, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


def capped_logits(hidden_NxH: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """`[N, Vd]` of the drafter or the target, in at least float32."""
    logits, cap = wide_matmul(hidden_NxH, vocabulary.head_VdxH, (1, 1)), vocabulary.softcap
    return cap * jnp.tanh(logits / cap) if cap else logits


def target_law(targets: Targets, vocabulary: Vocabulary) -> tuple[jax.Array, jax.Array]:
    """`[T, Vd]` the target's probabilities of the draft vocabulary, and `[T]` what it gives to other tokens."""
    p = jnp.exp(capped_logits(targets.hidden_TxH, vocabulary) - targets.log_total_T[:, None])
    return p, jnp.maximum(1 - jnp.sum(p, axis=-1), 0) if vocabulary.reduced else jnp.zeros_like(p[:, 0])


def cross_entropy(logits_NxV: jax.Array, label_N: jax.Array) -> jax.Array:
    """`[N]`, 0 where the label is -1."""
    said = jnp.take_along_axis(logits_NxV, jnp.maximum(label_N, 0)[:, None], axis=-1)[:, 0]
    return jnp.where(label_N >= 0, logsumexp(logits_NxV, axis=-1) - said, 0)


def row_losses(rows: Rows, targets: Targets, vocabulary: Vocabulary, base: bool) -> RowLosses:
    """As `RowLosses`, with gradients. `base`: whether `base_ce_M` is asked for."""
    used = rows.source_M >= 0
    base_logits = logits = capped_logits(rows.hidden_MxH, vocabulary)
    if rows.factor_Mxr is not None:
        logits = logits + wide_matmul(rows.factor_Mxr, vocabulary.correction_Vdxr, (1, 1))
    p, missed = (a[jnp.maximum(rows.source_M, 0)] for a in target_law(targets, vocabulary))
    distance = 0.5 * (jnp.sum(jnp.abs(jax.nn.softmax(logits, axis=-1) - p), axis=-1) + missed)
    return RowLosses(
        ce_M=jnp.where(used, cross_entropy(logits, rows.label_M), 0),
        distance_M=jnp.where(used, distance, 0),
        base_ce_M=jnp.where(used, cross_entropy(base_logits, rows.label_M), 0) if base else None,
    )


def weighted_sum(losses: RowLosses, weights: RowWeights) -> jax.Array:
    """Scalar: every loss of every row times its weight."""
    total = jnp.sum(weights.ce_M * losses.ce_M) + jnp.sum(weights.distance_M * losses.distance_M)
    return total if weights.base_ce_M is None else total + jnp.sum(weights.base_ce_M * losses.base_ce_M)


def distribution_loss(
    rows: Rows, targets: Targets, vocabulary: Vocabulary, weights: RowWeights
) -> tuple[jax.Array, RowLosses]:
    """The weighted sum and every row's losses; `[M, Vd]` logits are kept for the gradient."""
    frozen = vocabulary.replace(head_VdxH=jax.lax.stop_gradient(vocabulary.head_VdxH))
    losses = row_losses(rows, jax.lax.stop_gradient(targets), frozen, weights.base_ce_M is not None)
    return weighted_sum(losses, jax.lax.stop_gradient(weights)), jax.lax.stop_gradient(losses)
