"""The serving door: answers, resuming by request id, and bad input as one clear line with exit code 2."""

import json
import sys
from pathlib import Path

import jax
import pytest

from configs.base import get_base
from dspark_jax.door import run_door
from dspark_jax.errors import UserError
from dspark_jax.interop.drafter_io import Drafter, borrow, init_drafter
from dspark_jax.interop.export import save_drafter
from dspark_jax.interop.target_io import load_target
from dspark_jax.serving import serve_file, stream_prompt
from dspark_jax.training.loop import new_drafter_config

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def config(chat_model, tmp_path_factory):
    """A tiny target with an untrained drafter: its drafts are poor, its answers must be right all the same."""
    c = get_base()
    c.target.path = str(chat_model)
    c.drafter.num_layers, c.drafter.block_size, c.drafter.tap_layers = 1, 4, (0, 2)
    c.drafter.mask_token, c.drafter.markov_rank = "<|mask|>", 8
    c.serve.max_slots, c.serve.max_length = 4, 128
    c.sampling.max_tokens = 12
    target = load_target(chat_model)
    made = new_drafter_config(c, target)
    c.serve.drafter = str(tmp_path_factory.mktemp("drafter") / "random")
    save_drafter(c.serve.drafter, Drafter(made, init_drafter(made, jax.random.key(0)), borrow(target)), target)
    return c


def write_prompts(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answers(path):
    return {row["id"]: row for row in map(json.loads, Path(path).read_text().splitlines())}


@pytest.fixture
def prompts(tmp_path):
    rows = [{"id": f"q{i}", "prompt": f"question {i}, with {'many ' * i}words"} for i in range(6)]
    return write_prompts(tmp_path / "prompts.jsonl", rows)


@pytest.fixture(scope="module")
def served(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    rows = [{"id": f"q{i}", "prompt": f"question {i}, with {'many ' * i}words"} for i in range(6)]
    report = serve_file(config, write_prompts(folder / "prompts.jsonl", rows), folder / "out.jsonl")
    return answers(folder / "out.jsonl"), report, folder


def test_every_prompt_gets_an_answer_with_its_statistics(served, config, chat_model):
    rows, report, folder = served
    assert sorted(rows) == [f"q{i}" for i in range(6)]
    tokenizer = load_target(chat_model).tokenizer
    for row in rows.values():
        assert row["text"] == tokenizer.decode(row["token_ids"])
        assert row["finish_reason"] in ("stop", "length")
        assert row["rounds"] == len(row["drafted"]) == len(row["verified"]) == len(row["accepted"])
        assert len(row["token_ids"]) <= sum(row["accepted"]) + row["rounds"]
    assert report["tokens"] == sum(len(row["token_ids"]) for row in rows.values())
    assert json.loads((folder / "out.jsonl.report.json").read_text())["device"] == report["device"]


def test_an_interrupted_run_continues_with_nothing_lost_or_doubled(served, config, prompts, tmp_path):
    whole = served[0]
    out = tmp_path / "out.jsonl"
    lines = (served[2] / "out.jsonl").read_text().splitlines(keepends=True)
    # The process died while it wrote the fourth line.
    out.write_text("".join(lines[:3]) + lines[3][:20])
    stamp = (served[2] / "out.jsonl.run.json").read_text()
    (tmp_path / "out.jsonl.run.json").write_text(stamp)
    report = serve_file(config, prompts, out)
    assert report["requests"] == 3
    assert len(out.read_text().splitlines()) == 6
    assert {k: row["token_ids"] for k, row in answers(out).items()} == {k: r["token_ids"] for k, r in whole.items()}


def test_a_finished_run_started_again_changes_nothing(served, config, prompts):
    before = (served[2] / "out.jsonl").read_bytes()
    assert serve_file(config, prompts, served[2] / "out.jsonl")["requests"] == 0
    assert (served[2] / "out.jsonl").read_bytes() == before


def test_rows_may_carry_their_own_sampling(config, tmp_path):
    rows = [{"id": "a", "prompt": "hello there", "temperature": 1.0, "seed": 5, "max_tokens": 3}, {"prompt": "hello"}]
    serve_file(config, write_prompts(tmp_path / "p.jsonl", rows), tmp_path / "o.jsonl")
    got = answers(tmp_path / "o.jsonl")
    assert got["a"]["seed"] == 5 and got["a"]["temperature"] == 1.0 and len(got["a"]["token_ids"]) <= 3
    assert got["2"]["temperature"] == 0.0


def test_one_prompt_streams_the_text_that_a_batch_gives(served, config):
    *parts, report = stream_prompt(config, "question 0, with words")
    assert "".join(parts) == served[0]["q0"]["text"]
    assert report["tokens"] == len(served[0]["q0"]["token_ids"])


def test_a_prompt_that_cannot_be_answered_says_why_and_the_others_go_on(config, tmp_path):
    bad = [
        {"id": "long", "prompt": "word " * 200}, {"id": "cold", "prompt": "a", "temperature": -1},
        {"id": "ten", "prompt": "a", "max_tokens": "ten"},
    ]  # fmt: skip
    path = write_prompts(tmp_path / "p.jsonl", [*bad, {"id": "good", "prompt": "a"}])
    report = serve_file(config, path, tmp_path / "out.jsonl")
    rows = answers(tmp_path / "out.jsonl")
    words = {"long": "context", "cold": "temperature", "ten": "max_tokens"}
    for name, word in words.items():
        assert rows[name]["finish_reason"] == "error" and word in rows[name]["error"]
    assert rows["good"]["token_ids"] and report["finish_reasons"]["error"] == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompts"),
        ('{"prompt": "fine"}\n{"prompt": \n', "line 2"),
        ('{"prompt": "fine"}\n[1, 2]\n', "line 2"),
        ('{"question": "?"}\n', "line 1"),
        ('{"prompt": ""}\n', "line 1"),
        ('{"messages": [{"role": "wizard", "content": "hi"}]}\n', "wizard"),
        ('{"messages": [{"role": "assistant", "content": "hi"}]}\n', "no user message"),
        ('{"id": 1, "prompt": "a"}\n{"id": "1", "prompt": "b"}\n', "line 2"),
    ],
)
def test_bad_prompt_files_are_refused_before_anything_is_written(config, tmp_path, text, message):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        serve_file(config, tmp_path / "p.jsonl", tmp_path / "o.jsonl")
    assert not (tmp_path / "o.jsonl").exists()


def test_the_output_of_another_run_is_refused_and_left_alone(served, config, prompts):
    before = (served[2] / "out.jsonl").read_bytes()
    other = config.copy_and_resolve_references()
    other.sampling.temperature = 0.7
    with pytest.raises(UserError, match="another run"):
        serve_file(other, prompts, served[2] / "out.jsonl")
    assert (served[2] / "out.jsonl").read_bytes() == before


def test_a_foreign_file_is_never_overwritten(config, prompts, tmp_path):
    (tmp_path / "notes.jsonl").write_text("precious\n")
    with pytest.raises(UserError, match="exists"):
        serve_file(config, prompts, tmp_path / "notes.jsonl")
    assert (tmp_path / "notes.jsonl").read_text() == "precious\n"


def test_a_drafter_of_another_target_is_refused(config, prompts, tmp_path, golden):
    other = config.copy_and_resolve_references()
    other.serve.drafter = str(golden / "dspark_vanilla")
    with pytest.raises(UserError, match="another target"):
        serve_file(other, prompts, tmp_path / "o.jsonl")


def run(monkeypatch, capsys, module, *args):
    """Exit code and stderr of a door, in this process."""
    monkeypatch.setattr(sys, "argv", [module.__name__, *args])
    with pytest.raises(SystemExit) as stop:
        run_door(module.main)
    return stop.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--config"),
        (["--config=nope.py", "--prompt=hi"], "nope.py"),
        (["--config=configs/smollm2_135m.py"], "--prompt"),
        (["--config=configs/smollm2_135m.py", "--prompts=x.jsonl"], "--out"),
        (["--config=configs/smollm2_135m.py", "--config.serve.stratgy=off", "--prompt=hi"], "stratgy"),
        (["--config=configs/smollm2_135m.py", "--config.target.path=/no/such", "--prompt=hi"], "/no/such"),
        (["--config=configs/smollm2_135m.py", "--config.serve.max_slots=many", "--prompt=hi"], "many"),
        (["--config=configs/smollm2_135m.py", "--prompts=nope.jsonl", "--out=o.jsonl"], "nope.jsonl"),
        (["--config=configs/smollm2_135m.py", "--speed=9"], "speed"),
        (["--config=configs/smollm2_135m.py", "hi"], "hi"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_code_2(monkeypatch, capsys, args, message):
    import serve

    monkeypatch.chdir(ROOT)
    code, err = run(monkeypatch, capsys, serve, *args)
    assert code == 2 and len(err.strip().splitlines()) == 1 and message in err


def test_the_training_door_refuses_unknown_keys_by_name(monkeypatch, capsys):
    import train

    monkeypatch.chdir(ROOT)
    code, err = run(monkeypatch, capsys, train, "--config=configs/smollm2_135m.py", "--config.train.stepz=3")
    assert code == 2 and "stepz" in err and len(err.strip().splitlines()) == 1
