"""The training run of a config, from prompts to a drafter on disk. `train.py` is its door."""

import dataclasses
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from dspark_jax.data.batches import draft_vocabulary
from dspark_jax.errors import UserError
from dspark_jax.interop.drafter_io import Drafter, borrow, init_drafter
from dspark_jax.interop.export import save_drafter
from dspark_jax.interop.target_io import load_target
from dspark_jax.progress import Progress
from dspark_jax.training.checkpoints import open_checkpoints, restore_latest, save
from dspark_jax.training.data import features_cache, trained_on, training_rows
from dspark_jax.training.drafters import loss_settings, new_drafter_config
from dspark_jax.training.features import CachedFeatures, FeatureSource
from dspark_jax.training.metrics import MetricLog, summary
from dspark_jax.training.parts import Parts, step_parts
from dspark_jax.training.step import Setup, TrainState, learning_rate, make_optimizer
from dspark_jax.training.update import train_step
from pallas_kernels.backends import choose


def train(config: ConfigDict) -> Path:
    """Runs or continues the training that a config describes. Returns the directory of the drafter.

    Ctrl-C (or SIGTERM) ends the run after the current step with a checkpoint; the same command goes on from there.
    """
    target = load_target(config.target.path, dtype=config.target.dtype or None)
    drafter_config = new_drafter_config(config, target)
    target = target.with_taps(drafter_config.tap_layers)
    manager = open_checkpoints(config)
    cache = features_cache(config, target)
    rows = cache.rows if cache else training_rows(config, target)
    parts = step_parts(config, rows)
    ids = None
    if drafter_config.reduced:
        ids = draft_vocabulary(
            rows, drafter_config.draft_vocab_size, target.config.eos_token_ids, target.config.vocab_size
        )
    drafter = Drafter(drafter_config, init_drafter(drafter_config, jax.random.key(config.seed)), borrow(target, ids))
    schedule = learning_rate(config.train.lr, config.train.steps, config.train.warmup_ratio)
    optimizer = make_optimizer(schedule, config.train.weight_decay, config.train.max_grad_norm)
    kernels, _ = choose("auto", jax.tree.leaves(drafter.borrowed))
    setup = Setup(drafter.module, loss_settings(config), config.train.num_anchors, optimizer, kernels)
    state = TrainState(drafter.params, optimizer.init(drafter.params), jnp.zeros((), jnp.int32))
    state = restore_latest(manager, state)
    source = CachedFeatures(target, cache) if cache else FeatureSource(target, config.train.keep_features)
    state = _run_steps(config, setup, source, drafter, state, parts, manager, schedule)
    out = Path(config.workdir) / "drafter"
    trained = dataclasses.replace(drafter, params=state.params, trained_on=trained_on(config, target))
    save_drafter(out, trained, target)
    return out


def _run_steps(config, setup, source, drafter: Drafter, state: TrainState, parts: Parts, manager, schedule):
    """The loop itself: a few dispatches a step, metrics read once a window, so that the device never waits."""
    steps, log = config.train.steps, MetricLog(config.workdir)
    stop = _StopSignal()
    start = time.monotonic()
    with Progress("training", steps) as progress:
        for step in range(int(state.step), steps):
            state, metrics = train_step(setup, drafter.borrowed, state, source, parts(step))
            log.add(metrics)
            if (step + 1) % config.train.log_every == 0 or step + 1 == steps:
                row = log.write(step + 1, float(schedule(step)), time.monotonic() - start)
                start = time.monotonic()
                if not np.isfinite(row["loss"]):
                    raise UserError(f"the loss is {row['loss']} at step {step + 1}: lower train.lr and start anew")
                progress.update(step + 1, summary(row))
            if (step + 1) % config.train.checkpoint_every == 0 or step + 1 == steps:
                save(manager, state)
            if stop.asked:
                save(manager, state, wait=True)
                log.close()
                raise KeyboardInterrupt(f"stopped after step {step + 1} of {steps}; the same command continues")
    manager.wait_until_finished()
    log.close()
    stop.restore()
    return state


class _StopSignal:
    """Remembers SIGINT and SIGTERM, so that a step is never torn; a second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True
        self.restore()

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
