"""When not to draft at all: a load at which drafted rounds have lately been slower than plain ones is parked.

One state per slots bucket and context bucket, on the host. It is fed with finished rounds only, so it never depends on
a token that it decides about.
"""

import dataclasses

MEMORY = 50  # drafted rounds that the means look back over
PROBE_EVERY = 100  # parked time per time that probes, drafted rounds that see whether it pays, are thought to lose


@dataclasses.dataclass(frozen=True)
class Parking:
    """What drafted rounds brought and cost of late, relative to plain rounds, which bring 1 and cost 1."""

    tokens: float = 1.1  # emitted per slot and drafted round; a new state is worth a try
    cost: float = 1.0  # seconds of a drafted round / seconds of a plain one
    seen: int = 3  # rounds that these are the means of
    debt: float = 0.0  # plain rounds that have yet to run before the next probe

    @property
    def loss(self) -> float:
        """Plain rounds by which a drafted one falls behind; negative where it gets ahead."""
        return self.cost - self.tokens


def should_draft(state: Parking) -> bool:
    """Whether the next round drafts: it pays, or it is time to see whether it does.

    Probes lose 1/PROBE_EVERY of the time, however many rounds a dispatch of them has. So where drafting nearly pays
    they are frequent, and a load that bad luck has parked finds out soon; where it is hopeless they are rare.
    """
    return state.loss < 0 or state.debt <= 0


def after_drafted(state: Parking, tokens: float, cost: float) -> Parking:
    """The state after a drafted round that emitted `tokens` per slot and took `cost` times as long as a plain one."""
    seen = min(state.seen + 1, MEMORY)
    mean = lambda old, new: old + (new - old) / seen  # noqa: E731
    new = Parking(mean(state.tokens, tokens), mean(state.cost, cost), seen)
    return dataclasses.replace(new, debt=max(state.debt, 0.0) + PROBE_EVERY * max(new.loss, 0.0))


def after_plain(state: Parking) -> Parking:
    """The state after a round without drafting."""
    return dataclasses.replace(state, debt=state.debt - 1)
