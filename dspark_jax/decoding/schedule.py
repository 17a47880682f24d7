"""The scheduler's place in a round: from a proposal's confidences to how many of its drafts are verified."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.decoding.draft import Proposal
from dspark_jax.scheduling.scheduler import (
    RoundCost,
    Strategy,
    admit,
    bucket_of,
    confidences,
    global_budget,
    row_buckets,
    survival,
    synchronous_budget,
    threshold_lengths,
)

UNKNOWN = 0.7  # confidence of a request that has not drafted yet, for budgets made of older rounds


@dataclasses.dataclass(frozen=True)
class Policy:
    """How a round samples and how it decides what to verify (static)."""

    sampler: str
    strategy: Strategy
    kernels: str = "xla"  # or "tpu"

    @property
    def scheduled(self) -> bool:
        """True when the number of verified drafts is decided round by round."""
        return self.strategy.name not in ("off", "fixed")

    @property
    def needs_cost(self) -> bool:
        return self.strategy.name in ("load_aware", "load_aware_async", "dcut")

    @property
    def shares_budgets(self) -> bool:
        """True when other requests' drafts decide what is verified of one, and the sampler would notice.

        The law then holds only if requests draw different noise: with one seed for two of them, the one's draft tells
        what the other's is.
        """
        return self.needs_cost and self.sampler == "rejection"

    def buckets(self, slots: int, drafts: int) -> tuple[int, ...]:
        """Rows that a round's target step may run over, one program each."""
        return row_buckets(slots, drafts) if self.scheduled and drafts else (slots * (drafts + 1),)


@flax.struct.dataclass
class SlotSchedule:
    """What the scheduler keeps of every slot."""

    temperature_RxK: jax.Array  # of the confidences, by calibration
    older_Rx2xK: jax.Array  # survivals of the last two rounds, the older one last

    @classmethod
    def of(cls, temperature_K: jax.Array) -> "SlotSchedule":
        """One slot's entries."""
        start = UNKNOWN ** jnp.arange(1, len(temperature_K) + 1, dtype=jnp.float32)
        return cls(jnp.asarray(temperature_K, jnp.float32), jnp.stack([start, start]))


@flax.struct.dataclass
class Plan:
    """Drafts to verify of every slot, and the index of the bucket that holds them and the anchors."""

    length_R: jax.Array
    bucket: jax.Array
    schedule: SlotSchedule


def plan(
    policy: Policy,
    schedule: SlotSchedule,
    proposal: Proposal,
    greedy_R: jax.Array,
    active_R: jax.Array,
    cost: RoundCost | None,
) -> Plan:
    """Decides a round. Exact under `rejection`: nothing here looks at a token whose fate it decides (method.md)."""
    slots, drafts = proposal.token_RxK.shape
    anchors, rows_J = jnp.sum(active_R), policy.buckets(slots, drafts)
    confidence_RxK = _confidence(policy, schedule, proposal, greedy_R)
    if policy.strategy.name == "threshold":
        length_R = threshold_lengths(confidence_RxK, policy.strategy.value, active_R)
        return Plan(length_R, bucket_of(anchors + jnp.sum(length_R), jnp.asarray(rows_J)), schedule)
    now_RxK = survival(confidence_RxK, active_R).astype(jnp.float32)
    if policy.strategy.name == "load_aware_async":
        older_RxK = jnp.where(active_R[:, None], schedule.older_Rx2xK[:, 1], 0)
        budget = global_budget(older_RxK, anchors, cost)
        newest = jnp.where(active_R[:, None], now_RxK, schedule.older_Rx2xK[:, 0])
        schedule = schedule.replace(older_Rx2xK=jnp.stack([newest, schedule.older_Rx2xK[:, 0]], axis=1))
    else:
        # Where the target's token does not depend on the drafts, any schedule is exact.
        search = global_budget if policy.sampler == "coupled" else synchronous_budget
        budget = search(now_RxK, anchors, cost)
    return Plan(admit(now_RxK, budget.rows - anchors), budget.bucket, schedule)


def _confidence(policy: Policy, schedule: SlotSchedule, proposal: Proposal, greedy_R: jax.Array) -> jax.Array:
    """P(a draft is accepted | those before it were), `[R, K]`: the drafter's own, or, training-free, the draft's.

    "dcut" reads the draft distribution: the largest probability, which is known before a token is drawn; the drawn
    token's own only where that cannot bias anything.
    """
    if policy.strategy.name != "dcut":
        return confidences(proposal.confidence_RxK, schedule.temperature_RxK)
    warped = proposal.warped_RxKxVd
    largest = jnp.exp(jnp.max(warped, axis=-1) - jax.nn.logsumexp(warped, axis=-1))
    drawn = jnp.exp(proposal.log_q_RxK)
    return drawn if policy.sampler == "coupled" else jnp.where(greedy_R[:, None], drawn, largest)
