"""Fused verification against the engine's own from logits in memory, and its TPU kernel against jnp."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.fused_verify import Drafts, Head, Query, fused_verify, reference, row_statistics, serves, tpu
from pallas_kernels.fused_verify import verify as verify_module
from pallas_kernels.targets import full_size_head
from pallas_kernels.warp import Warp
from tests.decoding.laws import PASS, chi_square
from tests.kernels.rounds import Sizes, from_logits, random_round
from tests.kernels.targets import compile_tpu, every_tpu, has_kernel, needs_libtpu, tpu_interpreter

SMALL = [
    Sizes(requests=5, drafts=3, width=16, vocab=331),
    Sizes(requests=5, drafts=3, width=16, vocab=331, padding=9, spoken=3, dtype="bfloat16"),
    Sizes(requests=4, drafts=1, width=24, vocab=1100, softcap=4.0, transposed=True),
    Sizes(requests=1, drafts=16, width=8, vocab=640, spoken=2, softcap=4.0, dtype="bfloat16"),
]
small = pytest.mark.parametrize("sizes", SMALL, ids=lambda s: f"{s.requests}x{s.drafts}-{s.vocab}-{s.dtype}")
samplers = pytest.mark.parametrize("sampler", ["rejection", "coupled"])

fused = jax.jit(fused_verify, static_argnames=("sampler", "backend"))
statistics = {"tpu": jax.jit(tpu.row_statistics), "xla": jax.jit(reference.row_statistics)}


def assert_same(got, want, rows, drafts) -> None:
    """Tokens of requests with rows, and the log-probabilities of what they emit."""
    accepted, following, log_probs = map(np.asarray, want)
    live = np.asarray(rows.count_R) > 0
    np.testing.assert_array_equal(np.asarray(got.accepted_R)[live], accepted[live])
    np.testing.assert_array_equal(np.asarray(got.next_R)[live], following[live])
    for r in np.flatnonzero(live):
        emitted = [*([] if drafts is None else np.asarray(drafts.token_RxK)[r, : accepted[r]]), following[r]]
        expected = log_probs[int(rows.first_R[r]) + np.arange(len(emitted)), emitted]
        np.testing.assert_allclose(got.logprob_RxQ[r, : len(emitted)], expected, rtol=1e-5, atol=1e-5)


def rounds_of(sizes: Sizes):
    counts = st.lists(st.integers(0, sizes.drafts + 1), min_size=sizes.requests, max_size=sizes.requests)
    temperatures = st.lists(st.sampled_from([0.0, 0.7, 1.0, 1.5]), min_size=sizes.requests, max_size=sizes.requests)
    return st.tuples(st.integers(0, 2**16), counts, temperatures)


# ------------------------------------------------------------------------------------ the algorithm, anywhere


@samplers
@small
def test_picks_the_tokens_that_logits_in_memory_give(sizes, sampler):
    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(rounds_of(sizes))
    def check(drawn):
        arguments = random_round(sizes, *drawn, sampler)
        assert_same(fused(*arguments, sampler), from_logits(*arguments, sampler), arguments[2], arguments[3])

    check()


@samplers
def test_plain_decoding(sampler):
    hidden, head, rows, _, temperature, key = random_round(SMALL[0], 3, [1, 1, 0, 1, 1], [0, 1, 1, 0.7, 1.5], sampler)
    arguments = (hidden, head, rows, None, temperature, key, sampler)
    assert_same(fused(*arguments), from_logits(*arguments), rows, None)


@pytest.mark.parametrize("spread", [0.05, 0.5])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_residual_that_no_candidate_wins_is_found_in_the_logits(depth, spread, monkeypatch):
    """With few candidates of many tokens, and q close to p, they often do not suffice."""
    monkeypatch.setattr(reference, "DEPTH", depth)
    sizes = Sizes(requests=64, drafts=2, width=16, vocab=3000)
    arguments = random_round(sizes, 0, [3] * 64, [1.0] * 64, "rejection", spread)
    got = jax.jit(lambda *a: fused_verify(*a, "rejection", "xla"))(*arguments)
    assert_same(got, from_logits(*arguments, "rejection"), arguments[2], arguments[3])


def unsure(sizes: Sizes, spread: float, monkeypatch) -> tuple[int, int]:
    """Rejected requests whose residual took their logits, and all rejected ones."""
    seen = []

    def counting(flags, yes, no):
        seen.append(flags)
        return no()

    everyone = [sizes.drafts + 1] * sizes.requests, [1.0] * sizes.requests
    arguments = random_round(sizes, 0, *everyone, "rejection", spread)
    real = jax.lax.cond
    with monkeypatch.context() as patch:
        patch.setattr(verify_module.jax.lax, "cond", counting)
        fused_verify(*arguments, "rejection", "xla")
    assert real is jax.lax.cond
    return seen
