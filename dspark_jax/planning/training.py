"""The plan of a training step: the target's features, the drafter's gradients, and the optimizer.

The target is shared out over `model`; a micro-batch has a pack for each device, and the drafter is stored in parts.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from ml_collections import ConfigDict

from dspark_jax.data.batches import PAD_TO, Batch
from dspark_jax.data.packing import ALIGN, Pack, bucket
from dspark_jax.data.target_cache import CacheInfo
from dspark_jax.errors import UserError
from dspark_jax.interop.drafter_io import Drafter
from dspark_jax.interop.target_io import Target
from dspark_jax.models.drafter import Borrowed
from dspark_jax.models.eagle3 import Eagle3
from dspark_jax.parallel import place_tree, row_spec
from dspark_jax.planning.chips import Machine
from dspark_jax.planning.models import AnyMesh, abstract_models, bytes_of, placed, replicated
from dspark_jax.planning.program import Program, examine
from dspark_jax.planning.report import Plan
from dspark_jax.training.drafters import loss_settings
from dspark_jax.training.features import Features, target_features
from dspark_jax.training.losses import SlotWeights
from dspark_jax.training.optimizers import make_optimizer
from dspark_jax.training.sharding import EVERY, stored_specs
from dspark_jax.training.step import Setup, TrainState, learning_rate, new_state
from dspark_jax.training.update import Totals, apply_gradients, part_totals
from pallas_kernels.anchor_attention.tiled import CONTEXT


def plan_training(config: ConfigDict, machine: Machine, kernels: str = "xla") -> Plan:
    """A step of `train.batch_size` sequences that are all as long as they may be, with all their blocks.

    `kernels`: "tpu" or "xla", whose products can be counted.
    """
    target, drafter = abstract_models(config)
    target = target.with_taps(drafter.config.tap_layers)
    mesh = machine.mesh(config.mesh, max(kind.num_kv_heads for kind in target.config.attention))
    sequences = _sequences(config, mesh)
    t, heads = config.train, target.config.heads
    frozen = place_tree(target.params, lambda path, a: placed(a, mesh, row_spec(path, a.shape, heads, mesh)))
    setup, state = _setup(config, drafter, mesh, kernels)
    tables = replicated(drafter.borrowed, mesh)
    batch = _batch(config, sequences, mesh, padded=isinstance(setup.drafter, Eagle3))
    features = _features(target, batch, mesh)
    gradients = bytes_of(state.params)
    parts = {
        "target weights": bytes_of(frozen),
        "drafter's copies of tables": _copies(target, drafter, tables, mesh),
        "drafter weights, float32": bytes_of(state.params),
        "optimizer": bytes_of(state.opt_state),
        "gradients": gradients * (2 if t.micro_steps > 1 else 1),  # those added up, and a micro-batch's
        "features of a micro-batch": bytes_of(features),
    }
    machine = machine.holding(sum(parts.values()))
    programs = _programs(config, machine, mesh, target, frozen, setup, tables, state, features, batch)
    setting = f"{t.batch_size} sequences of {config.data.max_length} tokens in {t.micro_steps} micro-steps, all full"
    plan = Plan.of("training step", setting, machine, mesh, parts, programs)
    unit, each = ("blocks/s", t.num_anchors) if hasattr(batch, "anchor_DxCxN") else ("sequences/s", 1)
    return plan.with_rate(unit, t.batch_size * each).with_advice(_advice(plan, machine, sequences))


def _copies(target: Target, drafter: Drafter, tables: Borrowed, mesh: AnyMesh) -> int:
    """Bytes of the vocabulary tables that are not the target's own arrays."""
    head = 0 if target.config.tied and not drafter.config.reduced else bytes_of(tables.head_VdxH)
    return head + (bytes_of(tables.embedding_VxH) if mesh.size > 1 else 0)


def cache_line(config: ConfigDict) -> str:
    """What `prepare-features` would write at most, in words."""
    target, drafter = abstract_models(config)
    c = config.data
    info = CacheInfo("", None, drafter.config.tap_layers, target.config.hidden_size, c.cache_dtype, c.max_length)
    size = info.bytes_per_row * c.num_prompts * c.max_length
    return (
        f"a cache of features instead: {info.bytes_per_row} bytes a token in {c.cache_dtype}, {size / 1e12:.3g} TB for "
        f"{c.num_prompts} sequences of {c.max_length} tokens"
    )


def _sequences(config: ConfigDict, mesh: AnyMesh) -> int:
    """Sequences of the fullest pack, or of the fullest device's share where they are padded."""
    t = config.train
    if t.micro_steps < 1 or t.batch_size % t.micro_steps:
        raise UserError(f"train.batch_size={t.batch_size} does not divide into train.micro_steps={t.micro_steps}")
    return -(-t.batch_size // t.micro_steps // mesh.size)


def _setup(config: ConfigDict, drafter: Drafter, mesh: AnyMesh, kernels: str) -> tuple[Setup, TrainState]:
    t = config.train
    schedule = learning_rate(t.lr, t.steps, t.warmup_ratio)
    optimizer = make_optimizer(t.optimizer, schedule, t.weight_decay, t.max_grad_norm)
    setup = Setup(drafter.module, loss_settings(config), t.num_anchors, optimizer, kernels, t.ema)
    return setup, _in_parts(jax.eval_shape(functools.partial(new_state, setup=setup), drafter.params), mesh)


def _in_parts(tree: Any, mesh: AnyMesh) -> Any:
    return jax.tree.map(lambda a, spec: placed(a, mesh, spec), tree, stored_specs(tree, mesh.size))


def _batch(config: ConfigDict, sequences: int, mesh: AnyMesh, padded: bool) -> Pack | Batch:
    """A micro-batch, its packs or sequences shared out over all devices."""
    t, longest, rows = config.train, config.data.max_length, mesh.size
    split = lambda shape, dtype=jnp.int32: placed(  # noqa: E731
        jax.ShapeDtypeStruct(shape, dtype), mesh, PartitionSpec(EVERY)
    )
    if padded:
        count, length = rows * sequences, -(-longest // PAD_TO) * PAD_TO
        return Batch(split((count, length)), split((count, length), jnp.float32), split((count,)), split((count,)))
    length = bucket(sequences * -(-longest // ALIGN) * ALIGN)
    slots = sequences * t.num_anchors
    at_once = min(slots, t.blocks_at_once)
    blocks = (rows, -(-slots // at_once), at_once)
    tokens = (rows, length)
    return Pack(split(tokens), split(tokens, jnp.float32), split(tokens), split(blocks), split(blocks, jnp.bool_))


def _features(target: Target, batch: Pack | Batch, mesh: AnyMesh) -> Features:
    rows = (batch.token_DxT if isinstance(batch, Pack) else batch.token_BxS).shape
    width = target.config.hidden_size
    arrays = {
        "taps_BxSxMH": ((*rows, len(target.tap_layers) * width), target.dtype),
        "last_hidden_BxSxH": ((*rows, width), target.dtype),
        "log_total_BxS": (rows, jnp.promote_types(target.dtype, jnp.float32)),
    }
    one = {name: jax.ShapeDtypeStruct(*array) for name, array in arrays.items()}
    return Features(**{name: placed(array, mesh, PartitionSpec(EVERY)) for name, array in one.items()})


def _programs(
    config: ConfigDict,
    machine: Machine,
    mesh: AnyMesh,
    target: Target,
    frozen: Any,
    setup: Setup,
    tables: Any,
    state: TrainState,
    features: Features,
    batch: Pack | Batch,
) -> list[tuple[int, Program]]:
    """The programs of a step, and how often each runs."""
    packed, steps = isinstance(batch, Pack), config.train.micro_steps
    # Loops of unknown length: parts of a pack's blocks, and tiles of the context before a row or a block.
    tiles = config.data.max_length / 2 / CONTEXT + 0.5
    programs = []
    if config.data.features == "online" and not config.train.keep_features:
        tokens = (batch.token_DxT, batch.position_DxT) if packed else (batch.token_BxS, None)
        program = examine(machine, mesh, target_features, target.module, frozen, *tokens, loops=(tiles,))
        programs.append((steps, program))
    scalar = placed(jax.ShapeDtypeStruct((), jnp.float32), mesh)
    whole, loops = (SlotWeights(scalar, scalar), (tiles,)) if packed else (1, ())
    if packed and (parts := batch.anchor_DxCxN.shape[1]) > 1:  # one part is no loop
        loops = (parts, tiles)
    args = (setup, tables, state.params, state.step, features, batch, whole)
    programs.append((steps, examine(machine, mesh, part_totals, *args, loops=loops)))
    made: Totals = part_totals.eval_shape(*args)
    programs.append((1, examine(machine, mesh, apply_gradients, setup, state, _in_parts(made, mesh))))
    return programs


def _advice(plan: Plan, machine: Machine, sequences: int) -> str:
    """What to change where it does not fit."""
    stays = sum(size for name, size in plan.parts.items() if "features" not in name)
    if stays > machine.chip.memory:
        return "weights and optimizer alone do not fit: more devices that share them (--topology, config.mesh)"
    if sequences > 1:
        return "raise train.micro_steps"
    return "lower train.blocks_at_once or data.max_length"
