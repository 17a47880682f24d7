"""When not to draft at all: a load at which drafted rounds have lately been slower than plain ones is parked.

One state per slots bucket and context bucket, on the host. It is fed with finished rounds only, so it never depends on
a token that it decides about.
"""

import dataclasses

DECAY = 0.95  # of the exponential means: they look back over about 20 drafted rounds
PROBE_EVERY = 64  # parked time per time of a probe, a drafted round that sees whether it pays again


@dataclasses.dataclass(frozen=True)
class Parking:
    """What drafted rounds brought and cost of late, relative to plain rounds, which bring 1 and cost 1."""

    tokens: float = 1.1  # emitted per slot and drafted round; a new state is worth a try
    cost: float = 1.0  # seconds of a drafted round / seconds of a plain one
    last_cost: float = 1.0  # of the last drafted round
    parked: int = 0  # plain rounds since then

    @property
    def gain(self) -> float:
        """Tokens per second drafted / tokens per second plain."""
        return self.tokens / self.cost


def should_draft(state: Parking) -> bool:
    """Whether the next round drafts: it pays, or it is time to see whether it does.

    Probes emit a token per slot at the least, so they never cost more than 1/PROBE_EVERY of the time.
    """
    return state.gain > 1 or state.parked >= PROBE_EVERY * state.last_cost


def after_drafted(state: Parking, tokens: float, cost: float) -> Parking:
    """The state after a drafted round that emitted `tokens` per slot and took `cost` times as long as a plain one."""
    mean = lambda old, new: DECAY * old + (1 - DECAY) * new  # noqa: E731
    return Parking(mean(state.tokens, tokens), mean(state.cost, cost), cost)


def after_plain(state: Parking) -> Parking:
    """The state after a round without drafting."""
    return dataclasses.replace(state, parked=state.parked + 1)
