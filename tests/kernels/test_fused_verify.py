"""Fused verification against the engine's own, which has all logits in memory."""

import contextlib
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

from pallas_kernels.draft_law import Written
from pallas_kernels.fused_verify import fused_verify, reference, serves
from pallas_kernels.warp import Warp
from tests.decoding.laws import FAIL, PASS, chi_square
from tests.kernels.rounds import SMALL, Sizes, assert_same, from_logits, name_of, propose, random_round
from tests.kernels.targets import tpu_interpreter

samplers = pytest.mark.parametrize("sampler", ["rejection", "coupled"])

fused = jax.jit(fused_verify, static_argnames=("sampler", "backend"))
LIMITS = [(0, 1.0, 0.0), (0, 1.0, 0.0), (5, 1.0, 0.0), (7, 0.8, 0.0), (0, 1.0, 0.1), (20, 0.95, 0.02)]


def rounds_of(sizes: Sizes):
    counts = st.lists(st.integers(0, sizes.drafts + 1), min_size=sizes.requests, max_size=sizes.requests)
    temperatures = st.lists(st.sampled_from([0.0, 0.7, 1.0, 1.5]), min_size=sizes.requests, max_size=sizes.requests)
    limits = st.lists(st.sampled_from(LIMITS), min_size=sizes.requests, max_size=sizes.requests)
    return st.tuples(st.integers(0, 2**16), counts, temperatures, limits)


@pytest.mark.parametrize(
    ("sizes", "sampler"),
    [*((sizes, "rejection") for sizes in SMALL), (SMALL[1], "coupled")],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_picks_the_tokens_that_logits_in_memory_give(sizes, sampler):
    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(rounds_of(sizes))
    def check(drawn):
        *drawn, limits = drawn
        arguments = random_round(sizes, *drawn, sampler, limits=limits)
        got = fused(*arguments, sampler)
        if not got.complete:  # flat rows: min-p can keep any number of tokens
            assert any(min_p for _, _, min_p in limits)
            return
        assert_same(got, from_logits(*arguments, sampler), arguments[2], arguments[3])

    check()


@samplers
def test_plain_decoding(sampler):
    warped = [0, 1, 1, 0.7, 1.5], sampler, 0.5, LIMITS[1:]
    hidden, head, rows, _, warp, key = random_round(SMALL[0], 3, [1, 1, 0, 1, 1], *warped)
    arguments = (hidden, head, rows, None, warp, key, sampler)
    assert_same(fused(*arguments), from_logits(*arguments), rows, None)


@pytest.mark.parametrize(("depth", "spread"), [(1, 0.5), (2, 0.05)])
def test_a_residual_that_no_candidate_wins_is_found_in_the_logits(depth, spread, monkeypatch):
    """With few candidates of many tokens, and q close to p, they often do not suffice."""
    monkeypatch.setattr(reference, "DEPTH", depth)
    sizes = Sizes(requests=64, drafts=2, width=16, vocab=3000)
    arguments = random_round(sizes, 0, [3] * 64, [1.0] * 64, "rejection", spread)
    got = jax.jit(lambda *a: fused_verify(*a, "rejection", "xla"))(*arguments)
    assert_same(got, from_logits(*arguments, "rejection"), arguments[2], arguments[3])


def test_candidates_nearly_always_suffice():
    """Half a thousand candidates hold the residual's winner unless q is so close to p that rejections are rare."""
    sizes = Sizes(requests=128, drafts=1, width=16, vocab=16_384)
    rejected = unsure = 0
    for seed in range(4):
        arguments = random_round(sizes, seed, [2] * 128, [1.0] * 128, "rejection", spread=0.3)
        got = fused(*arguments, "rejection")
        rejected += int(jnp.sum(got.accepted_R == 0))
        unsure += int(jnp.sum(got.unsure_R))
    assert rejected > 20 and unsure <= 0.03 * rejected


@pytest.mark.parametrize(("backend", "rounds"), [("xla", 30), pytest.param("tpu", 6, marks=pytest.mark.slow)])
def test_the_law_is_the_targets(backend, rounds):
    """Drafts from another law; what comes out is one or two tokens of the target's, whose rows are all alike."""
    trials, vocab, temperature = 128, 8, 1.3
    sizes = Sizes(requests=trials, drafts=1, width=4, vocab=vocab)
    rng = np.random.default_rng(0)
    hidden = jnp.broadcast_to(jnp.asarray(rng.normal(size=4) * 1.3, jnp.float32), (2 * trials, 4))
    noise = jnp.broadcast_to(jnp.asarray(rng.normal(size=vocab), jnp.float32), (trials, 1, vocab))
    everyone = [2] * trials, [temperature] * trials
    head = random_round(sizes, 0, *everyone, "rejection")[1]
    drafted, first, second = [], [], []
    for seed in range(rounds):
        _, _, rows, _, warp, key = random_round(sizes, seed, *everyone, "rejection")
        drafts = propose(hidden, head, rows, warp, key, "rejection", noise, 1)
        with tpu_interpreter() if backend == "tpu" else contextlib.nullcontext():
            got = jax.block_until_ready(fused(hidden, head, rows, drafts, warp, key, "rejection", backend))
        accepted = np.asarray(got.accepted_R) == 1
        drafted.append(np.asarray(drafts.token_RxK)[:, 0])
        first.append(np.where(accepted, drafted[-1], np.asarray(got.next_R)))
        second.append(np.asarray(got.next_R)[accepted])
    p = np.exp(np.asarray(jax.nn.log_softmax(head.logits(hidden[:1])[0] / temperature), np.float64))
    assert chi_square(np.concatenate(first), p / p.sum()) > PASS
    assert chi_square(np.concatenate(second), p / p.sum()) > PASS
    assert 0.2 < len(np.concatenate(second)) / (trials * rounds) < 0.95
    if backend == "xla":  # the control needs the larger sample
        assert chi_square(np.concatenate(drafted), p / p.sum()) < FAIL


def test_certain_drafts_leave_p_without_the_draft():
    sizes = Sizes(requests=64, drafts=1, width=4, vocab=331)
    hidden, head, rows, drafts, warp, key = random_round(sizes, 1, [2] * 64, [1.0] * 64, "rejection")
    log_q = jnp.zeros_like(drafts.log_q_RxK)
    got = fused(hidden, head, rows, drafts.replace(law=(), log_q_RxK=log_q), warp, key, "rejection")
    point = jnp.where(jnp.arange(331) == drafts.token_RxK[..., None], 0.0, -jnp.inf)
    as_law = drafts.replace(law=Written(point), log_q_RxK=log_q)
    assert_same(got, from_logits(hidden, head, rows, as_law, warp, key, "rejection"), rows, drafts)


def test_what_is_not_served():
    plain = Warp.temperatures(jnp.asarray([0.0, 1.3]))
    nucleus = plain.replace(top_p=jnp.asarray([1.0, 0.9]))
    assert serves(plain)
    assert serves(plain.replace(top_p=jnp.asarray([0.9, 1.0])))  # greedy: top-p changes nothing
    assert not serves(nucleus)
    assert serves(nucleus.replace(top_k=jnp.asarray([0, 20])))


@pytest.mark.parametrize("limit", [(600, 1.0, 0.0), (0, 1.0, 1e-6)], ids=["top-k", "min-p"])
def test_a_limit_beyond_the_candidates_is_reported(limit):
    sizes = Sizes(requests=2, drafts=1, width=16, vocab=2000)
    off = (0, 1.0, 0.0)
    for first, complete in ((off, True), (limit, False)):
        arguments = random_round(sizes, 0, [2, 2], [1.0, 1.0], "rejection", limits=[first, off])
        assert fused(*arguments, "rejection").complete == complete
    arguments = random_round(sizes, 0, [0, 2], [1.0, 1.0], "rejection", limits=[limit, off])
    assert fused(*arguments, "rejection").complete  # nobody reads the request without rows


def test_on_a_mesh():
    """And the in-block loop."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-m", "tests.kernels.sharded_rounds"], cwd=root, env=environment, check=True)
