"""Counter-based noise: a pure function of a key and a token id, in 32-bit integer arithmetic that runs anywhere.

XLA, kernels, vocabulary shards and reduced vocabularies all ask for the noise of a token by its id in the target's
vocabulary, and get the same number. Threefry-2x32 with 20 rounds (Salmon et al., 2011).
"""

import enum

import jax
import jax.numpy as jnp

Key = tuple[jax.Array, jax.Array]  # two uint32 arrays of one shape: a key for every row

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


class Role(enum.IntEnum):
    """What a random number is for. One stream per role: reusing one for another biases the output (report D1)."""

    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    SAMPLE = 4  # bonus tokens, plain decoding, and everything under the coupled sampler


def threefry2x32(key: Key, count: Key) -> Key:
    """Two words of noise for each (key, count) pair; the arguments broadcast."""
    k0, k1 = key
    schedule = (k0, k1, k0 ^ k1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = count[0] + k0, count[1] + k1
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << rotation) | (x1 >> (32 - rotation))
            x1 = x0 ^ x1
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


def fold_in(key: Key, a: jax.Array | int, b: jax.Array | int = 0) -> Key:
    """A new key for each (key, a, b)."""
    return threefry2x32(key, (jnp.asarray(a).astype(jnp.uint32), jnp.asarray(b).astype(jnp.uint32)))


def position_key(seed: Key, position: jax.Array, role: Role | jax.Array, slot: jax.Array | int = 0) -> Key:
    """The key of a role, or of one role each, at an absolute position. `slot` tells apart blocks that cover it."""
    return fold_in(fold_in(seed, position, slot), role)


def uniform(key: Key, token_id: jax.Array | int = 0) -> jax.Array:
    """float32 in (0, 1), one for each (key, id). Never 0 or 1; fine steps near 0, where logarithms need them."""
    bits, _ = fold_in(key, token_id)
    u = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2**-32)
    return jnp.minimum(u, jnp.float32(1 - 2**-24))


def gumbel(key: Key, token_id: jax.Array) -> jax.Array:
    """Standard Gumbel noise, float32: argmax(log p + gumbel) draws from p."""
    # -log1p(-u) is an exponential variable whose small values, which win the argmax, have full resolution.
    return -jnp.log(-jnp.log1p(-uniform(key, token_id)))
