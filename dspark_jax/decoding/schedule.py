"""The scheduler's place in a round: from a proposal's confidences to how many of its drafts are verified."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.decoding.draft import Proposal
from dspark_jax.interop.drafter_io import Drafter
from dspark_jax.models.lookup import Lookup
from dspark_jax.scheduling.cost_model import CostTable
from dspark_jax.scheduling.scheduler import (
    BY_CONFIDENCE,
    BY_COST,
    RoundCost,
    Strategy,
    admit,
    bucket_of,
    confidences,
    global_budget,
    parse_strategy,
    row_buckets,
    survival,
    synchronous_budget,
    threshold_lengths,
)

UNKNOWN = 0.7  # confidence of a request that has not drafted yet, where confidences are made of older rounds
COPY_THRESHOLD = "threshold:0.3"  # a row of verification costs well below a step of its own
MEMORY = 0.95  # of the running acceptance: it looks back over about 20 rounds


@dataclasses.dataclass(frozen=True)
class Policy:
    """How a round samples and how it decides what to verify (static).

    `running`: the drafter has no confidences; the running acceptance of each position stands in.
    """

    sampler: str
    strategy: Strategy
    running: bool = False
    kernels: str = "xla"  # or "tpu", "gpu"

    @property
    def scheduled(self) -> bool:
        """True when the number of verified drafts is decided round by round."""
        return self.strategy.name not in ("off", "fixed")

    @property
    def needs_cost(self) -> bool:
        return self.strategy.name in BY_COST

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


def policy_of(
    sampler: str, strategy: str, drafter: Drafter | None, cost_table: CostTable | None, kernels: str = "xla"
) -> Policy:
    """The policy that a strategy's name means for these parts. UserError where they do not go together.

    "auto": by the costs where they are known, else whole blocks; of a lookup, which matches now and then, what has come
    true of late.
    """
    block = drafter.config.num_drafts if drafter else 0
    copies = bool(drafter) and isinstance(drafter.config, Lookup)
    if strategy == "auto":
        unpriced = COPY_THRESHOLD if copies else f"fixed:{block}"
        strategy = "off" if not block else "load_aware" if cost_table else unpriced
    parsed = parse_strategy(strategy, block, not copies)
    confident = bool(drafter) and getattr(drafter.config, "confidence", False)
    return Policy(sampler, parsed, parsed.name in BY_CONFIDENCE and not confident, kernels)


@flax.struct.dataclass
class SlotSchedule:
    """What the scheduler keeps of every slot.

    Running acceptance counts drafts whose fate was seen, lately more than long ago, by the length M of the n-gram that
    a lookup had found; other drafters have one M, 0.
    """

    temperature_RxK: jax.Array  # of the confidences, by calibration
    older_Rx2xK: jax.Array  # survivals of the last two rounds, the older one last
    judged_RxMxK: jax.Array | tuple[()] = ()  # drafts that were verified, all before them accepted
    accepted_RxMxK: jax.Array | tuple[()] = ()  # those of them that were accepted

    @classmethod
    def of(cls, temperature_K: jax.Array, matches: int = 0) -> "SlotSchedule":
        """One slot's entries. `matches`: lengths to keep the running acceptance of; 0: it is not needed."""
        drafts = len(temperature_K)
        start = UNKNOWN ** jnp.arange(1, drafts + 1, dtype=jnp.float32)
        counts = [jnp.zeros((matches, drafts), jnp.float32)] * 2 if matches else [(), ()]
        return cls(jnp.asarray(temperature_K, jnp.float32), jnp.stack([start, start]), *counts)

    def acceptance(self, proposal: Proposal) -> jax.Array:
        """P(a draft is accepted | those before it were), `[R, K]`, as finished rounds have it."""
        at = _match(proposal)[:, None, None]
        judged, accepted = (
            jnp.take_along_axis(a, at, axis=1)[:, 0, : proposal.token_RxK.shape[1]]
            for a in (self.judged_RxMxK, self.accepted_RxMxK)
        )
        return (accepted + UNKNOWN) / (judged + 1)  # one draft's worth of what is assumed beforehand

    def observed(self, proposal: Proposal, verified_R: jax.Array, accepted_R: jax.Array) -> "SlotSchedule":
        """Takes a round's outcome, up to the first rejected draft and no further.

        What would have become of later drafts hangs on noise that their positions still have before them, and budgets
        made of that would be biased. What was not verified is slowly forgotten, so that it will be tried again.
        """
        index_K = jnp.arange(self.judged_RxMxK.shape[2])
        judged_RxK = index_K < jnp.minimum(accepted_R + 1, verified_R)[:, None]
        skipped_RxK = index_K >= verified_R[:, None]
        mine_RxMx1 = (jnp.arange(self.judged_RxMxK.shape[1]) == _match(proposal)[:, None])[:, :, None]
        keep = jnp.where(mine_RxMx1 & (judged_RxK | skipped_RxK)[:, None], MEMORY, 1.0)
        accepted_RxK = judged_RxK & (index_K < accepted_R[:, None])
        return self.replace(
            judged_RxMxK=keep * self.judged_RxMxK + (mine_RxMx1 & judged_RxK[:, None]),
            accepted_RxMxK=keep * self.accepted_RxMxK + (mine_RxMx1 & accepted_RxK[:, None]),
        )


def _match(proposal: Proposal) -> jax.Array:
    return jnp.zeros(len(proposal.token_RxK), jnp.int32) if proposal.match_R is None else proposal.match_R


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
        # Where the target's token does not depend on the drafts, any schedule is exact; and so is any that is made of
        # finished rounds.
        search = global_budget if policy.sampler == "coupled" or policy.running else synchronous_budget
        budget = search(now_RxK, anchors, cost)
    return Plan(admit(now_RxK, budget.rows - anchors), budget.bucket, schedule)


def _confidence(policy: Policy, schedule: SlotSchedule, proposal: Proposal, greedy_R: jax.Array) -> jax.Array:
    """P(a draft is accepted | those before it were), `[R, K]`: the drafter's own, or, training-free, the draft's.

    "dcut" reads the draft distribution: the largest probability, which is known before a token is drawn; the drawn
    token's own only where that cannot bias anything.
    """
    if policy.strategy.name != "dcut":
        own = confidences(proposal.confidence_RxK, schedule.temperature_RxK)
        return own * schedule.acceptance(proposal) if policy.running else own
    largest, drawn = jnp.exp(proposal.log_largest_RxK), jnp.exp(proposal.log_q_RxK)
    return drawn if policy.sampler == "coupled" else jnp.where(greedy_R[:, None], drawn, largest)
