"""The chunks in XLA's operations. Rows that share a source, as overlapping blocks do, have its law computed once."""

import flax.struct
import jax
import jax.numpy as jnp

from pallas_kernels.distribution_loss.chunks import Given, OfRows, Order, Trained, by_source, lanes, nothing, pick, put
from pallas_kernels.distribution_loss.reference import (
    RowLosses,
    Rows,
    RowWeights,
    Targets,
    Vocabulary,
    capped_logits,
    cross_entropy,
    target_law,
    wide_matmul,
)


@flax.struct.dataclass
class _Laws:
    """The target's laws of two chunks of sources, an even and an odd one."""

    p_2CxVd: jax.Array
    missed_2C: jax.Array


def over_chunks(chunk: int, trained: Trained, given: Given, differentiate: bool) -> tuple[OfRows, jax.Array | None]:
    """Every row's losses and, where asked for, the gradients of their weighted sum: of the rows, of the correction."""
    rows, targets, vocabulary, weights = given
    order = by_source(rows.source_M)

    def body(i: jax.Array, carry: tuple[_Laws, OfRows, jax.Array | None]):
        laws, of_rows, of_correction = carry
        lane, used = lanes(order, i, chunk)
        laws = _load(laws, order, i, lane[-1], targets, vocabulary)
        # A chunk's sources are consecutive, hence in two chunks of them at most.
        slot, at = order.place_M[lane] % (2 * chunk), order.row_M[lane]
        some = pick(at, used, rows, weights)
        new, more = _chunk(*some, laws.p_2CxVd[slot], laws.missed_2C[slot], vocabulary, differentiate)
        return laws, put(of_rows, new, at, used), None if more is None else of_correction + more

    law = jax.eval_shape(target_law, targets, vocabulary)[0]
    laws = _Laws(jnp.zeros((2 * chunk, law.shape[1]), law.dtype), jnp.zeros(2 * chunk, law.dtype))
    start = laws, *nothing(given, trained, differentiate)
    return jax.lax.fori_loop(0, (order.num_rows + chunk - 1) // chunk, body, start)[1:]


def _load(laws: _Laws, order: Order, i: jax.Array, last: jax.Array, targets: Targets, vocabulary: Vocabulary) -> _Laws:
    """Computes the target's laws that chunk i, whose last row is `last`, is the first to read."""
    chunk = len(laws.missed_2C) // 2
    loaded = jnp.where(i > 0, order.place_M[jnp.maximum(i * chunk - 1, 0)] // chunk + 1, 0)

    def load(j: jax.Array, held: _Laws) -> _Laws:
        place = jnp.minimum(j * chunk + jnp.arange(chunk), len(order.source_M) - 1)
        some = jax.tree.map(lambda a: a[jnp.minimum(order.source_M[place], len(a) - 1)], targets)
        new = _Laws(*target_law(some, vocabulary))
        return jax.tree.map(lambda old, a: jax.lax.dynamic_update_slice_in_dim(old, a, j % 2 * chunk, 0), held, new)

    return jax.lax.fori_loop(loaded, order.place_M[last] // chunk + 1, load, laws)


def _chunk(
    rows: Rows, weights: RowWeights, p_CxVd: jax.Array, missed_C: jax.Array, vocabulary: Vocabulary, differentiate: bool
) -> tuple[OfRows, jax.Array | None]:
    """The losses of a chunk's rows and the gradients of their weighted sum."""
    base = logits = capped_logits(rows.hidden_MxH, vocabulary)
    if rows.factor_Mxr is not None:
        logits = base + wide_matmul(rows.factor_Mxr, vocabulary.correction_Vdxr, (1, 1))
    q = jax.nn.softmax(logits, axis=-1)
    losses = RowLosses(
        cross_entropy(logits, rows.label_M),
        0.5 * (jnp.sum(jnp.abs(q - p_CxVd), axis=-1) + missed_C),
        None if weights.base_ce_M is None else cross_entropy(base, rows.label_M),
    )
    if not differentiate:
        return OfRows(losses, None, None), None
    base_q = None if weights.base_ce_M is None else jax.nn.softmax(base, axis=-1)
    of_hidden, of_factor, of_correction = gradients(rows, weights, q, p_CxVd, base, base_q, vocabulary)
    return OfRows(losses, of_hidden, of_factor), of_correction


def gradients(
    rows: Rows,
    weights: RowWeights,
    q_CxVd: jax.Array,
    p_CxVd: jax.Array,
    base_CxVd: jax.Array,
    base_q_CxVd: jax.Array | None,
    vocabulary: Vocabulary,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Of a chunk's weighted sum: by hidden states, factors and correction.

    `q`, `base_q`: the drafter's probabilities with and without correction; `base`: logits without it.
    """
    of_logits = _cross_entropy_slope(q_CxVd, rows.label_M, weights.ce_M)
    of_logits += _distance_slope(q_CxVd, p_CxVd, weights.distance_M)
    of_base = of_logits
    if base_q_CxVd is not None:
        of_base += _cross_entropy_slope(base_q_CxVd, rows.label_M, weights.base_ce_M)
    if vocabulary.softcap:
        of_base *= 1 - (base_CxVd / vocabulary.softcap) ** 2
    of_hidden = wide_matmul(of_base.astype(rows.hidden_MxH.dtype), vocabulary.head_VdxH, (1, 0))
    if rows.factor_Mxr is None:
        return of_hidden, None, None
    of_logits = of_logits.astype(rows.factor_Mxr.dtype)
    of_factor = wide_matmul(of_logits, vocabulary.correction_Vdxr, (1, 0))
    return of_hidden, of_factor, wide_matmul(of_logits, rows.factor_Mxr, (0, 0))


def _cross_entropy_slope(q_CxVd: jax.Array, label_C: jax.Array, weight_C: jax.Array) -> jax.Array:
    """By the logits: weight · (q - 1 at the label)."""
    said = jnp.arange(q_CxVd.shape[-1]) == label_C[:, None]
    return jnp.where(label_C >= 0, weight_C, 0)[:, None] * (q_CxVd - said)


def _distance_slope(q_CxVd: jax.Array, p_CxVd: jax.Array, weight_C: jax.Array) -> jax.Array:
    """By the logits: the slope ½ sign(q - p) by q, through the softmax."""
    side = jnp.sign(q_CxVd - p_CxVd)
    return 0.5 * weight_C[:, None] * q_CxVd * (side - jnp.sum(q_CxVd * side, axis=-1, keepdims=True))
