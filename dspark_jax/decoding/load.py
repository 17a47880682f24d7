"""What the host knows of a load: the costs that the scheduler weighs, and whether drafting pays at all."""

import dataclasses

import numpy as np

from dspark_jax.decoding.state import Emitted
from dspark_jax.scheduling.cost_model import CostTable, Drift, after_round, is_stale
from dspark_jax.scheduling.parking import Parking, after_drafted, after_plain, should_draft
from dspark_jax.scheduling.scheduler import RoundCost, bucket_of

Size = tuple[int, int]  # slots in use, tokens of context that a program reads


@dataclasses.dataclass
class Load:
    """A cost table in use. Parking and drift follow finished dispatches only, never a token still to be decided."""

    table: CostTable
    block: int  # drafts of a whole block
    parks: bool  # whether drafting may pause where it does not pay
    drift: Drift = Drift()
    _parking: dict[Size, Parking] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cost((1, 1))  # a table of shorter blocks is refused before anything runs

    def cost(self, size: Size) -> RoundCost:
        """Seconds of a round by rows; UserError when the table ends before this size."""
        return self.table.curve(*size, self.block)

    def drafts(self, size: Size) -> bool:
        """Whether the next dispatch drafts."""
        return not self.parks or should_draft(self._parking.get(size, Parking()))

    @property
    def stale(self) -> bool:
        """Whether rounds have come to cost something else than the table says."""
        return is_stale(self.drift)

    def observe(self, size: Size, drafted: bool, out: Emitted, seconds: float | None) -> None:
        """Takes a finished dispatch. `seconds`: how long it ran, None where that was not to be seen."""
        cost = self.cost(size)
        rows_D = out.rows_D[out.rows_D > 0]
        if not len(rows_D):
            return
        plain = float(cost.seconds_J[bucket_of(size[0], cost.rows_J)])
        times_D = cost.seconds_J[np.searchsorted(cost.rows_J, rows_D)] + (float(cost.overhead) if drafted else 0.0)
        state = self._parking.get(size, Parking())
        for d, time in enumerate(times_D):
            emitted = out.count_DxR[d]
            tokens = float(emitted.sum() / max((emitted > 0).sum(), 1))
            state = after_drafted(state, tokens, float(time) / plain) if drafted else after_plain(state)
        self._parking[size] = state
        if seconds is not None:
            self.drift = after_round(self.drift, seconds, float(times_D.sum()))
