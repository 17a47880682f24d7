"""How many drafted tokens a round verifies: strategies by name, and the pure functions behind them.

Arrays are of R slots x K drafts. A draft's *confidence* estimates P(accepted | all before it were), its *survival*
P(accepted). Every round runs one row per active slot, the anchors; a *budget* is the rows, anchors and drafts, that the
target's step runs, and always one of the buckets that a program was compiled for, so that padding is priced.
All functions of arrays run inside jit, with static shapes, and take NumPy arrays too.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.errors import UserError

STRATEGIES = ("auto", "off", "fixed:k", "threshold:θ", "dcut[:k]", "load_aware[:k]", "load_aware_async[:k]")
BY_CONFIDENCE = ("threshold", "load_aware", "load_aware_async")
BY_COST = ("load_aware", "load_aware_async", "dcut")

# ---------------------------------------------------------------------------------------------------- names


class Strategy(NamedTuple):
    """A strategy's name and its number: the least confidence of "threshold"; else the drafts of a block, 0: all."""

    name: str
    value: float = 0.0


def parse_strategy(strategy: str, block: int, has_probabilities: bool = True) -> Strategy:
    """The strategy of that name, for a drafter of `block` tokens (0: no drafter).

    `has_probabilities`: whether its drafts have any, which "dcut" reads. What "auto" becomes is left to the caller, who
    knows of the cost table. Raises UserError on an unknown name, a bad number, a missing drafter or missing
    probabilities.
    """
    name, colon, number = strategy.partition(":")
    known = bool(colon) == (name in _NUMBERED) or name in BY_COST
    if not known or name not in (form.partition("[")[0].partition(":")[0] for form in STRATEGIES):
        raise UserError(f"unknown strategy {strategy!r}: known are {', '.join(STRATEGIES)}")
    if name in ("off", "auto"):
        return Strategy(name)
    if name == "fixed":
        return Strategy(name, _drafts(strategy, number, block))
    _need_drafter(strategy, block)
    if name == "dcut" and not has_probabilities:
        others = ", ".join(s for s in STRATEGIES if s not in ("dcut[:k]", "auto"))
        raise UserError(f"strategy {strategy!r} reads draft probabilities, and a lookup has none: use {others}")
    if name == "threshold":
        return Strategy(name, _least_confidence(strategy, number))
    return Strategy(name, _drafts(strategy, number, block) if colon else 0)


_NUMBERED = ("fixed", "threshold")


def _drafts(strategy: str, count: str, block: int) -> int:
    if not count.isdecimal() or int(count) < 1:
        raise UserError(f"strategy {strategy!r}: behind the colon stands the number of drafts, at least 1")
    _need_drafter(strategy, block)
    if int(count) > block:
        raise UserError(f"strategy {strategy!r} asks for more tokens than the drafter's block predicts ({block})")
    return int(count)


def drafts_of(strategy: Strategy, block: int) -> int:
    """Drafts of a round at most, of a drafter of `block` tokens."""
    return int(strategy.value) if strategy.value and strategy.name in ("fixed", *BY_COST) else block


def _least_confidence(strategy: str, number: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = float("nan")
    if not value <= 1:
        raise UserError(f"strategy {strategy!r}: after 'threshold:' stands the least confidence, a number up to 1")
    return value


def _need_drafter(strategy: str, block: int) -> None:
    if not block:
        raise UserError(f"strategy {strategy!r} needs a drafter: give one, or use strategy 'off'")


# ---------------------------------------------------------------------------------------------------- survival


def confidences(logits_RxK: jax.Array, temperature_RxK: jax.Array | float = 1.0) -> jax.Array:
    """σ(z/T), `[R, K]`. `temperature_RxK`: of STS, anything that broadcasts; 1 leaves the drafter's own confidence."""
    return jax.nn.sigmoid(logits_RxK / temperature_RxK)


def survival(confidence_RxK: jax.Array, active_R: jax.Array) -> jax.Array:
    """P(draft k and all before it are accepted), `[R, K]`; 0 in slots that are not active."""
    valid_RxK = active_R[:, None] & (confidence_RxK > 0)  # a NaN is no confidence
    product = jnp.cumprod(jnp.where(valid_RxK, confidence_RxK, 0.0), axis=1)
    # Where a backend multiplies in a tree, each prefix rounds in its own way; but no row may ever rise.
    return jax.lax.cummin(product, axis=1)


# ---------------------------------------------------------------------------------------------------- lengths


def admit(survival_RxK: jax.Array, drafts: jax.Array | int) -> jax.Array:
    """Lengths `[R]` that verify the `drafts` drafts of greatest survival; one that cannot survive is never verified.

    Ties go by slot, then by position. Survival never rises along a row, so a draft ranks behind all before it; token
    values play no part.
    """
    falling_M = _falling(survival_RxK)
    last = falling_M[jnp.clip(drafts - 1, 0, len(falling_M) - 1)]
    above_RxK, tied_RxK = survival_RxK > last, survival_RxK == last
    tie_RxK = jnp.cumsum(tied_RxK.ravel(), dtype=jnp.int32).reshape(tied_RxK.shape)
    admitted_RxK = above_RxK | (tied_RxK & (tie_RxK <= drafts - jnp.sum(above_RxK)))
    return jnp.sum(admitted_RxK & (survival_RxK > 0), axis=1, dtype=jnp.int32)


def _falling(survival_RxK: jax.Array) -> jax.Array:
    """Survivals of all drafts by rank, `[R·K]`. Inside one jit, all who need them share one sort."""
    return -jnp.sort(-survival_RxK.ravel())


def threshold_lengths(confidence_RxK: jax.Array, threshold: float, active_R: jax.Array) -> jax.Array:
    """Lengths `[R]`: drafts before the first whose own confidence is below `threshold`; all of them if it is <= 0.

    As the reference's `--confidence-threshold`: strictly below, per step and not cumulative.
    """
    keep_RxK = jnp.cumprod(~(confidence_RxK < threshold), axis=1, dtype=jnp.int32)
    return jnp.where(active_R, jnp.sum(keep_RxK, axis=1, dtype=jnp.int32), 0)


# ---------------------------------------------------------------------------------------------------- costs


class RoundCost(NamedTuple):
    """Seconds of a round at one number of slots and one context length, by rows of the target's step."""

    rows_J: jax.Array  # most rows of each bucket, rising; the last bounds every budget
    seconds_J: jax.Array  # of the target's step in that bucket, never falling
    overhead: jax.Array | float  # what a drafted round adds, however much it verifies: drafting and scheduling


class Budget(NamedTuple):
    """How many rows the target's step runs. With `admit(survival, rows - anchors)` it becomes lengths."""

    bucket: jax.Array  # index of the bucket
    rows: jax.Array  # anchors and drafts
    tokens_per_second: jax.Array  # expected of the round


def row_buckets(slots: int, block: int) -> tuple[int, ...]:
    """Budgets of `slots` slots, from the anchors alone up to every draft: 1, 1.5, 2, 3, 4, 6, 8, .. rows a slot.

    Where a step's time grows with its rows, a bucket's empty rows are paid for: at most a third of them are.
    """
    most, rows, size = slots * (block + 1), [slots], slots
    while size < most:
        rows += [min(math.ceil(1.5 * size), most), min(2 * size, most)]
        size *= 2
    return tuple(dict.fromkeys(rows))


def bucket_of(rows: jax.Array | int, rows_J: jax.Array) -> jax.Array:
    """Index of the smallest bucket that holds `rows`; the last one if none does."""
    return jnp.minimum(jnp.searchsorted(jnp.asarray(rows_J), rows), len(rows_J) - 1)


def lower_envelope(rows_J: jax.Array, seconds_J: jax.Array) -> jax.Array:
    """The largest convex curve below a staircase, at the right edges of its steps, `[J]`; it is straight between them.

    An edge is a corner of the curve if no line to an earlier edge is steeper than one to a later edge.
    """
    rows_J, seconds_J = jnp.asarray(rows_J, jnp.result_type(float)), jnp.asarray(seconds_J)
    index_J = jnp.arange(len(rows_J))
    earlier_JxJ = index_J[:, None] < index_J
    run_JxJ = jnp.where(earlier_JxJ, rows_J - rows_J[:, None], 1)
    slope_JxJ = (seconds_J - seconds_J[:, None]) / run_JxJ
    into_J = jnp.max(jnp.where(earlier_JxJ, slope_JxJ, -jnp.inf), axis=0)
    out_J = jnp.min(jnp.where(earlier_JxJ, slope_JxJ, jnp.inf), axis=1)
    corner_J = into_J <= out_J
    left_J = jax.lax.cummax(jnp.where(corner_J, index_J, 0))
    right_J = jax.lax.cummin(jnp.where(corner_J, index_J, len(index_J) - 1), reverse=True)
    share_J = (rows_J - rows_J[left_J]) / jnp.maximum(rows_J[right_J] - rows_J[left_J], 1)
    return seconds_J[left_J] + share_J * (seconds_J[right_J] - seconds_J[left_J])


def plain_seconds(anchors: jax.Array | int, cost: RoundCost) -> jax.Array:
    """Seconds of a round without drafting, which emits a token per active slot: nothing but the target's step."""
    return jnp.asarray(cost.seconds_J)[bucket_of(anchors, cost.rows_J)]


# ---------------------------------------------------------------------------------------------------- budgets


def synchronous_budget(survival_RxK: jax.Array, anchors: jax.Array | int, cost: RoundCost) -> Budget:
    """Budget from the very confidences that rank: Algorithm 1 (DSpark) on the staircase's lower envelope.

    Drafts are admitted by rank while expected tokens per second rise, and the bucket reached is then filled. Whether a
    draft is verified so depends on drafts that rank before it alone, never on its own token, and the output keeps its
    law under rejection sampling. `anchors`: active slots.
    """
    expected_M = _expected_tokens(survival_RxK, anchors)
    rows_M = anchors + jnp.arange(len(expected_M))
    # The round cannot cost less than its anchors do; a curve that is flat up to there starts the envelope there.
    envelope_J = lower_envelope(cost.rows_J, jnp.maximum(cost.seconds_J, plain_seconds(anchors, cost)))
    seconds_M = jnp.interp(rows_M, jnp.asarray(cost.rows_J), envelope_J)
    speed_M = jnp.where(rows_M <= cost.rows_J[-1], expected_M / (cost.overhead + seconds_M), 0.0)
    drafts = jnp.sum(jnp.cumprod(speed_M[1:] > speed_M[:-1], dtype=jnp.int32))
    return _budget(bucket_of(anchors + drafts, cost.rows_J), expected_M, anchors, cost)


def global_budget(survival_RxK: jax.Array, anchors: jax.Array | int, cost: RoundCost) -> Budget:
    """The fastest budget on the staircase itself; of equally fast ones, the smallest.

    It looks at every confidence. Under `rejection` it must be given those of older rounds; under `coupled`, where any
    schedule is exact, the current ones serve. `anchors`: active slots.
    """
    expected_M = _expected_tokens(survival_RxK, anchors)
    return _budget(jnp.argmax(_speed_J(expected_M, anchors, cost)), expected_M, anchors, cost)


def _expected_tokens(survival_RxK: jax.Array, anchors: jax.Array | int) -> jax.Array:
    """Tokens that a round emits if 0, 1, .. R·K drafts are verified in the order of their ranks, `[R·K + 1]`."""
    falling_M = _falling(survival_RxK)
    return anchors + jnp.concatenate([jnp.zeros(1, falling_M.dtype), jnp.cumsum(falling_M)])


def _speed_J(expected_M: jax.Array, anchors: jax.Array | int, cost: RoundCost) -> jax.Array:
    """Expected tokens per second of every bucket, filled; -inf where it does not hold the anchors."""
    rows_J = jnp.asarray(cost.rows_J)
    drafts_J = jnp.clip(rows_J - anchors, 0, len(expected_M) - 1)
    return jnp.where(rows_J >= anchors, expected_M[drafts_J] / (cost.overhead + cost.seconds_J), -jnp.inf)


def _budget(bucket: jax.Array, expected_M: jax.Array, anchors: jax.Array | int, cost: RoundCost) -> Budget:
    return Budget(bucket, jnp.asarray(cost.rows_J)[bucket], _speed_J(expected_M, anchors, cost)[bucket])
