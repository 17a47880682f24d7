"""The TPU kernels of training attention: values and gradients of the dense one, and their compilation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.anchor_attention import anchor_attention, tiled, tpu
from pallas_kernels.anchor_attention.report import KINDS, anchor_attention_lines, arguments, gradients
from tests.kernels.targets import compile_tpu, every_tpu, has_kernel, needs_libtpu, tpu_interpreter
from tests.kernels.test_anchor_attention_tiled import (
    BLOCKS,
    LENGTH,
    MODES,
    PACKS,
    packs,
    random_arrays,
    with_gradients,
)  # fmt: skip


@pytest.fixture
def small_tiles(monkeypatch):
    """Two blocks of four slots a tile, and context tiles of four rows, of which the last is not full."""
    monkeypatch.setattr(tpu, "LANES", 4)
    monkeypatch.setattr(tpu, "QUERIES", 16)
    monkeypatch.setattr(tpu, "CONTEXT", 8)


def compare(arrays, anchor, keep, start, tolerance: float, **mode) -> None:
    run = functools.partial(with_gradients, **mode)
    wide = tuple(a.astype(jnp.float32) for a in arrays)
    wanted = jax.jit(functools.partial(run, backend="dense"))(wide, anchor, keep, start)
    with tpu_interpreter():
        got = jax.block_until_ready(jax.jit(functools.partial(run, backend="tpu"))(arrays, anchor, keep, start))
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == arrays[0].dtype
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=tolerance, atol=tolerance * max(np.abs(b).max(), 1))
    assert not np.any(got[0][~keep]) and all(not np.any(got[i][~keep]) for i in (1, 4, 5))


@pytest.fixture
def any_width(monkeypatch):
    monkeypatch.setattr(tpu, "unsupported", lambda *arrays: None)


@pytest.mark.parametrize("name", MODES)
@pytest.mark.usefixtures("small_tiles", "any_width")
def test_values_and_gradients_are_the_dense_ones(name):
    @settings(max_examples=4, deadline=None, derandomize=True)
    @given(blocks=packs, seed=st.integers(0, 99))
    def check(blocks, seed):
        start, anchor = np.array([place for place, _ in blocks], np.int32).T.reshape(2, PACKS, BLOCKS)
        keep = np.array([kept for _, kept in blocks]).reshape(PACKS, BLOCKS)
        compare(random_arrays(seed, dtype=np.float32), anchor, keep, start, 1e-5, **MODES[name])

    check()


@pytest.mark.parametrize(("slots", "queries", "group", "blocks"), [(3, 1, 1, 4), (9, 9, 3, 1), (1, 1, 2, 5)])
@pytest.mark.usefixtures("small_tiles", "any_width")
def test_odd_shapes(slots, queries, group, blocks):
    """Fewer queries than keys (Eagle3), a block larger than a tile, blocks of one slot; in one pack none is kept."""
    rng = np.random.default_rng(3)
    start, anchor = np.sort(rng.integers(0, LENGTH + 1, (2, PACKS, blocks), np.int32), axis=0)
    keep = rng.random(anchor.shape) < 0.8
    keep[1] = False
    arrays = random_arrays(1, slots, queries, group, dtype=np.float32, blocks=blocks)
    compare(arrays, anchor, keep, start, 1e-5, causal=True)


def test_whole_tiles_in_bfloat16():
    """Tiles as they are on a chip, and more than one of them."""
    rng, (blocks, length, slots, dim) = np.random.default_rng(0), (40, 700, 7, 128)
    shape = lambda *sizes: jnp.asarray(rng.standard_normal(sizes), jnp.bfloat16)  # noqa: E731
    context, block, q = (1, length, 1, dim), (1, blocks, slots, 1, dim), (1, blocks, slots, 4, dim)
    arrays = tuple(shape(*sizes) for sizes in (q, context, context, block, block, q))
    anchor = np.sort(rng.integers(0, length, (1, blocks), np.int32))
    compare(arrays, anchor, np.ones(anchor.shape, bool), np.maximum(anchor - 300, 0), 0.03)


def test_what_the_kernel_cannot_take_goes_the_other_way():
    arrays = random_arrays(0, dtype=np.float32)
    assert "128" in tpu.unsupported(arrays[0], arrays[1])
    anchor, keep = np.full((PACKS, BLOCKS), LENGTH), np.ones((PACKS, BLOCKS), bool)
    by = lambda backend: anchor_attention(*arrays[:-1], anchor, keep, 0.4, backend=backend)  # noqa: E731
    np.testing.assert_array_equal(by("tpu"), by("xla"))


@needs_libtpu
@every_tpu
@pytest.mark.parametrize("model", ["Qwen3-8B", "Gemma4-12B"])
def test_the_kernels_compile_at_full_size(model, chip):
    """Forward and backward, and no scores of blocks on context are in memory."""
    shapes, options = arguments(model, packs=1, blocks=512, length=4096)
    compiled = compile_tpu(chip, gradients, *shapes, **options, backend="tpu")
    assert has_kernel(compiled)
    q, context = shapes[0], shapes[1]
    scores = q.size // q.shape[-1] * context.shape[1] * 4
    assert compiled.memory_analysis().temp_size_in_bytes < scores / 3


@needs_libtpu
@pytest.mark.parametrize("model", ["Qwen3-8B", "Gemma4-12B"])
def test_the_longest_context_that_is_taken_fits_the_smallest_vector_memory(model):
    shapes, options = arguments(model, packs=1, blocks=64, length=tpu.RESIDENT // (8 * KINDS[model][-1]))
    assert tpu.unsupported(shapes[0], shapes[1]) is None
    assert has_kernel(compile_tpu("v5p", gradients, *shapes, **options, backend="tpu"))


@needs_libtpu
def test_the_report_shows_fewer_bytes():
    for _, _, temporary, moved in anchor_attention_lines(compile_tpu, "v5e"):
        assert temporary[1] < 1.1 * temporary[0] and moved[1] < 0.6 * moved[0]


def test_a_tile_is_a_whole_number_of_blocks():
    q, context, block = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 99, 7, 32, 128), (1, 4096, 8, 128), (1, 99, 7, 8, 128)))  # fmt: skip  # noqa: E501
    sizes = tpu.Sizes.of(q, context, block)
    assert sizes.size == 18 and sizes.queries == 512 and sizes.own_keys == 128 and sizes.tiles == 6
    assert tpu._own_bias(sizes, tiled.Options(1.0, False, 0, False)).shape == (128, 512)
