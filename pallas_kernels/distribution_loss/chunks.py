"""What the loops over chunks of rows have in common: their order, what they start from, what a chunk leaves."""

import flax.struct
import jax
import jax.numpy as jnp

from pallas_kernels.distribution_loss.reference import RowLosses, Rows, RowWeights, Targets, Vocabulary

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
class Order:
    """Rows by source. Behind `num_rows` stand those that count for nothing."""

    row_M: jax.Array
    place_M: jax.Array  # the source's number among the distinct ones: 0, 0, 1, 2, 2, …
    source_M: jax.Array  # the distinct ones
    num_rows: jax.Array


@flax.struct.dataclass
class OfRows:
    """What every row leaves."""

    losses: RowLosses
    hidden_MxH: jax.Array | None  # gradients
    factor_Mxr: jax.Array | None


def chunk_rows(num_rows: int, vocab: int) -> int:
    """How many rows are worked on at a time: a multiple of 16."""
    fitting = max(_LOGITS // vocab // 64 * 64, 64)
    return min(fitting, _ROWS, -(-num_rows // 16) * 16)


def by_source(source_M: jax.Array) -> Order:
    key = jnp.where(source_M >= 0, source_M, jnp.iinfo(source_M.dtype).max)
    row = jnp.argsort(key)
    ordered = key[row]
    place = jnp.cumsum(jnp.append(False, ordered[1:] != ordered[:-1]))
    return Order(row, place, jnp.zeros_like(key).at[place].set(ordered), jnp.sum(source_M >= 0))


def nothing(given: Given, trained: Trained, differentiate: bool) -> tuple[OfRows, jax.Array | None]:
    """What the loop fills: of every row, and the sum of the correction's gradients."""
    wide = jnp.promote_types(trained.hidden_MxH.dtype, jnp.float32)
    zeros = jnp.zeros(len(trained.hidden_MxH), wide)
    losses = RowLosses(zeros, zeros, None if given[-1].base_ce_M is None else zeros)
    if not differentiate:
        return OfRows(losses, None, None), None
    of_rows = OfRows(losses, *jax.tree.map(jnp.zeros_like, (trained.hidden_MxH, trained.factor_Mxr)))
    return of_rows, jax.tree.map(lambda a: jnp.zeros(a.shape, wide), trained.correction_Vdxr)


def lanes(order: Order, i: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Places `[C]` of chunk i in the order, and which of them are rows; the others repeat the last row."""
    lane = i * chunk + jnp.arange(chunk)
    return jnp.minimum(lane, order.num_rows - 1), lane < order.num_rows


def pick(at_C: jax.Array, used_C: jax.Array, rows: Rows, weights: RowWeights) -> tuple[Rows, RowWeights]:
    """Rows of a chunk and their weights, 0 where a lane is no row."""
    some_rows, some_weights = jax.tree.map(lambda a: a[at_C], (rows, weights))
    return some_rows, jax.tree.map(lambda a: jnp.where(used_C, a, 0), some_weights)


def put(of_rows: OfRows, new: OfRows, at_C: jax.Array, used_C: jax.Array) -> OfRows:
    """Writes what a chunk leaves of its rows; lanes that are none write nowhere."""
    to = jnp.where(used_C, at_C, len(of_rows.losses.ce_M))
    return jax.tree.map(lambda old, a: old.at[to].set(a.astype(old.dtype), mode="drop"), of_rows, new)
