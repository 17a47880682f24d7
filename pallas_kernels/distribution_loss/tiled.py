"""The loss chunk by chunk of the rows: logits of one chunk are alive at a time, and its gradients are made on the spot.

The weight of every row is known beforehand, so a chunk's gradients need no other chunk, and the backward pass only
scales them: no logits are made twice. Rows go in the order of their sources; overlapping blocks share them, and each is
computed once.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from pallas_kernels.distribution_loss.reference import (
    RowLosses,
    Rows,
    RowWeights,
    Targets,
    Vocabulary,
    capped_logits,
    cross_entropy,
    target_law,
    weighted_sum,
    wide_matmul,
)  # fmt: skip

_LOGITS = 2**26  # of a chunk at most: 256 MiB in float32, of which about five are alive
_ROWS = 512  # enough to keep a chip multiplying rather than reading the head

Given = tuple[Rows, Targets, Vocabulary, RowWeights]


@flax.struct.dataclass
class Trained:
    """What has gradients; also those themselves."""

    hidden_MxH: jax.Array
    factor_Mxr: jax.Array | None
    correction_Vdxr: jax.Array | None


@flax.struct.dataclass
class _Order:
    """Rows by source. Behind `num_rows` stand those that count for nothing."""

    row_M: jax.Array
    place_M: jax.Array  # the source's number among the distinct ones: 0, 0, 1, 2, 2, …
    source_M: jax.Array  # the distinct ones
    num_rows: jax.Array


@flax.struct.dataclass
class _Laws:
    """The target's laws of two chunks of sources, an even and an odd one."""

    p_2CxVd: jax.Array
    missed_2C: jax.Array


@flax.struct.dataclass
class _OfRows:
    """What every row leaves."""

    losses: RowLosses
    hidden_MxH: jax.Array | None  # gradients
    factor_Mxr: jax.Array | None


def distribution_loss(
    rows: Rows, targets: Targets, vocabulary: Vocabulary, weights: RowWeights, chunk: int | None = None
) -> tuple[jax.Array, RowLosses]:
    """As the reference. `chunk`: rows at a time; None: as many as the vocabulary's size lets fit."""
    trained = Trained(rows.hidden_MxH, rows.factor_Mxr, vocabulary.correction_Vdxr)
    chunk = chunk or chunk_rows(len(rows.label_M), len(vocabulary.head_VdxH))
    return _weighted(chunk, trained, (rows, targets, vocabulary, weights))


def chunk_rows(num_rows: int, vocab: int) -> int:
    """How many rows are worked on at a time."""
    fitting = max(_LOGITS // vocab // 64 * 64, 64)
    return min(fitting, _ROWS, num_rows)


def _weighted(chunk: int, trained: Trained, given: Given) -> tuple[jax.Array, RowLosses]:
    of_rows, _ = _over_chunks(chunk, trained, given, False)
    return weighted_sum(of_rows.losses, given[-1]), of_rows.losses


def _forward(chunk: int, trained: Trained, given: Given) -> tuple[tuple[jax.Array, RowLosses], Trained]:
    of_rows, of_correction = _over_chunks(chunk, trained, given, True)
    gradients = Trained(of_rows.hidden_MxH, of_rows.factor_Mxr, of_correction)
    gradients = jax.tree.map(lambda g, a: g.astype(a.dtype), gradients, trained)
    return (weighted_sum(of_rows.losses, given[-1]), of_rows.losses), gradients


def _backward(chunk: int, gradients: Trained, cotangent: tuple[jax.Array, Any]) -> tuple[Trained, None]:
    # The rows' losses serve metrics and the confidence's labels: they have no gradient.
    return jax.tree.map(lambda g: g * cotangent[0].astype(g.dtype), gradients), None


_weighted = jax.custom_vjp(_weighted, nondiff_argnums=(0,))
_weighted.defvjp(_forward, _backward)


def _by_source(source_M: jax.Array) -> _Order:
    key = jnp.where(source_M >= 0, source_M, jnp.iinfo(source_M.dtype).max)
    row = jnp.argsort(key)
    ordered = key[row]
    place = jnp.cumsum(jnp.append(False, ordered[1:] != ordered[:-1]))
    return _Order(row, place, jnp.zeros_like(key).at[place].set(ordered), jnp.sum(source_M >= 0))


def _over_chunks(chunk: int, trained: Trained, given: Given, differentiate: bool) -> tuple[_OfRows, jax.Array | None]:
    """Every row's losses and, where asked for, the gradients of their weighted sum: of the rows, of the correction."""
    rows, targets, vocabulary, weights = given
    rows = rows.replace(hidden_MxH=trained.hidden_MxH, factor_Mxr=trained.factor_Mxr)
    vocabulary = vocabulary.replace(correction_Vdxr=trained.correction_Vdxr)
    order, num_rows = _by_source(rows.source_M), len(rows.label_M)

    def chunk_of(at_C: jax.Array, used_C: jax.Array, p_CxVd: jax.Array, missed_C: jax.Array):
        some_rows, some_weights = jax.tree.map(lambda a: a[at_C], (rows, weights))
        some_weights = jax.tree.map(lambda a: jnp.where(used_C, a, 0), some_weights)
        return _chunk(some_rows, some_weights, p_CxVd, missed_C, vocabulary, differentiate)

    def body(i: jax.Array, carry: tuple[_Laws, _OfRows, jax.Array | None]):
        laws, of_rows, of_correction = carry
        lane = i * chunk + jnp.arange(chunk)
        used = lane < order.num_rows
        lane = jnp.minimum(lane, order.num_rows - 1)
        laws = _load(laws, order, i, lane[-1], targets, vocabulary)
        # A chunk's sources are consecutive, hence in two chunks of them at most.
        slot = order.place_M[lane] % (2 * chunk)
        at = order.row_M[lane]
        new, more = chunk_of(at, used, laws.p_2CxVd[slot], laws.missed_2C[slot])
        to = jnp.where(used, at, num_rows)  # lanes behind the last row write nowhere
        of_rows = jax.tree.map(lambda old, a: old.at[to].set(a.astype(old.dtype), mode="drop"), of_rows, new)
        return laws, of_rows, None if more is None else of_correction + more

    start = _nothing(chunk, given, trained, differentiate)
    return jax.lax.fori_loop(0, (order.num_rows + chunk - 1) // chunk, body, start)[1:]


def _nothing(chunk: int, given: Given, trained: Trained, differentiate: bool):
    """What the loop starts from."""
    _, targets, vocabulary, weights = given
    wide = jnp.promote_types(trained.hidden_MxH.dtype, jnp.float32)
    zeros = jnp.zeros(len(trained.hidden_MxH), wide)
    losses = RowLosses(zeros, zeros, None if weights.base_ce_M is None else zeros)
    law = jax.eval_shape(target_law, targets, vocabulary)[0]
    laws = _Laws(jnp.zeros((2 * chunk, law.shape[1]), law.dtype), jnp.zeros(2 * chunk, law.dtype))
    if not differentiate:
        return laws, _OfRows(losses, None, None), None
    of_rows = _OfRows(losses, *jax.tree.map(jnp.zeros_like, (trained.hidden_MxH, trained.factor_Mxr)))
    # Every row's gradient is written once; the correction's is a sum over the chunks.
    return laws, of_rows, jax.tree.map(lambda a: jnp.zeros(a.shape, wide), trained.correction_Vdxr)


def _load(laws: _Laws, order: _Order, i: jax.Array, last: jax.Array, targets: Targets, vocabulary: Vocabulary) -> _Laws:
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
) -> tuple[_OfRows, jax.Array | None]:
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
        return _OfRows(losses, None, None), None
    of_logits = _cross_entropy_slope(q, rows.label_M, weights.ce_M) + _distance_slope(q, p_CxVd, weights.distance_M)
    of_base = of_logits
    if weights.base_ce_M is not None:
        of_base += _cross_entropy_slope(jax.nn.softmax(base, axis=-1), rows.label_M, weights.base_ce_M)
    if vocabulary.softcap:
        of_base *= 1 - (base / vocabulary.softcap) ** 2
    of_hidden = wide_matmul(of_base.astype(rows.hidden_MxH.dtype), vocabulary.head_VdxH, (1, 0))
    if rows.factor_Mxr is None:
        return _OfRows(losses, of_hidden, None), None
    of_logits = of_logits.astype(rows.factor_Mxr.dtype)
    of_factor = wide_matmul(of_logits, vocabulary.correction_Vdxr, (1, 0))
    return _OfRows(losses, of_hidden, of_factor), wide_matmul(of_logits, rows.factor_Mxr, (0, 0))


def _cross_entropy_slope(q_CxVd: jax.Array, label_C: jax.Array, weight_C: jax.Array) -> jax.Array:
    """By the logits: weight · (q - 1 at the label)."""
    said = jnp.arange(q_CxVd.shape[-1]) == label_C[:, None]
    return jnp.where(label_C >= 0, weight_C, 0)[:, None] * (q_CxVd - said)


def _distance_slope(q_CxVd: jax.Array, p_CxVd: jax.Array, weight_C: jax.Array) -> jax.Array:
    """By the logits: the slope ½ sign(q - p) by q, through the softmax."""
    side = jnp.sign(q_CxVd - p_CxVd)
    return 0.5 * weight_C[:, None] * q_CxVd * (side - jnp.sum(q_CxVd * side, axis=-1, keepdims=True))
