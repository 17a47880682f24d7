"""Resumable output files and rows of prompts."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.data.conversations import read_prompts, user_opening
from dspark_jax.data.generate import is_plain_question, write_answers, write_prompts
from dspark_jax.data.jsonl import ResumableJsonl, read_jsonl
from dspark_jax.decoding.engine import Engine
from dspark_jax.errors import UserError
from dspark_jax.interop.target_io import load_target


@settings(max_examples=30, deadline=None, derandomize=True)
@given(cut=st.integers(0, 200))
def test_a_file_cut_anywhere_keeps_its_whole_lines_and_nothing_else(cut, tmp_path_factory):
    path = tmp_path_factory.mktemp("cut") / "out.jsonl"
    rows = [{"id": str(i), "text": "é\n" * i} for i in range(5)]
    with ResumableJsonl(path, {"run": 1}) as out:
        for row in rows:
            out.append(row)
    data = path.read_bytes()[:cut]
    path.write_bytes(data)
    with ResumableJsonl(path, {"run": 1}) as out:
        assert len(out.done) == data.count(b"\n")
        for row in rows:
            if row["id"] not in out.done:
                out.append(row)
    assert [row for _, row in read_jsonl(path)] == rows


def test_another_run_is_named_by_what_differs(tmp_path):
    ResumableJsonl(tmp_path / "out.jsonl", {"target": "a", "seed": 1})
    with pytest.raises(UserError, match="seed"):
        ResumableJsonl(tmp_path / "out.jsonl", {"target": "a", "seed": 2})


def test_a_damaged_run_file_is_named(tmp_path):
    ResumableJsonl(tmp_path / "out.jsonl", {"seed": 1})
    (tmp_path / "out.jsonl.run.json").write_text("{")
    with pytest.raises(UserError, match="out.jsonl.run.json is damaged"):
        ResumableJsonl(tmp_path / "out.jsonl", {"seed": 1})


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi"},
        {"turns": ["hi", "second turn"]},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
    ],
)
def test_the_usual_shapes_of_a_prompt(tmp_path, row):
    (tmp_path / "p.jsonl").write_text("\n" + json.dumps(row) + "\n\n")
    (prompt,) = read_prompts(tmp_path / "p.jsonl")
    assert prompt.id == "2" and prompt.messages == [{"role": "user", "content": "hi"}]


def test_system_turns_and_history_are_kept(tmp_path):
    turns = [("system", "be brief"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    row = {"id": 7, "messages": [{"role": role, "content": text} for role, text in turns]}
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    (prompt,) = read_prompts(tmp_path / "p.jsonl")
    assert prompt.id == "7" and prompt.messages == row["messages"]


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("What is the capital of France?", True),
        ("too short", False),
        ("le chat \u4f60\u597d \u4f60\u597d \u4f60\u597d est la", False),
        ("go go go go go go go go", False),
        ("what is aaaaaaaaaaaaaaaa here now", False),
    ],
)
def test_which_self_written_turns_are_worth_an_answer(text, plain):
    assert is_plain_question(text) == plain


def test_the_opening_of_a_user_turn_comes_from_the_template(chat_model):
    assert user_opening(load_target(chat_model).tokenizer) == "<|start|>user\n"


@pytest.fixture(scope="module")
def engine(chat_model):
    return Engine(load_target(chat_model), max_slots=4, max_length=128)


def test_answers_resume_by_id_and_keep_exact_tokens(engine, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"id": f"q{i}", "prompt": f"ask {i}"}) + "\n" for i in range(5)))
    options = {"temperatures": (0.0, 1.0), "max_tokens": 10, "seed": 3}
    whole = write_answers(engine, read_prompts(path), tmp_path / "a.jsonl", **options)
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join(lines[:2]) + lines[2][:9])
    again = write_answers(engine, read_prompts(path), tmp_path / "a.jsonl", **options)
    by_id = lambda rows: {row["id"]: row for row in rows}  # noqa: E731
    assert by_id(again) == by_id(whole) and len(again) == 5
    for row in whole:
        assert row["messages"][-1]["content"] == engine.target.tokenizer.decode(row["answer_ids"])
        assert row["prompt_ids"] == engine.target.tokenizer.chat_ids(row["messages"][:-1])


def test_other_sampling_may_not_continue_an_answers_file(engine, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello you"}\n')
    rows = read_prompts(tmp_path / "p.jsonl")
    write_answers(engine, rows, tmp_path / "a.jsonl", temperatures=(0.0,), max_tokens=4, seed=0)
    with pytest.raises(UserError, match="max_tokens"):
        write_answers(engine, rows, tmp_path / "a.jsonl", temperatures=(0.0,), max_tokens=5, seed=0)


def test_the_target_writes_prompts_that_start_and_end_as_asked(engine, tmp_path, monkeypatch):
    # A random model writes no plain English; whether a turn ends and is kept is what is tested here.
    monkeypatch.setattr("dspark_jax.data.generate.is_plain_question", lambda text: True)
    monkeypatch.setattr("dspark_jax.data.generate.WAVE", 8)
    options = {"openings": ("Why", "How…\nThink first."), "temperature": 1.5, "max_tokens": 60, "seed": 1}
    rows = write_prompts(engine, tmp_path / "p.jsonl", 2, **options)
    assert len(rows) == 2 and len({row.messages[0]["content"] for row in rows}) == 2
    for row in rows:
        assert row.messages[0]["content"].startswith(("Why", "How")[int(row.id) % 2])
        assert row.messages[0]["content"].endswith("\nThink first.") == int(row.id) % 2
    assert write_prompts(engine, tmp_path / "p.jsonl", 2, **options) == rows


def test_prompts_go_on_after_a_cut_with_none_left_out(engine, tmp_path, monkeypatch):
    monkeypatch.setattr("dspark_jax.data.generate.is_plain_question", lambda text: True)
    monkeypatch.setattr("dspark_jax.data.generate.WAVE", 8)
    options = {"openings": ("Why",), "temperature": 1.5, "max_tokens": 60, "seed": 1}
    rows = write_prompts(engine, tmp_path / "p.jsonl", 3, **options)
    lines = (tmp_path / "p.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "p.jsonl").write_text("".join(lines[1:8:3]))  # turns end in any order, so a cut leaves any of them
    assert write_prompts(engine, tmp_path / "p.jsonl", 3, **options) == rows
    ids = [json.loads(line)["id"] for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert len(set(ids)) == len(ids) and set(ids) >= {str(i) for i in range(8)}


def test_a_full_disk_is_one_line_and_loses_no_row(tmp_path):
    with ResumableJsonl(tmp_path / "a.jsonl", {"seed": 1}) as out:
        out.append({"id": "a"})
    with pytest.raises(UserError, match="a.jsonl cannot be written: the disk is full; the rows before stay"):
        with ResumableJsonl(tmp_path / "a.jsonl", {"seed": 1}) as out:
            out._file.close()
            out._file = open("/dev/full", "a", encoding="utf-8")
            out.append({"id": "b"})
    with ResumableJsonl(tmp_path / "a.jsonl", {"seed": 1}) as out:
        assert out.rows == [{"id": "a"}]
