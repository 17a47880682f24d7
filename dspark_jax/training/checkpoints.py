"""Orbax checkpoints of a training run, and the check that a run is continued with the config it was started with."""

import json
import logging
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from dspark_jax.errors import UserError, full_disk_named, is_full
from dspark_jax.models.layers import Params
from dspark_jax.scheduling.json_files import write_json
from dspark_jax.training.step import TrainState

# Keys that may differ between the runs that write and continue a checkpoint.
_FREE = {
    "train.log_every", "train.checkpoint_every", "train.validate_every", "train.micro_steps", "train.blocks_at_once",
    "train.processes",
    "data.max_slots", "data.cache_dtype", "data.drafter", "data.servers",
}  # fmt: skip


def open_checkpoints(config: ConfigDict) -> ocp.CheckpointManager:
    """The run's checkpoint manager (the newest two are kept). UserError if the workdir belongs to another config."""
    folder = Path(config.workdir).absolute()
    stamp = folder / "config.json"
    mine = _flat(
        {name: config[name].to_dict() for name in ("target", "drafter", "data", "train")} | {"seed": config.seed}
    )
    if stamp.exists():
        before = json.loads(stamp.read_text(encoding="utf-8"))
        differs = [
            key for key in sorted(set(mine) | set(before)) if mine.get(key) != before.get(key) and key not in _FREE
        ]
        if differs:
            raise UserError(
                f"{folder} holds a run with another {', '.join(differs)}: set config.workdir to a new folder"
            )
    # Orbax's threads write pages of traces about what is then said in one line.
    logging.getLogger("absl").addFilter(_is_no_full_disk)
    with full_disk_named(stamp, "nothing was begun"):
        folder.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            write_json(stamp, dict(sorted(mine.items())))
        return ocp.CheckpointManager(folder / "checkpoints", options=ocp.CheckpointManagerOptions(max_to_keep=2))


def _is_no_full_disk(record: logging.LogRecord) -> bool:
    return not (record.exc_info and record.exc_info[1] and is_full(record.exc_info[1]))


def save(manager: ocp.CheckpointManager, state: TrainState, wait: bool = False) -> None:
    """Saves in the background (`wait`: before returning). A step that is already saved is left alone.

    UserError when the disk is full, as late as at the next save or `finish`.
    """
    step = int(state.step)
    with _full_disk_named(manager):
        if manager.latest_step() != step:
            manager.save(step, args=ocp.args.StandardSave(state))
    if wait:
        finish(manager)


def finish(manager: ocp.CheckpointManager) -> None:
    """Waits for what is being saved."""
    with _full_disk_named(manager):
        manager.wait_until_finished()


def _full_disk_named(manager: ocp.CheckpointManager) -> AbstractContextManager[None]:
    kept = "the checkpoints before stay, and the same command goes on from the last"
    return full_disk_named(manager.directory, kept)


def restore_latest(manager: ocp.CheckpointManager, state: TrainState) -> TrainState:
    """The newest checkpoint, or `state` as it is when there is none."""
    step = manager.latest_step()
    if step is None:
        return state
    return manager.restore(step, args=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, state)))


class BestWeights:
    """The weights that made the most tokens per round on rows held out, in WORKDIR/best beside the last checkpoints.

    `step` and `tau` (tokens per round) are theirs; step 0: there are none yet.
    """

    def __init__(self, workdir: str | Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=1)
        self._manager = ocp.CheckpointManager(Path(workdir).absolute() / "best", options=options)
        self.step, self.tau = self._manager.latest_step() or 0, 0.0
        if self.step:
            found = self._manager.restore(self.step, args=ocp.args.Composite(score=ocp.args.JsonRestore()))
            self.tau = found.score["tau_probabilistic"]

    def offer(self, step: int, tau: float, weights: Params) -> None:
        """Keeps weights that are better, on disk when this returns. Of equals the earlier stay."""
        if tau <= self.tau or step <= self.step:
            return
        score = ocp.args.JsonSave({"tau_probabilistic": tau})
        with _full_disk_named(self._manager):
            self._manager.save(step, args=ocp.args.Composite(weights=ocp.args.StandardSave(weights), score=score))
        finish(self._manager)
        self.step, self.tau = step, tau

    def restore(self, like: Params) -> Params:
        """The weights; `like` gives their shapes."""
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self._manager.restore(
            self.step, args=ocp.args.Composite(weights=ocp.args.StandardRestore(shapes))
        ).weights


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: list(tree) if isinstance(tree, tuple) else tree}
    return {k: v for name, sub in tree.items() for k, v in _flat(sub, f"{prefix}.{name}" if prefix else name).items()}
