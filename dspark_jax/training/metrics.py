"""Where training metrics go: JSONL, TensorBoard, and the text of the progress bar."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import tensorboardX


class MetricLog:
    """Sums the ratio metrics over a logging window, then writes numerators over denominators."""

    def __init__(self, workdir: str | Path):
        folder = Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._board = tensorboardX.SummaryWriter(str(folder / "tensorboard"))
        self._window: list[dict[str, Any]] = []

    def add(self, metrics: dict[str, Any]) -> None:
        """Takes one step's metrics; device arrays are left where they are until the window is written."""
        self._window.append(metrics)

    def write(self, step: int, learning_rate: float, seconds: float) -> dict[str, Any]:
        """Writes the window as one row and returns it."""
        window = [{k: v for k, v in m.items()} for m in self._window]
        sums: dict[str, list[np.ndarray]] = {}
        for m in window:
            for name, (num, den) in m["sums"].items():
                total = sums.setdefault(name, [np.zeros_like(num), np.zeros_like(den)])
                total[0], total[1] = total[0] + np.asarray(num), total[1] + np.asarray(den)
        row = {
            "step": step, "loss": float(np.mean([m["loss"] for m in window])),
            "grad_norm": float(window[-1]["grad_norm"]), "learning_rate": learning_rate,
            "blocks_per_second": float(sum(int(m["blocks"]) for m in window) / max(seconds, 1e-9)),
        }  # fmt: skip
        for name, (num, den) in sums.items():
            ratio = np.divide(num, den, out=np.zeros_like(num, dtype=np.float64), where=den > 0)
            row[name] = ratio.tolist()
        self._window = []
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for name, value in row.items():
            for k, one in enumerate(value) if isinstance(value, list) else [(None, value)]:
                self._board.add_scalar(f"train/{name}" + ("" if k is None else f"@{k}"), one, step)
        return row

    def close(self) -> None:
        self._file.close()
        self._board.close()


def summary(row: dict[str, Any]) -> str:
    """The progress bar's text: loss, expected tokens per round, acceptance at each slot."""
    rates = " ".join(f"{rate:.2f}" for rate in row["accept_rate"])
    return f"loss {row['loss']:.3f}  tokens/round {row['tau_probabilistic']:.2f}  accept [{rates}]"
