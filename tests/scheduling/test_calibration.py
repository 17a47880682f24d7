"""Calibration measures against their definitions, and temperatures that mend a drafter that is too sure of itself."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.errors import UserError
from dspark_jax.scheduling.calibration import (
    Rounds,
    Temperatures,
    fit_temperatures,
    key,
    load_temperatures,
    means,
    reliabilities,
    reliability,
    save_temperatures,
)


def rounds_of(truth: list[float], count: int, seed: int = 0) -> Rounds:
    """Rounds of a drafter whose logits are `truth` times what they should be, one factor per position."""
    rng = np.random.default_rng(seed)
    right_NxK = rng.normal(1.2, 1.0, (count, len(truth)))
    hit_NxK = rng.random(right_NxK.shape) < 1 / (1 + np.exp(-right_NxK))
    return Rounds(right_NxK * truth, np.full(count, len(truth)), np.cumprod(hit_NxK, axis=1).sum(axis=1))


# ---------------------------------------------------------------------------------------------------- measures


def test_measures_of_a_case_small_enough_to_write_down() -> None:
    found = reliability(np.array([0.12, 0.14, 0.91, 1.0]), np.array([0, 1, 1, 1]))
    assert found.ece == pytest.approx((abs(0.26 - 1) + abs(0.91 - 1) + abs(1.0 - 1)) / 4)
    assert found.brier == pytest.approx((0.12**2 + 0.86**2 + 0.09**2) / 4)
    assert found.auc == 1.0 and found.rounds == 4
    assert found.mean_survival == pytest.approx(2.17 / 4) and found.accepted == 0.75
    assert [(b.low, b.rounds, b.accepted) for b in found.bins] == [(0.1, 2, 0.5), (0.9, 1, 1.0), (0.95, 1, 1.0)]
    assert found.bins[0].mean_survival == pytest.approx(0.13) and found.bins[0].high == pytest.approx(0.15)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 999), st.booleans()), min_size=1, max_size=30))
def test_auc_counts_pairs_and_ties_half(rows: list[tuple[int, bool]]) -> None:
    survival, label = np.array([(bin_ + 0.5) / 1000 for bin_, _ in rows]), np.array([hit for _, hit in rows])
    pairs = list(itertools.product(survival[label], survival[~label]))
    expected = sum((p > n) + 0.5 * (p == n) for p, n in pairs) / len(pairs) if pairs else math.nan
    assert reliability(survival, label).auc == pytest.approx(expected, nan_ok=True)


def test_only_judged_drafts_count() -> None:
    """Round 0 verified two drafts and accepted one; round 1 verified none."""
    rounds = Rounds(np.zeros((2, 3)), np.array([2, 0]), np.array([1, 0]))
    first, second, third = reliabilities(rounds)
    assert (first.rounds, first.accepted, first.mean_survival) == (1, 1.0, pytest.approx(0.5))
    assert (second.rounds, second.accepted, second.mean_survival) == (1, 0.0, pytest.approx(0.25))
    assert third.rounds == 0 and math.isnan(third.ece) and third.bins == []
    assert means([first, second, third])["brier"] == pytest.approx((0.25 + 0.0625) / 2)
    assert math.isnan(means([third])["auc"])


def test_means_are_weighted_by_rounds() -> None:
    verified, accepted = np.array([2] * 10 + [1] * 30), np.array([2, 1] * 5 + [1, 0] * 15)
    positions = reliabilities(Rounds(np.zeros((40, 2)), verified, accepted))
    assert means(positions)["ece"] == pytest.approx((40 * positions[0].ece + 10 * positions[1].ece) / 50)


# ---------------------------------------------------------------------------------------------------- fitting


def test_temperatures_are_found_again_one_by_one() -> None:
    factors = [2.0, 1.0, 0.6, 3.0]
    assert fit_temperatures(rounds_of(factors, 40_000)) == pytest.approx(factors, rel=0.15)


def test_scaling_mends_the_error_on_held_out_rounds_and_keeps_the_ranking() -> None:
    factors = [2.5, 2.0, 2.0, 1.5, 2.0]
    fitted, held_out = fit_temperatures(rounds_of(factors, 8000)), rounds_of(factors, 8000, seed=1)
    before, after = reliabilities(held_out), reliabilities(held_out, fitted)
    assert means(before)["ece"] > 0.05 and means(after)["ece"] < 0.02
    assert means(after)["brier"] < means(before)["brier"]
    # The first position keeps its order exactly, later ones nearly: a product of several scaled factors.
    assert after[0].auc == pytest.approx(before[0].auc, abs=1e-3)
    assert all(a.auc > b.auc - 0.01 for a, b in zip(after, before, strict=True))


def test_a_position_with_few_rounds_is_left_alone() -> None:
    rounds = rounds_of([2.0, 2.0], 2000)
    rarely = Rounds(rounds.logit_NxK, np.where(np.arange(2000) < 99, 2, 1), np.minimum(rounds.accepted_N, 1))
    first, second = fit_temperatures(rarely)
    assert first > 1.5 and second == 1.0


def test_too_few_rounds_and_broken_confidences_are_refused() -> None:
    with pytest.raises(UserError, match="needs 100 rounds with verified drafts, got 99"):
        fit_temperatures(rounds_of([1.0], 99))
    broken = rounds_of([1.0], 200)
    broken.logit_NxK[7] = np.nan
    with pytest.raises(UserError, match="not all finite"):
        fit_temperatures(broken)


# ---------------------------------------------------------------------------------------------------- files


def test_bands() -> None:
    names = [key("rejection", t) for t in (0.0, 0.1, 0.5, 0.51, 0.9, 1.0, 2.0)]
    assert names == ["rejection greedy"] + [f"rejection {b}" for b in ("0-0.5", "0-0.5", "0.5-0.9", "0.5-0.9")] + [
        "rejection 0.9-1.3",
        "rejection 1.3-",
    ]


def test_temperatures_round_trip_and_serve_their_like_alone(tmp_path: Path) -> None:
    both = Temperatures("d1").with_fit("rejection", 1.0, np.array([2.0, 1.5])).with_fit("coupled", 0.7, np.array([3.0]))
    save_temperatures(tmp_path, both)
    loaded = load_temperatures(tmp_path, "d1")
    assert loaded == both and [path.name for path in tmp_path.iterdir()] == ["temperatures.json"]
    assert loaded.of("rejection", 1.2, 3).tolist() == [2.0, 1.5, 1.0]
    assert loaded.of("rejection", 1.0, 1).tolist() == [2.0]
    assert loaded.of("coupled", 1.0, 2).tolist() == [1.0, 1.0]


def test_without_a_file_confidences_stay_as_they_are(tmp_path: Path) -> None:
    assert load_temperatures(tmp_path, "d1").of("rejection", 1.0, 2).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (json.dumps({"drafter": "d2", "fitted": {}}), "is of drafter 'd2', this one is 'd1'"),
        ('{"drafter": "d1", "fit', "damaged or truncated"),
        (json.dumps({"fitted": {}}), "lacks 'drafter'"),
        (json.dumps({"drafter": "d1", "fitted": {"rejection greedy": ["hot"]}}), "malformed"),
        (json.dumps({"drafter": "d1", "fitted": {"rejection greedy": [1.0, 0.0]}}), "of 'rejection greedy' is not pos"),
    ],
)
def test_other_and_damaged_files_are_refused(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "temperatures.json").write_text(content)
    with pytest.raises(UserError) as error:
        load_temperatures(tmp_path, "d1")
    assert words in str(error.value) and "python -m dspark_jax calibrate" in str(error.value)
