"""The GPU kernels' numbers in Pallas' interpreter, against their references. `test_gpu_kernels` runs this file.

In a process of its own: the interpreter's warpgroups are threads that wait for each other, which takes a larger pool of
threads than two cores get (NPROC), and where one fails the others would wait for ever.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gpu_check, noise
from pallas_kernels.fused_verify import Head, Query, RowStatistics, fused_verify
from pallas_kernels.fused_verify import gpu as verify_gpu
from pallas_kernels.fused_verify import reference as verify_reference
from pallas_kernels.markov_sampler import gpu as sampler_gpu
from pallas_kernels.ragged_attention import gpu as attention_gpu
from pallas_kernels.ragged_attention import ragged_rows
from pallas_kernels.ragged_attention import reference as attention_reference
from pallas_kernels.report import Model
from tests.kernels.rounds import Sizes, assert_same, from_logits, random_round
from tests.kernels.targets import gpu_interpreter
from tests.kernels.test_markov_sampler_tpu import draw, random_asked
from tests.kernels.test_ragged_attention_tpu import WIDTH, arrays

# ---------------------------------------------------------------------------------------------------- fused_verify


def random_case(model: Model, padding: int, num_rows: int) -> tuple[jax.Array, Head, Query]:
    """Hidden states, head and query of `row_statistics`; the last `padding` ids stand for no token."""
    rng = np.random.default_rng(num_rows)
    hidden = gpu_check.exact(rng, (num_rows, model.width)) * 4
    head = gpu_check.random_head(rng, model).replace(num_tokens=model.vocab - padding)
    return hidden, head, gpu_check.random_query(rng, num_rows, head.num_tokens)


def check_statistics(got: RowStatistics, hidden: jax.Array, head: Head, query: Query, class_V: np.ndarray) -> None:
    """Against the reference's sums, and against its scores for the best of each class."""
    want = jax.jit(verify_reference.row_statistics)(hidden, head, query)
    for name in ("log_total_N", "log_total_warped_N", "token_logit_N"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=2e-5, atol=2e-5, err_msg=name)
    logits = np.asarray(head.logits(hidden), np.float32)
    gumbel = jax.jit(noise.gumbel)(tuple(word[:, None] for word in query.key_N), jnp.arange(head.vocab_size))
    score = logits / np.asarray(query.temperature_N)[:, None] + np.where(query.noisy_N[:, None], gumbel, 0)
    kept = np.asarray(got.score_NxC).reshape(len(hidden), verify_gpu.DEPTH, got.classes)
    for one in range(got.classes):
        best = -np.sort(-score[:, class_V == one], axis=1)[:, : verify_gpu.DEPTH]
        np.testing.assert_allclose(kept[:, : best.shape[1], one], best, rtol=2e-5, atol=2e-5)
        assert np.isneginf(kept[:, best.shape[1] :, one]).all()
    real = np.isfinite(got.score_NxC)
    ids = np.where(real, got.id_NxC, 0)
    of_ids = np.take_along_axis(score, ids, axis=1)
    np.testing.assert_allclose(np.asarray(got.score_NxC)[real], of_ids[real], rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(np.asarray(got.logit_NxC)[real], np.take_along_axis(logits, ids, axis=1)[real])
    assert (ids < head.num_tokens).all()


@pytest.mark.parametrize(
    ("model", "padding", "num_rows"),
    [(Model(128, 640, 0.0, True), 9, 20),
     pytest.param(Model(320, 384, 8.0, False), 0, 100, marks=pytest.mark.slow)],
    ids=["tied", "soft cap, two readers, more steps than are under way"],
)  # fmt: skip
def test_statistics_are_the_references(model, padding, num_rows):
    """Two blocks share the vocabulary: one of them goes over several tiles."""
    case = random_case(model, padding, num_rows)
    with gpu_interpreter():
        got = jax.block_until_ready(jax.jit(functools.partial(verify_gpu.row_statistics, splits=2))(*case))
    ids = np.arange(model.vocab)
    check_statistics(got, *case, ids // verify_gpu.TOKENS % 2 * verify_gpu.COLUMNS + ids % verify_gpu.COLUMNS)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["rejection", "coupled"])
def test_rounds_say_what_logits_in_memory_say(sampler):
    """From hidden states to tokens through the kernel."""
    sizes = Sizes(requests=3, drafts=3, width=64, vocab=256, spoken=3, dtype="bfloat16")
    limits = [(0, 1.0, 0.0), (0, 1.0, 0.0), (5, 0.9, 0.0)]
    arguments = random_round(sizes, 7, [4, 2, 1], [1.0, 0.0, 0.7], sampler, limits=limits)
    with gpu_interpreter():
        got = jax.jit(functools.partial(fused_verify, sampler=sampler, backend="gpu"))(*arguments)
        got = jax.block_until_ready(got)
    assert got.complete
    assert_same(got, from_logits(*arguments, sampler), arguments[2], arguments[3])


# ------------------------------------------------------------------------------------------------ ragged_attention

NUM_ROWS, BLOCK, PAGE = 12, 5, 32  # two pages a step


@functools.partial(jax.jit, static_argnames=("attend", "block", "options"))
def run(attend, q, k, v, counts, prefix, block, options):
    rows = ragged_rows(counts, prefix.length_R, len(q), block)
    return attend(q, k, v, rows, prefix, 1, **dict(options))


def check_attention(counts, lengths, block=BLOCK, heads=4, kv_heads=2, dim=64, **options):
    """Compares the kernel's real rows with the reference's in float32, and wants finite padding."""
    q, k, v, prefix = arrays(lengths, heads, kv_heads, dim=dim, page=PAGE, num_rows=NUM_ROWS, dtype=jnp.bfloat16)
    assert attention_gpu.unsupported(q, prefix) is None
    options = tuple(sorted({"causal": True, "scale": dim**-0.5, **options}.items()))
    counts = jnp.asarray(counts, jnp.int32)
    with gpu_interpreter():
        out = run(attention_gpu.ragged_attention, q, k, v, counts, prefix, block, options)
        out = np.asarray(out, np.float32)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, (q, k, v, counts, prefix))
    expected = np.asarray(run(attention_reference.ragged_attention, *wide, block, options))
    real = int(counts.sum())
    np.testing.assert_allclose(out[:real], expected[:real], rtol=2e-2, atol=2e-2)
    assert np.isfinite(out).all()


slow = {"marks": pytest.mark.slow}
OPTIONS = [
    pytest.param({}, id="causal", **slow),
    pytest.param({"causal": False, "softcap": 2.0}, id="both ways, soft cap", **slow),
    pytest.param({"window": 45}, id="window over pages"),
    pytest.param({"window": 9, "from_anchor": True, "causal": False}, id="window from the anchor", **slow),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_attention_equals_the_reference(options, monkeypatch):
    """A prefix of all pages, none, and one that ends within a page; two blocks share each."""
    monkeypatch.setattr(attention_gpu, "BLOCKS", 2 * 3 * 2)
    check_attention([5, 2, 4], [PAGE * WIDTH, 0, 3 * PAGE + 7], **options)


@pytest.mark.slow
def test_attention_in_more_steps_than_are_under_way(monkeypatch):
    """One block goes over all pages: plain decoding."""
    monkeypatch.setattr(attention_gpu, "BLOCKS", 1)
    monkeypatch.setattr(attention_gpu, "STEPS", 1)
    check_attention([1, 1, 1], [PAGE * WIDTH, 1, 2 * PAGE], block=1, dim=128)


@pytest.mark.slow
def test_attention_of_a_block_of_several_tiles(monkeypatch):
    """32 query heads of a head of keys leave room for two rows a tile."""
    monkeypatch.setattr(attention_gpu, "BLOCKS", 1)
    check_attention([5, 0, 3], [PAGE + 1, 5, 40], heads=64)


# -------------------------------------------------------------------------------------------------- markov_sampler

# Requests, drafts, draft vocabulary, rank, target tokens per draft token, words without a token, dtype; and blocks.
DRAWS = [
    pytest.param((5, 2, 704, 64, 3, 40, "bfloat16"), 2, id="readers take turns, requests are padded"),
    pytest.param((40, 3, 448, 128, 1, 0, "bfloat16"), 1, id="four groups, more tiles than are under way", **slow),
    pytest.param((24, 1, 192, 256, 2, 130, "bfloat16"), 132, id="tiles that stand for no token", **slow),
]


@pytest.mark.parametrize(("sizes", "blocks"), DRAWS)
def test_drafts_are_the_references(sizes, blocks, monkeypatch):
    """With logits that are exact, of which many are equal: of those the first is drawn."""
    monkeypatch.setattr(sampler_gpu, "SPLITS", blocks)
    asked = random_asked(np.random.default_rng(0), sizes)
    assert sampler_gpu.unsupported(asked[0]) is None
    want = draw(*asked, backend="xla")
    with gpu_interpreter():
        got = jax.block_until_ready(draw(*asked, backend="gpu"))
    np.testing.assert_array_equal(got.index_R, want.index_R)
    np.testing.assert_allclose(got.log_q_R, want.log_q_R, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(got.log_largest_R, want.log_largest_R, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_without_noise_none_is_made(monkeypatch):
    """A greedy group among noisy ones."""
    monkeypatch.setattr(sampler_gpu, "SPLITS", 2)
    speech, k, factor, temperature, noisy, key = random_asked(
        np.random.default_rng(1), (32, 1, 256, 64, 1, 0, "bfloat16")
    )
    noisy &= jnp.arange(32) >= 16
    asked = speech, k, factor, jnp.where(noisy, temperature, 1), noisy, key
    want = draw(*asked, backend="xla")
    with gpu_interpreter():
        got = jax.block_until_ready(draw(*asked, backend="gpu"))
    np.testing.assert_array_equal(got.index_R, want.index_R)
