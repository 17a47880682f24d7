"""Warps against the warpers of `transformers` and against a numpy oracle that sorts."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import warp as warps
from pallas_kernels.warp import Warp

apply = jax.jit(warps.apply)
# A token so close to a limit may fall on either side of it: sums are rounded in another order.
MARGIN = 1e-5


@dataclasses.dataclass(frozen=True)
class Params:
    """One row's warp as plain numbers."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def warp_of(rows: list[Params]) -> Warp:
    columns = zip(*(dataclasses.astuple(row) for row in rows), strict=True)
    types = (np.float32, np.int32, np.float32, np.float32)
    return Warp(*(jnp.asarray(np.array(column, dtype)) for column, dtype in zip(columns, types, strict=True)))


def oracle(logits: np.ndarray, row: Params) -> tuple[np.ndarray, np.ndarray]:
    """For one row `[V]`: which tokens are kept, ties included, and which are too close to a limit to say."""
    if row.temperature == 0:
        return np.ones(logits.shape, bool), np.zeros(logits.shape, bool)
    x = logits / logits.dtype.type(row.temperature)
    descending = np.sort(x)[::-1]
    kept = x >= descending[min(row.top_k or x.size, x.size) - 1]
    close = np.zeros(x.shape, bool)
    mass = np.where(kept, np.exp(x.astype(np.float64) - x.max()), 0)
    if row.top_p < 1:
        above = np.array([mass[x > value].sum() for value in x]) / mass.sum()
        kept &= above < row.top_p
        close |= np.abs(above - row.top_p) < MARGIN
    if row.min_p > 0:
        limit = x.max() + np.log(row.min_p)
        kept &= x >= limit
        close |= np.abs(x - limit) < MARGIN
    return kept, close


def assert_warped(out: np.ndarray, logits: np.ndarray, rows: list[Params]) -> None:
    """The warped rows are what the oracle says."""
    for got, x, row in zip(np.asarray(out), logits, rows, strict=True):
        kept, close = oracle(x, row)
        np.testing.assert_array_equal((got > -np.inf) | close, (kept & (x > -np.inf)) | close, err_msg=str(row))
        finite = got > -np.inf
        np.testing.assert_allclose(got[finite], x[finite] / (row.temperature or 1), rtol=1e-6, err_msg=str(row))


def transformers_warp(logits: np.ndarray, row: Params) -> np.ndarray:
    """Temperature, top-k, top-p and min-p of `transformers`, chained as its `generate` does."""
    torch = pytest.importorskip("torch")
    hf = pytest.importorskip("transformers.generation.logits_process")
    chain = [hf.TemperatureLogitsWarper(row.temperature)]
    chain += [hf.TopKLogitsWarper(row.top_k)] if row.top_k else []
    chain += [hf.TopPLogitsWarper(row.top_p)] if row.top_p < 1 else []
    chain += [hf.MinPLogitsWarper(row.min_p)] if row.min_p else []
    scores = torch.from_numpy(logits[None])
    for warper in chain:
        scores = warper(None, scores)
    return scores[0].numpy()


def test_rows_with_their_own_parameters_match_transformers():
    mixes = itertools.product((0.5, 0.7, 1.0, 2.0), (0, 1, 5, 1000), (0.05, 0.5, 0.9, 0.999, 1.0), (0.0, 0.05, 0.5))
    rows = [Params(*mix) for mix in mixes]
    # Greedy rows among them keep their logits, whatever else they ask for.
    greedy = [Params(0.0), Params(0.0, 3, 0.5, 0.1)]
    logits = np.random.default_rng(0).normal(scale=3, size=(len(rows) + len(greedy), 300)).astype(np.float32)
    out = np.asarray(apply(logits, warp_of(rows + greedy)))
    for got, x, row in zip(out, logits, rows, strict=False):
        expected = transformers_warp(x, row)
        _, close = oracle(x, row)
        np.testing.assert_array_equal((got > -np.inf) | close, (expected > -np.inf) | close, err_msg=str(row))
        both = (got > -np.inf) & (expected > -np.inf)
        np.testing.assert_allclose(got[both], expected[both], rtol=1e-6, err_msg=str(row))
    np.testing.assert_array_equal(out[-2:], logits[-2:])


# Few values, so that ties are common; exact under these temperatures, so that ties stay ties.
VALUES = [-np.inf, -20.0, -3.0, -1.5, -1.0, -0.25, 0.0, 0.25, 2.0, 4.0]
PARAMS = st.builds(
    Params,
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    st.integers(0, 50),
    st.one_of(st.just(1.0), st.floats(2**-20, 1.0, width=32)),
    st.one_of(st.just(0.0), st.floats(2**-20, 0.9921875, width=32)),
)


@st.composite
def batches(draw) -> tuple[np.ndarray, list[Params]]:
    vocab = draw(st.sampled_from([1, 6, 33]))  # few shapes, few compilations
    row = st.lists(st.sampled_from(VALUES), min_size=vocab, max_size=vocab).filter(lambda r: max(r) > -np.inf)
    logits = np.array(draw(st.lists(row, min_size=4, max_size=4)), np.float32)
    return logits, draw(st.lists(PARAMS, min_size=4, max_size=4))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(batches())
def test_any_rows_match_the_sorting_oracle(batch):
    logits, rows = batch
    assert_warped(apply(logits, warp_of(rows)), logits, rows)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(batches())
def test_the_maximum_is_always_kept(batch):
    logits, rows = batch
    out = np.asarray(apply(logits, warp_of(rows)))
    assert (out[logits == logits.max(axis=-1, keepdims=True)] > -np.inf).all()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(batches())
def test_top_k_and_min_p_are_idempotent(batch):
    # Top-p is not: the second time it takes its share of what the first one left.
    logits, rows = batch
    warp = warp_of([dataclasses.replace(row, temperature=1.0, top_p=1.0) for row in rows])
    once = apply(logits, warp)
    np.testing.assert_array_equal(apply(once, warp), once)


def one_row(logits: list[float], **params) -> list[float]:
    return np.asarray(apply(np.array([logits], np.float32), warp_of([Params(**params)])))[0].tolist()


def test_ties_at_the_edge_of_top_k_are_kept():
    assert one_row([1.0, 3.0, 2.0, 2.0, 2.0, 0.0], top_k=2) == [-np.inf, 3.0, 2.0, 2.0, 2.0, -np.inf]


def test_top_k_beyond_the_vocabulary_keeps_everything():
    assert one_row([1.0, -3.0, 2.0], top_k=4) == [1.0, -3.0, 2.0]


@pytest.mark.parametrize("top_p", [1e-6, 1e-20, 1e-37])
def test_a_tiny_top_p_keeps_exactly_the_ties_of_the_maximum(top_p):
    assert one_row([1.0, 3.0, -2.0, 3.0, 2.999], top_p=top_p) == [-np.inf, 3.0, -np.inf, 3.0, -np.inf]


def test_a_top_p_that_is_zero_in_float32_keeps_the_maximum():
    # SamplingParams allows it: 1e-50 is above 0 as a Python float.
    assert one_row([1.0, 3.0, -2.0], top_p=1e-50) == [-np.inf, 3.0, -np.inf]


def test_top_p_1_keeps_what_rounding_would_drop():
    # The last token's mass vanishes in any float32 sum.
    assert one_row([0.0, -80.0, -200.0], top_p=1.0) == [0.0, -80.0, -200.0]


def test_top_p_acts_on_what_top_k_leaves():
    law = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    # Of the first two tokens' mass the first has 4/7.
    kept = [value > -np.inf for value in one_row(law, top_k=2, top_p=0.55)]
    assert kept == [True, False, False, False]
    assert [value > -np.inf for value in one_row(law, top_p=0.55)] == [True, True, False, False]


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 0.01}, {"min_p": 0.9}])
def test_equal_logits_are_all_kept(params):
    assert one_row([-5.0] * 6, **params) == [-5.0] * 6


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 0.01}, {"min_p": 0.9}])
def test_zero_and_minus_zero_are_a_tie(params):
    assert one_row([-0.0, 0.0, -1.0], **params) == [0.0, 0.0, -np.inf]


def test_a_row_does_not_depend_on_the_others():
    # With no limited row in the batch another branch is taken.
    logits = np.random.default_rng(1).normal(size=(3, 33)).astype(np.float32)
    plain = [Params(0.7), Params(0.0), Params(1.0)]
    free = np.asarray(apply(logits, warp_of(plain)))
    mixed = np.asarray(apply(np.concatenate([logits, logits]), warp_of([*plain, *([Params(1.0, 3)] * 3)])))
    np.testing.assert_array_equal(mixed[:3], free)
    assert ((mixed[3:] > -np.inf).sum(axis=-1) == 3).all()


def test_a_threshold_is_the_smallest_kept_logit():
    logits = np.random.default_rng(2).normal(size=(4, 33)).astype(np.float32)
    warp = warp_of([Params(top_k=5), Params(top_p=0.6), Params(top_k=9, top_p=0.8), Params()])
    out = np.asarray(apply(logits, warp))
    kept_min = np.where(out > -np.inf, out, np.inf).min(axis=-1)
    np.testing.assert_array_equal(warps.thresholds(jnp.asarray(logits), warp), kept_min)


def test_float64_logits_stay_float64(x64):
    rows = [Params(0.5, 7), Params(1.0, 0, 0.7), Params(2.0, 0, 1.0, 0.1), Params(1.0, 9, 0.9, 0.02), Params(0.0)]
    logits = np.random.default_rng(3).normal(scale=3, size=(len(rows), 200))
    out = np.asarray(apply(logits, warp_of(rows)))
    assert out.dtype == np.float64
    assert_warped(out, logits, rows)
    for got, x, row in zip(out, logits, rows, strict=True):
        kept = got > -np.inf
        np.testing.assert_array_equal(got[kept], x[kept] / (row.temperature or 1))


def test_bfloat16_logits_are_warped_in_float32():
    logits = jnp.asarray([[1.0, 2.0, 3.0]], jnp.bfloat16)
    out = apply(logits, warp_of([Params(0.7, 2)]))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, np.array([[-np.inf, 2 / 0.7, 3 / 0.7]], np.float32), rtol=1e-6)
