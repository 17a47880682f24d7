"""The profile and calibrate commands, from prompts to the files that the engine then uses."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from dspark_jax import calibrate, profile
from dspark_jax.decoding.requests import Completion
from dspark_jax.errors import UserError
from dspark_jax.evaluation.metrics import record_rounds
from dspark_jax.interop.drafter_io import Drafter, borrow, init_drafter
from dspark_jax.interop.export import save_drafter
from dspark_jax.interop.target_io import load_target
from dspark_jax.models.config import DrafterConfig, draft_decoder
from dspark_jax.scheduling.simulate import load_trace
from dspark_jax.serving import load_models, make_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Path:
    """A config for a tiny pair, and prompts."""
    path = tmp_path_factory.mktemp("calibrate")
    target = load_target(chat_model, dtype="float32")
    config = DrafterConfig(
        draft_decoder(target.config, 1), 3, target.tokenizer.token_id("<|mask|>"), (0, 1), 3, target.config.vocab_size,
        markov_rank=4,
    )  # fmt: skip
    drafter = Drafter(config, init_drafter(config, jax.random.key(0)), borrow(target))
    save_drafter(path / "drafter", drafter, target)
    lines = [json.dumps({"prompt": word * 3}) for word in "abcdefgh"]
    (path / "prompts.jsonl").write_text("\n".join(lines))
    (path / "config.py").write_text(
        "from configs.base import get_base\n\n\ndef get_config():\n    c = get_base()\n"
        f"    c.target.path, c.workdir = {str(chat_model)!r}, {str(path)!r}\n"
        f"    c.serve.drafter = {str(path / 'drafter')!r}\n"
        "    c.serve.max_slots, c.serve.max_length, c.sampling.max_tokens = 1, 64, 24\n    return c\n"
    )
    return path


def argv(folder: Path, *more: str) -> list[str]:
    return ["command", f"--config={folder / 'config.py'}", *more]


def config_of(folder: Path):
    return calibrate.parse_config(argv(folder))[0]


def test_calibrate_leaves_temperatures_that_the_engine_uses(folder: Path) -> None:
    calibrate.main(argv(folder, f"--prompts={folder / 'prompts.jsonl'}", "--at=0,1"))
    names = {file.name for file in (folder / "drafter").iterdir()}
    assert {"temperatures.json", "reliability_rejection_greedy.png"} <= names
    assert load_trace(folder / "drafter" / "trace_rejection_greedy.json").confidence_NxK.shape[1] == 3
    engine = make_engine(config_of(folder), *load_models(config_of(folder)), strategy="threshold:0.5")
    assert set(engine.temperatures.fitted) == {"rejection greedy", "rejection 0.9-1.3"}


def test_a_lookup_has_no_confidences_to_calibrate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = argv(folder, f"--prompts={folder / 'prompts.jsonl'}", "--config.serve.drafter=lookup")
    monkeypatch.setattr("sys.argv", line)  # where overrides of a config are looked up
    with pytest.raises(UserError, match="needs a drafter with a confidence head"):
        calibrate.main(line)


def test_profile_leaves_a_cost_table_that_makes_auto_load_aware(folder: Path) -> None:
    profile.main(argv(folder))
    engine = make_engine(config_of(folder), *load_models(config_of(folder)))
    assert engine.policy.strategy.name == "load_aware"
    assert engine.load.table.stamp.fingerprint == engine.target.fingerprint


def test_a_table_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    table = json.loads((folder / "costs.json").read_text())
    table["stamp"]["fingerprint"] = "another"
    other = tmp_path / "costs.json"
    other.write_text(json.dumps(table))
    config = config_of(folder)
    config.serve.cost_table = str(other)
    with pytest.raises(UserError, match="fingerprint"):
        make_engine(config, *load_models(config))


def test_a_cut_round_says_nothing_of_its_later_drafts() -> None:
    # Rounds of 3 and 1 tokens; the second ended on its first draft, a stop token.
    out = Completion([1, 2, 3, 4], "", "stop", [3, 3], [3, 3], [2, 1], confidence=[[0.1, 0.2, 0.3], [1.0, 2.0, 3.0]])
    rounds = record_rounds([out])
    np.testing.assert_array_equal(rounds.verified_N, [3, 1])
    np.testing.assert_array_equal(rounds.accepted_N, [2, 1])


@pytest.mark.parametrize(
    ("flags", "words"), [((), "--prompts"), (("--prompts=x", "--config.serve.drafter="), "serve.drafter")]
)
def test_what_is_missing_is_named(folder: Path, flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        calibrate.main(argv(folder, *flags))
