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
from dspark_jax.decoding.round import Models, Slots, decode
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.schedule import Plan, Policy, plan
from dspark_jax.interop.drafter_io import Drafter
from dspark_jax.interop.target_io import Target, dense_forward
from dspark_jax.scheduling.scheduler import RoundCost, parse_strategy
from pallas_kernels.noise import Role, position_key
from tests.decoding.laws import chi_square, law

VOCAB, BLOCK, ANSWER = 5, 4, 4  # tokens of the vocabulary, of a block, and of every answer
LOADS, SIZE = 4096, 3  # loads in a program, requests in a load
STRATEGIES = ("threshold:0.5", "load_aware", "load_aware_async", "dcut")
LIKED = 0  # the token that leaks trust

Planner = Callable[..., Plan]


# ---------------------------------------------------------------------------------------------------- planners


def planner(strategy: str, sampler: str) -> Planner:
    """The engine's plan under one policy."""
    return functools.partial(plan, Policy(sampler, parse_strategy(strategy, BLOCK)))


def leaky(planner: Planner) -> Planner:
    """The same, with confidences that look at the very token whose fate they decide."""

    def plan(schedule, proposal: Proposal, *rest) -> Plan:
        leak = jnp.where(proposal.token_RxK == LIKED, 9.0, -9.0)
        return planner(schedule, proposal.replace(confidence_RxK=leak), *rest)

    return plan


def planners(sampler: str) -> dict[str, Planner]:
    """The engine's strategies, and mistakes made on purpose. Those are legal only where any schedule is exact."""
    own = {strategy: planner(strategy, sampler) for strategy in STRATEGIES}
    mistakes = {f"{strategy}, leaky": leaky(own[strategy]) for strategy in STRATEGIES[:3]}
    mistakes["global search over current confidences"] = planner("load_aware", "coupled")
    mistakes["dcut by the drawn token"] = planner("dcut", "coupled")
    return own | mistakes


def plan_by_load(every: Sequence[Planner], index: jax.Array) -> Planner:
    """Planner `index` on each load by itself, in place of `round.plan`."""

    def plan(policy, schedule, proposal, greedy_R, active_R, costs: RoundCost) -> Plan:
        parts = jax.tree.map(
            lambda a: a.reshape(LOADS, SIZE, *a.shape[1:]), (schedule, proposal, greedy_R, active_R)
        )

        def one(planner: Planner):
            return jax.vmap(lambda *load: (lambda p: (p.length_R, p.schedule))(planner(*load)))

        flat = jax.tree.map(
            lambda a: a.reshape(-1, *a.shape[2:]), jax.lax.switch(index, [one(p) for p in every], *parts, costs)
        )
        return Plan(flat[0], jnp.int32(0), flat[1])

    return plan


@dataclasses.dataclass(frozen=True)
class AllRows(Policy):
    """A target step of every row, whatever is verified: loads that run side by side have no bucket of their own."""

    def buckets(self, slots: int, drafts: int) -> tuple[int, ...]:
        return (slots * (drafts + 1),)


# ---------------------------------------------------------------------------------------------------- the program


@functools.cache
def program(models: Models, sampler: str) -> Callable:
    """f(weights, caches, slots, costs, index of the planner, whether draft noise goes by position) -> Emitted."""
    every, policy = list(planners(sampler).values()), AllRows(sampler, parse_strategy("load_aware", BLOCK))
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
            # Below its own jit, which knows nothing of patches.
            return decode.__wrapped__(models, policy, weights, caches, slots, costs, **sizes)[2]

    return jax.jit(answers)


@dataclasses.dataclass(frozen=True)
class Answers:
    """What the requests of all loads said, `[LOADS, SIZE, ANSWER]`, and the drafts verified in every round of each."""

    tokens: np.ndarray
    verified: np.ndarray  # one entry for each round of each request

    def shares(self) -> np.ndarray:
        """How often 0, 1, .. BLOCK drafts were verified."""
        return np.bincount(self.verified, minlength=BLOCK + 1) / len(self.verified)


def answers(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    costs: RoundCost,
    *,
    sampler: str,
    planner: str,
    by_position: bool = False,
    alone: bool = False,
    shared_seeds: bool = False,
    seed: int = 0,
) -> Answers:
    """Runs all loads. `costs`: of each. `alone`: the first request of each load has it for itself."""
    engine = Engine(
        target, drafter, strategy="threshold:0.5", sampler=sampler, max_slots=SIZE, page_size=8, cache_tokens=8 * SIZE
    )
    engine.fill(engine.requests(prompts, params))
    run = program(engine.models, sampler)
    caches = jax.tree.map(lambda a: jnp.zeros((a.shape[0], LOADS * SIZE, *a.shape[2:]), a.dtype), engine.caches)
    index = list(planners(sampler)).index(planner)
    out = jax.device_get(run(engine.weights, caches, _every_load(engine.slots, alone, shared_seeds, seed), costs, index, by_position))
    return Answers(_tokens(out.token_DxRxQ, out.count_DxR), out.verified_DxR[out.count_DxR > 0])


def _every_load(slots: Slots, alone: bool, shared_seeds: bool, seed: int) -> Slots:
    """One load's slots for all loads, each with seeds and a page of its own."""
    slots = jax.tree.map(lambda a: jnp.tile(a, (LOADS, *[1] * (a.ndim - 1))), slots)
    index = jnp.arange(LOADS * SIZE)
    first = index // SIZE if shared_seeds else index
    words = (first.astype(jnp.uint32), jnp.full(index.shape, seed, jnp.uint32))
    remaining = jnp.where(alone & (index % SIZE > 0), 0, slots.remaining_R)
    sampling = slots.sampling.replace(seed=words)
    return slots.replace(sampling=sampling, table_RxC=index[:, None], remaining_R=remaining)


def _tokens(token_DxRxQ: np.ndarray, count_DxR: np.ndarray) -> np.ndarray:
    """Rounds joined: `[LOADS, SIZE, ANSWER]`."""
    out, length = np.zeros((LOADS * SIZE, ANSWER), int), np.zeros(LOADS * SIZE, int)
    for token_RxQ, count_R in zip(token_DxRxQ, count_DxR, strict=True):
        for k in range(ANSWER):
            emits = np.flatnonzero(k < count_R)
            out[emits, length[emits] + k] = token_RxQ[emits, k]
        length += count_R
    return out.reshape(LOADS, SIZE, ANSWER)


# ---------------------------------------------------------------------------------------------------- laws


def answer_law(target: Target, first: int, params: SamplingParams) -> np.ndarray:
    """`[V] * ANSWER`: the probability of every answer to a prompt of one token, by the dense target."""
    prefixes = np.array(list(itertools.product(range(VOCAB), repeat=ANSWER - 1)))
    tokens = jnp.asarray(np.insert(prefixes, 0, first, axis=1))
    logits = np.asarray(dense_forward(target.module, target.params, tokens).logits)
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
    return min(
        chi_square(tokens_NxT[:, part], joint.sum(tuple(a for a in axes if a not in part))) for part in parts
    )
