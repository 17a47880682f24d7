"""Prompts to train on: bad rows, datasets of the hub, and evaluation questions kept out."""

import json
import sys
import types

import pytest

from dspark_jax.data.keep_out import KeepOut
from dspark_jax.data.prompts import training_prompts
from dspark_jax.errors import UserError


def write(path, *lines):
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return str(path)


def user(text):
    return {"role": "user", "content": text}


def test_every_user_turn_is_asked_and_system_turns_are_kept(tmp_path):
    pairs = [("system", "be brief"), ("human", "a"), ("gpt", "theirs"), ("human", "b"), ("gpt", "theirs")]
    path = write(
        tmp_path / "p.jsonl",
        {"id": "t", "turns": ["a", "b"]},
        {"id": "m", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}]},
        {"id": "c", "conversations": [{"from": role, "value": text} for role, text in pairs]},
        {"prompt": "a", "messages": None},
        {"prompt": "only the first turn", "messages": [user("a"), user("b")]},
    )
    rows, report = training_prompts(path, 10)
    assert {row.id: row.messages for row in rows} == {
        "t": [user("a"), user("b")],
        "m": [user("a")],
        "c": [{"role": "system", "content": "be brief"}, user("a"), user("b")],
        "4": [user("a")],
        "5": [user("a"), user("b")],
    }
    assert (report.read, report.skipped, report.kept_out) == (5, [], [])


def test_bad_rows_are_skipped_counted_and_named_by_line(tmp_path, capsys):
    bad = [
        (b'{"prompt": "cut', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b"[1]", "expected a JSON object"),
        (b"[" * 100_000, "not valid JSON"),
        ({"text": "no shape"}, "expected one of"),
        ({"prompt": " "}, "empty"),
        ({"turns": []}, "no user message"),
        ({"turns": ["a", 3]}, "non-text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "unknown role 'tool'"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown role"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no user message"),
        (b'{"prompt": "half \\ud800"}', "surrogates"),
        ({"id": "good", "prompt": "again"}, "the id 'good' stands in line 1 too"),
    ]
    path = write(
        tmp_path / "p.jsonl", {"id": "good", "prompt": "hi"}, b"", *(line for line, _ in bad), {"prompt": "yo"}
    )
    rows, report = training_prompts(path, 100)
    assert [row.id for row in rows] == ["good", str(len(bad) + 3)] and report.read == len(bad) + 2
    assert [row["line"] for row in report.skipped] == list(range(3, len(bad) + 3))
    for row, (_, reason) in zip(report.skipped, bad, strict=True):
        assert reason in row["reason"]
    report.print()
    err = capsys.readouterr().err
    assert "p.jsonl, line 3: skipped: not valid JSON" in err and f"{len(bad)} bad ones skipped" in err


def test_only_as_many_rows_are_read_as_are_wanted(tmp_path):
    path = write(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"}, b"never read")
    assert training_prompts(path, 2)[1].skipped == []


def test_a_file_without_usable_rows_is_refused_with_its_first_fault(tmp_path):
    with pytest.raises(UserError, match="no usable prompts: line 1: expected one of"):
        training_prompts(write(tmp_path / "p.jsonl", {"text": "x"}), 1)


def test_a_dataset_of_the_hub_is_streamed(monkeypatch):
    asked = []

    def load_dataset(name, split, streaming):
        asked.append((name, split, streaming))
        return iter([{"messages": [user("a")], "prompt": None}, {"messages": None}, {"messages": [user("c")]}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    rows, report = training_prompts("hf:someone/chats:test", 10)
    assert [(row.id, row.messages) for row in rows] == [("1", [user("a")]), ("3", [user("c")])]
    assert [row["line"] for row in report.skipped] == [2]
    training_prompts("hf:someone/chats", 1)
    assert asked == [("someone/chats", "test", True), ("someone/chats", "train", True)]


def test_what_a_dataset_needs_and_how_it_fails_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        training_prompts("hf:someone/chats", 1)

    def load_dataset(*args, **options):
        raise FileNotFoundError("no such\ndataset")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(UserError, match="hf:someone/chats: FileNotFoundError: no such dataset"):
        training_prompts("hf:someone/chats", 1)


BOX = "Please reason step by step, and put the final answer of yours into a box."
LONG = "A train leaves the old station at noon and reaches the coast after three hours and ten minutes of travel."


@pytest.fixture
def keep_out(tmp_path):
    folder = tmp_path / "sets"
    folder.mkdir()
    boxed = [{"turns": [f"What is the number {'of ' * i} things?\n{BOX}"]} for i in range(7)]
    write(folder / "a.jsonl", {"turns": [LONG, "Continue."]}, *boxed)
    write(folder / "b.jsonl", {"turns": ["Name nine odd fish that live in rivers."]})
    return KeepOut.of_folder(folder)


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        (f"Tell me: {LONG.upper()} How far is it?", True),  # case and surroundings do not matter
        ("the old station at noon, and reaches the coast after three hours and!", True),  # 13 words of it
        ("the old station at noon, and reaches the coast after three hours", False),  # 12 words of it
        ("Please: name nine odd fish that live in rivers", True),  # a short question counts as a whole
        ("name nine odd fish that live in lakes", False),
        ("continue", True),  # a very short one only where it is all there is
        ("how does one continue", False),
        (f"How many eggs are there?\n{BOX}", False),  # what many questions share is no question
        (f"What is the number of things?\n{BOX}", True),
    ],
)
def test_shared_runs_of_words(keep_out, text, shared):
    assert bool(keep_out.shared([user("fresh words"), user(text)])) == shared


def test_kept_out_prompts_are_counted_and_do_not_count_as_wanted(tmp_path, keep_out):
    path = write(tmp_path / "p.jsonl", {"turns": ["fine", f"Well. {LONG}"]}, {"prompt": "one"}, {"prompt": "two"})
    rows, report = training_prompts(path, 2, keep_out)
    assert [row.id for row in rows] == ["2", "3"]
    assert report.kept_out == [
        {"line": 1, "shares": "a train leaves the old station at noon and reaches the coast after"}
    ]


def test_a_folder_without_questions_is_refused(tmp_path):
    with pytest.raises(UserError, match="data.keep_out"):
        KeepOut.of_folder(tmp_path)
