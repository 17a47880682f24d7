"""The TPU kernel of fused verification: its numbers in the interpreter, its compilation, and what it saves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import report
from pallas_kernels.fused_verify import Head, Query, fused_verify, reference, tpu
from tests.kernels.rounds import SMALL, Sizes, assert_same, from_logits, name_of, random_round
from tests.kernels.targets import compile_tpu, every_tpu, has_kernel, needs_libtpu, tpu_interpreter

fused = jax.jit(fused_verify, static_argnames=("sampler", "backend"))
statistics = {"tpu": jax.jit(tpu.row_statistics), "xla": jax.jit(reference.row_statistics)}


def random_query(rng: np.random.Generator, num_rows: int, vocab: int) -> Query:
    words = tuple(jnp.asarray(rng.integers(0, 2**32, num_rows), jnp.uint32) for _ in range(2))
    noisy = jnp.asarray(rng.integers(0, 2, num_rows), bool)
    temperature = jnp.where(noisy, jnp.asarray(rng.choice([0.6, 1.0, 1.4], num_rows), jnp.float32), 1)
    return Query(jnp.asarray(rng.integers(0, vocab, num_rows), jnp.int32), temperature, noisy, words)


def compare_statistics(sizes: Sizes, num_rows: int, seed: int) -> None:
    """The kernel's statistics in the interpreter are the reference's, for the same hidden states and noise."""
    rng = np.random.default_rng(seed)
    shape = (sizes.width, sizes.vocab) if sizes.transposed else (sizes.vocab, sizes.width)
    # Eighths of small whole numbers: float32 sums of their products are exact in any order.
    weight = jnp.asarray(rng.integers(-8, 9, shape) / 8, sizes.dtype)
    hidden = jnp.asarray(rng.integers(-8, 9, (num_rows, sizes.width)) / 8, sizes.dtype)
    head = Head(weight, sizes.vocab - sizes.padding, sizes.softcap, sizes.transposed)
    query = random_query(rng, num_rows, head.num_tokens)
    want = statistics["xla"](hidden, head, query)
    with tpu_interpreter():
        got = jax.block_until_ready(statistics["tpu"](hidden, head, query))
    for name in ("log_total_N", "log_total_warped_N", "token_logit_N", "score_NxC"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=2e-5, atol=2e-5, err_msg=name)
    # Near-ties of noisy scores may stand in either order; ties of logits may not.
    same = np.asarray(got.id_NxC == want.id_NxC) | ~np.isfinite(np.asarray(want.score_NxC))
    assert same.mean() > 0.999
    assert same[~np.asarray(query.noisy_N)].all()
    np.testing.assert_allclose(np.where(same, got.logit_NxC, 0), np.where(same, want.logit_NxC, 0), rtol=1e-6)


@pytest.mark.parametrize("sizes", SMALL, ids=name_of)
def test_kernel_statistics_are_the_references(sizes):
    rows = sizes.requests * (sizes.drafts + 1)

    @settings(max_examples=5, deadline=None, derandomize=True)
    @given(st.integers(0, 2**16))
    def check(seed):
        compare_statistics(sizes, rows, seed)

    check()


@pytest.mark.parametrize("num_rows", [1, 16, 300])
def test_kernel_with_any_number_of_rows(num_rows):
    """300 rows do not fit one tile of rows."""
    compare_statistics(Sizes(0, 0, width=8, vocab=200, dtype="bfloat16"), num_rows, seed=0)


def test_kernel_with_a_head_that_a_tpu_stores_by_columns():
    """Its width is a multiple of the lanes, its vocabulary is not."""
    compare_statistics(Sizes(0, 0, width=128, vocab=200, transposed=True, dtype="bfloat16"), num_rows=16, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [49_152, 151_936])
def test_kernel_at_real_vocabularies(vocab):
    compare_statistics(Sizes(0, 0, width=64, vocab=vocab, dtype="bfloat16"), num_rows=8, seed=0)


def test_kernel_rounds():
    """From hidden states to tokens through the kernel."""
    sizes, sampler = SMALL[1], "rejection"
    arguments = random_round(sizes, 7, [4, 0, 2, 1, 4], [1.0, 0.0, 0.7, 1.0, 0.0], sampler)
    with tpu_interpreter():
        got = jax.block_until_ready(fused(*arguments, sampler, "tpu"))
    assert_same(got, from_logits(*arguments, sampler), arguments[2], arguments[3])


@needs_libtpu
@every_tpu
@pytest.mark.parametrize("model", report.MODELS)
def test_kernel_compiles_at_full_size(model, chip):
    """And keeps nothing of the size of the logits, even in bfloat16."""
    hidden, head, query = report.row_arguments(model, 128)
    compiled = compile_tpu(chip, tpu.row_statistics, hidden, head, query)
    assert has_kernel(compiled)
    assert compiled.memory_analysis().temp_size_in_bytes < 128 * head.vocab_size * 2 / 4


@needs_libtpu
@pytest.mark.slow
def test_the_report_shows_fewer_bytes():
    for line in report.fused_verify_lines("v6e"):
        assert line.temporary[1] < line.temporary[0] / 4, line
        assert line.moved[1] < line.moved[0], line
