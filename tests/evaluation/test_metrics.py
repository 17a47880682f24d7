"""Round statistics of hand-made completions, and where two runs part."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding.requests import Completion
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.evaluation.equality import first_difference
from dspark_jax.evaluation.metrics import round_stats
from dspark_jax.interop.target_io import Target, load_target
from pallas_kernels.noise import Role, gumbel, position_key


def completion(verified: list[int], accepted: list[int], tokens: int) -> Completion:
    return Completion([0] * tokens, "", "length", [4] * len(verified), verified, accepted)


def test_pooled_over_rounds_of_all_requests():
    stats = round_stats([completion([4, 4], [2, 0], 4), completion([4, 2, 2], [4, 2, 1], 10)])
    assert (stats.requests, stats.tokens, stats.rounds) == (2, 14, 5)
    assert stats.tokens_per_round == pytest.approx(14 / 5)
    assert stats.accepted_drafts_per_round == pytest.approx(9 / 5)
    assert stats.verified_drafts_per_round == pytest.approx(16 / 5)


def test_conditional_acceptance_counts_rounds_that_verified_the_draft_and_accepted_all_before():
    stats = round_stats([completion([4, 4], [2, 0], 4), completion([4, 2, 2], [4, 2, 1], 10)])
    # Draft 0: five tried, four accepted. Draft 1: four tried, three accepted. Draft 2: of the three rounds that
    # accepted two, one had verified no more; one of two was accepted. Draft 3: one of one.
    assert stats.conditional_acceptance == pytest.approx([4 / 5, 3 / 4, 1 / 2, 1 / 1])


def test_its_product_is_the_survival_where_all_rounds_verify_the_same():
    accepted = [0, 1, 1, 2, 3, 3, 3]
    stats = round_stats([completion([3] * 7, accepted, 20)])
    survival = [np.mean([a > k for a in accepted]) for k in range(3)]
    assert np.cumprod(stats.conditional_acceptance) == pytest.approx(survival)
    assert stats.accepted_drafts_per_round == pytest.approx(sum(survival))


@pytest.mark.parametrize("completions", [[], [completion([], [], 0)]])
def test_nothing_gives_zeros(completions):
    stats = round_stats(completions)
    assert (stats.tokens_per_round, stats.accepted_drafts_per_round, stats.verified_drafts_per_round) == (0, 0, 0)
    assert stats.conditional_acceptance == []


def test_plain_decoding_is_one_token_a_round():
    stats = round_stats([completion([0] * 5, [0] * 5, 5)])
    assert (stats.tokens_per_round, stats.accepted_drafts_per_round, stats.conditional_acceptance) == (1, 0, [])


def test_rounds_that_never_got_to_a_draft_do_not_divide_by_zero():
    assert round_stats([completion([2, 2], [0, 0], 2)]).conditional_acceptance == [0, 0]


# ------------------------------------------------------------------------------------------------- first differences

PROMPT = list(b"def scan(a):")
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def target(golden) -> Target:
    return load_target(golden / "target", dtype="float32")


@pytest.fixture(scope="module")
def ranked(target) -> list[int]:
    """Tokens after the prompt, likeliest first."""
    logits = target(np.asarray([PROMPT])).logits[0, -1]
    return np.argsort(-np.asarray(logits)).tolist()


def test_equal_runs_have_no_difference(target):
    assert first_difference(target, PROMPT, [1, 2, 3], [1, 2, 3], GREEDY) is None
    assert first_difference(target, PROMPT, [], [], GREEDY) is None


def test_a_clear_choice_is_a_difference(target, ranked):
    a, b = ranked[0], ranked[50]
    logits = np.asarray(target(np.asarray([PROMPT])).logits[0, -1])
    difference = first_difference(target, PROMPT, [a, 5], [b, 5], GREEDY)
    assert (difference.index, difference.token_a, difference.token_b) == (0, a, b) and not difference.near_tie
    assert difference.gap == pytest.approx(logits[a] - logits[b], rel=1e-4)
    assert "DIFFERENT at token 0" in str(difference)


def test_only_the_first_difference_counts(target, ranked):
    difference = first_difference(
        target, PROMPT[:-3], PROMPT[-3:] + [ranked[0], 1, 2], PROMPT[-3:] + [ranked[9], 3, 4], GREEDY
    )
    assert difference.index == 3


@pytest.mark.parametrize(("a", "b"), [([1, 2], [1, 2, 3]), ([1, 2, 3], [1, 2]), ([], [4])])
def test_a_run_that_goes_on_is_a_difference(target, a, b):
    difference = first_difference(target, PROMPT, a, b, GREEDY)
    assert difference.index == min(len(a), len(b)) and not difference.near_tie
    assert sorted((difference.token_a or -1, difference.token_b or -1)) == [-1, max(a + b)]
    assert str(difference)


def twins(target: Target, token: int, twin: int, offset: float) -> Target:
    """The target, with `twin`'s row of the (tied) table equal to `token`'s up to a factor 1 + offset."""
    table = target.params["embedding"]
    return dataclasses.replace(
        target, params=target.params | {"embedding": table.at[twin].set(table[token] * (1 + offset))}
    )


def test_equal_scores_are_a_near_tie(target, ranked):
    a, b = ranked[0], 310  # no byte is 310, so the prompt does not change
    difference = first_difference(twins(target, a, b, 0.0), PROMPT, [a], [b], GREEDY)
    assert difference.gap == 0 and difference.near_tie and "near-tie" in str(difference)
    assert not first_difference(twins(target, a, b, 1e-2), PROMPT, [a], [b], GREEDY).near_tie


def test_float32_has_noise(target, ranked):
    """A measured noise of 0 would call every rounding a difference."""
    difference = first_difference(target, PROMPT, ranked[:1], ranked[1:2], GREEDY)
    assert 0 < difference.noise < 1e-3


def test_sampled_scores_include_the_noise_of_seed_and_position(target, ranked):
    a, b = ranked[:2]
    params, seed = SamplingParams(temperature=0.7), 12345 + (7 << 32)
    logits = np.asarray(target(np.asarray([PROMPT])).logits[0, -1])
    key = position_key((jnp.uint32(12345), jnp.uint32(7)), jnp.int32(len(PROMPT)), Role.SAMPLE)
    noise = np.asarray(jax.device_get(gumbel(key, jnp.asarray([a, b]))))
    gap = abs((logits[a] - logits[b]) / 0.7 + noise[0] - noise[1])
    difference = first_difference(target, PROMPT, [a], [b], params, seed)
    assert difference.gap == pytest.approx(gap, rel=1e-3)
