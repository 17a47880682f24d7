"""Reports: a dictionary for JSON, a table for people, and the stamp that says on what it was measured."""

import dataclasses
import importlib.metadata
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import rich.console
import rich.table

from dspark_jax.decoding.requests import Completion
from dspark_jax.evaluation.metrics import round_stats


def environment() -> dict[str, Any]:
    """The device and the versions that a number depends on."""
    device = jax.devices()[0]
    kind = _cpu_name() if device.platform == "cpu" else device.device_kind
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")}
    machine = {"device": kind, "platform": device.platform, "devices": jax.device_count(), "cores": os.cpu_count()}
    return {**machine, **versions}


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "cpu"


def describe_device(stamp: dict[str, Any]) -> str:
    """One line for the head of a table."""
    where = f"{stamp['cores']} cores" if stamp["platform"] == "cpu" else f"{stamp['devices']} devices"
    return f"{stamp['device']} ({stamp['platform']}, {where}), jax {stamp['jax']}"


def generation_report(completions: Sequence[Completion], seconds: float) -> dict[str, Any]:
    """Speed, round statistics and finish reasons of a batch of completions."""
    stats = dataclasses.asdict(round_stats(completions))
    reasons = [c.finish_reason for c in completions]
    return {
        **stats,
        "seconds": seconds,
        "tokens_per_second": stats["tokens"] / seconds if seconds > 0 else 0.0,
        **_latency(completions),
        "finish_reasons": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
    }


def _latency(completions: Sequence[Completion]) -> dict[str, float]:
    """Medians over requests: seconds until the first token (the queue included), and speed from there on.

    Tokens of one dispatch arrive together, so the speed counts what came after the first dispatch's arrival.
    """
    answered = [c for c in completions if c.first_token_seconds is not None]
    if not answered:
        return {}
    spans = [(len(c.token_ids), c.seconds - c.first_token_seconds) for c in answered if c.seconds is not None]
    speeds = [tokens / span for tokens, span in spans if span > 0]
    first = {"seconds_to_first_token": statistics.median(c.first_token_seconds for c in answered)}
    return first | ({"tokens_per_second_per_user": statistics.median(speeds)} if speeds else {})


def print_report(report: dict[str, Any], title: str, console: rich.console.Console | None = None) -> None:
    """The report as a two-column table."""
    table = rich.table.Table(title=title, show_header=False)
    for name, value in report.items():
        if isinstance(value, list):
            value = " ".join(f"{v:.2f}" for v in value) or "-"
        elif isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items())
        table.add_row(name.replace("_", " "), f"{value:.2f}" if isinstance(value, float) else str(value))
    (console or rich.console.Console()).print(table)
