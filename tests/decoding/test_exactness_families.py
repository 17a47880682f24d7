"""Speculation changes nothing for Gemma4's layers and for sliding windows, in target and drafter (float64)."""

import dataclasses
import functools

import numpy as np
import pytest

from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.models.config import Attention, Rope

pytestmark = pytest.mark.usefixtures("x64")

VOCAB = 41
ROPE = Rope(10000.0)
FULL = Attention(num_kv_heads=2, head_dim=8, rope=ROPE)
WINDOWED = dataclasses.replace(FULL, window=6)
GEMMA4_FULL = Attention(1, 16, Rope(100.0, "proportional", partial_rotary_factor=0.5), keys_as_values=True, scale=1.0)
GEMMA4_SLIDING = Attention(2, 8, ROPE, window=6, scale=1.0)
GEMMA4 = {
    "family": "gemma4", "activation": "gelu_tanh", "value_norm": True, "sandwich": True, "layer_scalar": True,
    "embedding_scale": 32**0.5, "softcap": 8.0, "attention": (GEMMA4_FULL, GEMMA4_SLIDING), "layer_kinds": (1, 1, 0),
}  # fmt: skip
both_ways = lambda kind, **changes: dataclasses.replace(kind, causal=False, **changes)  # noqa: E731
# Changes of the target's layers, and of the drafter's.
CASES = {
    "gemma4": (GEMMA4, {}),
    "windows in some layers": (
        {"attention": (FULL, WINDOWED), "layer_kinds": (1, 0, 1)},
        {"attention": (both_ways(FULL), dataclasses.replace(FULL, window=3)), "layer_kinds": (0, 1)},
    ),
    "windows in all layers, the drafter's from the anchor": (
        {"attention": (WINDOWED,)}, {"attention": (both_ways(FULL, window=5, window_from_anchor=True),)},
    ),
}  # fmt: skip


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Greedy and sampled requests, shorter and longer than the windows."""
    rng = np.random.default_rng(5)
    lengths, temperatures = (1, 4, 6, 7, 19, 33), (0.0, 0.7, 1.3)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in lengths]
    return prompts, [SamplingParams(temperature=temperatures[i % 3], seed=i, max_tokens=20) for i in range(6)]


@pytest.fixture(scope="module")
def pair(tiny_target, tiny_drafter):
    """pair(name): the case's target and drafter."""

    @functools.cache
    def make(name: str):
        of_target, of_drafter = CASES[name]
        target = tiny_target(vocab=VOCAB, **of_target)
        return target, tiny_drafter(target, "bigram", block=3, **of_drafter)

    return make


@pytest.fixture(scope="module")
def plain(pair):
    """plain(name): what its target says without a drafter."""
    options = {"strategy": "off", "sampler": "coupled", "max_slots": 6, "rounds_per_dispatch": 20}
    return functools.cache(lambda name: Engine(pair(name)[0], **options).generate(*requests()))


@pytest.mark.parametrize(("name", "sampler"), [*((name, "coupled") for name in CASES), ("gemma4", "rejection")])
def test_drafting_changes_no_token(pair, plain, name, sampler):
    prompts, params = requests()
    before = plain(name)
    engine = Engine(*pair(name), sampler=sampler, max_slots=6, rounds_per_dispatch=20)
    outs = engine.generate(prompts, params)
    for p, one, other in zip(params, before, outs, strict=True):
        if sampler == "coupled" or p.temperature == 0:
            assert one.token_ids == other.token_ids
    accepted = sum(sum(c.accepted) for c in outs)
    assert accepted > 10 and sum(sum(c.verified) for c in outs) - accepted > 10


@pytest.mark.parametrize("name", CASES)
def test_the_windows_matter(pair, name):
    """The same weights without windows say something else of prompts like those above."""
    target, tokens = pair(name)[0], np.array([requests()[0][-1]])
    unbounded = tuple(dataclasses.replace(kind, window=0) for kind in target.config.attention)
    config = dataclasses.replace(target.config, attention=unbounded)
    near, far = target(tokens).logits[0], dataclasses.replace(target, config=config)(tokens).logits[0]
    difference = np.abs(near - far).max(axis=-1)
    window = max(kind.window for kind in target.config.attention)
    assert (difference[:window] < 1e-9).all() and (difference[-5:] > 1e-3).all()
