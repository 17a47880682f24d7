"""What every strategy would bring on a machine that is not at hand: `bench --simulate=TABLE`, without any model."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from dspark_jax.errors import UserError
from dspark_jax.evaluation.load_report import Point
from dspark_jax.scheduling.cost_model import CostTable, load_table
from dspark_jax.scheduling.simulate import Trace, load_trace, sweep, synthetic_trace

ACCEPTANCE = 0.85  # of a synthetic trace: typical P(a draft is accepted | all before it were), at every position
ROUNDS = 512  # of every strategy and load


def simulation(
    table_path: str, trace_path: str | None, loads: Sequence[int], strategies: Sequence[str], acceptance: float
) -> dict[str, Any]:
    """The strategies over the loads, at the table's shortest context. Empty `loads`: the table's own.

    Without a trace, a synthetic one: blocks of one request are alike, and confidences are right. UserError on files
    that are missing or damaged, and on a trace whose blocks are not those of the table.
    """
    table = load_table(table_path)
    block, context = _block(table), min(c for _, c in table.draft)
    trace = load_trace(trace_path) if trace_path else synthetic_trace([acceptance] * block)
    if trace.confidence_NxK.shape[1] != block:
        drafted = trace.confidence_NxK.shape[1]
        raise UserError(f"trace '{trace_path}' has blocks of {drafted} drafts, the cost table is for {block}")
    loads = loads or sorted({s for s, _ in table.draft})
    strategies = strategies or default_strategies(block)
    outcomes = sweep(table, trace, strategies, sorted(loads), context, ROUNDS)
    points = [
        Point(
            o.strategy, o.load, [o.tokens_per_second], o.tokens_per_round, o.budget_per_request, o.parked,
            ROUNDS * o.load,
        )
        for o in outcomes
    ]  # fmt: skip
    return {
        "table": table_path, "stamp": dataclasses.asdict(table.stamp), "context": context,
        "trace": trace_path or f"synthetic, acceptance {acceptance:g}", "tokens_of_a_whole_block": _whole(trace),
        "points": [dataclasses.asdict(point) for point in points],
    }  # fmt: skip


def default_strategies(block: int) -> list[str]:
    """All that a trace suffices for."""
    return ["off", *(f"fixed:{k}" for k in range(1, block + 1)), "threshold:0.5", "load_aware", "load_aware_async"]


def _block(table: CostTable) -> int:
    """Drafts of a block, by the most rows that the table holds for one number of slots."""
    slots, context = min(table.draft)
    return max(r for r, s, c in table.target if (s, c) == (slots, context)) // slots - 1


def _whole(trace: Trace) -> float:
    return float(trace.accepted_N.mean()) + 1
