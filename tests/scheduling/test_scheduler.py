"""Budgets and lengths against brute force, and why they keep the output's law."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.errors import UserError
from dspark_jax.scheduling.scheduler import (
    RoundCost,
    admit,
    bucket_of,
    confidences,
    drafts_of,
    global_budget,
    lower_envelope,
    parse_strategy,
    plain_seconds,
    row_buckets,
    survival,
    synchronous_budget,
    threshold_lengths,
)

SLOTS, BLOCK = 3, 3
EVERY_ROW = np.arange(1, SLOTS * (BLOCK + 1) + 1, dtype=np.int32)
BUCKETS = np.array([1, 2, 4, 8, 12], np.int32)


@jax.jit
def synchronous(confidence_RxK, active_R, cost):
    survival_RxK, anchors = survival(confidence_RxK, active_R), active_R.sum()
    budget = synchronous_budget(survival_RxK, anchors, cost)
    return budget, admit(survival_RxK, budget.rows - anchors)


@jax.jit
def from_older(older_RxK, confidence_RxK, active_R, cost):
    """The budget of a global search over older confidences; the current ones rank."""
    anchors = active_R.sum()
    budget = global_budget(survival(older_RxK, active_R), anchors, cost)
    return budget, admit(survival(confidence_RxK, active_R), budget.rows - anchors)


admitted = jax.jit(admit)
thresholded = jax.jit(threshold_lengths)

# Coarse values make ties, fine ones everything else.
unit = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(0, 1, width=32, allow_subnormal=False))
confidence_arrays = st.lists(unit, min_size=SLOTS * BLOCK, max_size=SLOTS * BLOCK).map(
    lambda values: np.array(values, np.float32).reshape(SLOTS, BLOCK)
)
active_masks = st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS).filter(any).map(np.array)
steps = st.floats(0, 2, width=32, allow_subnormal=False)
overheads = st.floats(0, 3, width=32, allow_subnormal=False).map(np.float32)


def increments(count):
    return st.lists(steps, min_size=count, max_size=count).map(lambda values: np.array(values, np.float32))


def staircase(rows_J, rises_J, overhead):
    return RoundCost(rows_J, np.float32(0.5) + np.cumsum(rises_J), overhead)


staircases = st.builds(lambda rises, overhead: staircase(BUCKETS, rises, overhead), increments(5), overheads)
convex_curves = st.builds(
    lambda rises, overhead: staircase(EVERY_ROW, np.sort(rises), overhead), increments(len(EVERY_ROW)), overheads
)


def best_speed(confidence_RxK, active_R, cost):
    """The most tokens per second that any lengths give, a full bucket being paid for, by trying them all."""
    survival_RxK = np.cumprod(np.where(active_R[:, None], confidence_RxK, 0).astype(np.float64), axis=1)
    gain_RxQ = np.concatenate([np.zeros((SLOTS, 1)), np.cumsum(survival_RxK, axis=1)], axis=1)
    anchors, best = active_R.sum(), 0.0
    for lengths in itertools.product(range(BLOCK + 1), repeat=int(anchors)):
        tokens = anchors + sum(gain_RxQ[r, n] for r, n in zip(np.flatnonzero(active_R), lengths, strict=True))
        bucket = np.searchsorted(cost.rows_J, anchors + sum(lengths))
        best = max(best, tokens / (float(cost.overhead) + float(cost.seconds_J[bucket])))
    return best


def speed_of(lengths, confidence_RxK, active_R, cost, bucket):
    survival_RxK = np.cumprod(confidence_RxK.astype(np.float64), axis=1)
    tokens = active_R.sum() + sum(survival_RxK[r, :n].sum() for r, n in enumerate(lengths))
    return tokens / (float(cost.overhead) + float(cost.seconds_J[bucket]))


# ---------------------------------------------------------------------------------------------------- optimality


@settings(max_examples=60, deadline=None, derandomize=True)
@given(confidence_arrays, active_masks, convex_curves)
def test_greedy_admission_is_the_best_of_all_lengths_where_costs_are_convex(confidence, active, cost):
    budget, lengths = synchronous(confidence, active, cost)
    found = speed_of(np.asarray(lengths), confidence, active, cost, int(budget.bucket))
    assert found == pytest.approx(best_speed(confidence, active, cost), rel=1e-5)
    assert float(budget.tokens_per_second) == pytest.approx(found, rel=1e-5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(confidence_arrays, active_masks, staircases)
def test_global_search_is_the_best_of_all_lengths_on_any_staircase(confidence, active, cost):
    budget, lengths = from_older(confidence, confidence, active, cost)
    found = speed_of(np.asarray(lengths), confidence, active, cost, int(budget.bucket))
    assert found == pytest.approx(best_speed(confidence, active, cost), rel=1e-5)
    assert float(budget.tokens_per_second) == pytest.approx(found, rel=1e-5)


def test_greedy_admission_crosses_an_edge_that_pays_only_when_the_bucket_is_filled():
    """One token over the edge costs more than it brings; the whole bucket does not (failure report R3)."""
    confidence, active = np.full((SLOTS, BLOCK), 0.9, np.float32), np.ones(SLOTS, bool)
    cost = RoundCost(BUCKETS, np.array([1, 1, 1, 1.5, 1.9], np.float32), np.float32(0))
    first_step_loses = (3 + 0.9 + 0.9) / 1.5 < (3 + 0.9) / 1
    budget, _ = synchronous(confidence, active, cost)
    assert first_step_loses and int(budget.rows) == 12
    assert float(budget.tokens_per_second) > (3 + 0.9) / 1


def test_drafting_and_scheduling_count_in_the_objective():
    """What is paid anyway makes it worth while to verify more."""
    confidence, active = np.full((SLOTS, BLOCK), 0.6, np.float32), np.ones(SLOTS, bool)
    cost = RoundCost(EVERY_ROW, EVERY_ROW.astype(np.float32), np.float32(0))
    rows = [int(synchronous(confidence, active, cost._replace(overhead=np.float32(t)))[0].rows) for t in (0, 4, 100)]
    assert rows[0] == 3 and rows == sorted(set(rows)) and rows[-1] == 12


def test_admission_stops_where_another_draft_brings_nothing():
    """Θ <= best stops: a draft of survival .5 at half the price of the anchor leaves the speed as it was."""
    confidence, active = np.full((SLOTS, BLOCK), 0.5, np.float32), np.array([False, True, False])
    cost = RoundCost(EVERY_ROW, 0.5 + 0.5 * EVERY_ROW.astype(np.float32), np.float32(0))
    budget, lengths = synchronous(confidence, active, cost)
    assert int(budget.rows) == 1 and not np.asarray(lengths).any()


def test_buckets_that_cannot_hold_the_anchors_do_not_bend_the_envelope():
    """A cheap bucket of one row would make every later one look steep to three slots."""
    confidence, active = np.full((SLOTS, BLOCK), 0.9, np.float32), np.ones(SLOTS, bool)
    cost = RoundCost(BUCKETS, np.array([0.1, 5, 5, 6, 20], np.float32), np.float32(0))
    assert int(synchronous(confidence, active, cost)[0].rows) == 8


def test_seconds_of_a_plain_round():
    cost = RoundCost(BUCKETS, np.array([1, 2, 3, 4, 5], np.float32), np.float32(9))
    assert [float(plain_seconds(n, cost)) for n in (1, 2, 3)] == [1, 2, 3]


def hull(rows_J, seconds_J):
    """At each edge, the lowest of all lines that join two edges around it."""
    pairs = [(i, j) for i in range(len(rows_J)) for j in range(i, len(rows_J))]
    return [
        min(
            seconds_J[i] + (rows - rows_J[i]) / max(rows_J[j] - rows_J[i], 1) * (seconds_J[j] - seconds_J[i])
            for i, j in pairs
            if rows_J[i] <= rows <= rows_J[j]
        )
        for rows in rows_J.astype(float)
    ]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(increments(5))
def test_lower_envelope(rises):
    seconds = np.cumsum(rises)
    assert np.asarray(lower_envelope(BUCKETS, seconds)) == pytest.approx(hull(BUCKETS, seconds), rel=1e-4, abs=1e-6)


# ---------------------------------------------------------------------------------------------------- lengths


@settings(max_examples=60, deadline=None, derandomize=True)
@given(confidence_arrays, active_masks, st.integers(-1, 12))
def test_admission_takes_the_greatest_survivals_ties_by_slot_then_position(confidence, active, drafts):
    survival_RxK = np.asarray(survival(confidence, active))
    order = sorted(itertools.product(range(SLOTS), range(BLOCK)), key=lambda i: (-survival_RxK[i], i))
    expected = np.zeros(SLOTS, int)
    for n, (r, k) in enumerate(i for i in order[: max(drafts, 0)] if survival_RxK[i] > 0):
        assert k == expected[r], f"admission {n} leaves a hole"
        expected[r] += 1
    assert np.asarray(admitted(survival_RxK, drafts)).tolist() == expected.tolist()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(confidence_arrays, active_masks)
def test_survival_never_rises_and_is_nothing_in_inactive_slots(confidence, active):
    survival_RxK = np.asarray(survival(confidence, active))
    assert (np.diff(survival_RxK, axis=1) <= 0).all() and not survival_RxK[~active].any()
    expected = np.cumprod(confidence[active].astype(np.float64), axis=1)
    assert survival_RxK[active] == pytest.approx(expected, rel=1e-5, abs=1e-30)


def test_a_drafter_that_gives_nan_is_not_verified():
    confidence = np.full((SLOTS, BLOCK), 0.9, np.float32)
    confidence[1, 1] = np.nan
    cost = RoundCost(BUCKETS, np.ones(5, np.float32), np.float32(0))
    assert np.asarray(synchronous(confidence, np.ones(SLOTS, bool), cost)[1]).tolist() == [3, 1, 3]


def test_confidences_are_calibrated_sigmoids():
    logits = np.array([[2.0, -3.0, 0.0]])
    assert np.asarray(confidences(logits, np.array([2.0, 1.0, 5.0])))[0] == pytest.approx(
        [1 / (1 + np.exp(-1)), 1 / (1 + np.exp(3)), 0.5]
    )


@pytest.mark.parametrize(
    ("probabilities", "threshold", "length"),
    [
        # The reference's vector (its own has a fourth step, which no threshold here reaches but 0).
        ([0.427, 0.140, 0.221], 0.2, 1),
        ([0.427, 0.140, 0.221], 0.5, 0),
        ([0.427, 0.140, 0.221], 0.0, 3),
        ([0.427, 0.140, 0.221], -1.0, 3),
        ([0.5, 0.5, 0.49], 0.5, 2),  # strictly below; the product 0.25 does not matter
    ],
)
def test_threshold_has_the_semantics_of_the_reference(probabilities, threshold, length):
    confidence, active = np.tile(np.float32(probabilities), (SLOTS, 1)), np.array([True, False, True])
    assert np.asarray(thresholded(confidence, np.float32(threshold), active)).tolist() == [length, 0, length]


def test_buckets():
    assert row_buckets(1, 7) == (1, 2, 3, 4, 6, 8) and row_buckets(16, 7) == (16, 24, 32, 48, 64, 96, 128)
    assert row_buckets(4, 4) == (4, 6, 8, 12, 16, 20) and row_buckets(2, 0) == (2,)
    assert [int(bucket_of(rows, BUCKETS)) for rows in (0, 1, 2, 3, 4, 9, 12, 13)] == [0, 0, 1, 2, 2, 4, 4, 4]


# ---------------------------------------------------------------------------------------------------- exactness


CASES = 4000


@pytest.fixture(scope="module")
def own_token_cases() -> dict[str, np.ndarray]:
    """For random blocks and cliffs: what lies behind draft k of a slot is drawn anew, as another k-th token would."""
    rng = np.random.default_rng(0)
    before = rng.choice([0.05, 0.5, 0.8, 0.95], (CASES, SLOTS, BLOCK)).astype(np.float32)
    anew, older = (rng.choice([0.0, 0.3, 1.0], before.shape).astype(np.float32) for _ in range(2))
    slot, k = rng.integers(SLOTS, size=CASES), rng.integers(BLOCK, size=CASES)
    behind = (np.arange(SLOTS)[:, None] == slot[:, None, None]) & (np.arange(BLOCK) > k[:, None, None])
    rises = rng.choice([0.0, 0.05, 0.5, 1.0], (CASES, len(BUCKETS)))
    seconds = (0.5 + np.cumsum(rises, axis=1)).astype(np.float32)
    active = rng.random((CASES, SLOTS)) < 0.8
    after = np.where(behind, anew, before)
    return {
        "before": before,
        "after": after,
        "older": older,
        "slot": slot,
        "k": k,
        "seconds": seconds,
        "active": active,
    }


@pytest.mark.parametrize(
    ("schedule", "safe"),
    [
        (lambda c, older, active, cost: synchronous(c, active, cost)[1], True),
        (lambda c, older, active, cost: from_older(older, c, active, cost)[1], True),
        (lambda c, older, active, cost: threshold_lengths(c, 0.5, active), True),
        (lambda c, older, active, cost: from_older(c, c, active, cost)[1], False),
    ],
    ids=["synchronous", "budget from older confidences", "threshold", "budget from current confidences"],
)
def test_whether_a_draft_is_verified_never_depends_on_its_own_token(own_token_cases, schedule, safe):
    """Draft k's token moves nothing but the confidences behind it: k's fate must be the same whatever they are."""

    @jax.jit
    @jax.vmap
    def verified(confidence, older, active, seconds, slot, k):
        return schedule(confidence, older, active, RoundCost(BUCKETS, seconds, np.float32(0.2)))[slot] > k

    rest = [own_token_cases[name] for name in ("older", "active", "seconds", "slot", "k")]
    before, after = (np.asarray(verified(own_token_cases[name], *rest)) for name in ("before", "after"))
    changed = int((before != after).sum())
    assert changed == 0 if safe else changed > 20
    assert 0.1 < before.mean() < 0.9


TARGET, DRAFT = {"A": 0.7, "B": 0.3}, {"A": 0.5, "B": 0.5}
COST = RoundCost(np.array([1, 2, 3], np.int32), np.array([1, 1 / 0.5, 1 / 0.45], np.float32), np.float32(0))
BLOCKS = {
    "A": np.float32([[0.8, 0.9]]),
    "B": np.float32([[0.8, 0.0]]),
}  # the second confidence has seen the first token
ONE = np.ones(1, bool)


def first_token_law(lengths):
    """P(first token) under rejection sampling, by enumeration of the first draft. `lengths`: verified, per draft."""
    law = dict.fromkeys(TARGET, 0.0)
    residual = {y: max(TARGET[y] - DRAFT[y], 0.0) for y in TARGET}
    for x, q in DRAFT.items():
        accept = min(1.0, TARGET[x] / q) if lengths[x] else 0.0
        law[x] += q * accept
        rest = residual if lengths[x] else TARGET
        for y in TARGET:
            law[y] += q * (1 - accept) * rest[y] / sum(rest.values())
    return law


def test_appendix_a_algorithm_1_keeps_the_law():
    lengths = {x: int(synchronous(block, ONE, COST)[1][0]) for x, block in BLOCKS.items()}
    assert lengths == {"A": 2, "B": 1}  # the second draft's fate may differ, the first one's may not
    assert first_token_law(lengths) == pytest.approx({"A": 0.7, "B": 0.3})


def test_appendix_a_a_global_search_over_current_confidences_breaks_it_under_rejection():
    lengths = {x: int(from_older(block, block, ONE, COST)[1][0]) for x, block in BLOCKS.items()}
    assert lengths == {"A": 2, "B": 0}
    assert first_token_law(lengths) == pytest.approx({"A": 0.85, "B": 0.15})


def test_appendix_a_under_coupled_the_global_search_keeps_it():
    """Draft and target choose with one noise u. Whatever is verified, what comes out is the target's choice."""
    law = dict.fromkeys(TARGET, 0.0)
    for low, high in itertools.pairwise([0.0, 0.5, 0.7, 1.0]):
        x, y = ("A" if low < p["A"] else "B" for p in (DRAFT, TARGET))
        length = int(from_older(BLOCKS[x], BLOCKS[x], ONE, COST)[1][0])
        accepted = length > 0 and x == y
        law[x if accepted else y] += high - low
    assert law == pytest.approx({"A": 0.7, "B": 0.3})


@pytest.mark.parametrize("older", BLOCKS)
def test_appendix_a_a_budget_from_older_confidences_keeps_the_law(older):
    lengths = {x: int(from_older(BLOCKS[older], block, ONE, COST)[1][0]) for x, block in BLOCKS.items()}
    assert first_token_law(lengths) == pytest.approx({"A": 0.7, "B": 0.3})


# ---------------------------------------------------------------------------------------------------- names


def test_strategies_by_name():
    assert parse_strategy("threshold:0.5", 7) == ("threshold", 0.5) and parse_strategy("fixed:3", 7) == ("fixed", 3)
    assert parse_strategy("load_aware_async", 7) == ("load_aware_async", 0)
    for strategy, drafts in {"load_aware:3": 3, "load_aware": 7, "fixed:2": 2, "threshold:0.5": 7}.items():
        assert drafts_of(parse_strategy(strategy, 7), 7) == drafts
    assert parse_strategy("off", 0).name == "off" and parse_strategy("dcut", 7).name == "dcut"


@pytest.mark.parametrize(
    ("strategy", "block", "probabilities", "words"),
    [
        ("fast", 7, True, "unknown strategy 'fast': known are auto, off, fixed:k, threshold:θ"),
        ("off:3", 7, True, "unknown strategy 'off:3'"),
        ("load_aware:8", 7, True, "more tokens than the drafter's block predicts (7)"),
        ("load_aware:", 7, True, "behind the colon stands the number of drafts, at least 1"),
        ("fixed", 7, True, "unknown strategy 'fixed'"),
        ("fixed:0", 7, True, "at least 1"),
        ("fixed:8", 7, True, "more tokens than the drafter's block predicts (7)"),
        ("threshold:high", 7, True, "a number up to 1"),
        ("threshold:nan", 7, True, "a number up to 1"),
        ("threshold:1.5", 7, True, "a number up to 1"),
        ("load_aware", 0, True, "needs a drafter: give one"),
        ("dcut", 7, False, "a lookup has none: use off, fixed:k, threshold:θ, load_aware[:k], load_aware_async[:k]"),
    ],
)
def test_bad_strategies_are_refused(strategy, block, probabilities, words):
    with pytest.raises(UserError) as error:
        parse_strategy(strategy, block, probabilities)
    assert words in str(error.value)
