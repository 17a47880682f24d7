"""Round statistics of completions, under the paper's names."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from dspark_jax.decoding.requests import Completion
from dspark_jax.scheduling.calibration import Rounds


@dataclasses.dataclass(frozen=True)
class RoundStats:
    """Pooled over the rounds of all requests.

    `tokens_per_round`: emitted tokens, the bonus included (the paper's accepted length). `accepted_drafts_per_round`:
    without the bonus. `conditional_acceptance[k]`: P(draft k accepted | it was verified and all before it accepted).
    """

    requests: int
    tokens: int
    rounds: int
    tokens_per_round: float
    accepted_drafts_per_round: float
    verified_drafts_per_round: float
    conditional_acceptance: list[float]


def round_stats(completions: Sequence[Completion]) -> RoundStats:
    """Statistics of completions; ratios of nothing are 0."""
    verified = [v for c in completions for v in c.verified]
    accepted = [a for c in completions for a in c.accepted]
    judged = [j for c in completions for j in _judged(c)]
    tokens, rounds = sum(len(c.token_ids) for c in completions), len(verified)
    conditional = []
    for k in range(max(judged, default=0)):
        tried = sum(j > k and a >= k for j, a in zip(judged, accepted, strict=True))
        conditional.append(sum(a > k for a in accepted) / max(tried, 1))
    per_round = max(rounds, 1)
    return RoundStats(
        requests=len(completions),
        tokens=tokens,
        rounds=rounds,
        tokens_per_round=tokens / per_round,
        accepted_drafts_per_round=sum(accepted) / per_round,
        verified_drafts_per_round=sum(verified) / per_round,
        conditional_acceptance=conditional,
    )


def _judged(completion: Completion) -> list[int]:
    """Drafts of each round whose fate was seen. Where a stop or the limit cut the last round off after an accepted
    draft, the target's verdict on the next one never counted, and must not read as a rejection.
    """
    judged = list(completion.verified)
    if judged and len(completion.token_ids) < sum(completion.accepted) + len(judged):
        judged[-1] = completion.accepted[-1]
    return judged


def record_rounds(completions: Sequence[Completion]) -> Rounds:
    """Confidences and fates of all rounds. One that a stop or the limit cut off says nothing of its later drafts."""
    logits = [row for c in completions for row in c.confidence]
    judged = [j for c in completions for j in _judged(c)]
    accepted = [a for c in completions for a in c.accepted]
    return Rounds(np.asarray(logits, np.float64), np.asarray(judged), np.asarray(accepted))


def deepspec_lengths(completion: Completion, max_new_tokens: int) -> list[int]:
    """Acceptance length of every round as DeepSpec's evaluator counts them (spec 7), for comparison with its numbers.

    It emits a first token before any round, starts rounds until `max_new_tokens` more are there, even one that the
    budget no longer needs, and never trims a length; a round that ends on an accepted stop token has no bonus. The
    completion must continue that first token with room for `max_new_tokens` and one more block.
    """
    lengths = [accepted + 1 for accepted in completion.accepted]
    if lengths:
        lengths[-1] = len(completion.token_ids) - sum(lengths[:-1])
    starts = itertools.accumulate(lengths, initial=0)
    return [length for length, start in zip(lengths, starts, strict=False) if start < max_new_tokens]


def deepspec_stats(completions: Sequence[Completion], max_new_tokens: int) -> dict[str, float | list[float]]:
    """DeepSpec's metrics under its names and with its way of counting; `round_stats` has ours.

    `acceptance_length` includes the bonus; `accept_rate[k]` is the share of rounds that accepted more than k drafts
    among those that proposed more than k: the survival of a prefix, not a conditional acceptance.
    """
    rounds, kept = [], []
    for c in completions:
        for length, verified, accepted in zip(
            deepspec_lengths(c, max_new_tokens), c.verified, c.accepted, strict=False
        ):
            stopped = length <= accepted  # on an accepted stop token: no bonus, and the proposal ends there
            rounds.append((length, min(verified, length) if stopped else verified))
            kept.append(length if stopped else length - 1)
    count, total = max(len(rounds), 1), sum(length for length, _ in rounds)
    proposed = sum(proposal for _, proposal in rounds)
    rates = [
        sum(accepted > k for accepted in kept) / sum(proposal > k for _, proposal in rounds)
        for k in range(max((proposal for _, proposal in rounds), default=0))
    ]
    return {
        "acceptance_length": total / count,
        "draft_tokens_per_proposal": proposed / count,
        "verify_rate": total / max(proposed + len(rounds), 1),
        "accept_rate": rates,
    }
