"""The training run of a config, from prompts to a drafter on disk. `train.py` is its door."""

import dataclasses
import functools
import signal
import time
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Self

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from ml_collections import ConfigDict

from dspark_jax.data.reference_cache import ReferenceCache
from dspark_jax.data.target_cache import TargetCache
from dspark_jax.errors import UserError
from dspark_jax.interop.export import save_drafter
from dspark_jax.interop.target_io import Target, load_target
from dspark_jax.parallel import on, parse_mesh, start_processes
from dspark_jax.progress import Progress
from dspark_jax.training.checkpoints import finish, open_checkpoints, restore_latest, save
from dspark_jax.training.data import features_cache, trained_on, training_rows
from dspark_jax.training.drafters import chosen_kernels, loss_settings, new_drafter_config
from dspark_jax.training.features import CachedFeatures, FeatureSource
from dspark_jax.training.metrics import MetricLog, summary
from dspark_jax.training.optimizers import make_optimizer
from dspark_jax.training.parts import Parts, check_division, step_parts
from dspark_jax.training.sharding import Agreement, made_in_parts, on_this_process, whole_everywhere, with_own_tables
from dspark_jax.training.start import new_drafter, trained_before
from dspark_jax.training.step import Setup, TrainState, learning_rate, new_state
from dspark_jax.training.update import train_step
from dspark_jax.training.validation import Rows, Validation, check_part, split_rows


def train(config: ConfigDict) -> Path:
    """Runs or continues the training that a config describes. Returns the directory of the drafter.

    The drafter is the best on the rows that `data.validation` holds out, where it does, else the last. Ctrl-C (or
    SIGTERM, to any of the processes) ends the run after the current step with a checkpoint; the same command, on
    whatever mesh, goes on from there.
    """
    t = config.train
    check_part(config.data.validation)  # before any work: answers may take hours
    check_division(config)
    process, processes = start_processes(t.processes)
    mesh = parse_mesh(config.mesh, together=True)
    target = load_target(config.target.path, dtype=config.target.dtype or None, mesh=mesh, copies=True)
    drafter_config = new_drafter_config(config, target)
    target = target.with_taps(drafter_config.tap_layers)
    schedule = learning_rate(t.lr, t.steps, t.warmup_ratio)
    optimizer, losses = make_optimizer(t.optimizer, schedule, t.weight_decay, t.max_grad_norm), loss_settings(config)
    kernels = chosen_kernels(config, target.params)
    lender = with_own_tables(target)
    before = trained_before(config, drafter_config, lender)  # before the workdir takes its name, and before answers
    manager = open_checkpoints(config)
    cache, rows = _rows(config, target)
    rows, held_out = split_rows(rows, config.data.validation)
    parts = step_parts(config, rows, mesh.size if mesh else 1)
    drafter = before or new_drafter(config, drafter_config, lender, rows)
    borrowed = whole_everywhere(drafter.borrowed, mesh)
    setup = Setup(drafter.module, losses, t.num_anchors, optimizer, kernels, t.ema)
    state = made_in_parts(functools.partial(new_state, setup=setup), drafter.params, mesh)
    state = restore_latest(manager, state)
    source = CachedFeatures(target, cache) if cache else FeatureSource(target, t.keep_features)
    validation = Validation(config, setup, borrowed, source, held_out) if config.data.validation else None
    state = _run_steps(config, setup, source, borrowed, state, parts, manager, schedule, validation)
    out = Path(config.workdir) / "drafter"
    weights = on_this_process(validation.best_weights(state.weights) if validation else state.weights, mesh)
    if process == 0:
        save_drafter(out, dataclasses.replace(drafter, params=weights, trained_on=trained_on(config, target)), lender)
    if processes > 1:  # all end together: JAX ends those whose fellows have left
        multihost_utils.sync_global_devices("drafter written")
    return out


def _rows(config: ConfigDict, target: Target) -> tuple[TargetCache | ReferenceCache | None, Rows]:
    """The cache to train from, if the config has one, and the rows."""
    with on(target.mesh):
        cache = features_cache(config, target)
    if cache:
        return cache, cache.rows
    if jax.process_count() > 1 and not config.data.answers:
        raise UserError(
            "several processes train on answers that are there: let one run `prepare answers`, and set data.answers "
            "(or data.features=cache)"
        )
    return None, training_rows(config, target)


def _run_steps(config, setup, source, borrowed, state: TrainState, parts: Parts, manager, schedule, validation):
    """The loop itself: a few dispatches a step, metrics read once a window, so that the device never waits."""
    steps, log = config.train.steps, MetricLog(config.workdir, int(state.step))
    start = time.monotonic()
    mesh = source.target.mesh
    # Closing waits for what is being saved, whatever ends the run.
    with on(mesh), closing(manager), Progress("training", steps) as progress, _StopSignal(mesh) as stop:
        if validation:  # a run that was stopped owes the validation of its last step
            validation.after(int(state.step), state.weights, log, stop.agreed)
        for step in range(int(state.step), steps):
            state, metrics = train_step(setup, borrowed, state, source, parts(step))
            log.add(metrics)
            if (step + 1) % config.train.log_every == 0 or step + 1 == steps:
                row = log.write(step + 1, float(schedule(step)), time.monotonic() - start)
                start = time.monotonic()
                if not np.isfinite(row["loss"]):
                    raise UserError(f"the loss is {row['loss']} at step {step + 1}: lower train.lr and start anew")
                progress.update(step + 1, summary(row) + (validation.summary if validation else ""))
            if validation:
                validation.after(step + 1, state.weights, log, stop.agreed)
            if (step + 1) % config.train.checkpoint_every == 0 or step + 1 == steps:
                save(manager, state)
            if stop.agreed():
                save(manager, state, wait=True)
                log.close()
                raise KeyboardInterrupt(f"stopped after step {step + 1} of {steps}; the same command continues")
        finish(manager)
        log.close()
    return state


class _StopSignal:
    """Remembers SIGINT and SIGTERM, so that a step is never torn; a second SIGINT ends the process at once."""

    def __init__(self, mesh: Mesh | None) -> None:
        self.asked, self._agree = False, Agreement(mesh)
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True
        self.restore()

    def agreed(self) -> bool:
        """Whether all processes are to stop here."""
        return self._agree(self.asked)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.restore()

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
