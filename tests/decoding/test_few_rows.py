"""Weights by row, as rounds on a CPU read them: the same tokens, and no copy of a matrix in the compiled round."""

import dataclasses
import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.round import decode
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.models import few_rows
from dspark_jax.models.config import Attention, Rope
from dspark_jax.models.few_rows import FEW, for_few_rows, free_memory, gains_by_row, product

GEMMA4 = {
    "family": "gemma4", "activation": "gelu_tanh", "value_norm": True, "sandwich": True, "layer_scalar": True,
    "embedding_scale": 32**0.5, "softcap": 8.0, "layer_kinds": (1, 1, 0), "tied": True,
    "attention": (
        Attention(1, 16, Rope(100.0, "proportional", partial_rotary_factor=0.5), keys_as_values=True, scale=1.0),
        Attention(2, 8, Rope(10000.0), window=6, scale=1.0),
    ),
}  # fmt: skip


@pytest.fixture
def by_row(monkeypatch) -> None:
    """Engines of targets of any size keep their weights by row."""
    monkeypatch.setattr(few_rows, "CACHED", 0)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 2 * FEW), st.integers(1, 9), st.integers(1, 40), st.sampled_from(["float32", "bfloat16"]))
def test_a_product_is_the_product(rows, width, out, dtype):
    rng = np.random.default_rng(rows)
    x, w = (jnp.asarray(rng.integers(-4, 5, shape), dtype) for shape in ((rows, width), (out, width)))
    wide = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    np.testing.assert_allclose(product(x, w), wide, rtol=1e-2 if dtype == "bfloat16" else 1e-6)
    np.testing.assert_array_equal(product(x[None], w)[0], product(x, w))


@pytest.mark.parametrize("changes", [{}, GEMMA4, {"qkv_bias": True, "o_bias": True, "mlp_bias": True}])
@pytest.mark.parametrize("kind", ["bigram", "eagle"])
def test_the_tokens_are_the_same(x64, by_row, monkeypatch, tiny_target, tiny_drafter, tiny_eagle, changes, kind):
    """Greedy and sampled."""
    target = tiny_target(**changes)
    drafter = tiny_drafter(target) if kind == "bigram" else tiny_eagle(target)
    prompts = [[1, 2, 3], [9], [4] * 20, [30, 7]]
    params = [SamplingParams(temperature=t, seed=i, max_tokens=16) for i, t in enumerate((0, 1.0, 0.6, 0))]
    made = lambda: Engine(dataclasses.replace(target), drafter, sampler="coupled", max_slots=4)  # noqa: E731
    ours = made()
    assert ours.weights.target_by_row is not None
    answers = [out.token_ids for out in ours.generate(prompts, params)]
    monkeypatch.setattr(few_rows, "CACHED", 2**24)
    stacked = made()
    assert stacked.weights.target_by_row is None
    assert answers == [out.token_ids for out in stacked.generate(prompts, params)]


def test_a_round_of_few_rows_copies_no_matrix(by_row, tiny_target, tiny_drafter):
    """A scan copies every layer out of its stack; `[1000, 64]` is the shape of a matrix here and of nothing else."""
    target = tiny_target("float32", hidden=64, layers=3, intermediate_size=1000)
    engine = Engine(target, tiny_drafter(target), max_slots=1)
    sizes = {"active": 1, "drafts": engine.drafts, "context_pages": 4, "rounds": 2}

    def copies(weights) -> list[str]:
        args = (engine.models, engine.policy, weights, engine.caches, engine.slots, None)
        text = decode.lower(*args, **sizes).compile().as_text()
        made = re.findall(r"= f32\[(?:1,)?(?:1000,64|64,1000)\]\S* (\S+?)\(", text)
        return [op for op in made if op not in ("parameter", "get-tuple-element", "bitcast")]

    assert not copies(engine.weights)
    stacked = dataclasses.replace(engine.weights, target_by_row=None)
    assert copies(stacked)


def test_who_gains_by_it(monkeypatch, tiny_target):
    params = tiny_target("float32").params
    assert not gains_by_row(params)  # it lies in the processor's caches
    monkeypatch.setattr(few_rows, "CACHED", 0)
    assert gains_by_row(params)
    with monkeypatch.context() as patch:
        patch.setattr(few_rows, "free_memory", lambda: 1000.0)
        assert not gains_by_row(params)
    assert 2**20 < free_memory() < 2**50
    assert not gains_by_row(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params))
    layers, kernels = for_few_rows(params)["layers"][0], params["layers"][0]["q_proj"]["kernel"]
    assert len(layers) == 3
    np.testing.assert_array_equal(layers[1]["q_proj"]["by_row"], kernels[1].T)
