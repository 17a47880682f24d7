"""Strategies over loads: what `bench --sweep` measured or `bench --simulate` computed, as a table and in words."""

import dataclasses
import statistics
from collections.abc import Sequence

import numpy as np
import rich.console
import rich.table

LOADS = (1, 2, 4, 8, 16, 32, 64)  # concurrent requests
NEAR = 0.97  # of the best constant length is near enough


@dataclasses.dataclass(frozen=True)
class Point:
    """What a strategy brought at a load."""

    strategy: str
    load: int  # concurrent requests
    speeds: list[float]  # tokens per second of all requests, an entry a turn
    tokens_per_round: float  # of a request, the bonus included
    budget: float  # drafts verified per request and round
    parked: float  # share of rounds without drafting
    rounds: int  # of single requests, all turns together

    @property
    def tokens_per_second(self) -> float:
        return statistics.median(self.speeds)

    @property
    def per_user(self) -> float:
        """Tokens per second of one request."""
        return self.tokens_per_second / self.load


def print_points(points: Sequence[Point], title: str) -> None:
    """A line for every load and strategy; speeds are medians ± half the interquartile range."""
    table = rich.table.Table(title=title, title_justify="left")
    for name in ("load", "strategy", "tokens/s", "per user", "tokens/round", "budget", "parked %"):
        table.add_column(name, justify="left" if name == "strategy" else "right", no_wrap=True)
    for i, p in enumerate(points):
        low, high = np.percentile(p.speeds, (25, 75))
        spread = f" ±{(high - low) / 2:.1f}" if len(p.speeds) > 1 else ""
        first, last = (not 0 <= j < len(points) or points[j].load != p.load for j in (i - 1, i + 1))
        table.add_row(
            str(p.load) if first else "", p.strategy, f"{p.tokens_per_second:.1f}{spread}", f"{p.per_user:.1f}",
            f"{p.tokens_per_round:.2f}", f"{p.budget:.2f}", f"{100 * p.parked:.0f}", end_section=last,
        )  # fmt: skip
    rich.console.Console().print(table)


def verdicts(points: Sequence[Point]) -> list[str]:
    """How the load-aware strategies stand against every constant length, "off" among them, load by load and in sum."""
    at = {(p.strategy, p.load): p for p in points}
    loads = sorted({p.load for p in points})
    constant = [s for s in dict.fromkeys(p.strategy for p in points) if s == "off" or s.startswith("fixed:")]
    aware = [s for s in dict.fromkeys(p.strategy for p in points) if s.startswith("load_aware")] if constant else []
    return [line for s in aware for line in (*_load_by_load(at, s, constant, loads), _in_sum(at, s, constant, loads))]


def _load_by_load(at: dict, strategy: str, constant: list[str], loads: list[int]) -> list[str]:
    lines, beaten = [], set()
    for load in loads:
        best = max(constant, key=lambda s: at[s, load].tokens_per_second)
        ratio = _ratio(at[strategy, load], at[best, load])
        beaten |= {s for s in constant if _ratio(at[strategy, load], at[s, load]) > 1}
        verdict = "within 3 %" if ratio >= NEAR else "NOT within 3 %"
        lines.append(f"load {load}: {strategy} has {ratio:.2f} x the best constant length's speed ({best}): {verdict}")
    never = [s for s in constant if s not in beaten]
    but = f", but {', '.join(never)}" if never else ""
    return [*lines, f"{strategy} is somewhere faster than each constant length{but}"]


def _in_sum(at: dict, strategy: str, constant: list[str], loads: list[int]) -> str:
    total = {s: sum(at[s, load].tokens_per_second for load in loads) for s in (strategy, *constant)}
    best = max(constant, key=total.__getitem__)
    verdict = "ahead of every constant length" if total[strategy] > total[best] else f"NOT ahead of {best}"
    return f"sum over loads: {strategy} {total[strategy]:.0f} tokens/s, {best} {total[best]:.0f}: {verdict}"


def _ratio(one: Point, other: Point) -> float:
    """Of speeds, turn by turn: strategies take turns, so that a busy machine slows both."""
    return statistics.median(a / b for a, b in zip(one.speeds, other.speeds, strict=True))
