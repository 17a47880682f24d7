"""Strategies over loads: `bench --sweep`, `--simulate` and `--scheduler`. Speeds are never asserted where measured."""

import dataclasses
import importlib
import json
from pathlib import Path

import jax
import pytest

from dspark_jax.errors import UserError
from dspark_jax.evaluation import bench
from dspark_jax.evaluation.load_report import Point, verdicts
from dspark_jax.interop.drafter_io import Drafter, borrow, init_drafter
from dspark_jax.interop.export import save_drafter
from dspark_jax.interop.target_io import Target, load_target
from dspark_jax.models.config import Attention, DrafterConfig, Rope, draft_decoder
from dspark_jax.scheduling.cost_model import load_table
from dspark_jax.scheduling.scheduler import row_buckets

TABLES = sorted((Path(__file__).parents[2] / "docs" / "tables").glob("*.json"))
PICTURES = ("speed", "budget")

# ---------------------------------------------------------------------------------------------------- the sweep


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> str:
    """The flag of a config for a tiny pair."""
    path = tmp_path_factory.mktemp("loads")
    target = load_target(chat_model, dtype="float32")
    sizes = DrafterConfig(
        draft_decoder(target.config, 1), 2, target.tokenizer.token_id("<|mask|>"), (0, 1), 3, target.config.vocab_size,
        markov_rank=4,
    )  # fmt: skip
    drafter = Drafter(sizes, init_drafter(sizes, jax.random.key(0)), borrow(target))
    save_drafter(path / "drafter", drafter, target)
    (path / "config.py").write_text(
        "from configs.base import get_base\n\n\ndef get_config():\n    c = get_base()\n"
        f"    c.target.path, c.workdir = {str(chat_model)!r}, {str(path)!r}\n"
        f"    c.serve.drafter = {str(path / 'drafter')!r}\n    return c\n"
    )
    return f"--config={path / 'config.py'}"


@pytest.fixture(scope="module")
def swept(config: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The JSON of a sweep over one load that was started again with two."""
    out = tmp_path_factory.mktemp("sweep") / "sweep.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dspark_jax.evaluation.load_sweep.chat_prompts", short_prompts)
        for loads in ("1", "1,2"):
            bench.main(argv(config, out, f"--loads={loads}"))
    return out


def short_prompts(target: Target, count: int) -> list[list[int]]:
    """All of one length: few programs."""
    return [[i + 1] * 8 for i in range(count)]


def argv(config: str, out: Path, *more: str) -> list[str]:
    small = ("--strategies=off,fixed:1", "--turns=2", "--tokens=24")
    return ["bench", "--sweep", config, f"--json={out}", *small, *more]


def test_a_sweep_leaves_points_and_pictures(swept: Path) -> None:
    report = json.loads(swept.read_text())
    assert report["run"]["device"] and report["run"]["jax"] and list(report["loads"]) == ["1", "2"]
    for rows in report["loads"].values():
        off, fixed = (Point(**row) for row in rows)
        assert (off.strategy, off.budget, off.parked, off.tokens_per_round) == ("off", 0, 1, 1)
        assert (fixed.strategy, fixed.budget, fixed.parked) == ("fixed:1", 1, 0) and fixed.tokens_per_round >= 1
        assert all(len(p.speeds) == 2 and min(p.speeds) > 0 and p.rounds > 0 for p in (off, fixed))
    assert all(swept.with_suffix(f".{name}.png").stat().st_size for name in PICTURES)


def test_a_sweep_goes_on_where_it_was(
    config: str, swept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr("dspark_jax.evaluation.load_sweep.Contest")  # nothing is left to measure
    bench.main(argv(config, swept, "--loads=1,2"))
    assert "fixed:1" in capsys.readouterr().out


def test_a_sweep_is_not_continued_with_other_settings(config: str, swept: Path) -> None:
    with pytest.raises(UserError, match="its turns differ"):
        bench.main(argv(config, swept, "--loads=1,2", "--turns=3"))


@pytest.mark.slow
def test_a_sweep_measures_its_costs_where_a_strategy_asks_for_them(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark_jax.evaluation.load_sweep.chat_prompts", short_prompts)
    out = tmp_path / "sweep.json"
    bench.main(argv(config, out, "--loads=1", "--strategies=off,load_aware"))
    assert {s for s, _ in load_table(out.with_suffix(".costs.json")).draft} == {1}
    assert [row["strategy"] for row in json.loads(out.read_text())["loads"]["1"]] == ["off", "load_aware"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--loads=1,x",), "--loads=1,x"),
        (("--loads=0",), "--loads=0"),
        (("--strategies=fixed:9",), "fixed:9"),
        (("--strategies=best",), "unknown strategy 'best'"),
        (("--scheduler",), "one at a time"),
    ],
)
def test_bad_flags_of_a_sweep_are_refused(config: str, tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        bench.main(argv(config, tmp_path / "new.json", *flags))


def test_a_sweep_needs_a_drafter(chat_model: Path, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(
        "from configs.base import get_base\n\n\ndef get_config():\n    c = get_base()\n"
        f"    c.target.path = {str(chat_model)!r}\n    return c\n"
    )
    with pytest.raises(UserError, match="set serve.drafter"):
        bench.main(argv(f"--config={tmp_path / 'plain.py'}", tmp_path / "sweep.json"))


def test_verdicts_compare_turn_by_turn() -> None:
    """A machine that is twice as slow in the second turn changes no ratio."""
    speeds = {("off", 1): 10, ("fixed:1", 1): 20, ("load_aware", 1): 19, ("off", 4): 40, ("fixed:1", 4): 30}
    speeds[("load_aware", 4)] = 44
    points = [Point(s, load, [v, v / 2, v], 1, 0, 0, 1) for (s, load), v in speeds.items()]
    near, ahead, somewhere, total = verdicts(points)
    assert "load 1: load_aware has 0.95 x" in near and "(fixed:1): NOT within 3 %" in near
    assert "load 4: load_aware has 1.10 x" in ahead and ahead.endswith("(off): within 3 %")
    assert somewhere.endswith("each constant length") and total.endswith("ahead of every constant length")


# ------------------------------------------------------------------------------------------------ the simulation


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_shipped_tables_are_marked_and_whole(table: Path) -> None:
    costs = load_table(table)
    assert (costs.stamp.source, costs.stamp.model, costs.stamp.dtype) == ("computed", "Qwen3-8B", "bfloat16")
    for slots, context in costs.draft:
        assert tuple(costs.curve(slots, context).rows_J.tolist()) == row_buckets(slots, 7)


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_load_aware_keeps_up_with_the_best_constant_length_on_shipped_tables(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "simulation.json"
    strategies = "--strategies=off,fixed:1,fixed:2,fixed:4,fixed:7,load_aware"
    bench.main(["bench", f"--simulate={table}", f"--json={out}", "--loads=1,64,256", strategies])
    points = [Point(**row) for row in json.loads(out.read_text())["points"]]
    for load in (1, 64, 256):
        *constant, aware = (p.tokens_per_second for p in points if p.load == load)
        assert aware > 0.97 * max(constant)
    budgets = [p.budget for p in points if p.strategy == "load_aware"]
    assert budgets[-1] <= budgets[0]
    assert all(out.with_suffix(f".{name}.png").stat().st_size for name in PICTURES)


def test_a_drafter_that_does_not_pay_is_parked(tmp_path: Path) -> None:
    out = tmp_path / "simulation.json"
    flags = ("--loads=256", "--acceptance=0.05", "--strategies=off,load_aware")
    bench.main(["bench", f"--simulate={TABLES[0]}", f"--json={out}", *flags])
    off, aware = (Point(**row) for row in json.loads(out.read_text())["points"])
    assert aware.parked > 0.85 and aware.tokens_per_second > 0.98 * off.tokens_per_second


def test_bad_inputs_of_a_simulation_are_refused(tmp_path: Path) -> None:
    whole = TABLES[0].read_text()
    damaged = {
        "truncated": (whole[: len(whole) // 2], "damaged or truncated"),
        "list": ("[]", "holds no JSON object"),
        "keys": ("{}", "lacks 'stamp'"),
        "time": (whole.replace('"seconds": ', '"seconds": -', 1), "not positive"),
    }
    for name, (text, words) in damaged.items():
        path = tmp_path / f"{name}.json"
        path.write_text(text)
        with pytest.raises(UserError, match=words):
            bench.main(["bench", f"--simulate={path}"])
    trace = tmp_path / "trace.json"
    trace.write_text('{"confidence": [[0.5, 0.5]], "accepted": [1]}')
    flags = {
        ("--simulate=/no/such.json",): "no cost table",
        (f"--simulate={TABLES[0]}", "--trace=/no/such.json"): "no trace",
        (f"--simulate={TABLES[0]}", f"--trace={trace}"): "blocks of 2 drafts, the cost table is for 7",
        (f"--simulate={TABLES[0]}", "--acceptance=1"): "strictly between 0 and 1",
        (f"--simulate={TABLES[0]}", "--strategies=dcut"): "cannot be simulated",
        (f"--simulate={TABLES[0]}", "--loads=512"): "ends at 256 slots",
    }
    for given, words in flags.items():
        with pytest.raises(UserError, match=words):
            bench.main(["bench", *given])


# -------------------------------------------------------------------------------------------------- the scheduler


def test_planning_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark_jax.evaluation.scheduler_cost.REQUESTS", (1, 8))
    out = tmp_path / "scheduler.json"
    bench.main(["bench", "--scheduler", "--repeats=7", f"--json={out}"])
    rows = json.loads(out.read_text())["scheduler"]
    assert [row["requests"] for row in rows] == [1, 8]
    assert all(row[f"{name}_ms"] > 0 for row in rows for name in ("load_aware", "load_aware_async"))


# ------------------------------------------------------------------------------------------------ computed tables


def test_collectives_are_counted_by_what_a_ring_sends() -> None:
    tables = pytest.importorskip("docs.experiments.computed_tables")
    hlo = """
  %all-reduce.1 = bf16[4,96]{1,0:T(8,128)(2,1)} all-reduce(%fusion), channel_id=1
  %ag = (bf16[2,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%p), dimensions={0}
  %add = f32[9]{0} add(%a, %b)
"""
    assert tables.sent_bytes(hlo, 8) == pytest.approx((2 * 4 * 96 * 2 + 16 * 8 * 2) * 7 / 8)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu compiles for absent TPUs")
def test_a_table_is_computed_for_chips_that_are_not_here() -> None:
    """More rows and more slots never cost less."""
    tables = pytest.importorskip("docs.experiments.computed_tables")
    sizes = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_heads": 16, "layer_kinds": (0, 0)}
    attention = (Attention(num_kv_heads=8, head_dim=32, rope=Rope(1e6)),)
    target = dataclasses.replace(tables.qwen3_8b().target, **sizes, attention=attention)
    drafter = DrafterConfig(draft_decoder(target, 1), 3, 0, (0, 1), 2, target.vocab_size, markov_rank=8)
    models = tables.Models("tiny", target, drafter)
    one, eight = (tables.computed_table(models, tables.MACHINES[name], (2, 8), (128,)) for name in ("h100", "v5e-8"))
    for table in (one, eight):
        assert table.stamp.source == "computed"
        # Not of one slot: of a model so small a program for one row copies the weights first, which is counted.
        assert table.target[2, 2, 128].seconds < table.target[8, 8, 128].seconds < table.target[32, 8, 128].seconds
        assert table.draft[2, 128].seconds < table.draft[8, 128].seconds
