"""The evaluation command: answers, the numbers made of them, and the page."""

import json
import math
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax import evaluate
from dspark_jax.data.generate import answer_wave
from dspark_jax.errors import UserError
from dspark_jax.evaluation import answers, benchmarks, summary, tables
from dspark_jax.evaluation.metrics import round_stats
from dspark_jax.interop.drafter_io import Drafter, borrow, init_drafter
from dspark_jax.interop.export import save_drafter
from dspark_jax.interop.target_io import load_target
from dspark_jax.models.config import DrafterConfig, draft_decoder
from dspark_jax.scheduling.calibration import Rounds

TURNS = {"gsm8k": [["one?"], ["two?"], ["three?"]], "mt-bench": [["a", "bee"], ["sea"]]}
TEMPERATURES = ("0", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Path:
    """A config for a tiny pair, and two sets."""
    path = tmp_path_factory.mktemp("evaluate")
    target = load_target(chat_model, dtype="float32")
    sizes = DrafterConfig(
        draft_decoder(target.config, 1), 3, target.tokenizer.token_id("<|mask|>"), (0, 1), 3, target.config.vocab_size,
        markov_rank=4,
    )  # fmt: skip
    drafter = Drafter(sizes, init_drafter(sizes, jax.random.key(0)), borrow(target))
    save_drafter(path / "drafter", drafter, target)
    (path / "data").mkdir()
    for name, rows in TURNS.items():
        (path / "data" / f"{name}.jsonl").write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in rows))
    (path / "config.py").write_text(
        "from configs.base import get_base\n\n\ndef get_config():\n    c = get_base()\n"
        f"    c.target.path, c.workdir = {str(chat_model)!r}, {str(path)!r}\n"
        f"    c.serve.drafter = {str(path / 'drafter')!r}\n"
        "    c.serve.max_slots, c.serve.max_length, c.sampling.max_tokens = 1, 64, 5\n    return c\n"
    )
    return path


def run(folder: Path, out: Path, *more: str) -> None:
    evaluate.main(["evaluate", f"--config={folder / 'config.py'}", f"--data={folder / 'data'}", f"--out={out}", *more])


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished evaluation."""
    out = tmp_path_factory.mktemp("whole") / "out"
    run(folder, out, "--plain=2")
    return out


def lines(out: Path, name: str, temperature: str) -> dict[str, dict]:
    rows = [json.loads(line) for line in (out / "answers" / f"{name}.t{temperature}.jsonl").read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def test_every_turn_is_answered_with_the_answers_before_it(whole: Path) -> None:
    for temperature in TEMPERATURES:
        assert set(lines(whole, "gsm8k", temperature)) == {"0", "1", "2"}
        rows = lines(whole, "mt-bench", temperature)
        assert set(rows) == {"0", "0#2", "1"}
        first, second = rows["0"]["messages"], rows["0#2"]["messages"]
        assert second[:2] == first and second[2] == {"role": "user", "content": "bee"}
        assert all(len(c) == 3 for row in rows.values() for c in row["confidence"])


def test_the_report_has_all_sets_and_their_unweighted_mean(whole: Path) -> None:
    report = json.loads((whole / "report.json").read_text())
    assert report["run"]["device"] and report["run"]["jax"] and set(report["temperatures"]) == set(TEMPERATURES)
    for part in report["temperatures"].values():
        assert list(part["sets"]) == ["gsm8k", "mt-bench"] and len(part["not_in_macro"]) == 7
        taus = [s["metrics"]["tokens_per_round"] for s in part["sets"].values()]
        assert part["macro"]["tokens_per_round"] == pytest.approx(sum(taus) / 2)
        for s in part["sets"].values():
            m = s["metrics"]
            assert 1 <= m["tokens_per_round"] <= 4 and 0 < m["verify_rate"] <= 1
            assert m["speed"]["tokens_per_second"] > 0 and m["speed"]["plain_tokens_per_second"] > 0
            assert len(m["conditional_acceptance"]) == len(m["confidence"]["ece"]) == 3


def test_the_page_needs_nothing_from_elsewhere(whole: Path) -> None:
    html = (whole / "report.html").read_text()
    assert "<script" not in html and "http" not in html.replace("data:image/png;base64", "")
    names = {path.name for path in (whole / "pictures").iterdir()}
    assert names == {"tokens_per_round.png", "acceptance.png", "thresholds.png", "reliability.t0.png",
                     "reliability.t1.png"}  # fmt: skip
    assert html.count("<img ") == len(names) and "bench --sweep" in html
    assert "over 2 of the 9 sets" in html and "GSM8K 3 of 500" in html


def test_a_report_made_again_is_the_same(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copytree(whole, tmp_path / "copy")
    for made in ("report.json", "report.html"):
        (copy / made).unlink()
    monkeypatch.delattr(answers, "load_models")
    evaluate.main(["evaluate", f"--out={copy}", "--report-only"])
    for made in ("report.json", "report.html"):
        assert (copy / made).read_bytes() == (whole / made).read_bytes()


def test_a_killed_run_goes_on_with_nothing_lost_or_doubled(
    folder: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, count = tmp_path / "out", iter(range(99))

    def dies(*arguments):
        for answer in answer_wave(*arguments):
            if next(count) == 7:
                raise KeyboardInterrupt
            yield answer

    monkeypatch.setattr(answers, "answer_wave", dies)
    with pytest.raises(KeyboardInterrupt):
        run(folder, out, "--plain=0")
    monkeypatch.undo()
    with (out / "answers" / "mt-bench.t0.jsonl").open("a") as file:
        file.write('{"id": "0", "torn')  # it died while it wrote
    run(folder, out, "--plain=0")
    for name in TURNS:
        for temperature in TEMPERATURES:
            assert lines(out, name, temperature) == lines(whole, name, temperature)


def test_a_folder_of_another_evaluation_is_refused(folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.read_bytes() for path in whole.rglob("*.jsonl")}
    override = "--config.sampling.max_tokens=9"
    monkeypatch.setattr("sys.argv", ["evaluate", f"--config={folder / 'config.py'}", override])
    with pytest.raises(UserError, match="its sampling differ"):
        run(folder, whole, override)
    assert before == {path: path.read_bytes() for path in whole.rglob("*.jsonl")}


def test_prompts_that_changed_are_not_mixed(folder: Path, whole: Path, tmp_path: Path) -> None:
    out, data = shutil.copytree(whole, tmp_path / "out"), shutil.copytree(folder / "data", tmp_path / "data")
    (data / "gsm8k.jsonl").write_text('{"turns": ["another question"]}\n')
    with pytest.raises(UserError, match="its prompts differ"):
        run(folder, out, f"--data={data}")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--sets=gsm9k",), "known are all, gsm8k"),
        (("--sets=alpaca",), "Alpaca: no such file"),
        (("--data=nowhere",), "no such folder"),
        (("--temperatures=hot",), "--temperatures=hot"),
        (("--temperatures=-1",), "--temperatures=-1"),
        (("--limit=0",), "limit"),
        (("--sweep=nowhere.json",), "no sweep at 'nowhere.json'"),
        (("--config.serve.drafter=",), "set serve.drafter"),
    ],
)
def test_bad_input_is_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], words: str
) -> None:
    monkeypatch.setattr("sys.argv", ["evaluate", f"--config={folder / 'config.py'}", *flags])
    with pytest.raises(UserError, match=words) as caught:
        run(folder, tmp_path / "out", *flags)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_a_drafter_without_confidences_has_the_rest_of_the_report(whole: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(whole, tmp_path / "copy")
    stamp = copy / answers.SETTINGS
    stamp.write_text(json.dumps(json.loads(stamp.read_text()) | {"has_confidence": False}))
    for path in (copy / "answers").glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [{name: value for name, value in row.items() if name != "confidence"} for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    evaluate.main(["evaluate", f"--out={copy}", "--report-only"])
    macro = json.loads((copy / "report.json").read_text())["temperatures"]["0"]["macro"]
    assert set(macro) == {"tokens_per_round", "accepted_drafts_per_round", "verify_rate", "conditional_acceptance",
                          "speed"}  # fmt: skip
    assert "reliability" not in (copy / "report.html").read_text().lower()


def test_a_busy_machine_is_named() -> None:
    whole = {"prompts": 500, "prompts_of_the_full_set": 500, "refused": 0}
    part = {"not_in_macro": [], "sets": {"gsm8k": whole | {"others_cpu_percent": 40.0}}}
    assert tables.notes({"temperatures": {"0": part}}, "0") == [
        "While speeds were taken, others used up to 40 % of the CPUs: they say little."
    ]


def test_a_report_needs_answers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="settings of an evaluation"):
        evaluate.main(["evaluate", f"--out={tmp_path}", "--report-only"])


def test_a_sweep_joins_the_page(whole: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(whole, tmp_path / "copy")
    point = {"strategy": "off", "speeds": [3.0], "tokens_per_round": 1.0, "budget": 0.0, "parked": 1.0, "rounds": 9}
    stamp = {"target": "t", "device": "cpu", "platform": "cpu", "cores": 2, "jax": "0"}
    sweep = {"run": stamp, "loads": {load: [point | {"load": int(load)}] for load in ("1", "2")}}
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    evaluate.main(["evaluate", f"--out={copy}", "--report-only", f"--sweep={tmp_path / 'sweep.json'}"])
    assert (copy / "pictures" / "loads.speed.png").exists() and "Pareto front: " in (copy / "report.html").read_text()
    evaluate.main(["evaluate", f"--out={copy}", "--report-only"])
    assert "Pareto front: " in (copy / "report.html").read_text()


# ---------------------------------------------------------------------------------------------------- the sets


@pytest.mark.parametrize(
    ("rows", "count", "first"),
    [
        (1319, 500, [435, 902, 303, 1168, 403]),
        (257, 256, [94, 116, 115, 25, 150]),
        (1055, 500, [14, 570, 218, 658, 367]),
        (750, 500, [228, 712, 412, 332, 388]),
        (19, 30, [0, 1, 2, 3, 4]),
    ],
)
def test_prompts_are_picked_as_the_reference_picks_them(rows: int, count: int, first: list[int]) -> None:
    chosen = benchmarks.picked(range(rows), count)
    assert chosen[:5] == first and len(chosen) == len(set(chosen)) == min(rows, count)


def test_sets_of_the_hub_are_kept_as_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def rows(label: str, *names: str, **options: str):
        calls.append((names, options))
        yield {"instruction": "Add.", "input": "1 2"}
        yield {"instruction": "Sing.", "input": ""}

    monkeypatch.setattr(benchmarks, "dataset_rows", rows)
    for _ in range(2):
        sets, missing = benchmarks.load_sets(["alpaca"], None, tmp_path)
        assert [row.messages[0]["content"] for row in sets["alpaca"]] == ["Add.\n\nInput:\n1 2", "Sing."]
    assert calls == [(("tatsu-lab/alpaca",), {"split": "train"})] and not missing


def test_what_the_hub_has_renamed_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks, "dataset_rows", lambda *a, **o: iter([{"text": "?"}]))
    with pytest.raises(UserError, match="has no field 'question'"):
        benchmarks.load_sets(["gsm8k"], None, tmp_path)
    assert not list(tmp_path.iterdir())


def test_prompt_forms() -> None:
    forms = {b.name: b.turns for b in benchmarks.BENCHMARKS}
    assert forms["aime25"]({"problem": "x?"})[0].endswith("x?\nPlease reason step by step, and put your final answer "
                                                          "within \\boxed{}.")  # fmt: skip
    assert forms["humaneval"]({"prompt": "def f():\n"})[0].endswith("passes the tests:\n```python\ndef f():\n\n```")
    given = {"question_content": "Q", "starter_code": "class S:"}
    assert (
        "### Question:\nQ\n\n### Format: Use the following code structure:\n```python\nclass S:\n```\n\n### Answer"
        in (forms["livecodebench"](given)[0])
    )
    assert "```python\n# YOUR CODE HERE\n```" in forms["livecodebench"](given | {"starter_code": ""})[0]
    assert forms["mt-bench"]({"prompt": ["a", "b"]}) == ["a", "b"]


# ---------------------------------------------------------------------------------------------------- the numbers


def test_the_mean_skips_what_a_part_does_not_have() -> None:
    parts = [{"a": 1.0, "b": [1.0, None]}, {"a": 3.0, "b": [2.0, 4.0, 6.0]}, {"a": None, "b": None, "c": 5}]
    assert summary.mean_of(parts) == {"a": 2, "b": [1.5, 4, 6], "c": 5}
    assert summary.mean_of([]) is None and summary.mean_of([None]) is None


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.tuples(st.lists(st.floats(-4, 4), min_size=3, max_size=3), st.integers(0, 3)), min_size=1, max_size=9)
)
def test_higher_thresholds_verify_less_and_bring_less(rows: list[tuple[list[float], int]]) -> None:
    logits, accepted = map(np.asarray, zip(*rows, strict=True))
    sweep = summary.threshold_sweep(Rounds(logits, np.full(len(rows), 3), accepted), np.ones(3))
    verified, tokens = sweep["drafts_verified_per_round"], sweep["tokens_per_round"]
    assert verified[0] == 3 and tokens[0] == pytest.approx(1 + accepted.mean())
    for values in (verified, tokens):
        assert all(a >= b for a, b in zip(values, values[1:], strict=False))


def test_a_threshold_cuts_before_the_first_draft_below_it() -> None:
    probabilities = np.array([[0.427, 0.140, 0.221, 0.185]])
    rounds = Rounds(np.log(probabilities / (1 - probabilities)), np.array([4]), np.array([3]))
    sweep = {row[0]: row for row in zip(*summary.threshold_sweep(rounds, np.ones(4)).values(), strict=True)}
    assert sweep[0.0][1:] == (4, 4, 4 / 5) and sweep[0.2][1:] == (1, 2, 1) and sweep[0.5][1:] == (0, 1, 1)


def test_a_round_that_was_cut_off_counts_as_little_as_it_shows() -> None:
    line = {"finish_reason": "stop", "token_ids": [1, 2, 3, 4], "verified": [3, 3], "accepted": [2, 1],
            "confidence": [[0.0] * 3] * 2}  # fmt: skip
    done = summary.completions([line, {"finish_reason": "error"}], 3)
    assert round_stats(done).tokens_per_round == 2
    rounds = summary.record_rounds(done)
    assert summary.conditional_acceptance(rounds) == [1, 1, 0]
    assert summary.threshold_sweep(rounds, np.ones(3))["tokens_per_round"][0] == 3
    assert not math.isnan(summary.reliabilities(rounds)[0].ece)
