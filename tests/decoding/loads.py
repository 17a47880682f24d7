"""Thousands of small loads that decode side by side in one program: tens of thousands of scheduled answers in a second.

A load is a few requests that share a budget. Draft, target, acceptance and commit are the engine's own (`decode`), over
the slots of all loads at once; the engine's own `plan` runs on every load by itself. Strategies, costs, seeds and
weights are inputs of the program, so that they share it.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding import draft as draft_module
from dspark_jax.decoding import round as round_module
from dspark_jax.decoding.draft import Proposal
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.round import decode
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.schedule import Plan, Policy, plan
from dspark_jax.decoding.state import Emitted, Models, Slots
from dspark_jax.interop.drafter_io import Drafter
from dspark_jax.interop.target_io import Target, dense_forward
from dspark_jax.scheduling.cost_model import CostTable
from dspark_jax.scheduling.scheduler import RoundCost, parse_strategy
from pallas_kernels.noise import Role, position_key
from tests.decoding.laws import chi_square, law

VOCAB, BLOCK, ANSWER = 5, 4, 4  # tokens of the vocabulary, of a block, and of every answer
LOADS, SIZE = 4096, 3  # loads in a program, requests in a load
PAGE = 8  # rows of a request, prompt and answer
STRATEGIES = ("threshold:0.5", "load_aware", "load_aware_async", "dcut")
LIKED = 0  # the only token that a leak trusts
SURE = 200.0  # a logit whose sigmoid is 1, and 0 below zero

Planner = Callable[..., Plan]


# ---------------------------------------------------------------------------------------------------- planners


def planner(strategy: str, sampler: str, running: bool = False) -> Planner:
    """The engine's plan under one policy."""
    return functools.partial(plan, Policy(sampler, parse_strategy(strategy, BLOCK), running))


def leaky(own: Planner) -> Planner:
    """The same plan, with confidences that look at the very token whose fate they decide."""

    def plan(schedule, proposal: Proposal, *rest) -> Plan:
        leak = jnp.where(proposal.token_RxK == LIKED, SURE, -SURE)
        return own(schedule, proposal.replace(confidence_RxK=leak), *rest)

    return plan


def planners(sampler: str, running: bool = False) -> dict[str, Planner]:
    """The engine's strategies, and mistakes made on purpose. Those are legal only where any schedule is exact.

    `running`: those that read confidences, with the running acceptance in their place.
    """
    own = {strategy: planner(strategy, sampler, running) for strategy in STRATEGIES}
    mistakes = {f"{strategy}, leaky": leaky(own[strategy]) for strategy in STRATEGIES[:3]}
    if running:
        del own["dcut"]
        return own | mistakes
    mistakes["global search over current confidences"] = planner("load_aware", "coupled")
    mistakes["dcut by the drawn token"] = planner("dcut", "coupled")
    return own | mistakes


def plan_by_load(every: Sequence[Planner], index: jax.Array) -> Planner:
    """Planner `index` on each load by itself, in place of `round.plan`."""

    def plan(policy, schedule, proposal, greedy_R, active_R, costs: RoundCost) -> Plan:
        slots = (schedule, proposal, greedy_R, active_R)
        loads = jax.tree.map(lambda a: a.reshape(LOADS, SIZE, *a.shape[1:]), slots)
        chosen = jax.lax.switch(index, [jax.vmap(own) for own in every], *loads, costs)
        flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), (chosen.length_R, chosen.schedule))
        return Plan(flat[0], jnp.int32(0), flat[1])

    return plan


@dataclasses.dataclass(frozen=True)
class AllRows(Policy):
    """A target step of every row, whatever is verified: loads that run side by side have no bucket of their own."""

    def buckets(self, slots: int, drafts: int) -> tuple[int, ...]:
        return (slots * (drafts + 1),)


# ---------------------------------------------------------------------------------------------------- the program


@functools.cache
def program(models: Models, sampler: str, running: bool) -> Callable:
    """f(weights, caches, slots, costs, index of the planner, whether draft noise goes by position) -> Emitted."""
    every = list(planners(sampler, running).values())
    policy = AllRows(sampler, parse_strategy("load_aware", BLOCK), running)
    real_key = draft_module.draft_key

    def answers(weights, caches, slots, costs, index, by_position):
        def key(sampler, seed, anchor_R, slot):
            stale = position_key(seed, anchor_R + 1 + slot, Role.DRAFT)
            fresh = real_key(sampler, seed, anchor_R, slot)
            return jax.tree.map(lambda a, b: jnp.where(by_position, a, b), stale, fresh)

        sizes = {"active": LOADS * SIZE, "drafts": BLOCK, "context_pages": 1, "rounds": ANSWER}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(round_module, "plan", plan_by_load(every, index))
            patch.setattr(draft_module, "draft_key", key)
            # Its own jit would remember a program that was traced without the patches.
            return decode.__wrapped__(models, policy, weights, caches, slots, costs, **sizes)[2]

    return jax.jit(answers)


@dataclasses.dataclass(frozen=True)
class Answers:
    """What the requests of L loads said, and how many drafts each of their rounds verified (-1: it had ended)."""

    token_LxSxT: np.ndarray
    verified_DxLxS: np.ndarray

    @classmethod
    def of(cls, emitted: Emitted) -> "Answers":
        out = jax.device_get(emitted)
        rounds, slots = out.count_DxR.shape
        tokens, length = np.zeros((slots, ANSWER), int), np.zeros(slots, int)
        for token_RxQ, count_R in zip(out.token_DxRxQ, out.count_DxR, strict=True):
            for k in range(ANSWER):
                emits = np.flatnonzero(k < count_R)
                tokens[emits, length[emits] + k] = token_RxQ[emits, k]
            length += count_R
        verified = np.where(out.count_DxR > 0, out.verified_DxR, -1)
        return cls(tokens.reshape(-1, SIZE, ANSWER), verified.reshape(rounds, -1, SIZE))

    def shares(self) -> np.ndarray:
        """How often 0, 1, .. BLOCK drafts were verified."""
        counts = np.bincount(self.verified_DxLxS.ravel() + 1, minlength=BLOCK + 2)[1:]
        return counts / counts.sum()


def engine_of(
    target: Target, drafter: Drafter, sampler: str, strategy: str = "threshold:0.5", table: CostTable | None = None
) -> Engine:
    """An engine of one load at a time."""
    return Engine(
        target, drafter, strategy=strategy, sampler=sampler, cost_table=table, max_slots=SIZE, page_size=PAGE,
        cache_tokens=PAGE * SIZE, rounds_per_dispatch=ANSWER,
    )  # fmt: skip


def filled(engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Engine:
    """The engine, holding a load with its prompts cached."""
    engine.fill(engine.requests(prompts, params))
    return engine


def every_load(slots: Slots, *, alone: bool = False, one_seed: bool = False, seed: int = 0) -> Slots:
    """One load's slots for all loads, each slot with a page of its own and, unless `one_seed`, its own seed.

    `alone`: only the first request of each load runs.
    """
    slots = jax.tree.map(lambda a: jnp.tile(a, (LOADS, *[1] * (a.ndim - 1))), slots)
    index = jnp.arange(LOADS * SIZE)
    words = ((index // SIZE if one_seed else index).astype(jnp.uint32), jnp.full(index.shape, seed, jnp.uint32))
    remaining = jnp.where(alone & (index % SIZE > 0), 0, slots.remaining_R)
    sampling = slots.sampling.replace(seed=words)
    return slots.replace(sampling=sampling, table_RxC=index[:, None], remaining_R=remaining)


def answers(engine: Engine, slots: Slots, costs: RoundCost, name: str, by_position: bool = False) -> Answers:
    """Runs all loads to their end under the planner of that name. `costs`: of each load.

    `by_position`: draft noise goes by absolute position, and no longer by anchor and slot in the block.
    """
    sampler, running = engine.policy.sampler, engine.policy.running
    pages = jnp.tile(engine.slots.table_RxC[:, 0], LOADS)  # every slot's page with its prompt
    caches = jax.tree.map(lambda a: a[:, pages], engine.caches)
    index = list(planners(sampler, running)).index(name)
    run = program(engine.models, sampler, running)
    return Answers.of(run(engine.weights, caches, slots, costs, index, by_position))


# ---------------------------------------------------------------------------------------------------- laws


def answer_law(target: Target, prompt: Sequence[int], params: SamplingParams) -> np.ndarray:
    """`[V] * ANSWER`: the probability of every answer to a prompt, by the dense target."""
    prefixes = np.array(list(itertools.product(range(VOCAB), repeat=ANSWER - 1)))
    tokens = jnp.asarray(np.hstack([np.tile(prompt, (len(prefixes), 1)), prefixes]))
    logits = np.asarray(dense_forward(target.module, target.params, tokens).logits)[:, len(prompt) - 1 :]
    p = law(logits.reshape(-1, VOCAB), params).reshape(*[VOCAB] * (ANSWER - 1), ANSWER, VOCAB)
    joint = np.ones([VOCAB] * ANSWER)
    for n in range(ANSWER):  # token n, given those before it; what comes after plays no part
        given = p[(*[slice(None)] * n, *[0] * (ANSWER - 1 - n), n)]
        joint *= given.reshape(*[VOCAB] * (n + 1), *[1] * (ANSWER - 1 - n))
    return joint


def fit(tokens_NxT: np.ndarray, joint: np.ndarray) -> float:
    """The least p-value of the beginnings of the answers, whole answers included, and of their single tokens."""
    axes = range(joint.ndim)
    parts = [tuple(axes[: n + 1]) for n in axes] + [(n,) for n in axes[1:]]
    return min(chi_square(tokens_NxT[:, part], joint.sum(tuple(a for a in axes if a not in part))) for part in parts)
