"""The arithmetic of the GPU kernel of the in-block loop, and what it does not take; `gpu_numerics` runs the kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gpu_check, noise
from pallas_kernels.fused_verify.gpu import gumbel
from pallas_kernels.markov_sampler import gpu
from pallas_kernels.markov_sampler.report import arguments


def test_arithmetic_at_a_real_vocabulary():
    """What readers do with every word, and what is made of what they find."""
    vocab, spoken, requests = 151_936, 151_600, 3
    rng = np.random.default_rng(1)
    query = gpu_check.random_query(rng, requests, spoken)
    inverse, noisy = 1 / query.temperature_N, query.noisy_N
    logits = jnp.asarray(rng.normal(size=(vocab, requests)) * 4, jnp.bfloat16).astype(jnp.float32)

    @jax.jit
    def over_all(logits):
        def step(best, i):
            index = i * gpu.WORDS + jax.lax.broadcasted_iota(jnp.int32, (gpu.WORDS, requests), 0)
            warped = jnp.where(index < spoken, logits[index[:, 0]] * inverse, -jnp.inf)
            return gpu.take(best, warped, jnp.where(noisy, warped + gumbel(query.key_N, index), warped), index), None

        return gpu.join(jax.lax.scan(step, gpu.nothing((gpu.WORDS, requests)), jnp.arange(vocab // gpu.WORDS))[0])

    best = jax.tree.map(np.asarray, over_all(logits))
    warped = np.asarray(logits * inverse)[:spoken]
    draws = jax.jit(noise.gumbel)(query.key_N, jnp.arange(spoken)[:, None])
    np.testing.assert_array_equal(best.index_R, (warped + np.where(noisy, draws, 0)).argmax(axis=0))
    np.testing.assert_array_equal(best.logit_R, warped[best.index_R, np.arange(requests)])
    np.testing.assert_array_equal(best.peak_R, warped.max(axis=0))
    want = np.exp(warped.astype(np.float64) - best.peak_R).sum(axis=0)
    np.testing.assert_allclose(best.total_R, want, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"vocab": 331}, "vocabulary of 331"), ({"rank": 48}, "rank of 48"), ({"rank": 320}, "rank of 320"),
     ({"requests": 65}, "65 requests"), ({"requests": 1}, "one request"), ({"dtype": "float32"}, "must be bfloat16")],
)  # fmt: skip
def test_what_the_kernel_does_not_take(changes, reason):
    sizes = {"requests": 64, "vocab": 256, "rank": 64, "dtype": "bfloat16"} | changes
    dtype = sizes.pop("dtype")
    speech, *_ = arguments(**sizes)
    table = jax.ShapeDtypeStruct(speech.correction_Vdxr.shape, dtype)
    assert reason in gpu.unsupported(speech.replace(correction_Vdxr=table))
