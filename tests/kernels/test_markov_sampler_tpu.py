"""The TPU kernel of the in-block loop: its draws in the interpreter, whole blocks by it, and its compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.draft_law import Factored, Speech
from pallas_kernels.fused_verify import fused_verify
from pallas_kernels.markov_sampler import draw_draft
from pallas_kernels.markov_sampler.report import arguments, markov_sampler_lines
from tests.decoding.laws import PASS, chi_square
from tests.kernels.rounds import SMALL, random_round
from tests.kernels.targets import compile_tpu, every_tpu, has_kernel, needs_libtpu, tpu_interpreter

draw = jax.jit(draw_draft, static_argnames="backend")
# Requests, drafts, draft vocabulary, rank, target tokens per draft token, words without a token, dtype.
SIZES = [
    (5, 3, 331, 8, 1, 0, "float32"), (1, 16, 640, 48, 3, 40, "bfloat16"), (70, 2, 4200, 16, 2, 5, "bfloat16"),
]  # fmt: skip


def random_speech(rng: np.random.Generator, requests, drafts, vocab, rank, spread, padding, dtype) -> Speech:
    # Of few digits, as the factors are: no sum of products is rounded, in any order, even in bfloat16.
    base = jnp.asarray(rng.integers(-16, 17, (drafts, requests, vocab)) / 8, dtype)
    correction = jnp.asarray(rng.integers(-2, 3, (vocab, rank)) / 2, dtype)
    token_ids = jnp.arange(0, vocab * spread, spread, dtype=jnp.int32)
    return Speech(base, correction, token_ids, vocab * spread - padding)


def random_asked(rng: np.random.Generator, sizes) -> tuple:
    """Arguments of `draw_draft`."""
    requests, speech = sizes[0], random_speech(rng, *sizes)
    factor = jnp.asarray(rng.integers(-1, 2, (requests, sizes[3])) * (rng.random(sizes[3]) < 4 / sizes[3]), sizes[-1])
    noisy = jnp.asarray(rng.integers(0, 2, requests), bool)
    temperature = jnp.where(noisy, jnp.asarray(rng.choice([0.5, 1.0, 2.0], requests), jnp.float32), 1)
    key = tuple(jnp.asarray(rng.integers(0, 2**32, requests), jnp.uint32) for _ in range(2))
    return speech, jnp.int32(rng.integers(sizes[1])), factor, temperature, noisy, key


def compare(sizes, seed: int) -> None:
    """The kernel picks the reference's tokens with the same noise, and knows what they weigh."""
    asked = random_asked(np.random.default_rng(seed), sizes)
    want = draw(*asked, backend="xla")
    with tpu_interpreter():
        got = jax.block_until_ready(draw(*asked, backend="tpu"))
    np.testing.assert_array_equal(got.index_R, want.index_R)
    np.testing.assert_allclose(got.log_q_R, want.log_q_R, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(got.log_largest_R, want.log_largest_R, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_kernel_draws_what_the_reference_draws(sizes):
    @settings(max_examples=6, deadline=None, derandomize=True)
    @given(st.integers(0, 2**16))
    def check(seed):
        compare(sizes, seed)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [49_152, 151_936])
def test_the_kernel_at_real_vocabularies(vocab):
    compare((8, 1, vocab, 64, 1, 100, "bfloat16"), seed=0)


def test_the_law_is_the_factored_ones():
    """Draws of one law with keys of their own, against the law that the residual will be told."""
    trials, vocab = 4096, 12
    rng = np.random.default_rng(0)
    base, factor = jnp.asarray(rng.normal(size=(1, 1, vocab)), jnp.float32), jnp.asarray(rng.normal(size=(1, 4)))
    alike = lambda a, axis: jnp.repeat(jnp.asarray(a, jnp.float32), trials, axis)  # noqa: E731
    speech = Speech(alike(base, 1), jnp.asarray(rng.normal(size=(vocab, 4)), jnp.float32), jnp.arange(vocab), vocab - 1)
    temperature, key = jnp.full(trials, 1.3), tuple(jnp.asarray(rng.integers(0, 2**32, (2, trials)), jnp.uint32))
    with tpu_interpreter():
        drawn = jax.block_until_ready(
            draw(speech, jnp.int32(0), alike(factor, 0), temperature, jnp.ones(trials, bool), key, backend="tpu")
        )
    law = Factored(speech, alike(factor, 0)[:, None], temperature).row(jnp.zeros(trials, int))[0]
    p = np.exp(np.asarray(jax.nn.log_softmax(law), np.float64))
    assert p[-1] == 0 and chi_square(np.asarray(drawn.index_R), p / p.sum()) > PASS
    np.testing.assert_allclose(np.exp(drawn.log_q_R), p[np.asarray(drawn.index_R)], rtol=1e-5)


@pytest.mark.parametrize("sizes", SMALL[:2], ids=str)
def test_a_law_that_is_written_nowhere_is_the_written_one(sizes):
    """To verification: with an identity for a table, factors are what is to be added to the base's zeros."""
    arguments = random_round(sizes, 3, [4, 4, 2, 0, 4], [1.0, 0.7, 1.0, 1.0, 0.0], "rejection")
    hidden, head, rows, drafts, warp, key = arguments
    temperature = jnp.where(warp.temperature > 0, warp.temperature, 1)
    logits = drafts.law.warped_RxKxVd * temperature[:, None, None]
    requests, number, vocab = logits.shape
    speech = Speech(jnp.zeros((number, requests, vocab)), jnp.eye(vocab), drafts.token_ids_Vd, head.num_tokens)
    factored = Factored(speech, logits, temperature)
    place = jnp.asarray(np.random.default_rng(0).integers(0, vocab, (requests, 9)))
    slot = jnp.asarray([0, 2, 1, 0, 2])
    for ask in (lambda law: law.row(slot), lambda law: law.at(slot, place)):
        np.testing.assert_allclose(ask(factored), ask(drafts.law), rtol=1e-5, atol=1e-5)
    fused = jax.jit(fused_verify, static_argnames="sampler")
    want = fused(*arguments, sampler="rejection")
    got = fused(hidden, head, rows, drafts.replace(law=factored), warp, key, sampler="rejection")
    live = np.asarray(rows.count_R) > 0
    np.testing.assert_array_equal(np.asarray(got.next_R)[live], np.asarray(want.next_R)[live])


@needs_libtpu
@every_tpu
@pytest.mark.parametrize(("requests", "vocab", "rank"), [(16, 151_936, 256), (4, 262_144, 256), (256, 49_152, 48)])
def test_the_kernel_compiles_at_full_size(requests, vocab, rank, chip):
    """And holds no logits of a draft."""
    compiled = compile_tpu(chip, draw_draft, *arguments(requests, vocab, rank))
    assert has_kernel(compiled)
    assert compiled.memory_analysis().temp_size_in_bytes < requests * vocab * 4 / 2


@needs_libtpu
def test_the_report_shows_fewer_bytes():
    for _, _, temporary, moved in markov_sampler_lines(compile_tpu, "v5e"):
        assert temporary[1] < temporary[0] / 4 and moved[1] < moved[0]
