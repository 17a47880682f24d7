"""Answers to train on: turn by turn, resumable, here and on servers, and what training makes of them."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest

from configs.base import get_base
from dspark_jax.data.conversations import PromptRow
from dspark_jax.data.generate import write_answers
from dspark_jax.data.turns import Turn, turn_ids
from dspark_jax.decoding.engine import Engine
from dspark_jax.errors import UserError
from dspark_jax.interop.drafter_io import Drafter, borrow, init_drafter, load_drafter
from dspark_jax.interop.export import save_drafter
from dspark_jax.interop.target_io import load_target
from dspark_jax.interop.tokenizer import Tokenizer
from dspark_jax.serving import chat_prompt, foreign_chats
from dspark_jax.training.data import learnt_rows, make_answers, training_rows
from dspark_jax.training.drafters import new_drafter_config

THINKING = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}--"
    "{% endif %}{% endif %}"
)
OPTIONS = {"temperatures": (0.0, 1.0), "max_tokens": 10, "seed": 3}


@pytest.fixture(scope="module")
def target(chat_model):
    return load_target(chat_model)


@pytest.fixture(scope="module")
def thinking_target(target):
    """The same with a template that knows of thinking."""
    tokenizer = Tokenizer(target.tokenizer._backend, {"eos_token": "<|end|>"}, THINKING, "test")
    return dataclasses.replace(target, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def engine(target):
    return Engine(target, max_slots=4, max_length=128)


def asks(key, *texts):
    return PromptRow(key, [{"role": "user", "content": text} for text in texts])


def learnt_tokens(row):
    ids = row["prompt_ids"] + row["answer_ids"]
    mask = row.get("loss_mask", [0] * len(row["prompt_ids"]) + [1] * len(row["answer_ids"]))
    return [token for token, learnt in zip(ids, mask, strict=True) if learnt]


ROWS = [asks("a", "one"), asks("b", "one", "two", "three"), asks("c", "x", "y")]


def by_id(lines):
    return {line["id"]: line for line in lines}


@pytest.fixture(scope="module")
def answered(engine, tmp_path_factory):
    path = tmp_path_factory.mktemp("answered") / "a.jsonl"
    return path, by_id(write_answers(engine, ROWS, path, **OPTIONS))


def test_each_turn_is_asked_after_the_targets_own_answers(answered, engine):
    _, lines = answered
    assert set(lines) == {"a", "b", "b#2", "b#3", "c", "c#2"}
    history = []
    for key, text in (("b", "one"), ("b#2", "two"), ("b#3", "three")):
        history.append({"role": "user", "content": text})
        line = lines[key]
        assert line["prompt_ids"] == engine.target.tokenizer.chat_ids(history)
        history.append({"role": "assistant", "content": engine.target.tokenizer.decode(line["answer_ids"])})
        assert line["messages"] == history and line["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize("kept", [1, 4])
def test_answers_go_on_after_a_cut_in_any_turn(answered, engine, tmp_path, kept):
    path, lines = answered
    text = path.read_text().splitlines(keepends=True)
    cut = tmp_path / "a.jsonl"
    cut.write_text("".join(text[:kept]) + text[kept][:30])
    (tmp_path / "a.jsonl.run.json").write_text((path.parent / "a.jsonl.run.json").read_text())
    again = write_answers(engine, ROWS, cut, **OPTIONS)
    assert by_id(again) == lines and len(again) == len(lines)


def test_a_turn_that_cannot_be_answered_ends_its_conversation_alone(engine, tmp_path):
    rows = [asks("long", "word " * 100, "more"), asks("a", "one")]
    lines = by_id(write_answers(engine, rows, tmp_path / "a.jsonl", **OPTIONS))
    assert set(lines) == {"long", "a"} and lines["long"]["finish_reason"] == "error" and lines["long"]["error"]
    assert [row["id"] for row in learnt_rows(list(lines.values()), engine.target.tokenizer, "")] == ["a"]


def test_given_answers_stay_and_ids_are_checked():
    row = PromptRow("r", [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user")])
    assert Turn(row).chat == row.messages and Turn(row, ("mine",)).chat is None
    with pytest.raises(UserError, match="r#2"):
        turn_ids([asks("r", "a", "b"), asks("r#2", "c")])


@pytest.mark.parametrize("drafter", ["", pytest.param("lookup", marks=pytest.mark.slow)])
def test_a_configs_answers_with_and_without_a_drafter(target, tmp_path, drafter):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"id": "a", "prompt": "one"}\n{"id": "b", "turns": ["one", "two", "three"]}\n')
    c = get_base()
    c.workdir, c.seed, c.data.prompts, c.data.drafter = str(tmp_path / "run"), OPTIONS["seed"], str(prompts), drafter
    c.data.temperatures, c.data.max_answer_tokens = (0.0,), OPTIONS["max_tokens"]
    c.data.max_slots, c.data.max_length = 4, 128
    made = by_id(make_answers(c, target, tmp_path / "run" / "answers.jsonl"))
    assert set(made) == {"a", "b", "b#2", "b#3"}
    assert [row["content"] for row in made["b#3"]["messages"][1::2]] == [
        target.tokenizer.decode(made[key]["answer_ids"]) for key in ("b", "b#2", "b#3")
    ]
    assert json.loads((tmp_path / "run" / "prompts.report.json").read_text())["read"] == 2
    c.data.thinking = "perhaps"
    with pytest.raises(UserError, match="thinking='perhaps'"):
        make_answers(c, target, tmp_path / "b.jsonl")


def test_thinking_reaches_the_template_and_is_part_of_the_run(thinking_target, tmp_path):
    engine = Engine(thinking_target, max_slots=4, max_length=128)
    for thinking, opening in (("off", "<|start|>assistant\n--"), ("on", "<|start|>assistant\n")):
        path = tmp_path / f"{thinking}.jsonl"
        (line,) = write_answers(engine, ROWS[:1], path, **OPTIONS, thinking=thinking)
        assert thinking_target.tokenizer.decode(line["prompt_ids"], skip_special_tokens=False).endswith(opening)
    with pytest.raises(UserError, match="thinking differ"):
        write_answers(engine, ROWS[:1], path, **OPTIONS, thinking="off")


def test_cut_sampling_reaches_the_engine_and_is_part_of_the_run(answered, engine, target, tmp_path):
    """One token is left to choose from, so every temperature answers as greedy does."""
    for name, cut in (("k", {"top_k": 1}), ("p", {"top_p": 1e-6})):
        lines = by_id(write_answers(engine, ROWS[:1], tmp_path / f"{name}.jsonl", (1.0,), 10, 3, **cut))
        greedy = by_id(write_answers(engine, ROWS[:1], tmp_path / f"{name}.greedy.jsonl", (0.0,), 10, 3))
        assert lines["a"]["answer_ids"] == greedy["a"]["answer_ids"]
        stamp = json.loads((tmp_path / f"{name}.jsonl.run.json").read_text())
        assert {key: stamp[key] for key in cut} == cut
        with pytest.raises(UserError, match=f"its {next(iter(cut))} differ"):
            write_answers(engine, ROWS[:1], tmp_path / f"{name}.jsonl", (1.0,), 10, 3)
    assert not {"top_p", "top_k"} & set(json.loads(Path(f"{answered[0]}.run.json").read_text()))
    config = get_base()
    config.workdir, config.data.top_p = str(tmp_path / "run"), 1.5
    with pytest.raises(UserError, match="top_p=1.5"):
        make_answers(config, target, tmp_path / "run" / "answers.jsonl")


def test_training_rows_learn_every_answer_once_with_its_own_tokens(answered, engine):
    _, lines = answered
    rows = learnt_rows(list(lines.values()), engine.target.tokenizer, "")
    learnt = [token for row in rows for token in learnt_tokens(row)]
    assert sorted(learnt) == sorted(token for line in lines.values() for token in line["answer_ids"])


def test_answers_of_servers_are_learnt_by_the_template(target):
    chat = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
    lines = [
        {"id": "r#2", "conversation": "r", "turn": 1, "messages": chat, "finish_reason": "stop"},
        {"id": "r", "conversation": "r", "turn": 0, "messages": chat[:2], "finish_reason": "length"},
    ]
    (row,) = learnt_rows(lines, target.tokenizer, "")
    ids = row["prompt_ids"] + row["answer_ids"]
    assert ids == target.tokenizer.chat_ids(chat, add_generation_prompt=False)
    learnt = target.tokenizer.decode(learnt_tokens(row), skip_special_tokens=False)
    assert learnt == "bd<|end|>\n"  # the first ran into the limit


def test_texts_that_the_template_refuses_are_left_out_and_counted(target, capsys):
    refusing = "{% if messages[0].content == 'no' %}{{ raise_exception('never') }}{% endif %}" + THINKING
    tokenizer = Tokenizer(target.tokenizer._backend, {"eos_token": "<|end|>"}, refusing, "test")
    lines = []
    for text in ("yes", "no"):
        chat = [{"role": "user", "content": text}, {"role": "assistant", "content": "an answer"}]
        lines.append({"id": text, "messages": chat, "finish_reason": "stop"})
    assert [row["id"] for row in learnt_rows(lines, tokenizer, "")] == ["yes"]
    assert "1 answered conversations left out" in capsys.readouterr().err
    with pytest.raises(UserError, match="never"):
        learnt_rows(lines[1:], tokenizer, "")


def test_training_takes_a_prepared_file_and_refuses_a_foreign_one(answered, target, thinking_target, tmp_path):
    path, lines = answered
    config = get_base()
    config.workdir, config.data.answers = str(tmp_path / "run"), str(path)
    learnt = sum(len(learnt_tokens(row)) for row in training_rows(config, target))
    assert learnt == sum(len(line["answer_ids"]) for line in lines.values())
    with pytest.raises(UserError, match="another chat template"):
        training_rows(config, thinking_target)
    config.data.thinking = "off"
    with pytest.raises(UserError, match=r'another data.thinking \(null is "off" here\)'):
        training_rows(config, target)
    stamp = path.parent / "a.jsonl.run.json"
    before = json.loads(stamp.read_text())
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text(path.read_text())
    (tmp_path / "foreign.jsonl.run.json").write_text(json.dumps({**before, "target": "0123456789abcdef"}))
    config.data.thinking, config.data.answers = "", str(foreign)
    with pytest.raises(UserError, match="another target"):
        training_rows(config, target)
    config.data.answers = str(tmp_path / "nowhere.jsonl")
    with pytest.raises(UserError, match="no record of the answers"):
        training_rows(config, target)


def test_serving_tells_the_template_whether_to_think(thinking_target):
    c, messages = get_base(), ROWS[0].messages
    assert chat_prompt(c, thinking_target, messages) == messages
    c.serve.thinking = "off"
    expected = thinking_target.tokenizer.encode("<|start|>user\none<|end|>\n<|start|>assistant\n--")
    assert chat_prompt(c, thinking_target, messages) == expected


def test_a_drafter_keeps_what_it_was_trained_on_and_serving_warns(thinking_target, target, tmp_path):
    c = get_base()
    c.drafter.num_layers, c.drafter.block_size, c.drafter.tap_layers = 1, 4, (0, 2)
    c.drafter.mask_token, c.drafter.markov_rank = "<|mask|>", 8
    made = new_drafter_config(c, thinking_target)
    chats = {"template": thinking_target.tokenizer.template_hash, "thinking": "off"}
    drafter = Drafter(made, init_drafter(made, jax.random.key(0)), borrow(thinking_target), trained_on=chats)
    save_drafter(tmp_path / "drafter", drafter, thinking_target)
    back = load_drafter(tmp_path / "drafter", thinking_target)
    assert back.trained_on == chats
    assert "trained with thinking off" in foreign_chats(c, thinking_target, back)
    assert "another chat template" in foreign_chats(c, target, back)
    c.serve.thinking = "off"
    assert foreign_chats(c, thinking_target, back) is None
    as_is = dataclasses.replace(back, trained_on={**chats, "thinking": ""})
    assert "with thinking off" in foreign_chats(c, thinking_target, as_is)
    c.serve.thinking = "on"  # this template thinks by itself
    assert foreign_chats(c, thinking_target, as_is) is None
    assert foreign_chats(c, target, dataclasses.replace(back, trained_on={})) is None
