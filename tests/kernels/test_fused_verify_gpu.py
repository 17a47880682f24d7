"""The arithmetic of the GPU kernel of fused verification, and what it does not take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gpu_check, noise
from pallas_kernels.fused_verify import Head, gpu


def test_arithmetic_at_a_real_vocabulary():
    """What a warpgroup does with every token, over all of them."""
    vocab, rows, padding = 151_936, 4, 300
    rng = np.random.default_rng(1)
    query = gpu_check.random_query(rng, rows, vocab - padding)
    head = Head(jax.ShapeDtypeStruct((vocab, 64), jnp.bfloat16), vocab - padding)
    logits = jnp.asarray(rng.normal(size=(rows, vocab)) * 4, jnp.bfloat16).astype(jnp.float32)

    @jax.jit
    def over_all(logits):
        def step(state, j):
            of_row = (query.token_N, 1 / query.temperature_N, query.noisy_N.astype(jnp.int32), *query.key_N)
            token, inverse, noisy, *key = (a[:, None] for a in of_row)
            ids = j * gpu.COLUMNS + jnp.arange(gpu.COLUMNS)
            return gpu.take(state, logits[:, ids], ids, token, inverse, noisy, tuple(key), head), None

        return jax.lax.scan(step, gpu.initial((rows, gpu.COLUMNS)), jnp.arange(vocab // gpu.COLUMNS))[0]

    peak, total, total_warped, token_logit, *kept = map(np.asarray, over_all(logits))
    spoken = np.asarray(logits)[:, : vocab - padding].astype(np.float64)
    temperature, top = np.asarray(query.temperature_N, np.float64)[:, None], peak.max(1, keepdims=True)
    for sums, weight in ((total, 1), (total_warped, 1 / temperature)):
        got, want = (sums * np.exp((peak - top) * weight)).sum(1), np.exp((spoken - top) * weight).sum(1)
        np.testing.assert_allclose(got, want, rtol=1e-4)
    np.testing.assert_array_equal(token_logit.max(1), spoken[np.arange(rows), query.token_N])
    gumbel = jax.jit(noise.gumbel)(tuple(word[:, None] for word in query.key_N), jnp.arange(vocab - padding))
    score = spoken / temperature + np.where(query.noisy_N[:, None], gumbel, 0)
    np.testing.assert_array_equal(kept[2][np.arange(rows), kept[0].argmax(1)], score.argmax(1))


def test_noise_is_that_of_all_backends():
    """To rounding, also of small and large uniform numbers."""
    key, ids = tuple(jnp.uint32(word) for word in (7, 9)), jnp.arange(2**20)
    got, want = jax.jit(gpu.gumbel)(key, ids), jax.jit(noise.gumbel)(key, ids)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"vocab": 331}, "vocabulary of 331"), ({"width": 72}, "width of 72"), ({"dtype": "float32"}, "bfloat16"),
     ({"rows": 129}, "129 rows")],
)  # fmt: skip
def test_what_the_kernel_does_not_take(changes, reason):
    sizes = {"rows": 128, "vocab": 256, "width": 64, "dtype": "bfloat16"} | changes
    hidden, weight = (jax.ShapeDtypeStruct((sizes[name], sizes["width"]), sizes["dtype"]) for name in ("rows", "vocab"))
    assert reason in gpu.unsupported(hidden, Head(weight, sizes["vocab"]))
