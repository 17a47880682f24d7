"""Cost tables: measured by a stand-in, kept, looked up and refused."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dspark_jax.errors import UserError
from dspark_jax.scheduling.cost_model import (
    FEWEST,
    CostTable,
    Drift,
    Stamp,
    after_round,
    is_stale,
    load_table,
    profile,
    save_table,
)
from dspark_jax.scheduling.scheduler import row_buckets

STAMP = Stamp("TPU v5e", 8, "data=1,model=8", "Qwen3-8B", "abc", "d1", "bfloat16", "0.10.2")
SECONDS = {4: 0.010, 8: 0.009, 16: 0.020, 20: 0.019}  # of rows; noise makes some buckets seem cheaper


@pytest.fixture(scope="module")
def table() -> CostTable:
    noise: dict[tuple[int, int, int], list[float]] = {}

    def measure(rows: int, slots: int, context: int) -> float:
        factor = noise.setdefault((rows, slots, context), [1.2, 1, 0.9, 1, 1]).pop()
        draft = 0.002 * slots if rows else 0
        return draft + factor * (SECONDS.get(rows or slots, 0.001 * (rows or slots)) + context * 1e-6)

    return profile(STAMP, (1, 4), (128, 512), 4, measure, passes=5)


@pytest.fixture
def saved(table: CostTable, tmp_path: Path) -> Path:
    save_table(tmp_path / "table.json", table)
    return tmp_path / "table.json"


def test_profile_measures_every_bucket_as_median_and_spread(table: CostTable) -> None:
    assert set(table.draft) == {(1, 128), (1, 512), (4, 128), (4, 512)}
    assert {rows for rows, slots, _ in table.target if slots == 1} == {1, 2, 3, 4, 5}
    assert {rows for rows, slots, _ in table.target if slots == 4} == {4, 6, 8, 12, 16, 20}
    middle = 0.020 + 128e-6
    assert dataclasses.astuple(table.target[16, 4, 128]) == pytest.approx((middle, 0.0))
    assert dataclasses.astuple(table.draft[4, 128]) == pytest.approx((0.008, 0.0))


def test_spread_is_the_interquartile_range() -> None:
    times = iter([1.0, 1.0, 0.02, 0.02, 0.03, 0.03, 0.04, 0.04, 0.05, 0.05])  # a plain round and one of a row, in turn
    table = profile(STAMP, (1,), (8,), 0, lambda *_: next(times) / 100, 5)
    assert dataclasses.astuple(table.target[1, 1, 8]) == pytest.approx((0.0004, 0.0002))


def test_sizes_take_turns_so_that_a_slow_minute_makes_no_step() -> None:
    calls = []

    def measure(*size: int) -> float:
        calls.append(size)
        return 0.01 * (2 if len(calls) <= 4 else 1)  # slow through the first pass

    table = profile(STAMP, (1,), (8,), 2, measure, 5)
    assert calls[:4] == [(0, 1, 8), (1, 1, 8), (2, 1, 8), (3, 1, 8)] and len(calls) == 20
    assert [time.seconds for time in table.target.values()] == pytest.approx([0.01] * 3, rel=1e-6)


def test_long_rounds_are_measured_less_often() -> None:
    calls: list[tuple[int, ...]] = []
    profile(STAMP, (1,), (8,), 0, lambda *size: calls.append(size) or 0.1, 9)
    assert len(calls) == 2 * FEWEST


def test_a_curve_is_monotone_and_otherwise_as_measured(table: CostTable) -> None:
    cost = table.curve(4, 512)
    assert cost.rows_J.tolist() == [4, 6, 8, 12, 16, 20]
    assert cost.seconds_J == pytest.approx(np.array([0.010, 0.010, 0.010, 0.012, 0.020, 0.020]) + 512e-6)
    assert cost.overhead == pytest.approx(0.008)


def test_shorter_blocks_have_the_beginning_of_a_curve(table: CostTable) -> None:
    whole = table.curve(4, 512)
    for block, rows in {1: [4, 6, 8], 2: [4, 6, 8, 12], 3: [4, 6, 8, 12, 16], 4: [4, 6, 8, 12, 16, 20]}.items():
        part = table.curve(4, 512, block)
        assert part.rows_J.tolist() == rows == list(row_buckets(4, block))
        assert part.seconds_J.tolist() == whole.seconds_J[: len(rows)].tolist() and part.overhead == whole.overhead
    with pytest.raises(UserError, match="ends at 20 rows of a round, 24 are needed"):
        table.curve(4, 512, 5)


@pytest.mark.parametrize(
    ("slots", "context", "cell"), [(1, 1, (1, 128)), (2, 128, (4, 128)), (3, 129, (4, 512)), (1, 512, (1, 512))]
)
def test_sizes_are_rounded_up_to_their_buckets(
    table: CostTable, slots: int, context: int, cell: tuple[int, int]
) -> None:
    found, exact = table.curve(slots, context), table.curve(*cell)
    assert all(np.array_equal(a, b) for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize(("slots", "context", "words"), [(5, 128, "ends at 4 slots"), (1, 513, "ends at 512 context")])
def test_nothing_is_invented_beyond_the_table(table: CostTable, slots: int, context: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        table.curve(slots, context)


def test_files_round_trip(table: CostTable, saved: Path) -> None:
    assert load_table(saved, STAMP) == table
    assert [path.name for path in saved.parent.iterdir()] == ["table.json"]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("device", "TPU v6e", "is of device 'TPU v5e', here it is 'TPU v6e'"),
        ("devices", 4, "is of devices 8, here it is 4"),
        ("mesh", "data=2,model=4", "is of mesh 'data=1,model=8'"),
        ("fingerprint", "xyz", "is of model (Qwen3-8B) of fingerprint 'abc', here it is 'xyz'"),
        ("drafter", "d2", "is of drafter 'd1'"),
        ("dtype", "float32", "is of dtype 'bfloat16'"),
        ("jax", "0.11.1", "is of jax '0.10.2', here it is '0.11.1'"),
        ("source", "computed", "is of source 'measured'"),
    ],
)
def test_a_table_of_something_else_is_refused(saved: Path, field: str, value: str | int, words: str) -> None:
    with pytest.raises(UserError) as error:
        load_table(saved, dataclasses.replace(STAMP, **{field: value}))
    assert words in str(error.value) and "python -m dspark_jax profile" in str(error.value)
    assert load_table(saved).stamp == STAMP  # simulation takes any


def test_the_name_of_a_model_does_not_matter(saved: Path) -> None:
    assert load_table(saved, dataclasses.replace(STAMP, model="a copy"))


def edit(change: Callable[[dict], object]) -> Callable[[str], str]:
    def edited(text: str) -> str:
        value = json.loads(text)
        change(value)
        return json.dumps(value)

    return edited


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: len(text) // 2], "damaged or truncated"),
        (lambda text: "[]", "holds no JSON object"),
        (edit(lambda v: v.pop("draft")), "lacks 'draft'"),
        (edit(lambda v: v["stamp"].pop("mesh")), "malformed"),
        (edit(lambda v: v["target"][0].pop("seconds")), "lacks 'seconds'"),
        (edit(lambda v: v["target"][0].update(seconds="fast")), "malformed"),
        (edit(lambda v: v["target"][0].update(seconds=0.0)), "target time at rows 1, slots 1, context 128 is 0.0, not"),
        (edit(lambda v: v["draft"][0].update(seconds=-1.0)), "draft time at slots 1, context 128 is -1.0, not"),
        (edit(lambda v: v["draft"][0].update(seconds=float("nan"))), "is nan, not positive"),
        (edit(lambda v: v["draft"].pop(0)), "incomplete at 1 slots and context 128"),
        (edit(lambda v: v.update(target=[t for t in v["target"] if t["slots"] == 1])), "incomplete at 4 slots"),
        (edit(lambda v: v.update(draft=[])), "incomplete"),
    ],
)
def test_damaged_files_are_refused_with_one_line(saved: Path, damage: Callable[[str], str], words: str) -> None:
    saved.write_text(damage(saved.read_text()))
    with pytest.raises(UserError) as error:
        load_table(saved, STAMP)
    assert words in str(error.value) and str(saved) in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no cost table at '.*none.json'"):
        load_table(tmp_path / "none.json")


def test_a_clock_that_stands_still_is_refused() -> None:
    with pytest.raises(UserError, match="the measurement: the target time at rows 1, slots 1, context 8 is 0.0"):
        profile(STAMP, (1,), (8,), 1, lambda *_: 0.0, 3)


def rounds_until_stale(ratio: float, rounds: int) -> int:
    drift = Drift()
    for n in range(rounds):
        if is_stale(drift):
            return n
        drift = after_round(drift, measured=ratio * 0.01, predicted=0.01)
    return rounds


def test_drift_is_noticed_both_ways_and_noise_is_not() -> None:
    assert rounds_until_stale(1.2, 2000) == rounds_until_stale(0.85, 2000) == 2000
    assert 10 < rounds_until_stale(1.5, 200) < 200 and 10 < rounds_until_stale(0.5, 200) < 200
    assert not is_stale(after_round(Drift(), measured=60.0, predicted=0.01))  # one hiccup
