"""Eagle3 in training and when serving: on one prefix both give the same logits, for every kind of layer (A6)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding.caches import empty_pools, view_pools, write_pools
from dspark_jax.decoding.draft import propose
from dspark_jax.decoding.sampling import SamplingParams, SlotSampling
from dspark_jax.interop.drafter_tensors import abstract_drafter
from dspark_jax.models.config import Attention, DecoderConfig, Eagle3Config, Rope
from dspark_jax.models.drafter import Borrowed
from dspark_jax.models.eagle3 import Eagle3
from dspark_jax.training.eagle3 import training_time_test
from pallas_kernels.ragged_attention import ragged_rows

VOCAB, HIDDEN, PAGE, DRAFTS = 17, 12, 16, 3
ATTENTION = Attention(num_kv_heads=1, head_dim=4, rope=Rope(10000.0))
QWEN3 = DecoderConfig("qwen3", VOCAB, HIDDEN, 16, 2, (ATTENTION,), (0,), qk_norm=True, tied=False)
GEMMA4 = dataclasses.replace(
    QWEN3, family="gemma4", attention=(dataclasses.replace(ATTENTION, keys_as_values=True, scale=1.0),),
    activation="gelu_tanh", value_norm=True, sandwich=True, layer_scalar=True, embedding_scale=HIDDEN**0.5, softcap=3.0,
)  # fmt: skip
WINDOWED = dataclasses.replace(QWEN3, attention=(dataclasses.replace(ATTENTION, window=6),))
CONFIGS = {
    "gemma4": Eagle3Config(GEMMA4, DRAFTS, (0, 1, 2), 4, VOCAB),
    "window, wider target": Eagle3Config(
        WINDOWED, DRAFTS, (0, 1), 4, VOCAB, target_hidden_size=20, norm_before_fc=True
    ),
    "reduced, other norms": Eagle3Config(
        QWEN3, DRAFTS, (0, 1, 2), 4, 6, norm_before_residual=True, feed_normed=True, fc_norm=True
    ),
}


def random_drafter(config: Eagle3Config):
    """Parameters and tables of size one; norms are not one."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731

    def leaf(path, like):
        kernel = path[-1].key == "kernel"
        return draw(*like.shape) / np.sqrt(like.shape[-2]) if kernel else 1 + 0.3 * draw(*like.shape)

    ids = np.sort(rng.permutation(VOCAB)[: config.draft_vocab_size])
    borrowed = Borrowed(draw(VOCAB, HIDDEN), draw(len(ids), HIDDEN), jnp.asarray(ids, jnp.int32))
    return jax.tree_util.tree_map_with_path(leaf, abstract_drafter(config)), borrowed


@functools.partial(jax.jit, static_argnums=0)
def serve(module: Eagle3, params, borrowed, taps_RxSxMH, token_RxS, length_R, sampling):
    """What each slot drafts after the first `length_R` tokens of its sequence, its context in pages."""
    slots, size = token_RxS.shape
    rows = ragged_rows(jnp.full(slots, size), jnp.zeros(slots, jnp.int32), slots * size, size)
    apply = functools.partial(module.apply, {"params": params})
    following, taps = jnp.roll(token_RxS, -1, axis=1).reshape(-1), taps_RxSxMH.reshape(slots * size, -1)
    kv = apply(taps, rows.position_N, following, borrowed, method=Eagle3.context)
    table = jnp.arange(slots * size // PAGE).reshape(slots, -1)[::-1]
    pools = empty_pools(module.config.decoder, slots * size // PAGE, PAGE, taps.dtype)
    prefixes = view_pools(write_pools(pools, kv, table, rows, rows.valid_N), table, length_R - 1)
    slot = jnp.arange(slots)
    carry = apply(taps_RxSxMH[slot, length_R - 2], method=Eagle3.carry)
    anchor = token_RxS[slot, length_R - 1]
    return propose(module, params, borrowed, anchor, prefixes, carry, sampling, "rejection", module.config.num_drafts)


@functools.partial(jax.jit, static_argnums=0)
def train(module: Eagle3, params, borrowed, taps_BxSxMH, token_BxS, length_B):
    """The trainer's logits `[T, B, S, Vd]`."""
    steps = module.config.num_drafts
    rest = (taps_BxSxMH, token_BxS, length_B, steps)
    return jnp.stack(training_time_test(module, params, borrowed, *rest, judge=lambda t, logits: logits))


def both_sides(config: Eagle3Config, size: int, lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Served and trained logits `[R, K, Vd]` of the drafts after each length; the drafts are the tokens that follow."""
    rng = np.random.default_rng(1)
    module, (params, borrowed) = Eagle3(config), random_drafter(config)
    taps = rng.standard_normal((len(lengths), size, config.tap_width)).astype(np.float32)
    token, length = rng.integers(0, VOCAB, (len(lengths), size)).astype(np.int32), np.asarray(lengths)
    one = SlotSampling.of(SamplingParams(temperature=0.0), 0, (), 1)
    sampling = jax.tree.map(lambda a: np.repeat(np.asarray(a)[None], len(lengths), axis=0), one)
    served = serve(module, params, borrowed, taps, token, length, sampling)
    for row, n, drafts in zip(token, lengths, np.asarray(served.token_RxK), strict=True):
        row[n : n + config.num_drafts] = drafts
    trained = train(module, params, borrowed, taps, token, length + config.num_drafts)
    return np.asarray(served.law.warped_RxKxVd), np.stack([trained[:, r, n - 2] for r, n in enumerate(lengths)])


@pytest.mark.parametrize("name", CONFIGS)
def test_served_drafts_equal_trained_rows(name):
    """Slots with prefixes of different lengths: one cached row, around a page, past the window."""
    served, trained = both_sides(CONFIGS[name], 48, [2, 3, 16, 17, 18, 40])
    assert np.abs(served).max() > 1
    np.testing.assert_allclose(served, trained, rtol=1e-4, atol=1e-4 * np.abs(served).max())


def test_served_drafts_equal_trained_rows_at_far_positions():
    served, trained = both_sides(Eagle3Config(QWEN3, DRAFTS, (0, 1, 2), 4, VOCAB), 4224, [4200])
    np.testing.assert_allclose(served, trained, rtol=1e-4, atol=1e-4 * np.abs(served).max())
