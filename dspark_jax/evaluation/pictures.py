"""The pictures of an evaluation, as PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dspark_jax.errors import UserError
from dspark_jax.evaluation.load_report import Point
from dspark_jax.evaluation.plots import load_pictures, pyplot, reliability_diagrams
from dspark_jax.evaluation.report import describe_device
from dspark_jax.evaluation.summary import Scored, pooled
from dspark_jax.evaluation.tables import TITLES
from dspark_jax.scheduling.json_files import read_json

_COLORS = {"maths": "#3366b8", "code": "#c2571a", "chat": "#3d8b4f"}
_SHADES = ("#3366b8", "#c2571a", "#3d8b4f", "#8a4fb0")  # of temperatures


class Picture(NamedTuple):
    """A file, and what is seen in it."""

    path: Path
    caption: str


def draw(report: Mapping[str, Any], scored: Sequence[Scored], folder: Path) -> list[Picture]:
    """All pictures of a report, into `folder`. `scored`: the rounds that the report was made from."""
    folder.mkdir(parents=True, exist_ok=True)
    made = [_tokens_per_round(report, folder), _acceptance(report, folder)]
    if report["run"]["has_confidence"]:
        made.append(_thresholds(report, folder))
        made += [_reliability(report, scored, folder, temperature) for temperature in report["temperatures"]]
    return made


def draw_loads(path: Path, folder: Path) -> list[Picture]:
    """Pareto front, and budget against load, from the JSON of `bench --sweep` or `bench --simulate`."""
    title, points = read_sweep(path)
    speed, budget = load_pictures(folder / "loads", title, points)
    return [
        Picture(speed, "Pareto front: throughput of all requests against speed of one. A dot is a load, a line a "
                "strategy; further to the upper right is better."),
        Picture(budget, "Budget against load: drafts that are verified per request and round."),
    ]  # fmt: skip


def read_sweep(path: Path) -> tuple[str, list[Point]]:
    """Title and points of a sweep. UserError on a file of another kind."""
    found = read_json(path, "sweep", "give a file that `bench --sweep` or `bench --simulate` wrote")
    try:
        if "loads" in found:
            run = found["run"]
            title = f"{run['target']} on {describe_device(run)}"
            return title, [Point(**row) for load in sorted(found["loads"], key=int) for row in found["loads"][load]]
        stamp = found["stamp"]
        title = f"simulated: {stamp['model']} on {stamp['devices']} x {stamp['device']}, {stamp['source']} costs"
        return title, [Point(**row) for row in found["points"]]
    except (KeyError, TypeError, ValueError):
        raise UserError(f"'{path}' is no sweep: give a file that `bench --sweep` or `bench --simulate` wrote") from None


def _tokens_per_round(report: Mapping[str, Any], folder: Path) -> Picture:
    """Bars by set, a shade per temperature."""
    parts = report["temperatures"]
    names = [name for name in TITLES if any(name in part["sets"] for part in parts.values())]
    labels = [*(TITLES[name] for name in names), "macro-average"]
    figure, axis = pyplot.subplots(figsize=(8, 3.6))
    width = 0.8 / len(parts)
    for i, (temperature, part) in enumerate(parts.items()):
        metrics = [*(part["sets"][name]["metrics"] if name in part["sets"] else {} for name in names), part["macro"]]
        heights = [m.get("tokens_per_round", 0.0) for m in metrics]
        places = [x + (i - (len(parts) - 1) / 2) * width for x in range(len(labels))]
        bars = axis.bar(places, heights, width, color=_SHADES[i % len(_SHADES)], label=f"temperature {temperature}")
        axis.bar_label(bars, fmt="%.2f", fontsize=6.5, padding=1)
    axis.axhline(1, color="0.5", linewidth=1, linestyle=":")
    axis.set_xticks(range(len(labels)), labels, rotation=25, ha="right", fontsize=8)
    axis.set_ylabel("tokens per round")
    axis.margins(y=0.12)
    axis.legend(fontsize=8, frameon=False, ncols=len(parts), loc="lower right", bbox_to_anchor=(1, 1))
    caption = "Tokens per round, the bonus included. Plain decoding stands at 1, the dotted line."
    return _save(figure, folder / "tokens_per_round.png", caption)


def _acceptance(report: Mapping[str, Any], folder: Path) -> Picture:
    """A panel per temperature, a line per domain."""
    parts = report["temperatures"]
    figure, axes = pyplot.subplots(1, len(parts), figsize=(4.2 * len(parts), 3.4), sharey=True, squeeze=False)
    for axis, (temperature, part) in zip(axes[0], parts.items(), strict=True):
        for domain, metrics in part["domains"].items():
            values = metrics["conditional_acceptance"]
            places = [k + 1 for k, value in enumerate(values) if value is not None]
            seen = [value for value in values if value is not None]
            axis.plot(places, seen, "o-", markersize=4, color=_COLORS[domain], label=domain)
        drafts = report["run"]["drafts"]
        axis.set(title=f"temperature {temperature}", xlabel="position in the block")
        axis.set(xlim=(0.7, drafts + 0.3), ylim=(-0.02, 1.02), xticks=range(1, drafts + 1))
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8, frameon=False)
    axes[0, 0].set_ylabel("conditional acceptance")
    caption = (
        "Acceptance by position and domain: of the drafts whose predecessors were all accepted, the share accepted; "
        "the mean over the domain's sets. Late positions are reached by few rounds, and scatter."
    )
    return _save(figure, folder / "acceptance.png", caption)


def _thresholds(report: Mapping[str, Any], folder: Path) -> Picture:
    """Tokens per round against drafts verified, and the verify rate over thresholds."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8.4, 3.4))
    for i, (temperature, part) in enumerate(report["temperatures"].items()):
        sweep, color = part["macro"]["sweep"], _SHADES[i % len(_SHADES)]
        rows = [row for row in zip(*sweep.values(), strict=True) if None not in row]
        if not rows:
            continue
        threshold, verified, tokens, rate = zip(*rows, strict=True)
        left.plot(verified, tokens, "o-", markersize=4, color=color, label=f"temperature {temperature}")
        right.plot(threshold, rate, "o-", markersize=4, color=color, label=f"temperature {temperature}")
        for at in (0, len(threshold) // 2, len(threshold) - 1) if not i else ():
            where = (verified[at], tokens[at])
            left.annotate(f"{threshold[at]:g}", where, fontsize=7, xytext=(2, -10), textcoords="offset points")
    left.set(xlabel="drafts verified per round", ylabel="tokens per round")
    right.set(xlabel="threshold", ylabel="verify rate", ylim=(0, 1.02))
    for axis in (left, right):
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8, frameon=False)
    caption = (
        "Confidence thresholds, macro-average. Left: what a round brings against what it verifies; small numbers are "
        "thresholds. Right: the share of verified rows that became tokens."
    )
    return _save(figure, folder / "thresholds.png", caption)


def _reliability(report: Mapping[str, Any], scored: Sequence[Scored], folder: Path, temperature: str) -> Picture:
    """Of all sets' rounds together."""
    sets = [s for s in scored if f"{s.temperature:g}" == temperature]
    before, after = pooled(sets)
    path, fitted = folder / f"reliability.t{temperature}.png", (sets[0].temperature_K != 1).any()
    reliability_diagrams(path, f"temperature {temperature}", before, after if fitted else None)
    caption = (
        f"Reliability at temperature {temperature}, by position, over the rounds of all sets: predicted survival "
        "against the share accepted. On the diagonal, predictions are right; below it, the head is over-confident."
    )
    return Picture(path, caption)


def _save(figure: Any, path: Path, caption: str) -> Picture:
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
    return Picture(path, caption)
