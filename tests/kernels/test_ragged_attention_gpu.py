"""What the GPU kernel of ragged attention does not take; its numbers are in `gpu_numerics`."""

import jax.numpy as jnp
import pytest

from pallas_kernels.ragged_attention import gpu
from tests.kernels.test_ragged_attention_tpu import arrays


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"dim": 256}, "head dim 256"), ({"page": 48}, "pages of 48"), ({"dtype": jnp.float32}, "both must be bfloat16"),
     ({"heads": 256}, "128 query heads")],
)  # fmt: skip
def test_what_the_kernel_does_not_take(changes, reason):
    shape = {"heads": 4, "dim": 64, "page": 16, "dtype": jnp.bfloat16} | changes
    q, *_, prefix = arrays([1, 1, 1], num_rows=4, **shape)
    assert reason in gpu.unsupported(q, prefix)
    assert gpu.unsupported(q, None) == "there is no cached prefix"
