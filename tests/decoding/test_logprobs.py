"""Log-probabilities are the target's own, of every emitted token, whatever warps and penalties a request has (H5)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.interop.drafter_io import load_drafter
from dspark_jax.interop.target_io import Target, dense_forward, load_target

ANSWER = 16
KINDS = [
    {}, {"temperature": 0.0}, {"temperature": 2.0}, {"temperature": 0.6, "top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3},
    {"repetition_penalty": 1.6}, {"presence_penalty": 2.0, "frequency_penalty": 1.0}, {"logit_bias": {4: 8.0}},
    {"temperature": 0.0, "logit_bias": {4: -100.0}}, {"min_tokens": 10, "ignore_eos": False},
]  # fmt: skip


def check(target: Target, tokens: int, prompts, params, outs, tolerance: float) -> None:
    """Chosen and likeliest log-probabilities against one dense pass over prompt and answer."""
    for prompt, asked, out in zip(prompts, params, outs, strict=True):
        text = np.zeros((1, 64), int)
        text[0, : len(prompt) + len(out.token_ids)] = prompt + out.token_ids
        start = len(prompt) - 1
        logits = dense_forward(target.module, target.params, jnp.asarray(text)).logits[0, start:, :tokens]
        expected = np.asarray(jax.nn.log_softmax(logits, axis=-1))
        assert len(out.logprobs) == len(out.token_ids) > 0
        for row, token, entry in zip(expected, out.token_ids, out.logprobs, strict=False):
            assert entry.token_id == token and abs(entry.logprob - row[token]) < tolerance
            ids, values = [i for i, _ in entry.top], [value for _, value in entry.top]
            assert len(set(ids)) == len(ids) == asked.logprobs
            np.testing.assert_allclose(values, np.sort(row)[::-1][: asked.logprobs], atol=tolerance)
            np.testing.assert_allclose(values, row[ids], atol=tolerance)


@pytest.mark.parametrize("name", ["plain", "whole", "two"])
def test_log_probabilities_in_float64(x64, few_programs, pages_come_back, talk, name):
    rng = np.random.default_rng(0)
    base = {"max_tokens": ANSWER, "ignore_eos": True}
    params = [
        SamplingParams(**(base | kind | {"seed": i, "logprobs": 1 + 3 * (i % 5)})) for i, kind in enumerate(KINDS)
    ]
    prompts = [rng.integers(0, 30, 1 + i % 5).tolist() for i in range(len(params))]
    outs = getattr(talk, name).generate(prompts, params)
    check(talk.target, talk.target.tokenizer.vocab_size, prompts, params, outs, 1e-9)


def test_who_asks_for_none_gets_none(x64, few_programs, pages_come_back, talk):
    """Also beside requests that do, and 0 is the chosen token's alone."""
    wishes = [None, 0, 5, None, 20, 0]
    params = [SamplingParams(seed=1, max_tokens=ANSWER, logprobs=n, ignore_eos=True) for n in wishes]
    outs = talk.plain.generate([[1, 2]] * len(params), params)
    assert len({tuple(out.token_ids) for out in outs}) == 1
    for wish, out in zip(wishes, outs, strict=True):
        assert (out.logprobs is None) == (wish is None)
        if wish is not None:
            assert [len(entry.top) for entry in out.logprobs] == [wish] * ANSWER
            assert [entry.logprob for entry in out.logprobs] == [entry.logprob for entry in outs[4].logprobs]


def test_log_probabilities_of_the_golden_pair(golden, few_programs):
    target = load_target(golden / "target", dtype="float32")
    drafter = load_drafter(golden / "dspark_vanilla", target)
    prompts = [np.random.default_rng(i).integers(0, 256, 5 + i).tolist() for i in range(4)]
    params = [SamplingParams(temperature=i / 2, seed=i, max_tokens=ANSWER, logprobs=5) for i in range(4)]
    engine = Engine(target, drafter, max_slots=4, max_length=64, rounds_per_dispatch=32)
    check(target, target.config.vocab_size, prompts, params, engine.generate(prompts, params), 1e-3)
