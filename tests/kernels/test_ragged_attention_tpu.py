"""The TPU kernel of ragged attention: numerics in the interpreter that finds races, and compilation for real chips."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.ragged_attention import Prefix, ragged_attention, ragged_rows, reference, tpu, unsupported
from tests.kernels.targets import compile_tpu, every_tpu, has_kernel, needs_libtpu, tpu_interpreter, tpu_mesh

REQUESTS, BLOCK, NUM_ROWS, WIDTH, LAYERS = 3, 5, 12, 4, 2


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """Tiles of two or more block rows and chunks of two pages, so that small shapes take several of each."""
    monkeypatch.setattr(tpu, "TILE", 8)
    monkeypatch.setattr(tpu, "CHUNK", 16)


@functools.partial(jax.jit, static_argnames=("attend", "block", "options"))
def run(attend, q, k, v, counts, prefix, block, options):
    rows = ragged_rows(counts, prefix.length_R, len(q), block)
    return attend(q, k, v, rows, prefix, 1, **dict(options))


def arrays(lengths, heads=4, kv_heads=2, dim=8, page=8, num_rows=NUM_ROWS, dtype=jnp.float32, seed=0):
    """q, k, v and a pool with pages in any order; rows behind the prefixes hold large numbers."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    pages = REQUESTS * WIDTH + 2
    table = rng.permutation(pages)[: REQUESTS * WIDTH].reshape(REQUESTS, WIDTH).astype(np.int32)
    pools = [np.full((LAYERS, pages, kv_heads, page, dim), 1e30, np.float32) for _ in range(2)]
    for request, length in enumerate(lengths):
        row = np.arange(length)
        for pool in pools:
            pool[:, table[request, row // page], :, row % page] = draw(length, LAYERS, kv_heads, dim)
    cast = lambda a: jnp.asarray(a, dtype)  # noqa: E731
    prefix = Prefix(*map(cast, pools), jnp.asarray(table), jnp.asarray(lengths, jnp.int32))
    q, k, v = draw(num_rows, heads, dim), draw(num_rows, kv_heads, dim), draw(num_rows, kv_heads, dim)
    return cast(q), cast(k), cast(v), prefix


def check(counts, lengths, block=BLOCK, tolerance=2e-6, num_rows=NUM_ROWS, seed=0, shape=None, **options):
    """Compares the kernel's real rows with the reference's, and wants finite padding."""
    q, k, v, prefix = arrays(lengths, num_rows=num_rows, seed=seed, **(shape or {}))
    options = tuple(sorted({"causal": True, "scale": q.shape[-1] ** -0.5, **options}.items()))
    counts = jnp.asarray(counts, jnp.int32)
    with tpu_interpreter():
        out = np.asarray(run(tpu.ragged_attention, q, k, v, counts, prefix, block, options), np.float32)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, (q, k, v, counts, prefix))
    expected = np.asarray(run(reference.ragged_attention, *wide, block, options))
    real = int(counts.sum())
    np.testing.assert_allclose(out[:real], expected[:real], rtol=tolerance, atol=tolerance)
    assert np.isfinite(out).all()
    return out[real:]


OPTIONS = {
    "causal": {},
    "both ways": {"causal": False},
    "window": {"window": 5},
    "window of one": {"window": 1},
    "window over pages": {"window": 19},
    "window from the anchor": {"window": 9, "from_anchor": True, "causal": False},
    "soft cap": {"softcap": 2.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(data=st.data())
def test_equals_the_reference_for_any_counts_and_lengths(options, data):
    counts = data.draw(st.lists(st.integers(0, BLOCK), min_size=3, max_size=3).filter(lambda c: sum(c) <= NUM_ROWS))
    lengths = data.draw(st.lists(st.integers(0, WIDTH * 8), min_size=3, max_size=3))
    check(counts, lengths, seed=data.draw(st.integers(0, 99)), **options)
