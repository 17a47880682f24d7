"""Ragged attention against a plain loop over requests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.ragged_attention import Prefix, Rows, ragged_attention, ragged_rows, step_attention
from pallas_kernels.ragged_attention.reference import masked_attention

LAYERS, PAGE, HEADS, KV_HEADS, DIM = 2, 4, 6, 2, 8
SCALE = DIM**-0.5
BLOCK, NUM_ROWS, TABLE_WIDTH = 5, 14, 4  # fixed for hypothesis: one compilation


@functools.partial(jax.jit, static_argnames=("block", "causal", "window", "from_anchor"))
def attention(q, k, v, counts, starts, prefix, layer, *, block, causal, **windowed):
    rows = ragged_rows(counts, starts, len(q), block)
    return ragged_attention(q, k, v, rows, prefix, layer, causal=causal, scale=SCALE, **windowed)


def random_rows(seed: int, num_rows: int = NUM_ROWS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [N, H, D], k and v [N, KV, D] in float32."""
    rng = np.random.default_rng(seed)
    shapes = [(num_rows, HEADS, DIM), (num_rows, KV_HEADS, DIM), (num_rows, KV_HEADS, DIM)]
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def cached_prefix(lengths: list[int], seed: int, garbage: float = 1e30) -> tuple[Prefix, list]:
    """A pool with each request's rows on permuted pages, and `garbage` wherever no request has a row.

    Also gives what was cached: per request (k, v), each `[L, length, KV, D]`.
    """
    rng = np.random.default_rng(seed)
    pages = len(lengths) * TABLE_WIDTH + 3
    k, v = np.full((2, LAYERS, pages, KV_HEADS, PAGE, DIM), garbage, np.float32)
    table = rng.permutation(pages)[: len(lengths) * TABLE_WIDTH].reshape(len(lengths), TABLE_WIDTH)
    cached = []
    for request, length in enumerate(lengths):
        row = np.arange(length)
        at = (slice(None), table[request, row // PAGE], slice(None), row % PAGE)
        cached.append(tuple(rng.normal(size=(2, LAYERS, length, KV_HEADS, DIM)).astype(np.float32)))
        k[at], v[at] = (rows.swapaxes(0, 1) for rows in cached[-1])  # indexed axes come first
    return Prefix(jnp.asarray(k), jnp.asarray(v), jnp.asarray(table), jnp.asarray(lengths)), cached


def plain_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """One row's q `[H, D]` over k and v `[C, KV, D]`, in float64; zeros where there is nothing to see."""
    out = np.zeros(q.shape)
    for head in range(HEADS if len(k) else 0):
        kv_head = head // (HEADS // KV_HEADS)
        scores = k[:, kv_head].astype(np.float64) @ q[head] * SCALE
        weights = np.exp(scores - scores.max())
        out[head] = weights / weights.sum() @ v[:, kv_head]
    return out


def expected_rows(
    q, k, v, counts, causal: bool, cached, layer: int, window: int = 0, from_anchor: bool = False
) -> np.ndarray:
    """The real rows `[sum(counts), H, D]`, request by request."""
    out, first = [], 0
    for request, count in enumerate(counts):
        for i in range(count):
            block = np.arange(i + 1 if causal else count)
            if window and not from_anchor:
                block = block[block > i - window]
            keys, values = k[first + block], v[first + block]
            if cached is not None:
                # Distance from the block's first row, which stands right behind the prefix.
                distance = np.arange(-cached[request][0].shape[1], 0)
                oldest = -len(distance) if not window else -window if from_anchor else i - window + 1
                seen = distance >= oldest
                keys = np.concatenate([cached[request][0][layer][seen], keys])
                values = np.concatenate([cached[request][1][layer][seen], values])
            out.append(plain_attention(q[first + i], keys, values))
        first += count
    return np.reshape(out, (-1, HEADS, DIM))


def check(
    counts: list[int], lengths: list[int] | None, causal: bool, seed: int, layer: int = 1, **windowed
) -> np.ndarray:
    """Compares the real rows with the plain loop and returns the padding rows, which must be finite."""
    q, k, v = random_rows(seed)
    prefix, cached = (None, None) if lengths is None else cached_prefix(lengths, seed)
    starts = jnp.asarray(lengths or [0] * len(counts))
    args = (q, k, v, jnp.asarray(counts), starts, prefix, layer)
    out = np.asarray(attention(*args, block=BLOCK, causal=causal, **windowed))
    expected = expected_rows(q, k, v, counts, causal, cached, layer, **windowed)
    np.testing.assert_allclose(out[: len(expected)], expected, rtol=1e-5, atol=1e-5)
    assert np.isfinite(out).all()
    return out[len(expected) :]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [None, [7, 0, 16]])
@pytest.mark.parametrize("counts", [[5, 4, 5], [1, 5, 2], [0, 3, 5], [4, 0, 1], [2, 3, 0], [0, 0, 0]])
def test_matches_a_loop_over_requests(counts, lengths, causal):
    check(counts, lengths, causal, seed=sum(counts))


@pytest.mark.parametrize("causal", [True, False])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_matches_a_loop_for_any_counts_and_lengths(causal, data):
    counts = data.draw(st.lists(st.integers(0, BLOCK), min_size=3, max_size=3).filter(lambda c: sum(c) <= NUM_ROWS))
    lengths = data.draw(st.lists(st.integers(0, TABLE_WIDTH * PAGE), min_size=3, max_size=3))
    check(counts, lengths, causal, data.draw(st.integers(0, 99)), data.draw(st.integers(0, LAYERS - 1)))


@pytest.mark.parametrize(("window", "from_anchor"), [(1, False), (3, False), (3, True), (9, False), (9, True)])
@pytest.mark.parametrize("causal", [True, False])
@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_window_matches_a_loop_for_any_counts_and_lengths(causal, window, from_anchor, data):
    counts = data.draw(st.lists(st.integers(0, BLOCK), min_size=3, max_size=3).filter(lambda c: sum(c) <= NUM_ROWS))
    lengths = data.draw(st.lists(st.integers(0, TABLE_WIDTH * PAGE), min_size=3, max_size=3))
    seed = data.draw(st.integers(0, 99))
    check(counts, lengths, causal, seed, window=window, from_anchor=from_anchor)


@pytest.mark.parametrize("from_anchor", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_a_window_larger_than_everything_is_none(causal, from_anchor):
    counts, lengths = [5, 2, 4], [16, 0, 13]
    q, k, v = random_rows(11)
    args = (q, k, v, jnp.asarray(counts), jnp.asarray(lengths), cached_prefix(lengths, 11)[0], 1)
    plain = attention(*args, block=BLOCK, causal=causal)
    windowed = attention(*args, block=BLOCK, causal=causal, window=TABLE_WIDTH * PAGE + BLOCK, from_anchor=from_anchor)
    np.testing.assert_array_equal(windowed, plain)


@pytest.mark.parametrize("window", [0, 2, 7, 40])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_step_equals_the_last_row_of_a_causal_block(steps, window):
    """Eagle3 drafts row by row behind its prefix; all rows at once must give the newest one the same."""
    lengths = [7, 0, 16]
    q, k, v = random_rows(12, 3 * steps)
    prefix, _ = cached_prefix(lengths, 12)
    counts = jnp.full(3, steps)
    out = attention(
        q, k, v, counts, jnp.asarray(lengths), prefix, 1, block=steps, causal=True, window=window, from_anchor=False
    )
    by_request = [a.reshape(3, steps, *a.shape[1:]) for a in (q, k, v)]
    # Rows behind the newest one are room for drafts to come.
    own = [jnp.concatenate([a, jnp.full((3, 2, *a.shape[2:]), 9.0)], axis=1) for a in by_request[1:]]
    step = step_attention(by_request[0][:, -1], *own, steps - 1, prefix, 1, scale=SCALE, window=window)
    np.testing.assert_allclose(step, out.reshape(3, steps, HEADS, DIM)[:, -1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("garbage", [-3e38, 0.0, 1e30])
def test_unused_pages_and_rows_past_the_length_have_no_effect(garbage):
    counts, lengths = [5, 2, 4], [6, 0, 13]
    q, k, v = random_rows(3)
    outs = []
    for value in (1.0, garbage):
        prefix, _ = cached_prefix(lengths, 3, value)
        args = (q, k, v, jnp.asarray(counts), jnp.asarray(lengths), prefix, 0)
        outs.append(np.asarray(attention(*args, block=BLOCK, causal=True))[: sum(counts)])
    np.testing.assert_array_equal(*outs)


def test_the_pages_a_request_lies_on_have_no_effect():
    counts, lengths = [5, 2, 4], [6, 3, 13]
    q, k, v = random_rows(4)
    prefix, _ = cached_prefix(lengths, 4)
    moved = np.random.default_rng(9).permutation(prefix.k_LxPxKVxSxD.shape[1])  # old page of each new page
    other = Prefix(
        prefix.k_LxPxKVxSxD[:, moved], prefix.v_LxPxKVxSxD[:, moved],
        jnp.asarray(np.argsort(moved))[prefix.table_RxC], prefix.length_R,
    )  # fmt: skip
    outs = [
        attention(q, k, v, jnp.asarray(counts), jnp.asarray(lengths), pool, 1, block=BLOCK, causal=True)
        for pool in (prefix, other)
    ]
    np.testing.assert_array_equal(*outs)


def test_two_requests_can_share_pages():
    counts, lengths = [2, 2, 1], [8, 8, 5]
    q, k, v = random_rows(5)
    prefix, cached = cached_prefix(lengths, 5)
    table = prefix.table_RxC.at[1].set(prefix.table_RxC[0]).at[2, 0].set(prefix.table_RxC[0, 0])
    out = attention(
        q, k, v, jnp.asarray(counts), jnp.asarray(lengths), prefix.replace(table_RxC=table), 0, block=BLOCK, causal=True
    )
    tail = tuple(np.concatenate([a[:, :PAGE], b[:, PAGE:]], axis=1) for a, b in zip(cached[0], cached[2], strict=True))
    expected = expected_rows(q, k, v, counts, True, [cached[0], cached[0], tail], 0)
    np.testing.assert_allclose(out[: sum(counts)], expected, rtol=1e-5, atol=1e-5)


def test_rows_are_laid_out_request_by_request():
    rows = ragged_rows(jnp.asarray([2, 0, 3]), jnp.asarray([10, 20, 30]), 8, 3)
    np.testing.assert_array_equal(rows.valid_N, [True] * 5 + [False] * 3)
    np.testing.assert_array_equal(rows.slot_N, [0, 0, 2, 2, 2, 2, 2, 2])  # padding points at the last request
    np.testing.assert_array_equal(rows.offset_N[:5], [0, 1, 0, 1, 2])
    np.testing.assert_array_equal(rows.position_N[:5], [10, 11, 30, 31, 32])
    np.testing.assert_array_equal(rows.first_R, [0, 2, 2])
    assert rows.block == 3
    # Padding rows must not point outside of a block.
    assert ((rows.offset_N >= 0) & (rows.offset_N < 3)).all()


def test_padding_rows_that_see_nothing_give_zeros():
    # They belong to the last request, which has neither rows nor a prefix.
    padding = check([5, 4, 0], [3, 0, 0], causal=True, seed=6)
    assert padding.shape[0] == NUM_ROWS - 9
    np.testing.assert_array_equal(padding, 0)


@pytest.mark.parametrize("peak", [0.0, 1e4])
def test_a_query_that_sees_nothing_gives_zeros(peak):
    q = jnp.full((1, 2, KV_HEADS, 3, DIM), peak)
    k = v = jnp.ones((1, 4, KV_HEADS, DIM))
    visible = jnp.asarray([[[False] * 4, [True] * 4]])
    out = masked_attention(q, k, v, visible, SCALE)
    np.testing.assert_array_equal(out[0, 0], 0)
    np.testing.assert_allclose(out[0, 1], 1, rtol=1e-6)


def test_large_scores_do_not_overflow():
    q, k, v = random_rows(7)
    counts = jnp.asarray([5, 5, 4])
    out = attention(1e4 * q, k, v, counts, jnp.zeros(3, jnp.int32), None, 0, block=BLOCK, causal=True)
    assert np.isfinite(out).all()


def test_bfloat16_rows_come_back_in_bfloat16_and_near_float32():
    counts, lengths = [5, 4, 5], [7, 0, 16]
    q, k, v = random_rows(8)
    prefix, cached = cached_prefix(lengths, 8)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)))
    pool = prefix.replace(
        k_LxPxKVxSxD=prefix.k_LxPxKVxSxD.astype(jnp.bfloat16), v_LxPxKVxSxD=prefix.v_LxPxKVxSxD.astype(jnp.bfloat16)
    )
    out = attention(*narrow, jnp.asarray(counts), jnp.asarray(lengths), pool, 0, block=BLOCK, causal=False)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(out, np.float32), expected_rows(q, k, v, counts, False, cached, 0), rtol=0.05, atol=0.05
    )


def test_float64_rows_are_attended_in_float64(x64):
    counts = [5, 4, 5]
    q, k, v = (array.astype(np.float64) for array in random_rows(9))
    out = attention(q, k, v, jnp.asarray(counts), jnp.zeros(3, jnp.int32), None, 0, block=BLOCK, causal=True)
    assert out.dtype == jnp.float64
    np.testing.assert_allclose(out, expected_rows(q, k, v, counts, True, None, 0), rtol=1e-12, atol=1e-12)


def test_rows_are_a_pytree_with_a_static_block():
    rows = ragged_rows(jnp.asarray([1, 2]), jnp.asarray([0, 0]), 4, 2)
    assert isinstance(rows, Rows)
    assert len(jax.tree.leaves(rows)) == 6
