"""One update from a step's micro-batches: gradients are added up one after another, then the optimizer steps.

Block drafters: all that a micro-batch's blocks share, the context's keys and values, is computed once; the blocks then
run some at a time, forward and backward. So memory does not grow with their number, nothing is computed twice, and
dummies cost at most one such part. What slots weigh is known from masks alone, or by D-PACE from a forward pass, and it
is summed over all micro-batches first: the loss is one mean over the update's slots, however it is divided, or the mean
of the micro-steps' (`wholes`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from dspark_jax.data.batches import Batch
from dspark_jax.data.packing import MicroBatch, Pack
from dspark_jax.models.drafter import Borrowed
from dspark_jax.models.eagle3 import Eagle3
from dspark_jax.models.layers import Params
from dspark_jax.training.anchors import Blocks, make_blocks
from dspark_jax.training.features import Features, on_devices
from dspark_jax.training.losses import SlotWeights, slot_weights, wholes
from dspark_jax.training.sharding import most, stored, summed
from dspark_jax.training.step import (
    ContextKV,
    Setup,
    Sums,
    TrainState,
    averaged,
    computed_in,
    draft_labels,
    drafter_loss,
    drafter_weights,
    eagle3_step_loss,
    run_context,
)

Source = Callable[[Batch | MicroBatch], Features]


@flax.struct.dataclass
class Totals:
    """What micro-batches add up: gradients, the loss, the metrics' sums, and blocks (of Eagle3: rows)."""

    grads: Params
    loss: jax.Array
    sums: Sums
    blocks: jax.Array


def train_step(
    setup: Setup, borrowed: Borrowed, state: TrainState, source: Source, parts: Sequence[Batch | MicroBatch]
) -> tuple[TrainState, dict[str, Any]]:
    """One update over a step's micro-batches: packs for block drafters, batches of one shape for Eagle3.

    `source` gives a micro-batch's features when its turn has come. The new state, and the step's metrics.
    """
    if len(parts) == 1:  # D-PACE reads them twice
        features = source(parts[0])
        source = lambda _: features  # noqa: E731
    totals, each = None, divisors(setup, borrowed, state.params, source, parts)
    for part, whole in zip(parts, each, strict=True):
        one = part_totals(setup, borrowed, state.params, state.step, source(part), arrays_of(part), whole)
        totals = one if totals is None else add_totals(totals, one)
    return apply_gradients(setup, state, totals)


def arrays_of(part: Batch | MicroBatch) -> Batch | Pack:
    """A micro-batch as the devices have it."""
    mesh = jax.sharding.get_mesh()
    return on_devices(part.pack if isinstance(part, MicroBatch) else part, None if mesh.empty else mesh)


def divisors(
    setup: Setup, borrowed: Borrowed, params: Params, source: Source, parts: Sequence[Batch | MicroBatch]
) -> list[SlotWeights | int]:
    """What the loss of each of a step's micro-batches is divided by: what slots weigh; of Eagle3, all sequences.

    D-PACE's weights are the drafter's doing: they take a forward pass over all micro-batches, and their features.
    """
    if isinstance(setup.drafter, Eagle3):
        return [sum(int(np.count_nonzero(part.length_B)) for part in parts)] * len(parts)
    if setup.weights.dpace:
        each = [reached_weights(setup, borrowed, params, source(part), arrays_of(part)) for part in parts]
    else:
        each = [pack_weights(setup, borrowed, arrays_of(part)) for part in parts]
    return wholes(each, setup.weights.mean)


@functools.partial(jax.jit, static_argnames="setup")
def pack_weights(setup: Setup, borrowed: Borrowed, pack: Pack) -> SlotWeights:
    """What the slots of all blocks of the packs weigh."""
    return summed(lambda _, *args: _pack_weights(setup, *args), None, (borrowed,), (pack,))


def _pack_weights(setup: Setup, borrowed: Borrowed, pack: Pack) -> SlotWeights:
    anchors, keep = (a.reshape(len(a), -1) for a in (pack.anchor_DxCxN, pack.keep_DxCxN))
    blocks = _blocks(setup, pack, anchors, keep)
    return slot_weights(draft_labels(borrowed, blocks.label_BxNxK), blocks.eval_BxNxK, setup.weights.decay_gamma).sum()


@functools.partial(jax.jit, static_argnames="setup")
def part_totals(
    setup: Setup,
    borrowed: Borrowed,
    params: Params,
    step: jax.Array,
    features: Features,
    batch: Pack | Batch,
    whole: SlotWeights | int,
) -> Totals:
    """A micro-batch's part of the loss and of its gradients. `whole`: what all of the update is divided by."""
    totals = _eagle3_totals if isinstance(setup.drafter, Eagle3) else _block_totals
    specs = lambda of_params: Totals(of_params, P(), P(), P())  # noqa: E731
    return summed(functools.partial(totals, setup), params, (borrowed, step, whole), (features, batch), specs)


def _eagle3_totals(
    setup: Setup, params: Params, borrowed: Borrowed, step: jax.Array, rows: int, features: Features, batch: Batch
) -> Totals:
    loss = functools.partial(eagle3_step_loss, setup)
    (value, (sums, blocks)), grads = jax.value_and_grad(loss, has_aux=True)(params, borrowed, features, batch, rows)
    return Totals(grads, value, sums, blocks)


@functools.partial(jax.jit, static_argnames="setup")
def reached_weights(setup: Setup, borrowed: Borrowed, params: Params, features: Features, pack: Pack) -> SlotWeights:
    """What the slots of all blocks of the packs weigh by D-PACE."""
    return summed(functools.partial(_reached_weights, setup), params, (borrowed,), (features, pack))


def _reached_weights(setup: Setup, params: Params, borrowed: Borrowed, features: Features, pack: Pack) -> SlotWeights:
    context_kv = _context(setup, borrowed, params, features, pack)
    weigh = lambda blocks: drafter_weights(setup, params, borrowed, features, blocks, context_kv)  # noqa: E731
    return _over_blocks(setup, pack, weigh)


@functools.partial(jax.jit, static_argnames="setup")
def part_measures(
    setup: Setup,
    borrowed: Borrowed,
    params: Params,
    step: jax.Array | int,
    features: Features,
    batch: Pack | Batch,
    whole: SlotWeights | int,
) -> dict[str, Any]:
    """The loss and the metrics' sums of a micro-batch, as `apply_gradients` has them for a step; no gradients."""
    return summed(functools.partial(_measures, setup), params, (borrowed, step, whole), (features, batch))


def _measures(
    setup: Setup,
    params: Params,
    borrowed: Borrowed,
    step: jax.Array | int,
    whole: SlotWeights | int,
    features: Features,
    batch: Pack | Batch,
) -> dict[str, Any]:
    if isinstance(setup.drafter, Eagle3):
        loss, (sums, blocks) = eagle3_step_loss(setup, params, borrowed, features, batch, whole)
        return {"loss": loss, "blocks": blocks, "sums": sums}
    context_kv, base_share = _context(setup, borrowed, params, features, batch), setup.weights.base_share(step)

    def one(blocks: Blocks) -> dict[str, Any]:
        loss, (_, sums) = drafter_loss(setup, params, borrowed, features, blocks, base_share, whole, context_kv)
        return {"loss": loss, "blocks": jnp.sum(blocks.keep_BxN), "sums": sums}

    return _over_blocks(setup, batch, one)


def _block_totals(
    setup: Setup,
    params: Params,
    borrowed: Borrowed,
    step: jax.Array,
    whole: SlotWeights,
    features: Features,
    pack: Pack,
) -> Totals:
    base_share = setup.weights.base_share(step)

    def loss(params: Params, context_kv: ContextKV, blocks: Blocks) -> tuple[jax.Array, tuple[Sums, jax.Array]]:
        value, (_, sums) = drafter_loss(setup, params, borrowed, features, blocks, base_share, whole, context_kv)
        return value, (sums, jnp.sum(blocks.keep_BxN))

    def one(blocks: Blocks) -> tuple[Totals, ContextKV]:
        gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (value, (sums, count)), (grads, d_context) = gradient(params, context_kv, blocks)
        return Totals(grads, value, sums, count), d_context

    context_kv, pull = jax.vjp(lambda params: _context(setup, borrowed, params, features, pack), params)
    totals, d_context = _over_blocks(setup, pack, one)
    (grads,) = pull(jax.tree.map(lambda d, a: d.astype(a.dtype), d_context, context_kv))
    return totals.replace(grads=_add(totals.grads, grads))


def _context(setup: Setup, borrowed: Borrowed, params: Params, features: Features, pack: Pack) -> ContextKV:
    """What all blocks of a pack share."""
    low, states = computed_in(borrowed.embedding_VxH.dtype, params, features)
    return run_context(setup.drafter, low, borrowed, states.taps_BxSxMH, pack.position_DxT)


def _over_blocks(setup: Setup, pack: Pack, one: Callable[[Blocks], Any]) -> Any:
    """The sum of what `one` gives of a pack's blocks, some of them at a time."""

    def some(i: jax.Array | int) -> Any:
        anchors, keep = (jax.lax.dynamic_index_in_dim(a, i, 1, keepdims=False) for a in (anchor_DxCxN, keep_DxCxN))
        return one(_blocks(setup, pack, anchors, keep))

    anchor_DxCxN, keep_DxCxN = jnp.asarray(pack.anchor_DxCxN), jnp.asarray(pack.keep_DxCxN)
    if anchor_DxCxN.shape[1] == 1:  # of a loop the compiler would compute the first forward pass outside, and again
        return jax.tree.map(lambda a: a.astype(_wide(a.dtype)), some(0))
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, _wide(a.dtype)), jax.eval_shape(some, 0))
    used = most(jnp.max(jnp.sum(jnp.any(keep_DxCxN, axis=-1), axis=-1)))
    return jax.lax.fori_loop(0, used, lambda i, added: _add(added, some(i)), zeros)


def _blocks(setup: Setup, pack: Pack, anchor_DxN: jax.Array, keep_DxN: jax.Array) -> Blocks:
    tokens, mask, position = map(jnp.asarray, (pack.token_DxT, pack.loss_mask_DxT, pack.position_DxT))
    return make_blocks(tokens, mask, anchor_DxN, keep_DxN, setup.drafter.config.num_drafts, position)


def _wide(dtype: jnp.dtype) -> jnp.dtype:
    """In what many gradients or counts are added: at least float32, if they are not counts."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


add_totals = jax.jit(_add, donate_argnums=0)


@functools.partial(jax.jit, static_argnames="setup", donate_argnames="state")
def apply_gradients(setup: Setup, state: TrainState, totals: Totals) -> tuple[TrainState, dict[str, Any]]:
    """The optimizer's step, and the metrics of what it was taken for."""
    updates, opt_state = setup.optimizer.update(totals.grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    state = TrainState(params, opt_state, state.step + 1, averaged(state.ema, params, setup.ema, state.step))
    norm = optax.global_norm(totals.grads)
    return stored(state), {"loss": totals.loss, "grad_norm": norm, "blocks": totals.blocks, "sums": totals.sums}
