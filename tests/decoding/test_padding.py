"""Padded vocabularies: rows of the head that no token stands for never come out, whatever they say."""

import dataclasses

import jax
import numpy as np
import pytest
import scipy.stats

from dspark_jax.decoding.adjust import forbid_padding
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.interop.target_io import dense_forward

ANSWER = 20


@pytest.fixture(scope="module")
def loud(talk, tiny_drafter):
    """The talking target with padding louder than every token, and a drafter that says the same."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda a: a, talk.target.params)
        tokens = talk.target.tokenizer.vocab_size
        head = params["lm_head"]["kernel"]
        # Every hidden state has some padding's logit far above the tokens'.
        params["lm_head"] = {"kernel": head.at[:, tokens:].multiply(20.0)}
        target = dataclasses.replace(talk.target, params=params)
        return target, tiny_drafter(target, block=3)


@pytest.fixture
def shared(x64, few_programs) -> None:
    pass


def test_forbidden_ids():
    logits = np.zeros((2, 6), np.float32)
    assert np.isneginf(forbid_padding(logits, 4)).tolist() == [[False] * 4 + [True] * 2] * 2
    ids = np.array([0, 5, 2, 4, 1, 3])
    assert np.isneginf(forbid_padding(logits, 4, ids)).tolist() == [[False, True, False, True, False, False]] * 2
    assert forbid_padding(logits, 6) is logits


@pytest.mark.parametrize("name", ["plain", "whole", "two"])
def test_padding_never_comes_out(shared, talk, loud, name):
    target, drafter = loud
    tokens, like = target.tokenizer.vocab_size, getattr(talk, name)
    engine = Engine(
        target, None if name == "plain" else drafter, sampler=like.policy.sampler, max_slots=like.max_slots,
        strategy={"plain": "off", "whole": "auto", "two": "fixed:2"}[name], rounds_per_dispatch=like.rounds,
        page_size=like.page_size,
    )  # fmt: skip
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=ANSWER, ignore_eos=True, logprobs=20, **more)
        for i, t in enumerate((0.0, 0.5, 1.0, 3.0))
        for more in ({}, {"logit_bias": {tokens + 1: 100.0}}, {"top_k": 2}, {"repetition_penalty": 1.5})
    ]
    prompts = [np.random.default_rng(i).integers(0, tokens, 1 + i).tolist() for i in range(len(params))]
    outs = engine.generate(prompts, params)
    texts = np.asarray([(prompt + out.token_ids)[:16] for prompt, out in zip(prompts, outs, strict=True)])
    dense = dense_forward(target.module, target.params, texts)
    assert (np.argmax(dense.logits, axis=-1) >= tokens).mean() > 0.9
    for out in outs:
        assert len(out.token_ids) == ANSWER and max(out.token_ids) < tokens
        assert all(token < tokens for entry in out.logprobs for token, _ in entry.top)
    if name != "plain":
        # The drafter's padding is forbidden too: it is right far more often than never.
        assert sum(sum(c.accepted) for c in outs) > ANSWER


@pytest.mark.parametrize("name", ["plain", "whole", "two"])
def test_law_of_the_tokens_that_exist(shared, talk, name):
    """Every token of many answers, placed in the distribution function of the target's law without its padding.

    Where the law is right, the places (at random within a token's step) are uniform and independent.
    """
    engine, tokens, count = getattr(talk, name), talk.target.tokenizer.vocab_size, 75
    params = [SamplingParams(temperature=0.7, seed=i, max_tokens=60, ignore_eos=True, logprobs=1) for i in range(count)]
    texts = np.array([[3, 1, *out.token_ids] for out in engine.generate([[3, 1]] * count, params)])
    logits = dense_forward(talk.target.module, talk.target.params, texts).logits[:, 1:-1, :tokens]
    step = np.cumsum(jax.nn.softmax(logits / 0.7, axis=-1), axis=-1)
    above = np.take_along_axis(step, texts[:, 2:, None], axis=-1)[..., 0]
    below = np.where(texts[:, 2:] > 0, np.take_along_axis(step, texts[:, 2:, None] - 1, axis=-1)[..., 0], 0)
    place = below + (above - below) * np.random.default_rng(0).random(above.shape)
    assert scipy.stats.chisquare(np.histogram(place, bins=40, range=(0, 1))[0]).pvalue > 1e-4
