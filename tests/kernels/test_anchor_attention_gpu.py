"""What the GPU kernels of training attention do not take; their numbers are in `gpu_numerics`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.anchor_attention import anchor_attention, gpu
from pallas_kernels.anchor_attention.report import arguments
from tests.kernels.test_anchor_attention_tiled import BLOCKS, LENGTH, PACKS, random_arrays


@pytest.mark.parametrize(
    ("dim", "dtype", "reason"),
    [(256, jnp.bfloat16, "head dim 256"), (128, jnp.float32, "both must be bfloat16")],
)  # fmt: skip
def test_what_the_kernels_do_not_take(dim, dtype, reason):
    q, context = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((1, 9, 7, 32, dim), (1, 100, 8, dim)))
    assert reason in gpu.unsupported(q, context)


def test_what_the_kernels_do_not_take_goes_the_other_way():
    arrays = random_arrays(0, dtype=np.float32)
    anchor, keep = np.full((PACKS, BLOCKS), LENGTH), np.ones((PACKS, BLOCKS), bool)
    by = lambda backend: anchor_attention(*arrays[:-1], anchor, keep, 0.4, backend=backend)  # noqa: E731
    np.testing.assert_array_equal(by("gpu"), by("xla"))


def test_copied_bytes_are_those_of_whole_tiles():
    """512 blocks of 7 slots, four heads of queries for one of keys: 112 tiles of rows, 32 of keys."""
    q, context = arguments("Qwen3-8B", 1, 512, 4096)[0][:2]
    held = 112 * 128 * (5 * 256 + 7 * 4) + 4096 * 4 * 256
    streamed = 112 * 4096 * 4 * 256 + 32 * 112 * 128 * (2 * 256 + 4 * 4)
    assert gpu.copied_bytes(q, context) == 8 * (held + streamed)
