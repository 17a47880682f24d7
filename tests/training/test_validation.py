"""Rows held out, what is measured on them, and the best weights: through interruptions too."""

import json
import os
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.base import get_base
from dspark_jax.errors import UserError
from dspark_jax.interop.drafter_io import load_drafter
from dspark_jax.interop.target_io import load_target
from dspark_jax.training import loop, parts, validation
from dspark_jax.training.checkpoints import BestWeights, open_checkpoints
from dspark_jax.training.validation import fixed_batches, is_held_out, split_rows
from tests.training.test_train import tiny_config


def row(key, prompt=3, answer=12, **more):
    return {"id": key, "prompt_ids": [1] * prompt, "answer_ids": [2] * answer, **more}


def learnt(rows):
    return {r["id"] for r in rows if r["answer_ids"]}


@settings(deadline=None, max_examples=30)
@given(st.sets(st.text(max_size=8), max_size=40), st.sets(st.text(max_size=8), max_size=40), st.floats(0, 0.99))
def test_a_row_stays_on_its_side_when_data_grows(before, more, part):
    small, grown = ([row(key) for key in sorted(keys)] for keys in (before, before | more))
    (train, held), (train_grown, held_grown) = split_rows(small, part), split_rows(grown, part)
    assert [r["id"] for r in train] == [r["id"] for r in held] == [r["id"] for r in small]
    assert learnt(train) | learnt(held) == before and not learnt(train) & learnt(held)
    assert learnt(train) <= learnt(train_grown) and learnt(held) <= learnt(held_grown)


def test_about_the_part_asked_for_and_whole_conversations():
    rows = [row(f"{i}#{turn}", conversation=str(i)) for i in range(2000) for turn in (1, 2)]
    _, held = split_rows(rows, 0.1)
    conversations = {r["id"].split("#")[0] for r in held if r["answer_ids"]}
    assert 160 < len(conversations) < 240
    assert len(learnt(held)) == 2 * len(conversations)
    with pytest.raises(UserError, match="data.validation=2"):
        split_rows(rows, 2)


def test_every_row_that_is_held_out_counts_once():
    rows = [row("a"), row("b", answer=3), row("c", prompt=70), row("d"), row("e", answer=200)]
    batches = fixed_batches(rows, 3, 96)
    counted = [int(n) for b in batches for n, mask in zip(b.row_B, b.loss_mask_BxS, strict=True) if mask.any()]
    assert sorted(counted) == [0, 2, 3, 4]
    assert sum(float(b.loss_mask_BxS.sum()) for b in batches) == 12 + 12 + 12 + 93
    assert {b.token_BxS.shape[0] for b in batches} == {3}


# ------------------------------------------------------------------------------------------------------------ training

PART = 0.35


def validating_config(chat_model, workdir):
    """Ten prompts, some held out; no validation at the checkpoints but at every third step and the last."""
    workdir.parent.mkdir(exist_ok=True)
    config = tiny_config(chat_model, workdir, 8)
    config.data.validation, config.train.validate_every, config.train.ema = PART, 3, 0.9
    config.train.batch_size = 3
    return config


def metrics(config):
    lines = (Path(config.workdir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def validated(config):
    return {r["step"]: r["validation"] for r in metrics(config) if "validation" in r}


@pytest.fixture(scope="module")
def unbroken(chat_model, tmp_path_factory):
    config = validating_config(chat_model, tmp_path_factory.mktemp("validation") / "run")
    return config, loop.train(config)


def test_held_out_rows_are_measured_and_never_trained_on(unbroken, chat_model, monkeypatch):
    config, _ = unbroken
    found = validated(config)
    assert sorted(found) == [3, 6, 8]
    for measured in found.values():
        assert len(measured["accept_rate"]) == 4 and measured["tau_probabilistic"] > 1 and measured["loss"] > 0
    held = {str(i) for i in range(10) if is_held_out(str(i), PART)}
    assert 0 < len(held) < 6

    class Spy(parts.Batches):
        def __init__(self, rows, *others, **options):
            super().__init__(rows, *others, **options)
            used = {rows[sample.row]["id"] for step in range(12) for sample in self.samples(step)}
            assert used and not used & held

    config = config.copy_and_resolve_references()
    monkeypatch.setattr(parts, "Batches", Spy)
    loop.train(config)


def test_the_drafter_is_the_best_one_of_the_averaged_weights(unbroken, chat_model):
    config, out = unbroken
    found = validated(config)
    best = BestWeights(config.workdir)
    assert best.tau == max(m["tau_probabilistic"] for m in found.values())
    assert best.tau == found[best.step]["tau_probabilistic"]
    drafter = load_drafter(out, load_target(chat_model))
    kept = best.restore(drafter.params)
    for ours, theirs in zip(jax.tree.leaves(drafter.params), jax.tree.leaves(kept), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2**-7, atol=1e-6)  # files are bfloat16


def test_worse_weights_do_not_replace_the_best_and_the_step_is_told(chat_model, tmp_path, monkeypatch, capsys):
    config = validating_config(chat_model, tmp_path / "a" / "run")
    taus = iter([1.5, 1.9, 1.7])
    measure = validation.Validation.measure
    worse = lambda *args: measure(*args) | {"tau_probabilistic": next(taus)}  # noqa: E731
    monkeypatch.setattr(validation.Validation, "measure", worse)
    loop.train(config)
    assert "best on validation: step 6, 1.900 tokens per round" in capsys.readouterr().err
    assert BestWeights(config.workdir).step == 6 and open_checkpoints(config).latest_step() == 8


@pytest.mark.parametrize("where", ["before a validation", "in a validation", "in the last validation"])
def test_a_run_that_is_terminated_validates_as_an_unbroken_one(unbroken, chat_model, tmp_path, monkeypatch, where):
    whole, out = unbroken
    config = validating_config(chat_model, tmp_path / "a" / "run")
    config.data.prompts = whole.data.prompts
    terminate = lambda: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    with monkeypatch.context() as patch:
        if where == "before a validation":
            step, train_step = 5, loop.train_step
            counted = iter(range(1, 99))

            def stopped_step(*args):
                if next(counted) == 5:
                    terminate()
                return train_step(*args)

            patch.setattr(loop, "train_step", stopped_step)
        else:
            step, measure = 3 if where == "in a validation" else 8, validation.Validation.measure
            wanted = iter([step == 3, False, True])

            def stopped_measure(*args):
                if next(wanted):
                    terminate()
                return measure(*args)

            patch.setattr(validation.Validation, "measure", stopped_measure)
        with pytest.raises(KeyboardInterrupt, match=f"stopped after step {step} of 8; the same command continues"):
            loop.train(config)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    again = loop.train(config)
    assert [r["step"] for r in metrics(config)] == [r["step"] for r in metrics(whole)]
    for mine, theirs in zip(metrics(config), metrics(whole), strict=True):
        for ours, other in ((mine, theirs), (mine.get("validation", mine), theirs.get("validation", theirs))):
            assert ours.get("loss", 0) == pytest.approx(other.get("loss", 0), rel=1e-7)
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_a_part_that_holds_nothing_out_is_named(chat_model, tmp_path):
    config = validating_config(chat_model, tmp_path / "a" / "run")
    config.data.validation = 1e-9
    with pytest.raises(UserError, match="data.validation=1e-09 holds out none of 10 rows"):
        loop.train(config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data.validation": 2.0}, "data.validation=2.0"),
        ({"train.micro_steps": 3, "train.batch_size": 8}, "train.micro_steps=3 has to divide train.batch_size=8"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_any_work(tmp_path, changes, words):
    """Before the target is even looked for, and long before it writes prompts and answers."""
    config = get_base()
    config.workdir, config.target.path = str(tmp_path / "run"), str(tmp_path / "no model here")
    config.update_from_flattened_dict(changes)
    with pytest.raises(UserError, match=words):
        loop.train(config)
    assert not (tmp_path / "run").exists()
