"""Tiled anchor attention: values and gradients of the dense one, and no array of blocks × context anywhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.anchor_attention import anchor_attention, tiled

PACKS, BLOCKS, LENGTH, KV, DIM, SCALE = 2, 5, 11, 2, 4, 0.4
MODES = {
    "both ways": {},
    "causal": {"causal": True},
    "window": {"window": 3},
    "causal, window": {"causal": True, "window": 3},
    "window from the anchor": {"window": 2, "from_anchor": True},
}


@pytest.fixture(scope="module", autouse=True)
def small_tiles():
    """Two blocks of four slots a tile, and context tiles of which the last ends with the context."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "ROWS", 8)
        patch.setattr(tiled, "CONTEXT", 4)
        yield


def random_arrays(seed: int, slots: int = 4, queries: int = 4, group: int = 2, dtype=np.float64, blocks: int = BLOCKS):
    """q of the blocks, k and v of the context, k and v of the blocks, and a gradient of the output."""
    rng = np.random.default_rng(seed)
    context, block = (PACKS, LENGTH, KV, DIM), (PACKS, blocks, slots, KV, DIM)
    q = (PACKS, blocks, queries, KV * group, DIM)
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in (q, context, context, block, block, q))


def with_gradients(arrays, anchor, keep, start, backend, **mode):
    *inputs, grad = arrays
    attend = lambda *a: anchor_attention(  # noqa: E731
        *a, anchor, keep, SCALE, start_BxN=start, backend=backend, **mode
    )
    out, pull = jax.vjp(attend, *inputs)
    return out, *pull(grad)


programs = {
    (name, backend): jax.jit(functools.partial(with_gradients, backend=backend, **mode))
    for name, mode in MODES.items()
    for backend in ("dense", "tiled")
}
# (start, anchor) of a block: a document begins anywhere, and the anchor lies in it or is the row behind the pack.
places = st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(sorted)
packs = st.lists(st.tuples(places, st.booleans()), min_size=PACKS * BLOCKS, max_size=PACKS * BLOCKS)


@pytest.mark.parametrize("name", MODES)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(blocks=packs, seed=st.integers(0, 99))
def test_values_and_gradients_are_the_dense_ones_in_any_order(name, blocks, seed):
    start, anchor = np.array([place for place, _ in blocks]).T.reshape(2, PACKS, BLOCKS)
    keep = np.array([kept for _, kept in blocks]).reshape(PACKS, BLOCKS)
    with jax.enable_x64(True):
        arrays = random_arrays(seed)
        wanted, got = (programs[name, backend](arrays, anchor, keep, start) for backend in ("dense", "tiled"))
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)
    assert not np.any(got[0][~keep]) and all(not np.any(got[i][~keep]) for i in (1, 4, 5))


@pytest.mark.parametrize(("slots", "queries", "group", "blocks"), [(3, 1, 1, 4), (9, 9, 3, 1)])
def test_odd_shapes(x64, slots, queries, group, blocks):
    """Fewer queries than keys (Eagle3), and a block larger than a tile."""
    rng = np.random.default_rng(3)
    start, anchor = np.sort(rng.integers(0, LENGTH + 1, (2, PACKS, blocks), np.int32), axis=0)
    arrays, keep = random_arrays(1, slots, queries, group, blocks=blocks), rng.random(anchor.shape) < 0.8
    outs = [
        jax.jit(functools.partial(with_gradients, backend=backend, causal=True))(arrays, anchor, keep, start)
        for backend in ("dense", "tiled")
    ]
    for a, b in zip(*outs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


def test_bfloat16_sums_in_float32():
    start, anchor = np.zeros((PACKS, BLOCKS), int), np.full((PACKS, BLOCKS), LENGTH)
    keep = np.ones(anchor.shape, bool)
    low = random_arrays(5, dtype=jnp.bfloat16)
    got = programs["both ways", "tiled"](low, anchor, keep, start)
    wanted = programs["both ways", "dense"](tuple(a.astype(jnp.float32) for a in low), anchor, keep, start)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(np.float32), b, atol=0.02 * np.abs(b).max())


def test_what_is_not_seen_moves_nothing():
    """Rows before the document, from the anchor on, and other blocks: not a bit of any gradient moves."""
    start, anchor = np.array([[0, 0, 4, 4, 7]] * 2), np.array([[1, 3, 5, 7, 10]] * 2)
    keep = np.ones(anchor.shape, bool)
    arrays = random_arrays(8, dtype=np.float32)
    q, k, v, k_block, v_block, grad = arrays
    grad = grad.at[:, np.array([0, 1, 3, 4])].set(0)  # the gradient of block 2 alone, which sees row 4
    run = lambda *a: programs["both ways", "tiled"](a, anchor, keep, start)  # noqa: E731
    before = run(q, k, v, k_block, v_block, grad)
    other = np.arange(LENGTH) != 4
    moved = [a.at[:, other].add(1.0) for a in (k, v)] + [a.at[:, [0, 1, 3, 4]].add(1.0) for a in (k_block, v_block)]
    after = run(q, *moved, grad)
    np.testing.assert_array_equal(after[0][:, 2], before[0][:, 2])
    for a, b in zip(after[1:], before[1:], strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.any(before[2][:, other]) and np.any(before[2][:, 4])


def test_no_array_grows_with_blocks_times_context():
    """Of the compiled gradient: temporary memory beyond gradients and inputs in another order stays that of a tile."""

    def temporary(blocks: int, length: int) -> int:
        shape = lambda *s, dtype=jnp.float32: jax.ShapeDtypeStruct(s, dtype)  # noqa: E731
        q, context, block = shape(1, blocks, 4, 4, 8), shape(1, length, 2, 8), shape(1, blocks, 4, 2, 8)
        anchor, keep = shape(1, blocks, dtype=jnp.int32), shape(1, blocks, dtype=bool)
        program = programs["both ways", "tiled"].lower((q, context, context, block, block, q), anchor, keep, anchor)
        sizes = program.compile().memory_analysis()
        return sizes.temp_size_in_bytes / (sizes.argument_size_in_bytes + sizes.output_size_in_bytes)

    assert temporary(256, 256) < 2
    assert temporary(1024, 4096) < 2  # scores of one head alone would be 64 MB, 40 times the arguments
