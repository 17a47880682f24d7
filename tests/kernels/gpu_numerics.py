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
from pallas_kernels.anchor_attention import gpu as anchor_gpu
from pallas_kernels.distribution_loss import distribution_loss
from pallas_kernels.distribution_loss import gpu as loss_gpu
from pallas_kernels.distribution_loss import reference as loss_reference
from pallas_kernels.distribution_loss.chunks import Trained
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
from tests.kernels.test_anchor_attention_tiled import with_gradients
from tests.kernels.test_distribution_loss import assert_same as assert_close
from tests.kernels.test_distribution_loss import random_case as random_loss
from tests.kernels.test_distribution_loss import value_and_gradients
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


# ----------------------------------------------------------------------------------------------- distribution_loss

LOSSES = [
    pytest.param({"rows": 140, "vocab": 256, "softcap": 8.0, "reduced": True}, 128, 1, id="two chunks, soft cap"),
    pytest.param({"rows": 200, "vocab": 384, "width": 320}, 256, 2, id="two tiles of rows, one of sources", **slow),
    pytest.param({"rows": 250, "sources": 900, "vocab": 256}, 256, 4, id="two tiles of rows and of sources", **slow),
    pytest.param({"rows": 20, "vocab": 256, "rank": 0, "base": False}, None, 9, id="no in-block head", **slow),
    pytest.param({"rows": 20, "vocab": 128, "rank": 128, "base": False}, None, 1, id="no base", **slow),
]


@pytest.mark.parametrize(("shape", "chunk", "blocks"), LOSSES)
def test_losses_and_gradients_are_the_references(shape, chunk, blocks, monkeypatch):
    """Some rows have no label, some no source; one block or two go over tiles in more steps than are under way."""
    monkeypatch.setattr(loss_gpu, "BLOCKS", blocks)
    case = random_loss(3, **{"width": 128, "rank": 64, "dtype": jnp.bfloat16} | shape)
    trained = Trained(case[0].hidden_MxH, case[0].factor_Mxr, case[2].correction_Vdxr)
    assert loss_gpu.unsupported(trained, case[2]) is None
    want = value_and_gradients(loss_reference.distribution_loss, *case)
    with gpu_interpreter():
        got = jax.block_until_ready(value_and_gradients(distribution_loss, *case, chunk=chunk, backend="gpu"))
    assert_close(got, want, 2e-2)
    with gpu_interpreter():
        alone = jax.jit(functools.partial(distribution_loss, chunk=chunk, backend="gpu"))(*case)
        alone = jax.block_until_ready(alone)
    assert_close((3 * alone[0], alone[1]), got[0], 1e-5)


# ------------------------------------------------------------------------------------------------ anchor_attention

ANCHORS = [
    pytest.param({"length": 330, "blocks": 24}, {}, id="more steps than are under way"),
    pytest.param({"length": 700, "blocks": 40, "slots": 7, "keys": 7, "group": 4}, {"window": 99}, id="window", **slow),
    pytest.param({"slots": 3, "keys": 5, "group": 1, "blocks": 4}, {"causal": True}, id="more keys", **slow),
    pytest.param({"dim": 128, "kv": 2}, {"causal": True, "window": 3}, id="causal, window, two heads", **slow),
    pytest.param({}, {"window": 20, "from_anchor": True}, id="window from the anchor", **slow),
]


def anchor_case(packs=2, blocks=10, slots=4, keys=4, kv=1, group=2, dim=64, length=200):
    """What `with_gradients` takes; of the last pack no block is kept."""
    rng = np.random.default_rng(blocks)
    context, own, q = (packs, length, kv, dim), (packs, blocks, keys, kv, dim), (packs, blocks, slots, kv * group, dim)
    shapes = (q, context, context, own, own, q)
    arrays = tuple(jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    start, anchor = np.sort(rng.integers(0, length + 1, (2, packs, blocks)), axis=0).astype(np.int32)
    keep = rng.random(anchor.shape) < 0.8
    keep[-1] = False
    return (arrays[0] / 4, *arrays[1:]), np.sort(anchor), keep, np.minimum(start, np.sort(anchor))


@pytest.mark.parametrize(("shape", "mode"), ANCHORS)
def test_training_attention_and_its_gradients_are_the_references(shape, mode):
    arrays, *blocks = anchor_case(**shape)
    assert anchor_gpu.unsupported(*arrays[:2]) is None
    run = functools.partial(with_gradients, **mode)
    want = jax.jit(functools.partial(run, backend="dense"))(tuple(a.astype(jnp.float32) for a in arrays), *blocks)
    with gpu_interpreter():
        got = jax.block_until_ready(jax.jit(functools.partial(run, backend="gpu"))(arrays, *blocks))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=2e-2, atol=2e-2 * max(np.abs(b).max(), 1))
    empty = ~blocks[1]
    assert not np.any(got[0][empty]) and all(not np.any(got[i][empty]) for i in (1, 4, 5))


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
