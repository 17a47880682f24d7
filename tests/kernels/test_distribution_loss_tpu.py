"""The TPU kernels of the training loss: their numbers in the interpreter, their compilation, and what they save."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import report
from pallas_kernels.distribution_loss import distribution_loss, reference
from pallas_kernels.distribution_loss.chunks import chunk_rows
from pallas_kernels.distribution_loss.report import arguments, gradients
from tests.kernels.targets import TPUS, compile_tpu, has_kernel, needs_libtpu, tpu_interpreter
from tests.kernels.test_distribution_loss import assert_same, random_case, value_and_gradients

SHAPES = [  # vocabularies of less than a tile, of one and a bit, of several
    {"rows": 17, "dtype": jnp.bfloat16},
    {"rows": 20, "vocab": 130, "softcap": 2.0, "reduced": True},
    {"rows": 40, "vocab": 1100, "rank": 0, "base": False},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_give_the_references_losses_and_gradients(shape):
    """Two or three chunks of rows, the last one not full."""
    case = random_case(3, **({"dtype": jnp.float32} | shape))
    want = value_and_gradients(reference.distribution_loss, *case)
    with tpu_interpreter():
        got = value_and_gradients(distribution_loss, *case, chunk=16, backend="tpu")
        jax.block_until_ready(got)
    assert_same(got, want, 2e-2 if "dtype" in shape else 2e-5)


def test_losses_without_gradients():
    case = random_case(4, vocab=130, dtype=jnp.float32)
    with tpu_interpreter():
        got = jax.block_until_ready(jax.jit(functools.partial(distribution_loss, backend="tpu"))(*case))
    assert_same(got, jax.jit(reference.distribution_loss)(*case), 1e-5)


@pytest.mark.slow
def test_real_vocabulary():
    """Sharp distributions over 151936 tokens, where sums of many small terms and a few large ones meet."""
    case = random_case(5, rows=8, sources=8, vocab=151_936, width=16, rank=2, base=False, dtype=jnp.float32)
    want = value_and_gradients(reference.distribution_loss, *case)
    with tpu_interpreter():
        got = jax.block_until_ready(value_and_gradients(distribution_loss, *case, chunk=16, backend="tpu"))
    assert_same(got, want, 1e-4)


SIZES = [(model, chip) for model in report.MODELS for chip in sorted(TPUS)]
SLOW = [pytest.param(*size, marks=pytest.mark.slow) for size in SIZES if size != ("Qwen3-8B", "v5e")]


@needs_libtpu
@pytest.mark.parametrize(("model", "chip"), [("Qwen3-8B", "v5e"), *SLOW])
def test_kernels_compile_at_full_size(model, chip):
    """And keep two arrays of a chunk's logits, however many rows there are."""
    sizes = report.MODELS[model]
    shapes = arguments(sizes.width, sizes.vocab, sizes.softcap, 3584)
    compiled = compile_tpu(chip, gradients, *shapes, backend="tpu")
    assert has_kernel(compiled)
    logits = 4 * chunk_rows(3584, sizes.vocab) * sizes.vocab
    assert compiled.memory_analysis().temp_size_in_bytes < 4.2 * logits


@needs_libtpu
@pytest.mark.slow
def test_the_report_shows_fewer_bytes():
    for line in report.loss_lines("v6e"):
        assert line.temporary[1] < line.temporary[0], line
        assert line.moved[1] < line.moved[0] / 2, line
