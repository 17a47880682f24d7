"""What scheduling itself costs: `bench --scheduler`. Timed inside a device loop, as it runs inside a round."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from dspark_jax.decoding.draft import Proposal
from dspark_jax.decoding.schedule import Policy, SlotSchedule, plan
from dspark_jax.evaluation.measurements import CONTEXT, FrozenBatch, compiled_programs, random_prompts
from dspark_jax.evaluation.report import environment
from dspark_jax.evaluation.timing import Clock, seconds
from dspark_jax.scheduling.scheduler import RoundCost, Strategy
from dspark_jax.serving import load_models, make_engine

REQUESTS = (1, 64, 1024)
BLOCK = 7  # drafts, where no config names a drafter
LOOPS = 64  # plans a measurement
MOST_IN_A_ROUND = 64  # requests of a round that is timed beside its plan
STRATEGIES = ("load_aware", "load_aware_async")


def scheduler_cost(config: ConfigDict | None, repeats: int) -> dict[str, Any]:
    """Milliseconds of a plan by requests and strategy; with a config, beside a round of its models in turn."""
    target, drafter = load_models(config) if config else (None, None)
    block, clock = drafter.config.num_drafts if drafter else BLOCK, Clock(repeats, compiled_programs)
    rows = []
    for requests in REQUESTS:
        calls = {name: planning(name, requests, block) for name in STRATEGIES}
        if drafter and requests <= MOST_IN_A_ROUND:
            prompts = random_prompts(requests, CONTEXT, target.config.vocab_size)
            engine = make_engine(config, target, drafter, strategy=f"fixed:{block}", max_slots=requests)
            calls["round"] = FrozenBatch(engine, prompts).round
        times = clock.in_turn(calls)
        row = {"requests": requests, "drafts": block}
        for name, timing in times.items():
            row |= timing.entries(name)
        if "round" in times:
            row |= {f"{name}_percent": 100 * row[f"{name}_ms"] / row["round_ms"] for name in STRATEGIES}
        rows.append(row)
    return {**environment(), "repeats": repeats, "target": target.name if target else None, "scheduler": rows}


def planning(strategy: str, requests: int, drafts: int) -> Callable[[], float]:
    """Seconds of one plan for `requests` slots under `rejection`, the mean of a loop on the device."""
    policy, rng = Policy("rejection", Strategy(strategy)), np.random.default_rng(0)
    rows_J = np.asarray(policy.buckets(requests, drafts), np.int32)
    cost = RoundCost(rows_J, (1 + rows_J / (8 * requests)).astype(np.float32), np.float32(0.1))
    logits_RxK = jnp.asarray(rng.normal(1.5, 1.5, (requests, drafts)), jnp.float32)
    one = SlotSchedule.of(np.ones(drafts))
    schedule = jax.tree.map(lambda a: jnp.repeat(jnp.asarray(a)[None], requests, axis=0), one)
    run = jax.jit(functools.partial(_plans, policy))
    return lambda: seconds(lambda: run(logits_RxK, schedule, cost)) / LOOPS


def _plans(policy: Policy, logits_RxK: jax.Array, schedule: SlotSchedule, cost: RoundCost) -> jax.Array:
    """Drafts that LOOPS plans admit; confidences move a little, so that no plan can be lifted out of the loop."""
    active_R, nothing = jnp.ones(len(logits_RxK), bool), jnp.zeros_like(logits_RxK)

    def body(i: jax.Array, carry: tuple[jax.Array, SlotSchedule]) -> tuple[jax.Array, SlotSchedule]:
        drafts, schedule = carry
        proposal = Proposal(nothing.astype(jnp.int32), nothing, (), logits_RxK + 0.01 * i)
        planned = plan(policy, schedule, proposal, active_R, active_R, cost)
        return drafts + jnp.sum(planned.length_R) + planned.bucket, planned.schedule

    return jax.lax.fori_loop(0, LOOPS, body, (jnp.int32(0), schedule))[0]
