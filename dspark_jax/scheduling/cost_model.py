"""What a round costs on a device mesh: measured times, kept in a file that knows where they hold.

Times are in seconds. Buckets are the sizes that programs are compiled for: verified rows, slots, tokens of context.
"""

import bisect
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.errors import UserError
from dspark_jax.progress import Progress
from dspark_jax.scheduling.json_files import read_json, write_json
from dspark_jax.scheduling.scheduler import RoundCost, row_buckets

_MEND = "measure anew with `python -m dspark_jax profile`"
_FILE = "cost table"
_SIZES = {"target": ("rows", "slots", "context"), "draft": ("slots", "context")}


@dataclasses.dataclass(frozen=True)
class Stamp:
    """Where a table holds. `source` is "measured" or "computed" (from compiled costs, for a machine not at hand)."""

    device: str  # kind, as "TPU v5e"
    devices: int
    mesh: str  # axes and sizes, as "data=1,model=8"
    model: str  # a name for people
    fingerprint: str  # of the model's configuration and weights
    drafter: str  # fingerprint of the drafter
    dtype: str
    jax: str
    source: str = "measured"


@dataclasses.dataclass(frozen=True)
class Time:
    """Median seconds of repeated runs, and their interquartile range."""

    seconds: float
    spread: float = 0.0


@dataclasses.dataclass(frozen=True)
class CostTable:
    """Times of the target's step and of everything that a drafted round adds to it: drafting and scheduling."""

    stamp: Stamp
    target: Mapping[tuple[int, int, int], Time]  # by rows, slots, context
    draft: Mapping[tuple[int, int], Time]  # by slots, context

    def curve(self, slots: int, context: int, block: int = 0) -> RoundCost:
        """Costs of a round of the smallest measured buckets that hold `slots` and `context` tokens per slot.

        More rows never cost less: each time is the greatest up to it, and is otherwise as measured. `block`: drafts of
        a slot at most; 0: as many as were measured. UserError if the table ends before these sizes.
        """
        slots = _bucket("slots", slots, {s for s, _ in self.draft})
        context = _bucket("context", context, {c for _, c in self.draft})
        times = sorted((r, time.seconds) for (r, s, c), time in self.target.items() if (s, c) == (slots, context))
        rows_J, seconds_J = (np.array(column) for column in zip(*times, strict=True))
        if block:
            most = slots * (block + 1)
            buckets = bisect.bisect_left(rows_J, _bucket("rows of a round", most, rows_J)) + 1
            rows_J, seconds_J = np.minimum(rows_J[:buckets], most), seconds_J[:buckets]
        overhead = np.float32(self.draft[slots, context].seconds)
        return RoundCost(rows_J.astype(np.int32), np.maximum.accumulate(seconds_J).astype(np.float32), overhead)


def _bucket(what: str, size: int, buckets: Iterable[int]) -> int:
    buckets = sorted(buckets)
    if size > buckets[-1]:
        raise UserError(f"the {_FILE} ends at {buckets[-1]} {what}, {size} are needed: {_MEND} for larger sizes")
    return next(b for b in buckets if b >= size)


# ---------------------------------------------------------------------------------------------------- measuring


LEAST = 1e-9  # seconds, of a difference: noise can make the lesser of two rounds the longer one
FEWEST, ENOUGH = 3, 0.25  # passes that a size gets at least, and the seconds of rounds after which they will do


def profile(
    stamp: Stamp,
    slots: Sequence[int],
    contexts: Sequence[int],
    block: int,
    measure: Callable[[int, int, int], float],
    passes: int,
) -> CostTable:
    """The table of all buckets, with a progress bar. `slots`, `contexts`: their buckets; `block`: the drafter's tokens.

    `measure(rows, slots, context)` returns the seconds of a round with drafting that verifies `rows` rows, and of one
    without drafting for 0 rows. Sizes take turns, `passes` times: a machine's slow minute then hits all of them and
    makes no step of the staircase. Drafting and scheduling are what the fewest rows cost more than a plain round; a
    step's time is what is left when that is taken away.
    """
    pairs = [(s, c) for s in slots for c in contexts]
    seen = {(rows, s, c): [] for s, c in pairs for rows in (0, *row_buckets(s, block))}
    with Progress("profiling rounds", passes * len(seen)) as progress:
        for _ in range(passes):
            for (rows, s, c), times in seen.items():
                if len(times) < FEWEST or sum(times) < ENOUGH:
                    times.append(measure(rows, s, c))
                progress.advance(1, f"{rows} rows, {s} slots, context {c}")
    target, draft = {}, {}
    for s, c in pairs:
        plain, fewest, *more = (seen[rows, s, c] for rows in (0, *row_buckets(s, block)))
        target[s, s, c], draft[s, c] = summary(plain), summary(fewest, statistics.median(plain))
        for rows, times in zip(row_buckets(s, block)[1:], more, strict=True):
            target[rows, s, c] = summary(times, draft[s, c].seconds)
    table = CostTable(stamp, target, draft)
    _check_times(table, "the measurement")
    return table


def summary(seconds: Sequence[float], less: float = 0.0) -> Time:
    """Median and interquartile range of repeated runs, `less` taken away from each."""
    low, high = np.percentile(seconds, (25, 75))
    middle = statistics.median(seconds)
    return Time(max(middle - less, LEAST) if less else middle, float(high - low))


# ---------------------------------------------------------------------------------------------------- files


def save_table(path: str | Path, table: CostTable) -> None:
    """Writes JSON; never half of it."""
    times = {
        part: [
            dict(zip(names, key, strict=True)) | dataclasses.asdict(time)
            for key, time in sorted(getattr(table, part).items())
        ]
        for part, names in _SIZES.items()
    }
    write_json(path, {"stamp": dataclasses.asdict(table.stamp), **times})


def load_table(path: str | Path, expected: Stamp | None = None) -> CostTable:
    """The table in a file. `expected`: the stamp of what it shall serve; None for simulation, which takes any.

    UserError on a file that is missing, truncated or incomplete, on a time that is not positive, and on a table of
    another device, mesh, model, drafter, dtype or version of jax.
    """
    value = read_json(path, _FILE, _MEND)
    try:
        stamp = Stamp(**value["stamp"])
        parts = {part: _read_times(value[part], names) for part, names in _SIZES.items()}
    except KeyError as error:
        raise UserError(f"{_FILE} '{path}' lacks {error}: {_MEND}") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"{_FILE} '{path}' is malformed ({error}): {_MEND}") from None
    table = CostTable(stamp, **parts)
    _check_times(table, f"{_FILE} '{path}'")
    _check_sizes(table, path)
    if expected:
        _check_stamp(stamp, expected, path)
    return table


def _read_times(rows: list[dict[str, Any]], names: tuple[str, ...]) -> dict[tuple[int, ...], Time]:
    return {tuple(int(row[name]) for name in names): Time(float(row["seconds"]), float(row["spread"])) for row in rows}


def _check_times(table: CostTable, where: str) -> None:
    for part, names in _SIZES.items():
        for key, time in getattr(table, part).items():
            if not (0 < time.seconds < math.inf):
                sizes = ", ".join(f"{name} {size}" for name, size in zip(names, key, strict=True))
                raise UserError(f"{where}: the {part} time at {sizes} is {time.seconds}, not positive: {_MEND}")


def _check_sizes(table: CostTable, path: str | Path) -> None:
    """Every number of slots at every context, with a draft time and a target step that holds the anchors."""
    slots, contexts = ({key[i] for key in table.draft} for i in (0, 1))
    most = {}
    for rows, s, c in table.target:
        most[s, c] = max(rows, most.get((s, c), 0))
    for s, c in [(s, c) for s in sorted(slots) for c in sorted(contexts)] or [(1, 1)]:
        if (s, c) not in table.draft or most.get((s, c), 0) < s:
            raise UserError(f"{_FILE} '{path}' is incomplete at {s} slots and context {c}: {_MEND}")


def _check_stamp(stamp: Stamp, expected: Stamp, path: str | Path) -> None:
    here = dataclasses.asdict(expected)
    for name, value in dataclasses.asdict(stamp).items():
        # The name is for people; the fingerprint decides.
        if name != "model" and value != here[name]:
            what = f"model ({stamp.model}) of fingerprint" if name == "fingerprint" else name
            raise UserError(f"{_FILE} '{path}' is of {what} {value!r}, here it is {here[name]!r}: {_MEND}")


# ---------------------------------------------------------------------------------------------------- drift

DRIFT_DECAY = 0.98  # the mean looks back over about 50 rounds
DRIFT_LIMIT = 1.25  # slower or faster by this factor is another machine
HICCUP = 2.0  # one ratio counts at most this much: a pause of the host is no drift


@dataclasses.dataclass(frozen=True)
class Drift:
    """How far rounds have moved from what the table says: an exponential mean of measured / predicted seconds."""

    ratio: float = 1.0


def after_round(drift: Drift, measured: float, predicted: float) -> Drift:
    """The state after a round that took `measured` seconds where the table said `predicted`."""
    ratio = min(max(measured / predicted, 1 / HICCUP), HICCUP)
    return Drift(DRIFT_DECAY * drift.ratio + (1 - DRIFT_DECAY) * ratio)


def is_stale(drift: Drift) -> bool:
    """Whether to measure again. Then start from a fresh `Drift()`."""
    return not 1 / DRIFT_LIMIT < drift.ratio < DRIFT_LIMIT
