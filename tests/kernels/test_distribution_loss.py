"""The chunked loss and its own gradients against autodiff of the one with all logits in memory."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.distribution_loss import Rows, RowWeights, Targets, Vocabulary, distribution_loss, reference
from pallas_kernels.distribution_loss.chunks import chunk_rows


def random_case(
    seed, rows=13, sources=9, vocab=37, width=8, rank=3, softcap=0.0, reduced=False, base=True, dtype=jnp.float64
):
    """Rows (some without label, some without source), targets, tables and weights."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    wide = jnp.promote_types(dtype, jnp.float32)
    weight = lambda: jnp.asarray(rng.uniform(0, 1, rows), wide)  # noqa: E731
    correction = draw(vocab, rank) if rank else None
    vocabulary = Vocabulary(draw(vocab, width), correction, softcap, reduced)
    hidden = draw(sources, width)
    # A reduced vocabulary has a part of the target's mass: the total is more than its own.
    log_total = jax.nn.logsumexp(reference.capped_logits(hidden, vocabulary), axis=-1) + 0.3 * reduced
    label, source = (jnp.asarray(rng.integers(-1, high, rows), jnp.int32) for high in (vocab, sources))
    slots = Rows(draw(rows, width), draw(rows, rank) if rank else None, label, source)
    return slots, Targets(hidden, log_total), vocabulary, RowWeights(weight(), weight(), weight() if base else None)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("chunk", "backend"))
def value_and_gradients(loss, rows, targets, vocabulary, weights, **options):
    """The sum times 3, every row's losses, and the gradients of the hidden states, factors and correction."""

    def scaled(hidden, factor, correction):
        some = rows.replace(hidden_MxH=hidden, factor_Mxr=factor)
        value, losses = loss(some, targets, vocabulary.replace(correction_Vdxr=correction), weights, **options)
        return 3 * value, losses

    where = tuple(i for i, a in enumerate((0, rows.factor_Mxr, rows.factor_Mxr)) if a is not None)
    return jax.value_and_grad(scaled, where, has_aux=True)(rows.hidden_MxH, rows.factor_Mxr, vocabulary.correction_Vdxr)


def assert_same(got, want, tolerance):
    """Every array within `tolerance` of the largest expected value of its own."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, atol=tolerance * max(np.abs(b).max(), 1e-3), rtol=0)


def compare(case, chunk, tolerance):
    want = value_and_gradients(reference.distribution_loss, *case)
    assert_same(value_and_gradients(distribution_loss, *case, chunk=chunk), want, tolerance)
    value, losses = jax.jit(distribution_loss, static_argnames=("chunk", "backend"))(*case, chunk=chunk)
    assert_same((3 * value, losses), want[0], tolerance)


SHAPES = [
    {},
    {"rows": 1, "sources": 1, "rank": 0, "base": False},
    {"rows": 31, "sources": 3, "softcap": 2.0},
    {"rows": 17, "sources": 40, "vocab": 130, "reduced": True, "base": False},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_autodiff_with_all_logits_in_memory(shape, x64):
    @settings(max_examples=6, deadline=None, derandomize=True)
    @given(st.integers(0, 2**16), st.sampled_from([4, None]))
    def check(seed, chunk):
        compare(random_case(seed, **shape), chunk, 1e-12)

    check()


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
def test_in_lower_precision(dtype, tolerance):
    for seed in range(3):
        compare(random_case(seed, rows=31, softcap=3.0, dtype=dtype), 4, tolerance)


def test_rows_without_a_source_count_for_nothing(x64):
    rows, *given = random_case(0)
    nowhere = rows.replace(source_M=jnp.full_like(rows.source_M, -1))
    (value, losses), gradients = value_and_gradients(distribution_loss, nowhere, *given, chunk=4)
    assert value == 0 and not any(np.asarray(a).any() for a in jax.tree.leaves((losses, gradients)))


def test_the_order_of_the_rows_does_not_matter(x64):
    rows, targets, vocabulary, weights = random_case(1, rows=31)
    order = np.random.default_rng(0).permutation(31)
    shuffled = jax.tree.map(lambda a: a[order], (rows, weights))
    want, losses = distribution_loss(rows, targets, vocabulary, weights, chunk=4)
    got, moved = distribution_loss(shuffled[0], targets, vocabulary, shuffled[1], chunk=4)
    np.testing.assert_allclose(got, want, rtol=1e-12)
    np.testing.assert_allclose(moved.distance_M, losses.distance_M[order], rtol=1e-9, atol=1e-14)


def test_chunks_are_bounded_by_the_vocabulary():
    assert chunk_rows(3584, 151_936) == 384 and chunk_rows(3584, 262_144) == 256
    assert chunk_rows(3584, 300) == 512 and chunk_rows(5, 300) == 16


def test_on_a_mesh():
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-m", "tests.kernels.sharded_loss"], cwd=root, env=environment, check=True)
