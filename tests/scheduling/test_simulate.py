"""The scheduler against cost tables of machines that are not here."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from dspark_jax.errors import UserError
from dspark_jax.scheduling.calibration import Rounds
from dspark_jax.scheduling.cost_model import CostTable, Stamp, Time
from dspark_jax.scheduling.parking import PROBE_EVERY, Parking, after_drafted, after_plain, should_draft
from dspark_jax.scheduling.scheduler import row_buckets
from dspark_jax.scheduling.simulate import (
    Outcome,
    Trace,
    load_trace,
    recorded_trace,
    save_trace,
    simulate,
    sweep,
    synthetic_trace,
)

BLOCK, LOADS, ROUNDS = 4, (1, 4, 16), 256
FIXED = ("off", "fixed:1", "fixed:2", "fixed:4")
AWARE = ("load_aware", "load_aware_async")


def table_of(seconds_per_row: float, fixed: float, draft: float) -> CostTable:
    """A machine whose step takes `fixed` seconds and some for every row; 1 is what a plain step of one slot takes."""
    target = {(r, s, 64): Time(fixed + seconds_per_row * r) for s in LOADS for r in row_buckets(s, BLOCK)}
    stamp = Stamp("toy", 1, "data=1", "toy", "t", "d", "float32", "0", "computed")
    return CostTable(stamp, target, {(s, 64): Time(draft) for s in LOADS})


# Bandwidth-bound at first, compute-bound when full: verifying pays at low load and costs at high load.
TABLE = table_of(seconds_per_row=0.15, fixed=0.85, draft=0.15)
TRACE = synthetic_trace([0.8, 0.75, 0.7, 0.7], blocks=1024)


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, int], Outcome]:
    found = sweep(TABLE, TRACE, FIXED + AWARE, LOADS, 64, ROUNDS)
    return {(outcome.strategy, outcome.load): outcome for outcome in found}


def speeds(outcomes: dict[tuple[str, int], Outcome], strategy: str) -> np.ndarray:
    return np.array([outcomes[strategy, load].tokens_per_second for load in LOADS])


def test_off_emits_a_token_per_request_and_step(outcomes: dict) -> None:
    off = outcomes["off", 4]
    assert off.tokens_per_second == pytest.approx(4 / (0.85 + 4 * 0.15)) and off.tokens_per_round == 1.0
    assert off.tokens_per_second_per_request == pytest.approx(off.tokens_per_second / 4)
    assert (off.budget_per_request, off.parked) == (0.0, 1.0)


def test_fixed_verifies_its_length_and_pays_for_drafting_and_its_bucket(outcomes: dict) -> None:
    fixed = outcomes["fixed:2", 4]  # 12 rows, a bucket of their own
    assert fixed.budget_per_request == 2.0 and fixed.parked == 0.0
    assert fixed.tokens_per_second == pytest.approx(4 * fixed.tokens_per_round / (0.85 + 12 * 0.15 + 0.15))


@pytest.mark.parametrize("strategy", AWARE)
def test_the_load_decides_how_much_is_verified(outcomes: dict, strategy: str) -> None:
    budgets = [outcomes[strategy, load].budget_per_request for load in LOADS]
    assert budgets == sorted(budgets, reverse=True) and budgets[0] > 2 * budgets[-1]


def test_load_aware_is_near_the_best_fixed_length_everywhere_and_best_over_all_loads(outcomes: dict) -> None:
    found, fixed = speeds(outcomes, "load_aware"), np.array([speeds(outcomes, s) for s in FIXED])
    assert (found > 0.97 * fixed.max(axis=0)).all()
    assert all((found > row).any() for row in fixed)
    assert found.sum() > fixed.sum(axis=1).max()


@pytest.mark.parametrize("strategy", AWARE)
@pytest.mark.parametrize("draft", [0.15, 3.0])
def test_never_slower_than_not_speculating(strategy: str, draft: float) -> None:
    """Neither a drafter that is always wrong nor one that is dear costs more than the probes."""
    table, wrong = table_of(0.15, 0.85, draft), Trace(TRACE.confidence_NxK, np.zeros_like(TRACE.accepted_N))
    for trace, load in itertools.product((TRACE, wrong), LOADS):
        found, off = (simulate(table, trace, s, load, 64, 1024) for s in (strategy, "off"))
        assert found.tokens_per_second > 0.97 * off.tokens_per_second
        assert found.tokens_per_round < 1.1 or found.parked < 0.9  # parked rounds emit no drafts


def test_work_is_saved_in_verified_tokens_not_in_acceptance(outcomes: dict) -> None:
    """Fewer drafts are verified than by the whole block, and more of those are accepted (failure report R4)."""
    aware, whole = outcomes["load_aware", 4], outcomes["fixed:4", 4]
    assert aware.budget_per_request < 0.8 * whole.budget_per_request
    kept = [(o.tokens_per_round - 1) / o.budget_per_request for o in (aware, whole)]
    assert kept[0] > 1.1 * kept[1] and aware.tokens_per_second > 1.1 * whole.tokens_per_second


def test_an_outcome_hangs_on_nothing_but_the_seed() -> None:
    once, again, other = (simulate(TABLE, TRACE, "load_aware", 4, 64, ROUNDS, seed) for seed in (5, 5, 6))
    assert once == again and once != other


def test_threshold_verifies_what_is_above_it() -> None:
    trace = Trace(np.tile(np.float32([0.9, 0.6, 0.4, 0.9]), (16, 1)), np.full(16, 4))
    for theta, length in (("0.5", 2), ("0", 4), ("0.95", 0)):
        outcome = simulate(TABLE, trace, f"threshold:{theta}", 4, 64, 16)
        assert (outcome.budget_per_request, outcome.tokens_per_round) == (length, length + 1)


def test_an_asynchronous_budget_is_two_rounds_old() -> None:
    """Sure of itself every third round, right two rounds later: only a budget of that age hits."""
    sure, unsure = np.full(4, 0.99), np.full(4, 0.01)
    trace = Trace(np.tile(np.float32([sure, unsure, unsure]), (32, 1)), np.tile([0, 0, 4], 32))
    outcome = simulate(TABLE, trace, "load_aware_async", 1, 64, 960)
    assert outcome.tokens_per_round == pytest.approx((1 + 1 + 5) / 3, abs=0.05)
    assert outcome.budget_per_request == pytest.approx(4 / 3, abs=0.05)


def test_under_coupled_the_search_is_global() -> None:
    """On a staircase that the envelope misjudges, looking at everything pays."""
    cells = {1: 1.0, 2: 1.0, 4: 4.0, 5: 4.2}
    target = {(rows, 1, 64): Time(seconds) for rows, seconds in cells.items()}
    table = dataclasses.replace(TABLE, target=target, draft={(1, 64): Time(0.01)})
    found = {s: simulate(table, TRACE, "load_aware", 1, 64, ROUNDS, sampler=s) for s in ("rejection", "coupled")}
    assert found["coupled"].tokens_per_second >= found["rejection"].tokens_per_second
    assert found["coupled"].budget_per_request <= 1.0


def test_a_load_between_buckets_runs_in_the_larger_one() -> None:
    outcome = simulate(TABLE, TRACE, "load_aware", 3, 64, 64)
    assert outcome.load == 3 and outcome.budget_per_request <= BLOCK


# ---------------------------------------------------------------------------------------------------- traces


def test_synthetic_confidences_are_right() -> None:
    trace = synthetic_trace([0.8, 0.6], blocks=20_000, seed=3)
    first = trace.confidence_NxK[:, 0]
    assert (trace.accepted_N > 0).mean() == pytest.approx(first.mean(), abs=0.01)
    sure = first > 0.9
    assert (trace.accepted_N[sure] > 0).mean() == pytest.approx(first[sure].mean(), abs=0.01)


def test_recorded_rounds_become_a_trace_and_traces_are_kept(tmp_path: Path) -> None:
    rounds = Rounds(np.array([[0.0, 2.0], [1.0, 1.0]]), np.array([2, 1]), np.array([1, 0]))
    trace = recorded_trace(rounds, np.array([1.0, 2.0]))
    assert trace.confidence_NxK[0] == pytest.approx([0.5, 1 / (1 + np.exp(-1))]) and trace.accepted_N.tolist() == [1]
    save_trace(tmp_path / "trace.json", trace)
    loaded = load_trace(tmp_path / "trace.json")
    assert np.array_equal(loaded.confidence_NxK, trace.confidence_NxK) and loaded.accepted_N.tolist() == [1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"confidence": [[0.5', "damaged or truncated"),
        (json.dumps({"confidence": [[0.5]]}), "lacks 'accepted'"),
        (json.dumps({"confidence": [[0.5]], "accepted": [1, 1]}), "a row of confidences per accepted count"),
        (json.dumps({"confidence": [[0.5], [0.5, 0.5]], "accepted": [1, 1]}), "malformed"),
        (json.dumps({"confidence": [[1.5]], "accepted": [1]}), "a confidence outside 0 to 1"),
        (json.dumps({"confidence": [], "accepted": []}), "malformed"),
    ],
)
def test_bad_traces_are_refused(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "trace.json").write_text(content)
    with pytest.raises(UserError) as error:
        load_trace(tmp_path / "trace.json")
    assert words in str(error.value)


@pytest.mark.parametrize(("strategy", "words"), [("dcut", "cannot be simulated"), ("fixed:5", "more tokens than")])
def test_strategies_that_a_trace_cannot_answer_are_refused(strategy: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        simulate(TABLE, TRACE, strategy, 1, 64)


def test_a_load_beyond_the_table_is_refused() -> None:
    with pytest.raises(UserError, match="ends at 16 slots"):
        simulate(TABLE, TRACE, "off", 17, 64)


def test_acceptance_must_be_a_probability() -> None:
    with pytest.raises(UserError, match="strictly between 0 and 1"):
        synthetic_trace([0.5, 1.0])


# ---------------------------------------------------------------------------------------------------- parking


def run(state: Parking, rounds: int, tokens: float, cost: float) -> tuple[Parking, int]:
    """The state after some rounds, and how many of them drafted."""
    drafted = 0
    for _ in range(rounds):
        if should_draft(state):
            state, drafted = after_drafted(state, tokens, cost), drafted + 1
        else:
            state = after_plain(state)
    return state, drafted


def test_a_load_that_does_not_pay_is_parked_and_probed_now_and_then() -> None:
    """Probes lose 1/PROBE_EVERY of the time."""
    state, _ = run(Parking(), 20 * PROBE_EVERY, tokens=1.25, cost=2.0)
    _, probes = run(state, 10 * (PROBE_EVERY * 3 // 4 + 1), tokens=1.25, cost=2.0)
    assert probes in (9, 10, 11)


def test_a_dispatch_of_probes_is_paid_for_round_by_round() -> None:
    """The host decides for several rounds at once."""
    state, drafted, rounds = run(Parking(), 20 * PROBE_EVERY, tokens=1.25, cost=2.0)[0], 0, 0
    while rounds < 40 * PROBE_EVERY:
        probing = should_draft(state)
        for _ in range(8):
            state = after_drafted(state, 1.25, 2.0) if probing else after_plain(state)
        rounds, drafted = rounds + 8, drafted + 8 * probing
    assert 0.5 / PROBE_EVERY < 0.75 * drafted / rounds < 1.5 / PROBE_EVERY


def test_a_load_that_nearly_pays_is_probed_so_often_that_luck_cannot_park_it() -> None:
    """Drafted rounds bring one token or two, 1.5 in the mean, and cost 1.4."""
    rng, state, drafted = np.random.default_rng(0), Parking(), 0
    for _ in range(5000):
        if should_draft(state):
            state, drafted = after_drafted(state, rng.integers(1, 3), 1.4), drafted + 1
        else:
            state = after_plain(state)
    assert drafted > 0.85 * 5000


def test_a_parked_load_comes_back_when_it_pays_again() -> None:
    state, _ = run(Parking(), 100, tokens=1.2, cost=1.5)
    _, drafted = run(state, 1000, tokens=3.0, cost=1.5)
    assert drafted > 500


def test_a_load_that_pays_is_never_parked() -> None:
    assert run(Parking(), 500, tokens=1.6, cost=1.5)[1] == 500
