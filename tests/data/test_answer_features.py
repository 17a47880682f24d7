"""Answers and their features in one pass: what a later pass computes, whatever ends the run and wherever."""

import collections
import contextlib
import functools
import io
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from configs.base import get_base
from dspark_jax import prepare, prepare_features
from dspark_jax.data import answer_features, generate
from dspark_jax.data.cache_writer import CacheWriter
from dspark_jax.data.jsonl import read_jsonl
from dspark_jax.data.target_cache import CacheInfo, TargetCache
from dspark_jax.decoding.requests import Request
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.sink import RowFeatures
from dspark_jax.errors import UserError
from dspark_jax.interop.target_io import load_target
from dspark_jax.prepare_features import answers_with_features, fill, open_writer, read_answers
from dspark_jax.training.data import features_cache, learnt_rows

TAPS = (0, 2)
PROMPTS = [
    {"id": "a", "prompt": "one"},
    {"id": "b", "turns": ["one", "two", "three"]},
    {"id": "long", "turns": ["word " * 60, "more"]},  # does not fit
    {"id": "c", "prompt": "another question"},
    {"id": "d", "turns": ["x", "word " * 60]},  # the second turn does not fit
    {"id": "e", "prompt": "y"},
]


@pytest.fixture(scope="module")
def target(chat_model):
    return load_target(chat_model)


def config_of(chat_model, folder: Path):
    folder.mkdir(exist_ok=True)
    c = get_base()
    c.workdir, c.target.path = str(folder / "run"), str(chat_model)
    c.drafter.num_layers, c.drafter.block_size, c.drafter.tap_layers = 1, 4, TAPS
    c.drafter.mask_token, c.drafter.markov_rank = "<|mask|>", 8
    c.data.prompts, c.data.cache, c.data.features = str(folder / "p.jsonl"), str(folder / "cache"), "cache"
    c.data.max_answer_tokens, c.data.max_slots, c.data.max_length = 12, 4, 200
    c.data.cache_dtype, c.train.batch_size = "float32", 2
    Path(c.data.prompts).write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return c


def answers_path(config):
    return Path(config.workdir) / "answers.jsonl"


@pytest.fixture
def computed(monkeypatch):
    """Ids of the rows whose features were computed by another pass."""
    ids, write = [], prepare_features.write_features

    def seen(target, rows, *others):
        ids.extend(row["id"] for _, row in rows)
        write(target, rows, *others)

    monkeypatch.setattr(prepare_features, "write_features", seen)
    return ids


def check_cache(config, target):
    """The cache has every row of the answers once, with the features that a pass of its own computes."""
    lines = [line for _, line in read_jsonl(answers_path(config))]
    assert max(collections.Counter(line["id"] for line in lines).values()) == 1
    rows = learnt_rows(lines, target.tokenizer, "")
    place = [line["id"] for line in lines].index
    cache = TargetCache(config.data.cache, target, TAPS)
    assert cache.rows == sorted(rows, key=lambda row: place(row["id"]))
    afterwards = config.copy_and_resolve_references()
    afterwards.data.cache = config.data.cache + ".afterwards"
    with open_writer(afterwards, target) as writer:
        fill(afterwards, target, read_answers(answers_path(config)), writer)
    assert TargetCache(afterwards.data.cache, target, TAPS).rows == cache.rows
    for number, sequence in enumerate(cache.sequences):
        (ours,) = cache.read([number], [sequence.length])
        (theirs,) = TargetCache(afterwards.data.cache, target, TAPS).read([number], [sequence.length])
        for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert len(other) - len(one) in (0, 1)  # the last token is never run by an engine
            np.testing.assert_allclose(one, other[: len(one)], atol=2e-5 * np.abs(other).max(initial=0))


@pytest.fixture(scope="module")
def answered(chat_model, tmp_path_factory):
    """A config whose answers and features have been written by the command, and what the command said."""
    folder = tmp_path_factory.mktemp("answered")
    config = config_of(chat_model, folder)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        prepare.main(["prepare", "answers", f"--config={config_file(config, folder)}"])
    return config, out.getvalue()


def config_file(config, folder: Path) -> Path:
    text = "from ml_collections import ConfigDict\nimport json\n"
    text += f"def get_config():\n    return ConfigDict(json.loads({config.to_json()!r}))\n"
    (folder / "config.py").write_text(text)
    return folder / "config.py"


def test_one_pass_writes_what_another_would_compute(answered, target, computed):
    config, said = answered
    assert f"features in {config.data.cache}" in said and "bytes =" not in said  # nothing was left to compute
    assert features_cache(config, target.with_taps(TAPS)).lacks_last_rows
    answers_with_features(config, target, answers_path(config))
    assert computed == []
    check_cache(config, target)


def test_a_turn_that_the_next_repeats_is_written_with_it(target, tmp_path):
    """Conversation r is joined to one row, s breaks off behind its first turn, of t no turn is repeated."""

    def line(key, turn, prompt, answer):
        ids = {"prompt_ids": prompt, "answer_ids": answer}
        return {"id": f"{key}#{turn}", "conversation": key, "turn": turn, "finish_reason": "stop", **ids}

    first, second = [3, 4], [5] * 9
    more = [*first, *second, 6, 7]
    events = [
        (line("r", 0, first, second), more), (line("s", 0, first, second), more), (line("t", 0, first, second), [1, 2]),
        ({**line("s", 1, more, []), "finish_reason": "error"}, None),
        (line("r", 1, more, [8] * 10), None), (line("t", 1, [1, 2], [9] * 11), None),
    ]  # fmt: skip
    info = CacheInfo.of(target, TAPS, "float32", 200)
    with CacheWriter(str(tmp_path), info, 4) as writer:
        features = answer_features.AnswerFeatures(writer, target, [])
        for request, (answered, following) in enumerate(events):
            count = len(answered["prompt_ids"] + answered["answer_ids"]) - 1
            rows = RowFeatures(np.full((count, 64), request, np.float32), np.full((count, 32), request, np.float32))
            features.sink.take(Request(request, "", SamplingParams()), rows)
            features.take(request, answered, following)
    rows = learnt_rows([answered for answered, _ in events], None, "")
    with pytest.raises(UserError, match="holds 3 of 4"):
        TargetCache(str(tmp_path), target, TAPS)
    with CacheWriter(str(tmp_path), info, 3) as writer:
        assert set(writer.done) == {"t#0", "r#1", "t#1"} and {row["id"] for row in rows} == {*writer.done, "s#0"}
        writer.expect(3)
    cache = TargetCache(str(tmp_path), target, TAPS)
    assert cache.rows == [row for key in ("t#0", "r#1", "t#1") for row in rows if row["id"] == key]
    for number, request in enumerate((2, 4, 5)):
        (got,) = cache.read([number], [cache.sequences[number].length])
        assert (got.taps_NxMH == request).all() and len(got.taps_NxMH) == cache.sequences[number].length - 1


class Killed(BaseException):
    """What no code handles."""


def kill_at(monkeypatch, where: str, count: int):
    owner, name, before = {
        "before a line": (generate.ResumableJsonl, "append", True),
        "between a line and its features": (answer_features.AnswerFeatures, "take", True),
        "behind the features": (answer_features.AnswerFeatures, "take", False),
        "behind a part": (CacheWriter, "_finish", False),
        "before a computed row": (CacheWriter, "add", True),
    }[where]
    call, left = getattr(owner, name), iter(range(count))

    @functools.wraps(call)
    def killing(*args, **options):
        last = next(left, None) is None
        if last and before:
            raise Killed
        out = call(*args, **options)
        if last:
            raise Killed
        return out

    monkeypatch.setattr(owner, name, killing)


@pytest.mark.parametrize("part_bytes", [1, 1 << 30], ids=["a part a row", "one part"])
@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("before a line", 2),
        ("between a line and its features", 0),
        ("between a line and its features", 5),
        ("behind the features", 3),
        ("behind a part", 1),
        ("before a computed row", 4),
    ],
)
def test_a_run_killed_anywhere_goes_on(chat_model, target, tmp_path, monkeypatch, where, count, part_bytes):
    config = config_of(chat_model, tmp_path)
    monkeypatch.setattr(prepare_features, "CacheWriter", functools.partial(CacheWriter, part_bytes=part_bytes))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, where, count)
        answers_with_features(config, target, answers_path(config))
        raise Killed  # there were fewer such points
    if (Path(config.data.cache) / "cache.json").exists() and where != "behind a part":
        with pytest.raises(UserError, match="run prepare-features again"):
            TargetCache(config.data.cache, target, TAPS)
    answers_with_features(config, target, answers_path(config))
    check_cache(config, target)


def test_ctrl_c_keeps_the_features_of_what_has_ended(chat_model, target, tmp_path, monkeypatch, computed):
    config, take = config_of(chat_model, tmp_path), answer_features.AnswerFeatures.take

    def interrupted(self, *args, **options):
        take(self, *args, **options)
        if self._answered == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(answer_features.AnswerFeatures, "take", interrupted)
        answers_with_features(config, target, answers_path(config))
    answers_with_features(config, target, answers_path(config))
    assert computed == []
    check_cache(config, target)


def test_features_for_eagle3_are_computed_with_the_last_tokens(answered, target, tmp_path, computed):
    config = answered[0].copy_and_resolve_references()
    config.drafter.kind, config.drafter.num_layers, config.drafter.ttt_length = "eagle3", 1, 3
    config.data.cache = str(tmp_path / "cache")
    answers_with_features(config, target, answers_path(config))
    assert {"a", "b#3", "c", "d", "e"} <= set(computed)
    assert not features_cache(config, target.with_taps(TAPS)).lacks_last_rows


def test_a_cache_of_other_answers_or_another_way_of_thinking_is_refused(answered, target, tmp_path):
    config = answered[0].copy_and_resolve_references()
    lines = read_answers(answers_path(config))
    lines[-1] = {**lines[-1], "answer_ids": [*lines[-1]["answer_ids"][:-1], 1]}
    with pytest.raises(UserError, match=f"holds the features of other answers .of '{lines[-1]['id']}'"):
        with open_writer(config, target) as writer:
            fill(config, target, lines, writer)
    config.data.thinking = "off"
    with pytest.raises(UserError, match="another data.thinking"):
        open_writer(config, target)
    with pytest.raises(UserError, match="written with data.thinking='', here it is 'off'"):
        features_cache(config, target.with_taps(TAPS))


def test_features_without_a_place_are_refused_before_any_work(chat_model, tmp_path):
    config = config_of(chat_model, tmp_path)
    config.data.cache = ""
    with pytest.raises(UserError, match="set data.cache"):
        prepare.main(["prepare", "answers", f"--config={config_file(config, tmp_path)}"])
    assert not answers_path(config).exists()
