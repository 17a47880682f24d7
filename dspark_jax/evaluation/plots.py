"""Pictures of measurements, as PNG."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display

from matplotlib import pyplot  # noqa: E402

from dspark_jax.evaluation.load_report import Point  # noqa: E402
from dspark_jax.scheduling.calibration import Reliability  # noqa: E402


def reliability_diagrams(
    path: str | Path, title: str, before: Sequence[Reliability], after: Sequence[Reliability] | None
) -> None:
    """Predicted against seen survival of every position, with the head's confidences and, if given, fitted ones."""
    count = max(len(before), 1)
    columns = min(count, 4)
    rows = -(-count // columns)
    size = (2.6 * columns, 2.7 * rows + 0.3)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, sharex=True, sharey=True, squeeze=False)
    curves = {"head": (before, "o--")} | ({"calibrated": (after, "o-")} if after else {})
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    for k, axis in enumerate(axes.flat[: len(before)]):
        axis.plot([0, 1], [0, 1], color="0.8", linewidth=1)
        for name, (positions, style) in curves.items():
            part = positions[k]
            predicted, seen = [b.mean_survival for b in part.bins], [b.accepted for b in part.bins]
            axis.plot(predicted, seen, style, markersize=3, linewidth=1, label=f"{name}, ECE {part.ece:.3f}")
        axis.set_title(f"draft {k + 1}", fontsize=9)
        axis.set(xlim=(0, 1), ylim=(0, 1))
        axis.legend(fontsize=6, loc="upper left")
    figure.suptitle(title)
    figure.supxlabel("predicted survival", fontsize=9)
    figure.supylabel("share accepted", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def load_pictures(path: Path, title: str, points: Sequence[Point]) -> list[Path]:
    """The paper's two pictures, beside `path`: throughput against speed per user, and budget per request against load.

    A line is a strategy, a dot on it a load. Returns the files.
    """
    files = [path.with_suffix(f".{name}.png") for name in ("speed", "budget")]
    speed, budget = (pyplot.subplots(figsize=(6, 4.5)) for _ in files)
    for strategy, line in _lines(points).items():
        style = "o-" if strategy.startswith("load_aware") else "o--"
        options = {"markersize": 4, "linewidth": 1.8 if style == "o-" else 1, "label": strategy}
        speed[1].plot([p.per_user for p in line], [p.tokens_per_second for p in line], style, **options)
        budget[1].plot([p.load for p in line], [p.budget for p in line], style, **options)
    speed[1].set(xlabel="speed per user, tokens/s", ylabel="throughput, tokens/s", xscale="log", yscale="log")
    budget[1].set(xlabel="concurrent requests", ylabel="drafts verified per request and round", xscale="log")
    loads = sorted({p.load for p in points})
    budget[1].set_xticks(loads, labels=loads)
    budget[1].minorticks_off()
    for file, (figure, axis) in zip(files, (speed, budget), strict=True):
        axis.set_title(textwrap.fill(title, 80), fontsize=8)
        axis.legend(fontsize=7)
        figure.tight_layout()
        figure.savefig(file, dpi=120)
        pyplot.close(figure)
    return files


def _lines(points: Sequence[Point]) -> dict[str, list[Point]]:
    """The points of every strategy by load."""
    strategies = dict.fromkeys(p.strategy for p in points)
    return {s: sorted((p for p in points if p.strategy == s), key=lambda p: p.load) for s in strategies}
