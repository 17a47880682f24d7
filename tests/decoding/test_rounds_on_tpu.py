"""Rounds compiled for a TPU that is not here contain the kernel, and no copy of the caches."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.round import decode, prefill
from dspark_jax.models.config import Attention, Rope
from tests.kernels.targets import has_kernel, needs_libtpu, tpu_mesh

SLOTS, PAGES = 4, 1024
FULL = Attention(num_kv_heads=1, head_dim=256, rope=Rope(1e6), keys_as_values=True)
SLIDING = Attention(num_kv_heads=2, head_dim=128, rope=Rope(1e4), window=32)


@pytest.fixture(scope="module")
def engine(tiny_target, tiny_drafter) -> Engine:
    """Small but for its heads, which are as wide as a TPU's lanes, and its caches, which no TPU holds on its cores."""
    target = tiny_target(
        "bfloat16", max_length=4096, layers=4, attention=(FULL, SLIDING), layer_kinds=(1, 0, 1, 0), value_norm=True
    )
    drafter = tiny_drafter(target, kind="random", block=4)
    return Engine(target, drafter, strategy="fixed:3", max_slots=SLOTS, cache_tokens=PAGES * 16)


def compiled(chip: str, program, *args, **static) -> jax.stages.Compiled:
    """A jitted program of the engine's, its donations kept."""
    where = NamedSharding(tpu_mesh(chip), PartitionSpec())
    place = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where) if hasattr(a, "dtype") else a  # noqa: E731
    return program.lower(*(jax.tree.map(place, a) for a in args), **static).compile()


def cache_bytes(engine: Engine) -> int:
    return sum(a.nbytes for a in jax.tree.leaves(engine.caches))


@needs_libtpu
def test_a_decoding_round_attends_in_the_kernel(engine):
    sizes = {"active": SLOTS, "drafts": engine.drafts, "context_pages": 64, "rounds": 2}
    program = compiled(
        "v5e", decode, engine.models, engine.policy, engine.weights, engine.caches, engine.slots, **sizes
    )
    # Both kinds of the target's layers and the drafter's.
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 3
    assert program.memory_analysis().temp_size_in_bytes < cache_bytes(engine) / 8


@needs_libtpu
def test_prefill_attends_in_the_kernel(engine):
    tokens, whole = jnp.zeros((SLOTS, 32), jnp.int32), jnp.zeros(SLOTS, jnp.int32)
    arrays = (engine.weights, engine.caches, engine.slots.table_RxC, tokens, tokens, whole, whole, engine.slots.carry)
    program = compiled("v5e", prefill, engine.models, *arrays, context_pages=64)
    assert has_kernel(program)
    assert program.memory_analysis().temp_size_in_bytes < cache_bytes(engine) / 8
