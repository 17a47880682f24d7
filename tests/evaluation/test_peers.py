"""Ours against `transformers` on a tiny model: the same texts four ways, and a table. Speeds are never asserted."""

import importlib.util
import sys
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from bench import comparison
from configs.base import get_base
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.errors import UserError
from dspark_jax.serving import load_models, make_engine

HAS_TRANSFORMERS = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


@pytest.fixture
def config(chat_model: Path) -> ConfigDict:
    c = get_base()
    c.target.path, c.serve.drafter, c.serve.strategy = str(chat_model), "lookup", "fixed:2"
    return c


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="needs torch and transformers")
def test_four_ways_give_the_same_texts(config: ConfigDict, capsys: pytest.CaptureFixture[str]) -> None:
    report = comparison.measure(config, Path(sys.executable), None, limit=2, tokens=6, turns=2)
    assert [row["way"] for row in report["rows"]] == [
        comparison.PLAIN, comparison.LOOKUP, comparison.OFF, comparison.DRAFTED,
    ]  # fmt: skip
    assert all(row["same_texts"] == 2 and 2 <= row["tokens"] <= 12 and row["seconds"] > 0 for row in report["rows"])
    assert not report["differences"] and not report["compilations_after_warm_up"]
    comparison.print_report(report)
    assert capsys.readouterr().out.count("2 of 2") == 4


class OddPeer:
    """Answers as ours does, but for the last token where it looks up."""

    versions, cpu_seconds = {"torch": "0", "transformers": "0"}, 0.0

    def __init__(self, engine: Engine):
        self.engine = engine

    def answer(self, prompts, max_tokens, eos, lookup):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        answers = [completion.token_ids for completion in self.engine.generate(prompts, params)]
        return 1.0, [[*ids[:-1], (ids[-1] + lookup) % 256] for ids in answers]


def test_a_text_that_differs_is_counted_and_shown(config: ConfigDict) -> None:
    target, drafter = load_models(config)
    engines = {
        comparison.OFF: make_engine(config, target, None, strategy="off", max_slots=1),
        comparison.DRAFTED: make_engine(config, target, drafter, max_slots=1),
    }
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    peer = OddPeer(engines[comparison.OFF])
    report = comparison.compare(target, peer, engines, [[1, 2, 3], [4, 5, 6]], params, turns=2)
    assert [row["same_texts"] for row in report["rows"]] == [2, 0, 2, 2]
    assert [line.partition(":")[0] for line in report["differences"]] == [
        f"prompt {number}, {comparison.LOOKUP}" for number in (1, 2)
    ]
    assert not report["compilations_after_warm_up"]  # a prompt that is still cached would be read by another program
    assert all("DIFFERENT at token 4" in line for line in report["differences"])


def test_a_peer_that_does_not_start_is_named(config: ConfigDict) -> None:
    with pytest.raises(UserError, match="transformers ended with code 1"):
        comparison.measure(config, Path("/bin/false"), None, limit=1, tokens=4, turns=2)


def test_it_is_compared_with_a_drafter(config: ConfigDict) -> None:
    config.serve.drafter = ""
    with pytest.raises(UserError, match="serve.drafter"):
        comparison.measure(config, Path(sys.executable), None, limit=1, tokens=4, turns=2)
