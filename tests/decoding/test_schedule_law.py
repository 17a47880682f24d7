"""Scheduled verification keeps the law of the tokens: every strategy, sampler and head, in mixed loads (method.md)."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.interop.drafter_io import Drafter
from dspark_jax.interop.target_io import Target
from dspark_jax.models.config import Attention, Rope
from dspark_jax.scheduling.scheduler import RoundCost, row_buckets
from tests.decoding.laws import FAIL, PASS
from tests.decoding.loads import BLOCK, LOADS, SIZE, STRATEGIES, VOCAB, answer_law, answers, fit

HIDDEN = 8
PROMPTS = [[3], [2], [0]]
PARAMS = [SamplingParams(temperature=t, top_k=k, max_tokens=4, seed=0) for t, k in ((1.0, 0), (0.0, 0), (0.8, 4))]
CERTAIN = 200.0  # a logit whose sigmoid is 1, and 0 below zero


@pytest.fixture(scope="module")
def target(tiny_target) -> Target:
    """Its law depends on all tokens so far."""
    attention = (Attention(1, 4, Rope(10000.0)),)
    return tiny_target(
        "float32", VOCAB, HIDDEN, layers=1, max_length=8, sharpness=1.5, context=1.0, num_heads=2, attention=attention
    )


@pytest.fixture(scope="module")
def drafters(target, tiny_drafter) -> dict[str, Drafter]:
    """By head: right often, not always, with confidences that mean nothing."""
    markov = tiny_drafter(target, "bigram", BLOCK, noise=0.8, layer_kinds=(0,))
    r, rng = VOCAB, np.random.default_rng(2)
    joint = {"kernel": rng.standard_normal((2 * r + HIDDEN, 3 * r)), "bias": rng.standard_normal(3 * r)}
    joint = {name: jnp.asarray(a, jnp.float32) for name, a in joint.items()}
    params = markov.params | {"markov_head": markov.params["markov_head"] | {"joint_proj": joint}}
    rnn = dataclasses.replace(markov, config=dataclasses.replace(markov.config, head_type="rnn"), params=params)
    return {"markov": markov, "rnn": rnn}


def trusting(drafter: Drafter, logits_V: list[float]) -> Drafter:
    """The drafter with confidences that are a function of the previous token: the logit of each."""
    kernel = np.zeros((HIDDEN + VOCAB, 1), np.float32)
    kernel[HIDDEN:, 0] = logits_V  # its W1 tells tokens apart
    proj = {"kernel": jnp.asarray(kernel), "bias": jnp.zeros(1)}
    return dataclasses.replace(drafter, params=drafter.params | {"confidence_head": {"proj": proj}})


ADVERSARY = [CERTAIN, -CERTAIN, CERTAIN, CERTAIN, -CERTAIN]


def costs() -> RoundCost:
    """A random staircase for every load, between free and dear, some with cliffs."""
    rng = np.random.default_rng(0)
    rows_J = np.array(row_buckets(SIZE, BLOCK), np.int32)
    per_row = np.exp(rng.uniform(np.log(0.01), np.log(0.5), (LOADS, 1)))
    rises = per_row * np.diff(rows_J) * rng.choice([0.0, 0.5, 2.0], (LOADS, len(rows_J) - 1))
    seconds = np.cumsum(np.insert(rises, 0, 1, axis=1), axis=1).astype(np.float32)
    return RoundCost(np.tile(rows_J, (LOADS, 1)), seconds, rng.uniform(0, 0.5, LOADS).astype(np.float32))


@pytest.fixture(scope="module")
def laws(target):
    return [answer_law(target, prompt[0], params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.fixture(scope="module")
def run(target, drafters, laws):
    """run(head, adversary, ...) -> p-values of each of a load's requests, and how often each length was verified."""

    def run(head: str, adversary: bool, **options):
        drafter = trusting(drafters[head], ADVERSARY) if adversary else drafters[head]
        out = answers(target, drafter, PROMPTS, PARAMS, costs(), **options)
        return [fit(out.tokens[:, i], joint) for i, joint in enumerate(laws)], out.shares()

    return run


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("adversary", [False, True])
@pytest.mark.parametrize(("head", "sampler"), [("markov", "rejection"), ("rnn", "rejection"), ("markov", "coupled")])
def test_law(run, head, sampler, adversary, strategy):
    import time
    t=time.time()
    fits, shares = run(head, adversary, sampler=sampler, planner=strategy)
    print(head, sampler, adversary, strategy, np.array(fits), shares.round(3), time.time()-t)
    assert min(fits) > PASS


MISTAKES = ["threshold:0.5, leaky", "load_aware, leaky", "load_aware_async, leaky", "global search over current confidences", "dcut by the drawn token"]
@pytest.mark.parametrize("sampler", ["rejection", "coupled"])
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("adversary", [False, True])
def test_mistakes(run, sampler, mistake, adversary):
    fits, shares = run("markov", adversary, sampler=sampler, planner=mistake)
    print(sampler, mistake, adversary, np.array(fits), shares.round(3))
