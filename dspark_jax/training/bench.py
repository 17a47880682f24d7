"""What a training step costs, against the operations it cannot do without (`python -m dspark_jax bench --train`)."""

import functools
import resource
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
from ml_collections import ConfigDict

from dspark_jax.data.packing import MicroBatch
from dspark_jax.errors import UserError
from dspark_jax.evaluation.report import describe_device, environment
from dspark_jax.evaluation.timing import Clock, CpuUse, seconds
from dspark_jax.interop.drafter_io import borrow, init_drafter
from dspark_jax.interop.target_io import Target, load_target
from dspark_jax.models.drafter import Borrowed, DSpark
from dspark_jax.progress import Progress
from dspark_jax.training.counting import drafter_flops, target_flops
from dspark_jax.training.drafters import chosen_kernels, loss_settings, new_drafter_config
from dspark_jax.training.features import Features, FeatureSource, target_features
from dspark_jax.training.losses import SlotWeights
from dspark_jax.training.optimizers import make_optimizer
from dspark_jax.training.parts import step_parts
from dspark_jax.training.step import Setup, TrainState, learning_rate, new_state
from dspark_jax.training.update import apply_gradients, pack_weights, part_totals, train_step

MATRIX = {"cpu": 2048}  # side of the matrices whose product is timed
LARGE_MATRIX = 8192  # elsewhere
MORE_BLOCKS = 8  # times as many, whose memory is compared


def measure(config: ConfigDict, repeats: int) -> dict[str, Any]:
    """Times, operations and memory of a step on random tokens, under the names of the JSON report."""
    target, setup, borrowed, state = _models(config)
    parts = step_parts(config, _rows(config, borrowed))(0)
    online = config.data.features == "online" and not config.train.keep_features
    source, used = FeatureSource(target, keep=False), CpuUse()
    with Progress("measurements", 3) as progress:
        features = [jax.block_until_ready(source(part)) for part in parts]
        progress.advance(1)
        clock = Clock(repeats, _programs)
        times = clock.in_turn(_calls(target, setup, borrowed, state, source, parts, features), settle=False)
        progress.advance(1)
        memory = _memory(config, setup, borrowed, state, features)
        progress.advance(1)
    flops = {"target": target_flops(target.config, [d.length for part in parts for d in part.documents])}
    flops |= drafter_flops(setup.drafter.config, parts)
    if not online:
        flops["target"] = 0
    side = _side()
    rate = 2 * side**3 / times["matrix"].median * 1e3
    step = times["step"].median + (times["features"].median if online else 0)
    floor = sum(flops.values()) / rate * 1e3
    blocks = int(sum(part.pack.keep_DxCxN.sum() for part in parts))
    return {
        **environment(), "others_cpu_percent": used.others_percent(), "target": target.name, "dtype": str(target.dtype),
        "repeats": repeats, "features": "online" if online else "kept", "packs": len(parts), "blocks": blocks,
        "tokens": sum(d.length for part in parts for d in part.documents),
        "pack_tokens": parts[0].pack.token_DxT.size, "matrix_gflop_per_s": rate / 1e9,
        **times["step"].entries("step"), **times["features"].entries("features"), **times["matrix"].entries("matrix"),
        "blocks_per_second": blocks / step * 1e3, "floor_ms": floor, "times_floor": step / floor,
        "gflop": {name: count / 1e9 for name, count in flops.items()}, "memory": memory,
        "compilations_after_warm_up": clock.compilations,
    }  # fmt: skip


def _models(config: ConfigDict) -> tuple[Target, Setup, Borrowed, TrainState]:
    """The target and a new drafter of the config. UserError for Eagle3, whose steps have no blocks."""
    target = load_target(config.target.path, dtype=config.target.dtype or None)
    drafter = new_drafter_config(config, target)
    if config.drafter.kind == "eagle3":
        raise UserError("bench --train measures block drafters: this config's is Eagle3")
    t = config.train
    schedule = learning_rate(t.lr, t.steps, t.warmup_ratio)
    optimizer = make_optimizer(t.optimizer, schedule, t.weight_decay, t.max_grad_norm)
    kernels = chosen_kernels(config, target.params)
    setup = Setup(DSpark(drafter), loss_settings(config), t.num_anchors, optimizer, kernels, t.ema)
    params = init_drafter(drafter, jax.random.key(config.seed))
    ids = np.arange(drafter.draft_vocab_size) if drafter.reduced else None
    return target.with_taps(drafter.tap_layers), setup, borrow(target, ids), new_state(params, setup)


def _rows(config: ConfigDict, borrowed: Borrowed) -> list[dict[str, Any]]:
    """Random tokens, a quarter to all of the longest sequence, of which three quarters are the answer."""
    rng, longest = np.random.default_rng(0), config.data.max_length
    spoken = np.asarray(borrowed.token_ids_Vd)
    lengths = np.linspace(longest // 4, longest, config.train.batch_size).astype(int)
    tokens = [rng.choice(spoken, length).tolist() for length in lengths]
    return [{"prompt_ids": ids[: len(ids) // 4], "answer_ids": ids[len(ids) // 4 :]} for ids in tokens]


def _calls(
    target: Target,
    setup: Setup,
    borrowed: Borrowed,
    state: TrainState,
    source: FeatureSource,
    parts: Sequence[MicroBatch],
    features: Sequence[Features],
) -> dict[str, Any]:
    """What is timed in turn: a step on features that are there, the features, and the product of two matrices."""
    kept = [state]
    given = {id(part): one for part, one in zip(parts, features, strict=True)}
    matrix = jax.random.normal(jax.random.key(0), (_side(), _side()), target.dtype)
    multiply = jax.jit(jnp.matmul)

    def step() -> Any:
        kept[0], metrics = train_step(setup, borrowed, kept[0], lambda part: given[id(part)], parts)
        return metrics

    return {
        "step": lambda: seconds(step),
        "features": lambda: seconds(lambda: [source(part) for part in parts]),
        "matrix": lambda: seconds(lambda: multiply(matrix, matrix)),
    }


def _side() -> int:
    return MATRIX.get(jax.default_backend(), LARGE_MATRIX)


def _programs() -> int:
    return sum(jitted._cache_size() for jitted in (part_totals, pack_weights, apply_gradients, target_features))


def _memory(
    config: ConfigDict, setup: Setup, borrowed: Borrowed, state: TrainState, features: Sequence[Features]
) -> dict[str, Any]:
    """Bytes of a micro-batch's gradients with the config's blocks and with more of them, as compiled, and the process's
    largest resident set so far."""
    shapes = functools.partial(jax.tree.map, lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype))
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    rows, found = _rows(config, borrowed), {}
    for times in (1, MORE_BLOCKS):
        more = config.copy_and_resolve_references()
        more.train.num_anchors *= times
        pack = step_parts(more, rows)(0)[0].pack
        args = (shapes(state.params), shapes(state.step), shapes(features[0]), shapes(pack))
        compiled = part_totals.lower(setup, shapes(borrowed), *args, SlotWeights(scalar, scalar)).compile()
        found[str(pack.keep_DxCxN.size)] = compiled.memory_analysis().temp_size_in_bytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"temporary_bytes_by_block_slots": found, "resident_bytes": peak}


def print_report(report: dict[str, Any]) -> None:
    """The report as tables."""
    console, r = rich.console.Console(), report
    print(f"{describe_device(r)}")
    fill = 100 * r["tokens"] / (r["packs"] * r["pack_tokens"])
    print(
        f"{r['target']}, {r['dtype']}; features {r['features']}; {r['blocks']} blocks and {r['tokens']} tokens in "
        f"{r['packs']} packs of {r['pack_tokens']} ({fill:.0f} % full)"
    )
    table = rich.table.Table("", "ms", title="median ± half the interquartile range", title_justify="left")
    for name in ("step", "features", "matrix"):
        table.add_row(name, f"{r[f'{name}_ms']:.1f} ±{r[f'{name}_iqr_ms'] / 2:.1f}")
    table.add_row(f"floor: counted operations at {r['matrix_gflop_per_s']:.0f} Gflop/s", f"{r['floor_ms']:.1f}")
    console.print(table)
    parts = ", ".join(f"{name} {gflop:.1f}" for name, gflop in r["gflop"].items())
    print(f"Gflop of a step: {parts}")
    print(f"{r['blocks_per_second']:.0f} blocks/s, {r['times_floor']:.2f} times the floor")
    for slots, size in r["memory"]["temporary_bytes_by_block_slots"].items():
        print(f"temporary memory of a micro-batch's gradients at {slots} block slots: {size / 1e6:.1f} MB")
    print(f"largest resident set of this process: {r['memory']['resident_bytes'] / 1e6:.0f} MB")
