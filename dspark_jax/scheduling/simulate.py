"""What a strategy would do on a machine that is not at hand: the scheduler against a cost table, with no model.

A trace holds blocks as they were drafted: the confidences, and how many drafts the target would accept if all were
verified. Times come from the table, so the answer is as good as the table and the trace are.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.errors import UserError
from dspark_jax.scheduling.calibration import Rounds
from dspark_jax.scheduling.cost_model import CostTable
from dspark_jax.scheduling.json_files import read_json, write_json
from dspark_jax.scheduling.parking import Parking, after_drafted, after_plain, should_draft
from dspark_jax.scheduling.scheduler import (
    BY_COST,
    RoundCost,
    Strategy,
    admit,
    bucket_of,
    drafts_of,
    global_budget,
    parse_strategy,
    plain_seconds,
    survival,
    synchronous_budget,
    threshold_lengths,
)

BLOCKS_PER_REQUEST = 32  # of a synthetic trace
_PARKS = ("load_aware", "load_aware_async")
_WHAT, _MEND = "trace", "record it anew with `python -m dspark_jax calibrate`"


@dataclasses.dataclass(frozen=True)
class Trace:
    """N drafted blocks of K tokens, those of a request one after another."""

    confidence_NxK: np.ndarray  # P(accepted | all before it were), as served
    accepted_N: np.ndarray  # leading drafts that the target accepts


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a strategy brought at a load, over all simulated rounds."""

    strategy: str
    load: int  # concurrent requests
    context: int  # tokens per request
    tokens_per_second: float
    tokens_per_second_per_request: float
    tokens_per_round: float  # of a request, the bonus included
    budget_per_request: float  # drafts verified per request and round
    parked: float  # share of rounds without drafting


# ---------------------------------------------------------------------------------------------------- traces


def synthetic_trace(acceptance: Sequence[float], blocks: int = 4096, seed: int = 0) -> Trace:
    """A drafter whose confidences are right. `acceptance`: typical P(accepted | all before it were), per position.

    Blocks of one request are alike: half of the logit's variance is the request's, half the block's own.
    """
    if not all(0 < a < 1 for a in acceptance):
        raise UserError(f"acceptance {list(acceptance)} must lie strictly between 0 and 1 at every position")
    rng, typical_K = np.random.default_rng(seed), np.asarray(acceptance)
    request_N = np.repeat(rng.standard_normal(-(-blocks // BLOCKS_PER_REQUEST)), BLOCKS_PER_REQUEST)[:blocks]
    logit_NxK = np.log(typical_K / (1 - typical_K)) + request_N[:, None] + rng.standard_normal((blocks, 1))
    confidence_NxK = 1 / (1 + np.exp(-logit_NxK))
    hit_NxK = rng.random(confidence_NxK.shape) < confidence_NxK
    return Trace(confidence_NxK.astype(np.float32), np.cumprod(hit_NxK, axis=1).sum(axis=1))


def recorded_trace(rounds: Rounds, temperature_K: np.ndarray | float = 1.0) -> Trace:
    """The rounds that verified the whole block, with confidences as they are served."""
    whole_N = rounds.verified_N == rounds.logit_NxK.shape[1]
    confidence_NxK = 1 / (1 + np.exp(-rounds.logit_NxK[whole_N] / temperature_K))
    return Trace(confidence_NxK.astype(np.float32), rounds.accepted_N[whole_N])


def save_trace(path: str | Path, trace: Trace) -> None:
    """Writes JSON; never half of it."""
    write_json(path, {"confidence": trace.confidence_NxK.tolist(), "accepted": trace.accepted_N.tolist()})


def load_trace(path: str | Path) -> Trace:
    """The trace in a file. UserError on one that is missing, truncated or malformed."""
    value = read_json(path, _WHAT, _MEND)
    try:
        trace = Trace(np.array(value["confidence"], np.float32), np.array(value["accepted"], np.int64))
    except KeyError as error:
        raise UserError(f"{_WHAT} '{path}' lacks {error}: {_MEND}") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"{_WHAT} '{path}' is malformed ({error}): {_MEND}") from None
    shape = trace.confidence_NxK.shape
    if len(shape) != 2 or trace.accepted_N.shape != shape[:1] or not trace.confidence_NxK.size:
        raise UserError(f"{_WHAT} '{path}' is malformed (a row of confidences per accepted count): {_MEND}")
    if not ((trace.confidence_NxK >= 0) & (trace.confidence_NxK <= 1)).all():
        raise UserError(f"{_WHAT} '{path}' holds a confidence outside 0 to 1: {_MEND}")
    return trace


# ---------------------------------------------------------------------------------------------------- simulation


def sweep(
    table: CostTable,
    trace: Trace,
    strategies: Sequence[str],
    loads: Sequence[int],
    context: int,
    rounds: int = 512,
    seed: int = 0,
    sampler: str = "rejection",
) -> list[Outcome]:
    """Every strategy at every load. All of a load see the same blocks."""
    return [simulate(table, trace, s, load, context, rounds, seed, sampler) for load in loads for s in strategies]


def simulate(
    table: CostTable,
    trace: Trace,
    strategy: str,
    load: int,
    context: int,
    rounds: int = 512,
    seed: int = 0,
    sampler: str = "rejection",
) -> Outcome:
    """`rounds` rounds of `load` requests that never end. Each slot reads the trace in order from a random block on.

    `sampler`: with "coupled", "load_aware" searches globally. UserError on a strategy that needs what no trace holds.
    """
    name, value = parse_strategy(strategy, trace.confidence_NxK.shape[1])
    if name in ("auto", "dcut"):
        raise UserError(f"strategy {strategy!r} cannot be simulated: choose off, fixed:k, threshold:θ or load_aware")
    block = drafts_of(Strategy(name, value), trace.confidence_NxK.shape[1])
    cost = table.curve(load, context, block if name in BY_COST else 0)
    start_R = np.random.default_rng(seed).integers(len(trace.accepted_N), size=load)
    block_NxR = (start_R + np.arange(rounds)[:, None]) % len(trace.accepted_N)
    length_NxR, bucket_N = _verified(name, value, sampler, trace.confidence_NxK[block_NxR][..., :block], cost)
    token_N = (np.minimum(trace.accepted_N[block_NxR], length_NxR) + 1).sum(axis=1)
    second_N = cost.seconds_J[np.asarray(bucket_N)] + cost.overhead
    plain = float(plain_seconds(load, cost))
    drafted_N = np.full(rounds, name != "off")
    if name in _PARKS:
        drafted_N = _drafted(token_N / load, second_N / plain)
    per_round = rounds * load
    tokens = np.where(drafted_N, token_N, load).sum()
    speed = float(tokens / np.where(drafted_N, second_N, plain).sum())
    budget = float(np.asarray(length_NxR)[drafted_N].sum() / per_round)
    parked = float(1 - drafted_N.mean())
    return Outcome(strategy, load, context, speed, speed / load, float(tokens / per_round), budget, parked)


def _drafted(token_N: np.ndarray, cost_N: np.ndarray) -> np.ndarray:
    """Which rounds draft, given what each would bring per slot and cost, both relative to a plain round's."""
    state, drafted_N = Parking(), np.zeros(len(token_N), bool)
    for n in range(len(token_N)):
        drafted_N[n] = should_draft(state)
        state = after_drafted(state, token_N[n], cost_N[n]) if drafted_N[n] else after_plain(state)
    return drafted_N


@functools.partial(jax.jit, static_argnames=("name", "sampler"))
def _verified(
    name: str, value: float, sampler: str, confidence_NxRxK: jax.Array, cost: RoundCost
) -> tuple[jax.Array, jax.Array]:
    """Lengths `[N, R]` and the bucket of each round `[N]`, as if every round drafted."""
    slots, block = confidence_NxRxK.shape[1:]
    active_R = jnp.ones(slots, bool)
    survival_NxRxK = jax.vmap(survival, (0, None))(confidence_NxRxK, active_R)
    if name in ("off", "fixed", "threshold"):
        most = {"off": 0, "fixed": value, "threshold": block}[name]
        least = value if name == "threshold" else 0.0
        length_NxR = jax.vmap(threshold_lengths, (0, None, None))(confidence_NxRxK, least, active_R)
        length_NxR = jnp.minimum(length_NxR, most).astype(jnp.int32)
        return length_NxR, bucket_of(slots + length_NxR.sum(axis=1), cost.rows_J)
    seen_NxRxK = survival_NxRxK
    if name == "load_aware_async":
        # Nothing is known in the first two rounds, so they hope for the best.
        seen_NxRxK = jnp.concatenate([jnp.ones_like(survival_NxRxK[:2]), survival_NxRxK[:-2]])
    find = synchronous_budget if name == "load_aware" and sampler == "rejection" else global_budget
    budget_N = jax.vmap(find, (0, None, None))(seen_NxRxK, slots, cost)
    return jax.vmap(admit)(survival_NxRxK, budget_N.rows - slots), budget_N.bucket
