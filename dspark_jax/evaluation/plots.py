"""Pictures of measurements, as PNG."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display

from matplotlib import pyplot  # noqa: E402

from dspark_jax.scheduling.calibration import Reliability  # noqa: E402


def reliability_diagrams(
    path: str | Path, title: str, before: Sequence[Reliability], after: Sequence[Reliability]
) -> None:
    """Predicted against seen survival of every position, with the head's own confidences and with fitted ones."""
    count = max(len(before), 1)
    figure, axes = pyplot.subplots(1, count, figsize=(2.6 * count, 3), sharey=True, squeeze=False)
    for k, (axis, old, new) in enumerate(zip(axes[0], before, after, strict=True)):
        axis.plot([0, 1], [0, 1], color="0.8", linewidth=1)
        for name, part, style in (("head", old, "o--"), ("calibrated", new, "o-")):
            predicted, seen = [b.mean_survival for b in part.bins], [b.accepted for b in part.bins]
            axis.plot(predicted, seen, style, markersize=3, linewidth=1, label=f"{name}, ECE {part.ece:.3f}")
        axis.set(title=f"draft {k + 1}", xlabel="predicted survival", xlim=(0, 1), ylim=(0, 1))
        axis.legend(fontsize=6, loc="upper left")
    axes[0, 0].set_ylabel("share accepted")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
