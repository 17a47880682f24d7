"""The training door end to end on a tiny model: data, resume, interruption, errors."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from configs.base import get_base
from dspark_jax.data.batches import Batches, draft_vocabulary
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.errors import UserError
from dspark_jax.interop.drafter_io import load_drafter
from dspark_jax.interop.target_io import load_target
from dspark_jax.training.checkpoints import open_checkpoints
from dspark_jax.training.drafters import new_drafter_config
from dspark_jax.training.features import FeatureSource
from dspark_jax.training.loop import train

ROOT = Path(__file__).parents[2]


def tiny_config(chat_model, workdir, steps):
    c = get_base()
    c.workdir = str(workdir)
    c.target.path = str(chat_model)
    c.drafter.num_layers, c.drafter.block_size, c.drafter.tap_layers = 1, 4, (0, 2)
    c.drafter.mask_token, c.drafter.draft_vocab_size, c.drafter.markov_rank = "<|mask|>", 64, 8
    c.data.num_prompts, c.data.max_prompt_tokens, c.data.max_answer_tokens = 10, 24, 24
    c.data.prompts = str(workdir.parent / "prompts.jsonl")
    c.data.max_length, c.data.max_slots = 96, 8
    c.train.steps, c.train.batch_size, c.train.num_anchors = steps, 4, 4
    c.train.log_every, c.train.checkpoint_every = 1, 2
    rows = [{"id": str(i), "turns": [f"question number {i}?"]} for i in range(10)]
    Path(c.data.prompts).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return c


def losses(workdir):
    return {
        row["step"]: row["loss"] for row in map(json.loads, (Path(workdir) / "metrics.jsonl").read_text().splitlines())
    }


@pytest.fixture(scope="module")
def unbroken(chat_model, tmp_path_factory):
    config = tiny_config(chat_model, tmp_path_factory.mktemp("train") / "run", 6)
    return config, train(config)


def test_a_run_leaves_a_drafter_that_fits_its_target(unbroken, chat_model):
    config, out = unbroken
    target = load_target(chat_model)
    drafter = load_drafter(out, target)
    assert drafter.config.draft_vocab_size == 64 and drafter.target_fingerprint == target.fingerprint
    assert drafter.trained_on == {"template": target.tokenizer.template_hash, "thinking": ""}
    assert drafter.borrowed.token_ids_Vd.tolist() == sorted(set(drafter.borrowed.token_ids_Vd.tolist()))
    assert set(target.config.eos_token_ids) <= set(drafter.borrowed.token_ids_Vd.tolist())
    assert sorted(losses(config.workdir)) == [1, 2, 3, 4, 5, 6]


def test_the_loss_falls(unbroken):
    by_step = losses(unbroken[0].workdir)
    assert by_step[6] < by_step[1]


def test_training_goes_on_from_a_drafter_that_is_there(unbroken, chat_model, tmp_path):
    config = tiny_config(chat_model, tmp_path / "run", 1)
    config.drafter.init_from, config.train.lr = str(unbroken[1]), 0.0
    target = load_target(chat_model)
    before, after = load_drafter(unbroken[1], target), load_drafter(train(config), target)
    assert jax.tree.all(jax.tree.map(np.array_equal, before.params, after.params))
    assert np.array_equal(before.borrowed.token_ids_Vd, after.borrowed.token_ids_Vd)
    # The first loss is that of the trained drafter, on its own data.
    assert losses(config.workdir)[1] < losses(unbroken[0].workdir)[1]
    config.drafter.markov_rank, config.workdir = 4, str(tmp_path / "other")
    with pytest.raises(UserError, match="init_from=.* has other sizes .*: markov_rank 8 there, 4 here"):
        train(config)
    config.drafter.init_from = str(tmp_path / "nowhere")
    with pytest.raises(UserError, match="nowhere"):
        train(config)
    assert not (tmp_path / "other").exists()  # refused before anything is written


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("domino", {"head_type": "domino", "gru_width": 8, "confidence": False}),
        ("eagle3", {"kind": "eagle3", "ttt_length": 3}),
    ],
)
def test_other_kinds_are_trained_and_saved(chat_model, tmp_path, kind, changes):
    config = tiny_config(chat_model, tmp_path / "run", 4)
    config.drafter.update(changes)
    config.train.curriculum = 1.0 if kind == "domino" else 0.0
    target = load_target(chat_model)
    drafter = load_drafter(train(config), target)
    by_step = losses(config.workdir)
    assert by_step[4] < by_step[1]
    made = new_drafter_config(config, target)
    assert (drafter.config.num_drafts, drafter.config.tap_layers) == (made.num_drafts, made.tap_layers)


@pytest.mark.parametrize("keep_features", [False, True])
def test_a_resumed_run_repeats_the_unbroken_one(chat_model, tmp_path, keep_features, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole, broken = (tiny_config(chat_model, tmp_path / name / "run", 6) for name in "ab")
    broken.data.prompts = whole.data.prompts
    for config in (whole, broken):
        config.train.keep_features = keep_features
    train(whole)
    import dspark_jax.training.loop as loop

    class StopAfterThree(loop._StopSignal):
        @property
        def asked(self):
            self.polls = getattr(self, "polls", 0) + 1
            return self.polls >= 3

        @asked.setter
        def asked(self, value):
            pass

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_StopSignal", StopAfterThree)
        with pytest.raises(KeyboardInterrupt, match="after step 3 of 6"):
            train(broken)
    train(broken)
    a, b = losses(whole.workdir), losses(broken.workdir)
    assert b == {step: pytest.approx(a[step], rel=1e-7) for step in a}


def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_go_on(chat_model, tmp_path):
    config = tiny_config(chat_model, tmp_path / "run", 100_000)
    text = Path(tmp_path / "config.py")
    text.write_text(
        "from ml_collections import ConfigDict\nimport json\n"
        f"def get_config():\n    return ConfigDict(json.loads({config.to_json()!r}))\n"
    )
    command = [sys.executable, str(ROOT / "train.py"), f"--config={text}"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ})
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command continues" in err.splitlines()[-1]
    last = max(losses(tmp_path / "run"))
    assert open_checkpoints(config).latest_step() == last


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def saves_once(save):
    """Orbax's `save`, to which the disk is full from the second time on."""
    left = iter([save])
    return lambda *args, **options: next(left, full_disk)(*args, **options)


def fails_at_the_end(wait):
    """Orbax saves in the background, and may say so late."""

    def call(manager):
        wait(manager)
        if manager.latest_step() == 6:
            full_disk()

    return call


@pytest.mark.parametrize(
    ("method", "fails", "kept"), [("save", saves_once, 2), ("wait_until_finished", fails_at_the_end, 6)]
)
def test_a_disk_that_is_full_at_a_checkpoint_costs_only_the_steps_since_the_last(
    unbroken, chat_model, tmp_path, monkeypatch, method, fails, kept
):
    config = tiny_config(chat_model, tmp_path / "run", 6)
    config.data.prompts = unbroken[0].data.prompts
    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, method, fails(getattr(ocp.CheckpointManager, method)))
        with pytest.raises((UserError, OSError), match="the disk is full; the checkpoints before|No space left"):
            train(config)
    assert open_checkpoints(config).latest_step() == kept
    assert load_drafter(train(config), load_target(chat_model))
    assert losses(config.workdir) == {step: pytest.approx(loss) for step, loss in losses(unbroken[0].workdir).items()}


def test_a_disk_that_is_full_at_a_metric_is_named_and_half_a_line_is_no_harm(unbroken, chat_model, tmp_path):
    config = tiny_config(chat_model, tmp_path / "run", 6)
    config.data.prompts = unbroken[0].data.prompts
    metrics = Path(config.workdir) / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.symlink_to("/dev/full")
    with pytest.raises(UserError, match="metrics.jsonl cannot be written: the disk is full; .* the same command"):
        train(config)
    metrics.unlink()
    metrics.write_text('{"step": 0, "lo')
    train(config)
    assert losses(config.workdir) == {step: pytest.approx(loss) for step, loss in losses(unbroken[0].workdir).items()}


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_a_drafter_that_knows_one_answer_by_heart_is_accepted_when_it_is_served(chat_model, tmp_path, optimizer):
    """Training and serving agree on positions, masks and previous tokens, or few drafts would be accepted."""
    config = tiny_config(chat_model, tmp_path / "run", 250)
    Path(config.data.prompts).write_text('{"id": "0", "prompt": "question"}\n')
    config.data.temperatures, config.data.max_answer_tokens, config.data.max_slots = (0.0,), 40, 1
    config.train.batch_size, config.train.num_anchors, config.train.lr = 1, 40, 1e-2
    config.train.optimizer, config.train.ema = optimizer, 0.9
    config.train.ce_weight, config.train.checkpoint_every, config.train.log_every = 0.5, 1000, 250
    target = load_target(chat_model)
    drafter = load_drafter(train(config), target)
    answer = json.loads((tmp_path / "run" / "answers.jsonl").read_text())
    engine = Engine(target, drafter, strategy="fixed:4", max_slots=1)
    params = SamplingParams(temperature=0.0, max_tokens=len(answer["answer_ids"]))
    (out,) = engine.generate([answer["prompt_ids"]], params)
    assert len(set(out.token_ids)) > 5  # no loop of a few tokens, which would be easy
    assert out.token_ids == answer["answer_ids"] and out.tokens_per_round > 4.4


def test_another_config_in_the_same_workdir_is_refused_by_name(unbroken):
    other = unbroken[0].copy_and_resolve_references()
    other.train.lr = 1.0
    with pytest.raises(UserError, match="train.lr"):
        open_checkpoints(other)


def test_kept_features_do_not_depend_on_the_batch(chat_model):
    target = load_target(chat_model, tap_layers=(0, 2))
    rows = [{"prompt_ids": [1, 2, 3], "answer_ids": list(range(4, 4 + n))} for n in (10, 70, 20, 30)]
    batches = Batches(rows, 2, 96, seed=0)
    source = FeatureSource(target, keep=True)
    first, again = source(batches(0)), FeatureSource(target, keep=True)(batches(0))
    assert all(
        (np.asarray(a) == np.asarray(b)).all()
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True)
    )


def test_batches_are_a_function_of_the_step_and_cover_an_epoch():
    rows = [{"prompt_ids": [1] * 3, "answer_ids": [2] * (8 + i)} for i in range(12)]
    batches = Batches(rows, 4, 64, seed=3)
    order = [batches(step) for step in range(6)]
    assert sorted(int(r) for b in order[:3] for r in b.row_B) == list(range(12))
    again = Batches(rows, 4, 64, seed=3)(4)
    assert (again.token_BxS == order[4].token_BxS).all() and (again.row_B == order[4].row_B).all()
    for batch in order:
        for tokens, mask, length in zip(batch.token_BxS, batch.loss_mask_BxS, batch.length_B, strict=True):
            assert mask.sum() == length - 3 and (tokens[:3] == 1).all() and (tokens[length:] == 0).all()


def test_too_few_rows_for_a_batch_are_refused():
    with pytest.raises(UserError, match="fewer than a batch of 4"):
        Batches([{"prompt_ids": [1], "answer_ids": [2] * 9}], 4, 64, seed=0)


def test_the_draft_vocabulary_is_the_most_frequent_tokens_and_the_end():
    rows = [{"prompt_ids": [], "answer_ids": [5, 5, 5, 7, 7, 9]}]
    assert draft_vocabulary(rows, 3, always=(2,), vocab_size=20).tolist() == [2, 5, 7]
    assert draft_vocabulary(rows, 6, always=(2,), vocab_size=20).tolist() == [0, 1, 2, 5, 7, 9]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token": "<|nope|>"}, "mask_token"),
        ({"mask_token": "<|end|>"}, "mask token"),
        ({"tap_layers": (0, 9)}, "tap layers"),
        ({"head_type": "psychic"}, "psychic"),
    ],
)
def test_a_drafter_that_cannot_be_is_refused_before_any_work(chat_model, tmp_path, change, message):
    config = tiny_config(chat_model, tmp_path / "run", 2)
    config.drafter.update(change)
    with pytest.raises(UserError, match=message):
        train(config)
    assert not (tmp_path / "run" / "answers.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": "sgd"}, "unknown train.optimizer 'sgd'"),
        ({"ema": 1.0}, "train.ema=1.0"),
        ({"kernels": "cuda"}, "unknown train.kernels 'cuda'"),
        ({"dpace": 1.5}, "train.dpace=1.5"),
        ({"curriculum": 2.0}, "train.curriculum=2.0"),
    ],
)
def test_training_that_cannot_be_is_refused_before_any_work(chat_model, tmp_path, change, message):
    config = tiny_config(chat_model, tmp_path / "run", 2)
    config.train.update(change)
    with pytest.raises(UserError, match=message):
        train(config)
    assert not (tmp_path / "run").exists()


def test_drafter_configs_are_hashable(unbroken, chat_model):
    # They are static arguments of jitted functions.
    drafter = load_drafter(unbroken[1], load_target(chat_model))
    assert hash(drafter.config) == hash(dataclasses.replace(drafter.config))
