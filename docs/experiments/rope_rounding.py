"""Does it matter that DeepSpec's trainer rounds rotary frequencies to bfloat16 and its evaluation does not?

    python docs/experiments/rope_rounding.py [--steps=800]

Trains two drafters for the tests' tiny target on Python source, one with exact and one with rounded frequencies, and
scores each with both, near the start of a sequence and far into it. Prints expected tokens per round on held-out text.
"""

import argparse
import dataclasses
import sys
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.data.batches import Sample
from dspark_jax.data.packing import micro_batches
from dspark_jax.interop.drafter_io import borrow, init_drafter
from dspark_jax.interop.target_io import load_target
from dspark_jax.models.config import DrafterConfig, draft_decoder
from dspark_jax.models.drafter import DSpark
from dspark_jax.training.anchors import make_blocks
from dspark_jax.training.features import FeatureSource, target_features
from dspark_jax.training.losses import LossWeights
from dspark_jax.training.optimizers import make_optimizer
from dspark_jax.training.step import Setup, TrainState, drafter_loss, learning_rate
from dspark_jax.training.update import train_step

TARGET = Path(__file__).parents[2] / "tests" / "data" / "golden" / "target"
LENGTH, ANCHORS, HELD_OUT = 1024, 96, 12
PLACES = {"near (anchors 32 to 159)": (32, 160), "far (anchors 832 to 959)": (832, 960)}


def sequences() -> np.ndarray:
    """`[N, LENGTH]` bytes of the standard library's modules; the tiny target reads bytes as token ids."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    rows = np.frombuffer(text, np.uint8).astype(np.int32)
    rows = rows[: len(rows) // LENGTH * LENGTH].reshape(-1, LENGTH)
    return rows[np.random.default_rng(0).permutation(len(rows))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=800)
    steps = parser.parse_args().steps
    target = load_target(TARGET, dtype="float32").with_taps((-1, 1, 2, 4))
    rows = sequences()
    trained = {rounded: train(target, rows[HELD_OUT:], rounded, steps) for rounded in (False, True)}
    for place, anchors in PLACES.items():
        for rounded, (config, params) in trained.items():
            for served in (False, True):
                tau = score(target, with_rounding(config, served), params, rows[:HELD_OUT], anchors)
                kinds = [("rounded" if flag else "exact") for flag in (rounded, served)]
                print(f"{place}: trained {kinds[0]:7}, served {kinds[1]:7}: {tau:.3f} tokens per round")


def with_rounding(config: DrafterConfig, rounded: bool) -> DrafterConfig:
    (kind,) = config.decoder.attention
    kind = dataclasses.replace(kind, rope=dataclasses.replace(kind.rope, rounded=rounded))
    return dataclasses.replace(config, decoder=dataclasses.replace(config.decoder, attention=(kind,)))


def train(target, rows: np.ndarray, rounded: bool, steps: int):
    config = DrafterConfig(
        decoder=draft_decoder(target.config, 2, rope_rounded=rounded), block_size=5, mask_token_id=300,
        tap_layers=target.tap_layers, num_target_layers=target.config.num_layers,
        draft_vocab_size=target.config.vocab_size, markov_rank=16,
    )  # fmt: skip
    optimizer = make_optimizer("adamw", learning_rate(2e-3, steps, 0.04), 0.0, 1.0)
    setup = Setup(DSpark(config), LossWeights(), ANCHORS, optimizer)
    params = init_drafter(config, jax.random.key(0))
    state, borrowed = TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32)), borrow(target)
    source = FeatureSource(target, keep=False)
    for step in range(steps):
        epoch, row = divmod(step, len(rows))
        sample = Sample(row, epoch, rows[row].tolist(), np.ones(LENGTH))
        state, _ = train_step(setup, borrowed, state, source, micro_batches([sample], 1, ANCHORS, ANCHORS, seed=1))
        print(f"\rtraining {'rounded' if rounded else 'exact'}: step {step + 1} of {steps}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return config, state.params


def score(target, config: DrafterConfig, params, rows: np.ndarray, anchors: tuple[int, int]) -> float:
    """Expected tokens per round at every second anchor of a range."""
    setup = Setup(DSpark(config), LossWeights(), 0, None)
    places = jnp.tile(jnp.arange(*anchors, 2), (1, 1))
    loss = jax.jit(lambda features, blocks: drafter_loss(setup, params, borrow(target), features, blocks)[1][1])
    totals = np.zeros(2)
    for row in rows:
        blocks = make_blocks(row[None], np.ones((1, LENGTH)), places, jnp.ones(places.shape, bool), config.num_drafts)
        totals += np.array(loss(target_features(target.module, target.params, row[None]), blocks)["tau_probabilistic"])
    return totals[0] / totals[1]


if __name__ == "__main__":
    main()
