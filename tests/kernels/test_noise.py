"""Counter-based noise: known answers, independence of how it is asked for, and its statistics."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import noise
from pallas_kernels.noise import Role, fold_in, position_key

SEED = (np.uint32(0x12345678), np.uint32(0x9ABCDEF0))

# Compiled once a shape: outside jit each of the hundred operations would be compiled for itself.
uniform, gumbel = jax.jit(noise.uniform), jax.jit(noise.gumbel)


def words(*values: int) -> tuple[jax.Array, ...]:
    return tuple(jnp.uint32(value) for value in values)


def keys(count: int, first: int = 0) -> noise.Key:
    """One key for each of `count` positions, as `[count, 1]`: ids broadcast against them."""
    key = position_key(SEED, jnp.arange(first, first + count), Role.SAMPLE)
    return tuple(word[:, None] for word in key)


def assert_uncorrelated(streams: list[np.ndarray]) -> None:
    """No pair of streams correlates by more than 5 standard deviations."""
    matrix = np.corrcoef(np.stack(streams))
    off_diagonal = matrix[~np.eye(len(streams), dtype=bool)]
    assert np.abs(off_diagonal).max() < 5 / np.sqrt(streams[0].size)


# The 20-round lines for threefry2x32 in the kat_vectors file of Random123.
@pytest.mark.parametrize(
    ("key", "count", "answer"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_known_answers(key, count, answer):
    got = jax.jit(noise.threefry2x32)(words(*key), words(*count))
    assert tuple(int(word) for word in got) == answer
    assert all(word.dtype == jnp.uint32 for word in got)


def test_noise_of_an_id_does_not_depend_on_which_ids_are_asked_for():
    rng = np.random.default_rng(0)
    whole = np.asarray(uniform(keys(3), jnp.arange(500)))
    subset = np.sort(rng.choice(500, 40, replace=False))  # a reduced vocabulary
    shuffled = rng.permutation(500)
    np.testing.assert_array_equal(uniform(keys(3), jnp.asarray(subset)), whole[:, subset])
    np.testing.assert_array_equal(uniform(keys(3), jnp.asarray(shuffled)), whole[:, shuffled])
    # A vocabulary shard, and ids in a two-dimensional tile.
    np.testing.assert_array_equal(uniform(keys(3), jnp.arange(250, 500)), whole[:, 250:])
    tile = uniform(tuple(word[:, None] for word in keys(3)), jnp.arange(500).reshape(20, 25))
    np.testing.assert_array_equal(tile.reshape(3, 500), whole)
    # One row and one id at a time.
    for row, token in [(0, 0), (1, 499), (2, 123)]:
        assert float(uniform(position_key(SEED, row, Role.SAMPLE), token)) == whole[row, token]


def test_gumbel_of_an_id_does_not_depend_on_which_ids_are_asked_for():
    ids = jnp.asarray([3, 499, 17, 250, 0])
    # Logarithms may differ in their last bits between vector widths.
    expected = np.asarray(gumbel(keys(3), jnp.arange(500)))[:, ids]
    np.testing.assert_allclose(gumbel(keys(3), ids), expected, rtol=1e-6, atol=1e-6)


def test_noise_of_a_row_does_not_depend_on_the_other_rows():
    whole = np.asarray(uniform(keys(8), jnp.arange(50)))
    np.testing.assert_array_equal(uniform(keys(3, first=5), jnp.arange(50)), whole[5:])


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint32, jnp.int16])
def test_noise_does_not_depend_on_the_integer_type_of_the_id(dtype):
    expected = uniform(keys(2), jnp.arange(100))
    np.testing.assert_array_equal(uniform(keys(2), jnp.arange(100, dtype=dtype)), expected)


def test_noise_is_the_same_without_jit_and_under_vmap():
    key, ids = keys(4), jnp.arange(64)
    row = tuple(word[:, 0] for word in key)
    np.testing.assert_array_equal(noise.uniform(key, ids), uniform(key, ids))
    np.testing.assert_array_equal(jax.vmap(uniform, (0, None))(row, ids), uniform(key, ids))
    np.testing.assert_allclose(noise.gumbel(key, ids), gumbel(key, ids), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(gumbel, (0, None))(row, ids), gumbel(key, ids), rtol=1e-6, atol=1e-6)


def test_noise_is_the_same_float32_numbers_in_x64_mode():
    with jax.enable_x64(False):
        narrow = [np.asarray(f(keys(4), jnp.arange(64))) for f in (uniform, gumbel)]
    with jax.enable_x64(True):
        wide = [np.asarray(f(keys(4), jnp.arange(64))) for f in (uniform, gumbel)]
    for a, b in zip(narrow, wide, strict=True):
        assert a.dtype == b.dtype == np.float32
        np.testing.assert_array_equal(a, b)


def test_gumbel_has_the_moments_of_a_standard_gumbel():
    sample = np.asarray(gumbel(keys(400), jnp.arange(1000)), np.float64)
    n = sample.size
    assert sample.mean() == pytest.approx(0.5772156649, abs=5 * np.pi / np.sqrt(6 * n))
    # The fourth central moment of a Gumbel variable is 27/5 var^2, so var(s^2) = 22/5 var^2 / n.
    variance = np.pi**2 / 6
    assert sample.var() == pytest.approx(variance, abs=5 * variance * np.sqrt(4.4 / n))


def test_uniform_fills_every_twentieth_alike():
    counts, _ = np.histogram(np.asarray(uniform(keys(200), jnp.arange(1000))), bins=20, range=(0, 1))
    expected = 200 * 1000 / 20
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001


def test_argmax_of_log_probabilities_plus_gumbel_draws_from_the_law():
    law = np.array([0.6, 0.2, 0.1, 0.05, 0.03, 0.015, 0.004, 0.001])
    draws = 50_000
    scores = np.log(law).astype(np.float32) + np.asarray(gumbel(keys(draws), jnp.arange(8)))
    counts = np.bincount(scores.argmax(axis=-1), minlength=8)
    chi_square = ((counts - draws * law) ** 2 / (draws * law)).sum()
    assert chi_square < 24.3  # 7 degrees of freedom, p = 0.001


@pytest.mark.parametrize("bits", [0, 1, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 1])
def test_uniform_is_strictly_between_0_and_1_for_extreme_bits(bits, monkeypatch):
    monkeypatch.setattr(noise, "fold_in", lambda key, token_id: words(bits, 0))
    u = np.asarray(noise.uniform(words(0, 0), 0))
    assert u.dtype == np.float32 and 0 < u < 1
    assert u == pytest.approx(bits / 2**32, rel=1e-6, abs=2**-32)
    assert np.isfinite(noise.gumbel(words(0, 0), 0))


def test_fold_in_gives_another_key_for_each_argument():
    pairs = list(itertools.product(range(20), range(20)))
    made = fold_in(SEED, jnp.asarray([a for a, _ in pairs]), jnp.asarray([b for _, b in pairs]))
    assert len(set(zip(*(np.asarray(word).tolist() for word in made), strict=True))) == len(pairs)


def test_streams_of_roles_positions_slots_and_seeds_are_uncorrelated():
    ids = jnp.arange(20_000)
    made = [position_key(SEED, 7, role) for role in Role]
    made += [position_key(SEED, position, Role.DRAFT) for position in (0, 1, 8)]
    # The slot must not act like a shift of the position.
    made += [position_key(SEED, position, Role.DRAFT, slot) for position, slot in ((7, 1), (6, 1), (8, 7))]
    made += [position_key((SEED[0] ^ np.uint32(1), SEED[1]), 7, Role.DRAFT)]
    made += [position_key((SEED[0], SEED[1] ^ np.uint32(1)), 7, Role.DRAFT)]
    made += [position_key((SEED[1], SEED[0]), 7, Role.DRAFT)]
    assert_uncorrelated([np.asarray(uniform(key, ids)) for key in made])


def test_neighbouring_ids_and_positions_are_uncorrelated():
    u = np.asarray(uniform(keys(101), jnp.arange(201)))
    assert_uncorrelated([u[:-1, :-1].ravel(), u[:-1, 1:].ravel(), u[1:, :-1].ravel(), u[1:, 1:].ravel()])
