"""What a training step holds in memory, by XLA's account of the compiled program. Nothing is run."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.data.batches import Sample
from dspark_jax.data.packing import micro_batches
from dspark_jax.interop.drafter_tensors import abstract_drafter, drafter_module
from dspark_jax.models.config import Attention, DecoderConfig, DrafterConfig, Rope
from dspark_jax.models.drafter import Borrowed
from dspark_jax.training.features import Features
from dspark_jax.training.losses import LossWeights, SlotWeights
from dspark_jax.training.step import Setup
from dspark_jax.training.update import part_totals

VOCAB, HIDDEN, LENGTH, BATCH, SLOTS = 131_072, 8, 64, 2, 4
ATTENTION = Attention(num_kv_heads=1, head_dim=4, rope=Rope(100.0), causal=False)
DECODER = DecoderConfig("qwen3", VOCAB, HIDDEN, 8, 2, (ATTENTION,), (0,), qk_norm=True, tied=False)
CONFIG = DrafterConfig(DECODER, SLOTS, VOCAB - 1, (0, 1), 3, VOCAB, markov_rank=2)


@pytest.fixture(scope="module")
def compiled():
    """compiled(blocks per sequence) -> the training step of a drafter with a wide vocabulary."""
    array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    params = jax.tree.map(lambda a: array(*a.shape), abstract_drafter(CONFIG))
    tables = (array(VOCAB, HIDDEN), array(VOCAB, HIDDEN), array(VOCAB, dtype=jnp.int32))
    tokens = BATCH * LENGTH
    features = Features(array(1, tokens, CONFIG.tap_width), array(1, tokens, HIDDEN), array(1, tokens))
    samples = [Sample(i, 0, [0] * LENGTH, np.ones(LENGTH)) for i in range(BATCH)]
    step, whole = array(dtype=jnp.int32), SlotWeights(array(), array())

    def program(num_anchors: int, blocks_at_once: int = 1 << 20) -> jax.stages.Compiled:
        setup = Setup(drafter_module(CONFIG), LossWeights(), num_anchors, None)
        (part,) = micro_batches(samples, 1, num_anchors, blocks_at_once, seed=0)
        return part_totals.lower(setup, Borrowed(*tables), params, step, features, part.pack, whole).compile()

    return program


def test_memory_does_not_grow_with_blocks_times_vocabulary(compiled):
    few, many = compiled(256), compiled(512)
    temporary = [program.memory_analysis().temp_size_in_bytes for program in (few, many)]
    added_logits = 4 * VOCAB * SLOTS * BATCH * 256
    assert temporary[1] - temporary[0] < added_logits / 100, temporary
    assert temporary[1] < 2 * added_logits, temporary  # less than the logits alone would take
    shapes = re.findall(r"\b(?:f|bf|s|u|pred)\d*\[([\d,]+)\]", many.as_text())
    largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    assert VOCAB < largest < VOCAB * SLOTS * BATCH * 512 / 2


def test_memory_does_not_grow_with_blocks(compiled):
    """They are computed some at a time: more of them add their own indices, and nothing else."""
    few, many = (compiled(blocks, 64).memory_analysis() for blocks in (64, 512))
    indices = many.argument_size_in_bytes - few.argument_size_in_bytes
    assert many.temp_size_in_bytes - few.temp_size_in_bytes < 3 * indices
