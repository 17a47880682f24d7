"""The `bench` command on the tiny golden model: that it runs and what it writes. Speeds are never asserted."""

import importlib.util
import json
from pathlib import Path

import pytest

from dspark_jax.errors import UserError
from dspark_jax.evaluation import bench, measurements
from dspark_jax.evaluation.timing import Clock

CONFIG = """
from configs.base import get_base

def get_config():
    c = get_base()
    c.target.path = {target!r}
    c.serve.drafter = {drafter!r}
    c.serve.strategy = "fixed:1"  # every drafted token makes the programs longer to compile
    return c
"""
# Of six layers: q and o, k and v, MLP, the norms before attention and MLP, the norms of q and k; float32.
LAYER_BYTES = 6 * 4 * (2 * 96 * 144 + 2 * 96 * 48 + 3 * 96 * 256 + 2 * 96 + 2 * 24)
HAS_TRANSFORMERS = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def write_config(folder: Path, target: Path, drafter: Path | str) -> Path:
    path = folder / "tiny.py"
    path.write_text(CONFIG.format(target=str(target), drafter=str(drafter)))
    return path


@pytest.fixture(scope="module")
def report(golden: Path, golden_target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The JSON of one run with target and drafter; short answers, one at a time, keep the number of programs low."""
    folder = tmp_path_factory.mktemp("bench")
    config, out = write_config(folder, golden_target, golden / "dspark_vanilla"), folder / "bench.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measurements, "ANSWER", 8)
        patch.setattr(measurements, "TOGETHER", (1,))
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # PyTorch's waiting threads leave the CPUs to other tests
        bench.main(["bench", f"--config={config}", "--repeats=7", f"--json={out}"])
    return json.loads(out.read_text())


def test_report_is_stamped(report: dict) -> None:
    assert report["device"] and report["platform"] and report["jax"] and report["threads"] >= 1
    assert report["repeats"] == 7 and report["dtype"] == "float32"
    assert report["context_tokens"] == 128 and report["strategy"] == "fixed:1"


def test_every_part_is_measured(report: dict) -> None:
    assert list(report["step"]) == list(report["round"]) == ["1", "16"]
    for row in report["step"].values():
        assert row["ours_ms"] > 0 and row["ours_iqr_ms"] >= 0
    for batch, row in report["round"].items():
        assert row["rows"] == int(batch) * 2  # the anchor and one draft
        assert min(row["round_ms"], row["target_forward_ms"], row["drafting_ms"]) > 0
        outside = max(1 - row["target_forward_ms"] / row["round_ms"], row["drafting_ms"] / row["round_ms"])
        assert row["outside_percent"] == pytest.approx(100 * outside)
    for row in report["end_to_end"].values():
        assert row["ratio"] == pytest.approx(row["drafted_tokens_per_s"] / row["off_tokens_per_s"])
        assert row["tokens_per_round"] >= 1
    floor = report["floor"]
    assert floor["weight_bytes"] == (320 * 96 + 96) * 4 + LAYER_BYTES
    assert floor["floor_ms"] == pytest.approx(floor["weight_bytes"] / floor["read_gb_per_s"] / 1e6)


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="torch and transformers are optional")
def test_transformers_computes_the_same_model(report: dict) -> None:
    """The yardstick has our weights: after 128 random tokens both choose the same next ones."""
    for batch, row in report["step"].items():
        assert row["same_next_tokens"] == f"{batch} of {batch}"
        assert row["ratio"] == pytest.approx(row["ours_ms"] / row["transformers_ms"])
    assert report["skipped"] == {}


def test_nothing_is_compiled_after_warm_up(report: dict) -> None:
    assert report["compilations_after_warm_up"] == 0


def test_goals_take_their_values_from_the_measurements(report: dict) -> None:
    assert [row["at_most"] for row in report["goals"]] == [1.15, 1.0, 25.0, 25.0]
    assert report["goals"][0]["value"] == report["step"]["1"].get("ratio")
    assert report["goals"][3]["value"] == report["round"]["16"]["outside_percent"]


@pytest.mark.parametrize(
    ("others", "met"),
    [(0.0, [True, False, True, None]), (None, [True, False, True, None]), (50.0, [None, None, None, None])],
)
def test_goals_are_judged_where_measured_and_never_on_a_busy_machine(others: float | None, met: list) -> None:
    measured = {
        "others_cpu_percent": others, "step": {"1": {"ratio": 1.15}, "16": {"ratio": 1.01}},
        "round": {"1": {"outside_percent": 7.0}},
    }  # fmt: skip
    assert [row["met"] for row in bench.goals(measured)] == met


def test_missing_drafter_is_skipped_with_a_line(
    golden_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that is not trained yet and a missing PyTorch leave their parts out and say so."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = write_config(tmp_path, golden_target, tmp_path / "untrained")
    bench.main(["bench", f"--config={config}", "--repeats=7"])
    out = capsys.readouterr().out
    assert f"not measured: rounds and end to end: no model at '{tmp_path / 'untrained'}'" in out.replace("\n", "")
    assert "not measured: transformers: torch and transformers not installed" in out
    assert out.count("not measured") == 2 + 4  # two reasons, four goals


@pytest.mark.parametrize("flag", ["--repeats=6", "--json=/no/such/folder/out.json", "--speed=9"])
def test_bad_flags_are_refused_before_anything_runs(flag: str, golden_target: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, golden_target, "")
    with pytest.raises(UserError, match=flag.removeprefix("--").partition("=")[0]):
        bench.main(["bench", f"--config={config}", flag])


def test_calls_are_timed_in_turn_and_compilations_counted() -> None:
    """The warm-up may compile; later growth is counted. Each timed call follows an untimed one."""
    order, programs = [], [0]

    def call(name: str, milliseconds: float) -> float:
        order.append(name)
        programs[0] += len(order) in (1, 2, 7)  # twice in the warm-up, once after it
        return milliseconds / 1e3

    clock = Clock(2, lambda: programs[0])
    times = clock.in_turn({"a": lambda: call("a", 3.0), "b": lambda: call("b", float(len(order)))})
    assert "".join(order) == "ab" + "aabb" * 2
    assert clock.compilations == 1
    assert times["a"].entries("a") == {"a_ms": pytest.approx(3.0), "a_iqr_ms": pytest.approx(0.0)}
    assert times["b"].entries("b") == {"b_ms": pytest.approx(7.0), "b_iqr_ms": pytest.approx(2.0)}
