"""Round statistics of completions, under the paper's names."""

import dataclasses
from collections.abc import Sequence

from dspark_jax.decoding.requests import Completion


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
