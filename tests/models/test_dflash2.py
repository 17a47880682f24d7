"""DFlash2's block convolutions: against a plain loop, and as the identity that they start from."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.interop.drafter_tensors import abstract_drafter, init_drafter
from dspark_jax.models.config import Attention, DecoderConfig, DrafterConfig, Rope
from dspark_jax.models.dflash import BlockConvolution
from dspark_jax.models.drafter import Borrowed, DSpark
from pallas_kernels.ragged_attention import ragged_attention, ragged_rows

SIZE, TAPS, GROUP, WIDTH, BLOCKS, VOCAB = 5, 3, 4, 12, 3, 11


def convolution(seed: int = 0) -> tuple[BlockConvolution, dict, np.ndarray]:
    """A module with random weights, and rows of some blocks."""
    rng = np.random.default_rng(seed)
    module = BlockConvolution(SIZE, TAPS, GROUP)
    rows = rng.standard_normal((BLOCKS * SIZE, WIDTH))
    shapes = module.init(jax.random.key(0), jnp.asarray(rows))["params"]
    return module, jax.tree.map(lambda a: rng.standard_normal(a.shape), shapes), rows


def plain_loop(params: dict, source: np.ndarray, rows: np.ndarray, side: int) -> np.ndarray:
    """y_r = sum over taps of (base + projected) * x_{r - tap}, row by row (checkpoint_formats.md section 6)."""
    projected = (source @ params["kernel_projection"]["kernel"]).reshape(-1, 2, TAPS, WIDTH // GROUP)
    out = np.zeros_like(rows)
    for r in range(len(rows)):
        for tap in range(min(TAPS, r % SIZE + 1)):
            for f in range(WIDTH):
                weight = params["base_kernel"][side, tap, f] + projected[r, side, tap, f // GROUP]
                out[r, f] += weight * rows[r - tap, f]
    return out


@pytest.mark.usefixtures("x64")
def test_both_sides_match_a_loop_over_rows():
    module, params, source = convolution()
    after = np.random.default_rng(1).standard_normal(source.shape)  # what the sub-layer makes of it
    sides = module.apply({"params": params}, jnp.asarray(source))
    for side, rows in enumerate((source, after)):
        got = module.convolve(jnp.asarray(rows), sides[side])
        np.testing.assert_allclose(got, plain_loop(params, source, rows, side), rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("row", [SIZE - 1, SIZE, 2 * SIZE - 2])
def test_a_row_reaches_later_rows_of_its_own_block_only(row):
    module, params, rows = convolution()
    coefficients = module.apply({"params": params}, jnp.asarray(rows))[0]
    moved = rows + (np.arange(len(rows)) == row)[:, None]
    difference = module.convolve(jnp.asarray(moved), coefficients) - module.convolve(jnp.asarray(rows), coefficients)
    touched = np.flatnonzero(np.abs(difference).max(axis=1) > 1e-9)
    assert touched.tolist() == [r for r in range(row, row + TAPS) if r // SIZE == row // SIZE]


@pytest.fixture(scope="module")
def drafter_config() -> DrafterConfig:
    attention = Attention(num_kv_heads=1, head_dim=4, rope=Rope(10000.0), causal=False)
    decoder = DecoderConfig("qwen3", VOCAB, WIDTH, 8, 2, (attention,), (0, 0), qk_norm=True, tied=False)
    return DrafterConfig(
        decoder, SIZE, VOCAB - 1, (0,), 2, VOCAB, logits_start=1, markov_rank=3, head_type="selector",
        selector_top_k=4, conv_taps=TAPS, conv_group=GROUP, confidence=False, confidence_with_markov=False,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnums=0)
def block_states(config: DrafterConfig, params: dict) -> jax.Array:
    """Hidden states `[B, K, H]` of blocks that attend to themselves."""
    rng = np.random.default_rng(2)
    table = jnp.asarray(rng.standard_normal((VOCAB, WIDTH)))
    rows = ragged_rows(jnp.full(BLOCKS, SIZE), jnp.arange(BLOCKS) * 7, BLOCKS * SIZE, SIZE)

    def attend(layer, q, k, v):
        return ragged_attention(q, k, v, rows, None, layer.index, causal=False, scale=0.5)

    args = (jnp.asarray([1, 2, 3]), rows.position_N.reshape(BLOCKS, SIZE), attend, Borrowed(table, table, None))
    return DSpark(config).apply({"params": params}, *args, method=DSpark.block)


@pytest.mark.usefixtures("x64")
def test_fresh_convolutions_are_the_identity(drafter_config):
    params = jax.jit(init_drafter, static_argnums=0)(drafter_config, jax.random.key(0))
    (layers,) = params["backbone"]["layers"]
    bare = {name: value for name, value in layers.items() if not name.endswith("_conv")}
    plain_params = {**params, "backbone": {**params["backbone"], "layers": (bare,)}}
    plain_config = dataclasses.replace(drafter_config, conv_taps=0, conv_group=0)
    assert jax.tree.structure(plain_params) == jax.tree.structure(abstract_drafter(plain_config))
    plain = block_states(plain_config, plain_params)
    np.testing.assert_allclose(block_states(drafter_config, params), plain, rtol=1e-12)
    # And each does something once it has learnt.
    for name in ("attention_conv", "mlp_conv"):
        learnt = {**layers, name: {**layers[name], "base_kernel": layers[name]["base_kernel"] + 1}}
        moved = block_states(drafter_config, {**params, "backbone": {**params["backbone"], "layers": (learnt,)}})
        assert np.abs(moved - plain).max() > 1e-3


def test_convolutions_have_the_published_shapes(drafter_config):
    (layers,) = abstract_drafter(drafter_config)["backbone"]["layers"]
    for name in ("attention_conv", "mlp_conv"):
        assert layers[name]["base_kernel"].shape == (2, 2, TAPS, WIDTH)
        assert layers[name]["kernel_projection"]["kernel"].shape == (2, WIDTH, 2 * TAPS * WIDTH // GROUP)
