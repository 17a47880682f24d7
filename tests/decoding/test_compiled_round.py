"""What a compiled round costs: arithmetic by its bucket of rows, and no copy of the cache, on this CPU and on a TPU."""

import math
import re

import jax
import numpy as np
import pytest

from dspark_jax.decoding import schedule as schedule_module
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.round import decode
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.models.config import Attention, Rope
from pallas_kernels.targets import tpu_mesh
from tests.kernels.targets import needs_libtpu

BYTES = {"bf16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8}


def lowered(engine: Engine, sharding=None, context_pages: int = 4) -> jax.stages.Lowered:
    """The engine's decode program for all its slots."""
    like = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)  # noqa: E731
    weights, caches, slots = jax.tree.map(like, (engine.weights, engine.caches, engine.slots))
    sizes = {"active": engine.max_slots, "drafts": engine.drafts, "context_pages": context_pages}
    return decode.lower(engine.models, engine.policy, weights, caches, slots, None, **sizes, rounds=2)


def only_bucket(monkeypatch, rows: int) -> None:
    """Rounds of scheduled engines run over `rows` rows and nothing else."""
    monkeypatch.setattr(schedule_module, "row_buckets", lambda slots, drafts: (rows,))


def test_a_smaller_budget_does_less_arithmetic(monkeypatch, tiny_target, tiny_drafter):
    """The target's share grows with the rows, one for one; only drafting does not."""
    target = tiny_target("float32", hidden=64, vocab=300)
    flops = {}
    for rows in (4, 8, 16):
        only_bucket(monkeypatch, rows)
        engine = Engine(target, tiny_drafter(target, block=4), strategy="threshold:0.5", max_slots=4)
        jax.clear_caches()
        flops[rows] = lowered(engine).compile().cost_analysis()["flops"]
    kernels = [a for path, a in jax.tree_util.tree_leaves_with_path(target.params) if path[-1].key == "kernel"]
    products = 2 * sum(a.size for a in kernels)  # of one row; the layers' loop is counted once
    products -= 2 * sum(a.size for a in kernels if a.ndim == 3) * (1 - 1 / target.config.num_layers)
    assert flops[8] - flops[4] > 4 * products
    assert flops[16] - flops[8] == pytest.approx(2 * (flops[8] - flops[4]), rel=0.05)


def test_padding_changes_nothing(x64, few_programs, monkeypatch, tiny_target, tiny_drafter):
    """The rows of a round in the smallest bucket that holds them, and padded to the largest: one result."""
    target = tiny_target()
    drafter = tiny_drafter(target, block=4)
    drafter.params["confidence_head"]["proj"]["kernel"] *= 30  # sure of some drafts and not of others
    prompts = [[1, 2, 3], [9], [4, 4, 4, 4, 4], [30, 7]]
    params = [SamplingParams(temperature=t, seed=5, max_tokens=16, logprobs=2) for t in (0, 1.0, 0.6, 0)]
    outs, ran = [], []
    for padded in (False, True):
        if padded:
            only_bucket(monkeypatch, 20)
            jax.clear_caches()
        engine = Engine(target, drafter, strategy="threshold:0.4", max_slots=4)
        outs.append(engine.generate(prompts, params))
        ran.append(engine.policy.buckets(4, engine.drafts))
    assert len(ran[0]) > len(ran[1]) == 1
    lengths = {v for out in outs[0] for v in out.verified}
    assert len(lengths) > 1, "all rounds alike: there was nothing to pad"
    for ragged, full in zip(*outs, strict=True):
        assert (ragged.token_ids, ragged.verified, ragged.accepted) == (full.token_ids, full.verified, full.accepted)
        np.testing.assert_allclose(*([e.logprob for e in out.logprobs] for out in (ragged, full)), atol=1e-12)


def largest_temporary(compiled: jax.stages.Compiled, pools: set[tuple[int, ...]]) -> int:
    """Bytes of the largest array that the program computes besides the pools, which it updates in place."""
    sizes = [0]
    for dtype, dims, what in re.findall(r"= (\w+)\[([\d,]+)\]\S* ([\w-]+)\(", compiled.as_text()):
        shape = tuple(map(int, dims.split(",")))
        if what in ("parameter", "get-tuple-element", "bitcast") or dtype not in BYTES:
            continue
        if shape in pools and what in ("scatter", "fusion", "custom-call", "dynamic-update-slice"):
            continue
        sizes.append(math.prod(shape) * BYTES[dtype])
    return max(sizes)


@pytest.mark.parametrize("chip", ["cpu", pytest.param("v5e", marks=needs_libtpu)])
def test_no_temporary_is_larger_than_a_layers_cache(chip, tiny_target, tiny_drafter):
    """With a cache that outweighs all else: 4 slots of 4096 rows, and a program that reads all of them."""
    dtype, heads, dim = ("float32", 3, 64) if chip == "cpu" else ("bfloat16", 8, 128)
    attention = (Attention(num_kv_heads=heads, head_dim=dim, rope=Rope(10000.0)),)
    sizes = {"hidden": 128, "num_heads": 2 * heads, "attention": attention}
    target = tiny_target(dtype, layers=4, max_length=4096, vocab=300, **sizes)
    engine = Engine(target, tiny_drafter(target, "random", block=4), max_slots=4, cache_tokens=4 * 4096)
    sharding = None if chip == "cpu" else jax.NamedSharding(tpu_mesh(chip), jax.P())
    compiled = lowered(engine, sharding, context_pages=256).compile()
    pools = [leaf for leaf in jax.tree.leaves(engine.caches)]
    a_layer = 2 * pools[0].nbytes // pools[0].shape[0]
    assert largest_temporary(compiled, {pool.shape for pool in pools}) <= a_layer
    memory = compiled.memory_analysis()
    print(f"{chip}: {memory.temp_size_in_bytes / a_layer:.2f} layers' caches of temporaries in all")
    assert memory.temp_size_in_bytes < 2 * a_layer
    assert memory.alias_size_in_bytes >= sum(pool.nbytes for pool in pools)  # updated where they lie


def test_no_weights_are_copied(tiny_target, tiny_drafter):
    """With layers that outweigh all else. An axis of length 1 around their scan had them all copied (on the CPU)."""
    target = tiny_target("float32", layers=8, hidden=128, vocab=64)
    engine = Engine(target, tiny_drafter(target, "random", block=2), strategy="fixed:2", max_slots=1, cache_tokens=64)
    memory = lowered(engine).compile().memory_analysis()
    layers = sum(a.nbytes for a in jax.tree.leaves(target.params) if a.ndim == 3)
    assert memory.temp_size_in_bytes < layers / 2
