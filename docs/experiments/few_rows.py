"""Rounds over weights in stacks and by row (models/few_rows.py), turn by turn in one process.

PYTHONPATH=. python docs/experiments/few_rows.py
"""

import dataclasses
import statistics

from rich.progress import track

from configs.smollm2_135m import get_config
from dspark_jax.decoding.engine import Engine
from dspark_jax.evaluation.measurements import CONTEXT, FrozenBatch, random_prompts
from dspark_jax.interop.target_io import load_target
from dspark_jax.models import few_rows

TURNS = 21


def main() -> None:
    config = get_config()
    target = load_target(config.target.path)
    prompts = random_prompts(1, CONTEXT, target.config.vocab_size)
    batches, cached = {}, few_rows.CACHED
    for strategy in ("off", "fixed:1", "fixed:3", "fixed:7"):
        for layout in ("stacks", "by row"):
            few_rows.CACHED = cached if layout == "by row" else 2**63
            target = dataclasses.replace(target)  # decides anew
            drafter = None if strategy == "off" else config.serve.drafter
            batches[strategy, layout] = FrozenBatch(Engine(target, drafter, strategy=strategy, max_slots=1), prompts)
    for batch in batches.values():
        batch.round()  # compiles
    times = {name: [] for name in batches}
    for _ in track(range(TURNS), "turns"):
        for name, batch in batches.items():
            times[name].append(1e3 * batch.round())
    print("medians of a round, batch 1, in ms")
    for strategy in dict.fromkeys(name for name, _ in batches):
        stacks, by_row = (statistics.median(times[strategy, layout]) for layout in ("stacks", "by row"))
        print(f"{strategy:8} stacks {stacks:6.1f}   by row {by_row:6.1f}   ratio {by_row / stacks:.2f}")


if __name__ == "__main__":
    main()
