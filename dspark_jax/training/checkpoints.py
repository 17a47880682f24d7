"""Orbax checkpoints of a training run, and the check that a run is continued with the config it was started with."""

import json
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from dspark_jax.errors import UserError
from dspark_jax.training.step import TrainState

# Keys that may differ between the runs that write and continue a checkpoint.
_FREE = {
    "train.log_every", "train.checkpoint_every", "train.micro_steps", "train.blocks_at_once", "data.max_slots",
    "data.cache_dtype", "data.drafter", "data.servers",
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
    folder.mkdir(parents=True, exist_ok=True)
    stamp.write_text(json.dumps(mine, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return ocp.CheckpointManager(folder / "checkpoints", options=ocp.CheckpointManagerOptions(max_to_keep=2))


def save(manager: ocp.CheckpointManager, state: TrainState, wait: bool = False) -> None:
    """Saves in the background (`wait`: before returning). A step that is already saved is left alone."""
    step = int(state.step)
    if manager.latest_step() != step:
        manager.save(step, args=ocp.args.StandardSave(state))
    if wait:
        manager.wait_until_finished()


def restore_latest(manager: ocp.CheckpointManager, state: TrainState) -> TrainState:
    """The newest checkpoint, or `state` as it is when there is none."""
    step = manager.latest_step()
    if step is None:
        return state
    return manager.restore(step, args=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, state)))


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: list(tree) if isinstance(tree, tuple) else tree}
    return {k: v for name, sub in tree.items() for k, v in _flat(sub, f"{prefix}.{name}" if prefix else name).items()}
