"""Anchor attention (training) against a plain loop over every query, and against what serving computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.anchor_attention import anchor_attention
from pallas_kernels.ragged_attention import Prefix, ragged_attention, ragged_rows

BATCH, BLOCKS, SIZE, LENGTH, HEADS, KV_HEADS, DIM, SCALE = 2, 3, 4, 9, 4, 2, 6, 0.4

attention = jax.jit(anchor_attention, static_argnames=("scale", "causal", "window", "from_anchor"))


def random_arrays(seed: int) -> tuple[np.ndarray, ...]:
    """q of the blocks, k and v of the context, k and v of the blocks."""
    rng = np.random.default_rng(seed)
    context, block = (BATCH, LENGTH, KV_HEADS, DIM), (BATCH, BLOCKS, SIZE, KV_HEADS, DIM)
    shapes = ((BATCH, BLOCKS, SIZE, HEADS, DIM), context, context, block, block)
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


def sees(query: int, key: int, causal: bool, window: int, from_anchor: bool) -> bool:
    """Whether slot `query` sees the row `key` places behind the block's anchor (below 0: a context row)."""
    if key > query and causal:
        return False
    if window and from_anchor:
        return key >= -window
    return not window or key > query - window


def plain_attention(arrays, anchors, keep, causal, window, from_anchor) -> np.ndarray:
    """One query and one head at a time, over the rows that it sees, in float64."""
    q, k_context, v_context, k_block, v_block = (np.asarray(a, np.float64) for a in arrays)
    out = np.zeros_like(q)
    for b, n, slot, head in np.ndindex(BATCH, BLOCKS, SIZE, HEADS):
        if not keep[b][n]:
            continue
        anchor, kv = anchors[b][n], head // (HEADS // KV_HEADS)
        rows = [i for i in range(anchor) if sees(slot, i - anchor, causal, window, from_anchor)]
        own = [i for i in range(SIZE) if sees(slot, i, causal, window, from_anchor)]
        k = np.concatenate([k_context[b, rows, kv], k_block[b, n, own, kv]])
        v = np.concatenate([v_context[b, rows, kv], v_block[b, n, own, kv]])
        scores = k @ q[b, n, slot, head] * SCALE
        weights = np.exp(scores - scores.max())
        out[b, n, slot, head] = weights / weights.sum() @ v
    return out


anchor_grids = st.lists(st.lists(st.integers(0, LENGTH), min_size=BLOCKS, max_size=BLOCKS), min_size=2, max_size=2)
keep_grids = st.lists(st.lists(st.booleans(), min_size=BLOCKS, max_size=BLOCKS), min_size=2, max_size=2)
MODES = [
    {"causal": causal, "window": window, "from_anchor": from_anchor}
    for causal in (False, True)
    for window, from_anchor in ((0, False), (1, False), (3, False), (3, True), (LENGTH + SIZE, False), (LENGTH, True))
]
mode = pytest.mark.parametrize("mode", MODES, ids=lambda m: "-".join(f"{k}={v}" for k, v in m.items()))


@mode
@settings(max_examples=8, deadline=None, derandomize=True)
@given(anchors=anchor_grids, keep=keep_grids, seed=st.integers(0, 99))
def test_matches_a_loop_over_queries(mode, anchors, keep, seed):
    arrays = random_arrays(seed)
    out = attention(*arrays, jnp.asarray(anchors), jnp.asarray(keep), scale=SCALE, **mode)
    np.testing.assert_allclose(out, plain_attention(arrays, anchors, keep, **mode), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("from_anchor", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_window_larger_than_everything_is_none(causal, from_anchor):
    args = (*random_arrays(0), jnp.asarray([[0, 4, 9], [9, 9, 1]]), jnp.ones((BATCH, BLOCKS), bool))
    plain = attention(*args, scale=SCALE, causal=causal)
    windowed = attention(*args, scale=SCALE, causal=causal, window=LENGTH + SIZE, from_anchor=from_anchor)
    np.testing.assert_array_equal(windowed, plain)


@pytest.mark.parametrize("mode", [MODES[0], MODES[-3]], ids=["both ways", "causal, window"])
def test_dummy_blocks_are_zero_and_their_gradients_too(mode):
    arrays = tuple(map(jnp.asarray, random_arrays(1)))
    keep = jnp.asarray([[True, False, True], [False, False, False]])

    def total(arrays):
        out = attention(*arrays, jnp.zeros((BATCH, BLOCKS), jnp.int32) + 5, keep, scale=SCALE, **mode)
        return jnp.sum(out**2), out

    (_, out), grads = jax.value_and_grad(total, has_aux=True)(arrays)
    assert not np.any(np.where(keep[..., None, None, None], 0, out)) and np.all(np.any(out[0, 0] != 0, axis=-1))
    assert all(np.isfinite(g).all() for g in grads)
    assert not np.any(grads[0][1]) and not np.any(grads[1][1])


@mode
def test_training_and_serving_see_the_same_rows(mode):
    """A packed block equals the same block behind a cached prefix of `anchor` rows."""
    q, k_context, v_context, k_block, v_block = random_arrays(2)
    anchors = jnp.asarray([[0, 4, 9], [2, 7, 8]])
    packed = attention(q, k_context, v_context, k_block, v_block, anchors, jnp.ones_like(anchors, bool), scale=SCALE,
                       **mode)  # fmt: skip
    flat = lambda a: jnp.asarray(a).reshape(-1, *a.shape[3:])  # noqa: E731
    rows = ragged_rows(jnp.full(anchors.size, SIZE), anchors.reshape(-1), anchors.size * SIZE, SIZE)
    table = jnp.repeat(jnp.arange(BATCH), BLOCKS)[:, None]  # one page a sequence
    prefix = Prefix(*(jnp.asarray(a).swapaxes(1, 2)[None] for a in (k_context, v_context)), table, anchors.reshape(-1))
    served = jax.jit(functools.partial(ragged_attention, scale=SCALE, **mode))(
        flat(q), flat(k_block), flat(v_block), rows, prefix, 0
    )
    np.testing.assert_allclose(served, flat(packed), rtol=1e-4, atol=1e-5)
