"""Clocks: times taken in turn, so that a busy machine slows both sides of a ratio, and how busy the machine was."""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Timing:
    """Repeated times of one call, in ms."""

    ms: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.ms)

    def entries(self, name: str) -> dict[str, float]:
        """Median and interquartile range under their names in the report."""
        low, high = np.percentile(self.ms, (25, 75))
        return {f"{name}_ms": self.median, f"{name}_iqr_ms": float(high - low)}


def seconds(call: Callable[[], Any]) -> float:
    """Seconds until the call's arrays are ready."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


class Clock:
    """Times calls in turn, and counts the programs compiled meanwhile: there should be none.

    `compiled_programs`: how many there are by now.
    """

    def __init__(self, repeats: int, compiled_programs: Callable[[], int]):
        self.repeats, self.compilations, self._programs = repeats, 0, compiled_programs

    def in_turn(
        self, calls: Mapping[str, Callable[[], float]], repeats: int = 0, settle: bool = True
    ) -> dict[str, Timing]:
        """Timings of calls that return their own seconds; the first call of each is a warm-up.

        `settle`: every timed call follows an untimed one of the same kind, by when the threads of the side before,
        which spin for a while, have gone to sleep.
        """
        for call in calls.values():
            call()
        programs, times = self._programs(), {name: [] for name in calls}
        for _ in range(repeats or self.repeats):
            for name, call in calls.items():
                if settle:
                    call()
                times[name].append(call() * 1e3)
        self.compilations += self._programs() - programs
        return {name: Timing(ms) for name, ms in times.items()}


class CpuUse:
    """How much of the machine's CPUs other processes use, from its making on."""

    def __init__(self):
        self._start = self._now()

    def others_percent(self, also_ours: float = 0.0) -> float | None:
        """Percent of all CPUs; None where the system does not tell. `also_ours`: CPU seconds of processes of ours."""
        if self._start is None:
            return None
        busy, own, wall = (now - then for now, then in zip(self._now(), self._start, strict=True))
        return 100 * max(busy - own - also_ours, 0.0) / (wall * os.cpu_count())

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds of CPU used by everyone and by this process, and of time."""
        if not os.path.exists("/proc/stat"):
            return None
        with open("/proc/stat") as file:
            ticks = [int(field) for field in file.readline().split()[1:9]]  # the rest is counted in the first two
        busy = sum(ticks) - ticks[3] - ticks[4]  # without idle and waiting for disks
        return busy / os.sysconf("SC_CLK_TCK"), time.process_time(), time.monotonic()
