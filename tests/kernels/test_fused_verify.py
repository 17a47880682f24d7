"""Fused verification against the engine's own from logits in memory, and its TPU kernel against jnp."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import report
from pallas_kernels.fused_verify import Head, Query, fused_verify, reference, serves, tpu
from pallas_kernels.warp import Warp
from tests.decoding.laws import FAIL, PASS, chi_square
from tests.kernels.rounds import Sizes, from_logits, propose, random_round
from tests.kernels.targets import compile_tpu, every_tpu, has_kernel, needs_libtpu, tpu_interpreter

SMALL = [
    Sizes(requests=5, drafts=3, width=16, vocab=331),
    Sizes(requests=5, drafts=3, width=16, vocab=331, padding=9, spoken=3, dtype="bfloat16"),
    Sizes(requests=4, drafts=1, width=24, vocab=1100, softcap=8.0, transposed=True),
    Sizes(requests=1, drafts=16, width=8, vocab=640, spoken=2, softcap=4.0, dtype="bfloat16"),
]


def name_of(sizes: Sizes) -> str:
    return f"{sizes.requests}x{sizes.drafts}-{sizes.vocab}-{sizes.dtype}"


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


LIMITS = [(0, 1.0, 0.0), (0, 1.0, 0.0), (5, 1.0, 0.0), (7, 0.8, 0.0), (0, 1.0, 0.1), (20, 0.95, 0.02)]


def rounds_of(sizes: Sizes):
    counts = st.lists(st.integers(0, sizes.drafts + 1), min_size=sizes.requests, max_size=sizes.requests)
    temperatures = st.lists(st.sampled_from([0.0, 0.7, 1.0, 1.5]), min_size=sizes.requests, max_size=sizes.requests)
    limits = st.lists(st.sampled_from(LIMITS), min_size=sizes.requests, max_size=sizes.requests)
    return st.tuples(st.integers(0, 2**16), counts, temperatures, limits)


# ------------------------------------------------------------------------------------ the algorithm, anywhere


@pytest.mark.parametrize(
    ("sizes", "sampler"),
    [*((sizes, "rejection") for sizes in SMALL), (SMALL[1], "coupled"), (SMALL[3], "coupled")],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_picks_the_tokens_that_logits_in_memory_give(sizes, sampler):
    @settings(max_examples=25, deadline=None, derandomize=True)
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


@pytest.mark.parametrize(("backend", "rounds"), [("tpu", 6), ("xla", 30)])
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
    got = fused(hidden, head, rows, drafts.replace(warped_RxKxVd=(), log_q_RxK=log_q), warp, key, "rejection")
    point = jnp.where(jnp.arange(331) == drafts.token_RxK[..., None], 0.0, -jnp.inf)
    as_law = drafts.replace(warped_RxKxVd=point, log_q_RxK=log_q)
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


# ---------------------------------------------------------------------------------------------- the TPU kernel


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
    """And its head is the only large array: nothing as large as one row per token of the vocabulary is kept."""
    hidden, head, query = report.row_arguments(model, 128)
    compiled = compile_tpu(chip, tpu.row_statistics, hidden, head, query)
    assert has_kernel(compiled)
    assert compiled.memory_analysis().temp_size_in_bytes < 128 * head.vocab_size * 2 / 4
