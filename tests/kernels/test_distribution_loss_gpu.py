"""What the GPU kernel of the training loss does not take, which XLA then does; its numbers are in `gpu_numerics`."""

import jax.numpy as jnp
import pytest

from pallas_kernels.distribution_loss import distribution_loss, gpu
from pallas_kernels.distribution_loss.chunks import Trained
from tests.kernels.test_distribution_loss import assert_same, random_case, value_and_gradients


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"dtype": jnp.float32}, "must be bfloat16"), ({"vocab": 200}, "a vocabulary of 200"),
     ({"width": 96}, "a width of 96"), ({"rank": 24}, "the in-block head's rank of 24")],
)  # fmt: skip
def test_what_the_kernel_does_not_take(changes, reason):
    case = random_case(0, **{"vocab": 256, "width": 64, "rank": 64, "dtype": jnp.bfloat16} | changes)
    trained = Trained(case[0].hidden_MxH, case[0].factor_Mxr, case[2].correction_Vdxr)
    assert reason in gpu.unsupported(trained, case[2])
    by_xla, by_gpu = (value_and_gradients(distribution_loss, *case, backend=way) for way in ("xla", "gpu"))
    assert_same(by_gpu, by_xla, 1e-6)
