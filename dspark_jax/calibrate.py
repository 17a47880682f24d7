"""Fits the confidence head's temperatures: python -m dspark_jax calibrate --config=configs/X.py --prompts=FILE

The prompts are answered with whole blocks, so that every draft's fate is seen; they should be none that the drafter was
trained on. Writes beside the drafter temperatures.json, which the engine then uses, a reliability diagram per position
before and after, and the rounds as a trace for `bench --simulate`.
"""

from pathlib import Path

import numpy as np
import rich.console
import rich.table
from absl import flags
from ml_collections import ConfigDict

from dspark_jax.data.conversations import read_prompts
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.profiling import drafter_fingerprint
from dspark_jax.decoding.requests import Completion
from dspark_jax.door import parse_config
from dspark_jax.errors import UserError
from dspark_jax.evaluation.metrics import record_rounds
from dspark_jax.evaluation.plots import reliability_diagrams
from dspark_jax.progress import Progress
from dspark_jax.scheduling.calibration import (
    Reliability,
    fit_temperatures,
    key,
    load_temperatures,
    means,
    reliabilities,
    save_temperatures,
)
from dspark_jax.scheduling.simulate import recorded_trace, save_trace
from dspark_jax.serving import chat_prompt, load_models, make_engine, sampling_params


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("prompts", None, "JSONL of held-out prompts", flag_values=values)
    flags.DEFINE_list("at", ["0", "1"], "sampling temperatures to fit, each for its band", flag_values=values)


def main(argv: list[str]) -> None:
    config, given = parse_config(argv, define)
    if given.prompts is None:
        raise UserError("calibration needs held-out prompts: give --prompts=FILE")
    target, drafter = load_models(config)
    if drafter is None or not getattr(drafter.config, "confidence", False):
        raise UserError("calibration needs a drafter with a confidence head: set serve.drafter to one")
    engine = make_engine(config, target, drafter, strategy=f"fixed:{drafter.config.num_drafts}")
    folder, sampler = Path(drafter.name), config.serve.sampler
    known = load_temperatures(folder, drafter_fingerprint(drafter))
    for temperature in _numbers(given.at):
        rounds = record_rounds(answers(config, engine, given.prompts, temperature))
        fitted_K = fit_temperatures(rounds)
        before, after = reliabilities(rounds), reliabilities(rounds, fitted_K)
        name = key(sampler, temperature)
        print_calibration(f"{name}: {len(rounds.verified_N)} rounds", fitted_K, before, after)
        save_trace(folder / f"trace_{name.replace(' ', '_')}.json", recorded_trace(rounds, fitted_K))
        reliability_diagrams(folder / f"reliability_{name.replace(' ', '_')}.png", name, before, after)
        known = known.with_fit(sampler, temperature, fitted_K)
    save_temperatures(folder, known)
    print(f"written to {folder}")


def _numbers(texts: list[str]) -> list[float]:
    try:
        return [float(text) for text in texts]
    except ValueError:
        raise UserError(f"--at={','.join(texts)}: give sampling temperatures, as --at=0,0.7,1") from None


def answers(config: ConfigDict, engine: Engine, prompts: str, temperature: float) -> list[Completion]:
    """Answers to all prompts at one temperature."""
    rows, done = read_prompts(prompts), []
    with config.unlocked():
        config.sampling.temperature = temperature
    params = [sampling_params(config, row) for row in rows]
    with Progress(f"answers at temperature {temperature:g}", len(rows)) as progress:
        asked = [chat_prompt(config, engine.target, row.messages) for row in rows]
        for _, completion in engine.stream_completions(asked, params):
            done.append(completion)
            progress.advance(1)
    failed = next((c.error for c in done if c.error), None)
    if failed:
        raise UserError(f"a prompt cannot be answered: {failed}")
    return done


def print_calibration(
    title: str, temperature_K: np.ndarray, before: list[Reliability], after: list[Reliability]
) -> None:
    """Errors of every position's survival, before and after."""
    table = rich.table.Table(title=title)
    for name in ("position", "temperature", "ECE", "Brier", "AUC"):
        table.add_column(name)
    for k, (temperature, old, new) in enumerate(zip(temperature_K, before, after, strict=True)):
        changes = _changes(old.ece, new.ece, old.brier, new.brier, old.auc, new.auc)
        table.add_row(str(k + 1), f"{temperature:.2f}", *changes)
    old, new = means(before), means(after)
    table.add_row("mean", "", *_changes(*(m[name] for name in ("ece", "brier", "auc") for m in (old, new))))
    rich.console.Console().print(table)


def _changes(*values: float) -> list[str]:
    return [f"{old:.3f} -> {new:.3f}" for old, new in zip(values[::2], values[1::2], strict=True)]
