"""Where training metrics go: JSONL, TensorBoard, and the text of the progress bar."""

import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorboardX

from dspark_jax.data.jsonl import parse_object, read_lines
from dspark_jax.errors import full_disk_named


def means(window: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What steps or batches measured together: numerators over denominators, and the loss by blocks."""
    sums: dict[str, list[np.ndarray]] = {}
    for m in window:
        for name, (num, den) in m["sums"].items():
            total = sums.setdefault(name, [np.zeros_like(num), np.zeros_like(den)])
            total[0], total[1] = total[0] + np.asarray(num), total[1] + np.asarray(den)
    blocks = np.array([int(m["blocks"]) for m in window])
    row = {"loss": float(np.average([m["loss"] for m in window], weights=blocks if blocks.any() else None))}
    for name, (num, den) in sums.items():
        row[name] = np.divide(num, den, out=np.zeros_like(num, dtype=np.float64), where=den > 0).tolist()
    return row


class MetricLog:
    """Rows of metrics, in WORKDIR/metrics.jsonl and for TensorBoard: of training, a logging window at a time, and of
    validation. `step`: the one that the run goes on from; rows of later ones, which it will write again, are dropped.
    Of several processes the first writes.
    """

    def __init__(self, workdir: str | Path, step: int = 0):
        folder = Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        self._writes = jax.process_index() == 0
        with self._full_disk_named():
            rows = _rows_up_to(self._path, step, self._writes)
            if self._writes:
                self._file = self._path.open("a", encoding="utf-8")
                self._board = tensorboardX.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        self.validated = {row["step"] for row in rows if "validation" in row}
        self._window: list[dict[str, Any]] = []

    def _full_disk_named(self) -> AbstractContextManager[None]:
        return full_disk_named(self._path, "the checkpoints before stay, and the same command goes on from the last")

    def add(self, metrics: dict[str, Any]) -> None:
        """Takes one step's metrics; device arrays are left where they are until the window is written."""
        self._window.append(metrics)

    def write(self, step: int, learning_rate: float, seconds: float) -> dict[str, Any]:
        """Writes the window as one row and returns it."""
        window, self._window = self._window, []
        row = {
            "step": step, **means(window), "loss": float(np.mean([m["loss"] for m in window])),
            "grad_norm": float(window[-1]["grad_norm"]), "learning_rate": learning_rate,
            "blocks_per_second": float(sum(int(m["blocks"]) for m in window) / max(seconds, 1e-9)),
        }  # fmt: skip
        self._write(step, row, "train", row)
        return row

    def write_validation(self, step: int, row: dict[str, Any]) -> None:
        """Writes what was measured on rows held out after a step."""
        self._write(step, {"step": step, "validation": row}, "validation", row)
        self.validated.add(step)

    def _write(self, step: int, line: dict[str, Any], board: str, row: dict[str, Any]) -> None:
        if not self._writes:
            return
        with self._full_disk_named():
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            for name, value in row.items():
                for k, one in enumerate(value) if isinstance(value, list) else [(None, value)]:
                    self._board.add_scalar(f"{board}/{name}" + ("" if k is None else f"@{k}"), one, step)

    def close(self) -> None:
        if not self._writes:
            return
        with self._full_disk_named():
            self._file.close()
            self._board.close()


def _rows_up_to(path: Path, step: int, cut: bool) -> list[dict[str, Any]]:
    """The rows of a metrics file up to a step. `cut`: others are taken out of it, a line that was torn too."""
    rows, lines = [], list(read_lines(path)) if path.is_file() else []
    for _, line in lines:
        try:
            row = parse_object(line)
        except ValueError:
            continue
        if row["step"] <= step:
            rows.append(row)
    if cut and len(rows) < len(lines):
        fresh = path.with_name(path.name + ".tmp")
        fresh.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        os.replace(fresh, path)
    return rows


def summary(row: dict[str, Any]) -> str:
    """The progress bar's text: loss, expected tokens per round, acceptance at each slot."""
    rates = " ".join(f"{rate:.2f}" for rate in row["accept_rate"])
    return f"loss {row['loss']:.3f}  tokens/round {row['tau_probabilistic']:.2f}  accept [{rates}]"
