"""One update from a step's micro-batches: gradients are added up one after another, then the optimizer steps.

Block drafters: all that a micro-batch's blocks share, the context's keys and values, is computed once; the blocks then
run some at a time, forward and backward. So memory does not grow with their number, nothing is computed twice, and
dummies cost at most one such part. What slots weigh is known from masks alone, and summed over all micro-batches first:
the loss is one mean over the update's slots, however it is divided, or the mean of the micro-steps' (`wholes`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from dspark_jax.data.batches import Batch
from dspark_jax.data.packing import MicroBatch, Pack
from dspark_jax.models.drafter import Borrowed
from dspark_jax.models.eagle3 import Eagle3
from dspark_jax.models.layers import Params
from dspark_jax.training.anchors import Blocks, make_blocks
from dspark_jax.training.features import Features
from dspark_jax.training.losses import SlotWeights, slot_weights, wholes
from dspark_jax.training.step import (
    ContextKV,
    Setup,
    Sums,
    TrainState,
    computed_in,
    draft_labels,
    drafter_loss,
    eagle3_step_loss,
    run_context,
)


@flax.struct.dataclass
class Totals:
    """What micro-batches add up: gradients, the loss, the metrics' sums, and blocks (of Eagle3: rows)."""

    grads: Params
    loss: jax.Array
    sums: Sums
    blocks: jax.Array


def train_step(
    setup: Setup,
    borrowed: Borrowed,
    state: TrainState,
    source: Callable[[Batch | MicroBatch], Features],
    parts: Sequence[Batch | MicroBatch],
) -> tuple[TrainState, dict[str, Any]]:
    """One update over a step's micro-batches: packs for block drafters, batches of one shape for Eagle3.

    `source` gives a micro-batch's features when its turn has come. The new state, and the step's metrics.
    """
    arrays = [part.pack if isinstance(part, MicroBatch) else part for part in parts]
    each, totals = [None] * len(parts), None
    if not isinstance(setup.drafter, Eagle3):
        each = wholes([pack_weights(setup, borrowed, pack) for pack in arrays], setup.weights.mean)
    for part, array, whole in zip(parts, arrays, each, strict=True):
        one = part_totals(setup, borrowed, state.params, state.step, source(part), array, whole, 1 / len(parts))
        totals = one if totals is None else add_totals(totals, one)
    return apply_gradients(setup, state, totals)


@functools.partial(jax.jit, static_argnames="setup")
def pack_weights(setup: Setup, borrowed: Borrowed, pack: Pack) -> SlotWeights:
    """What the slots of all blocks of a pack weigh."""
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
    whole: SlotWeights | None,
    share: float,
) -> Totals:
    """A micro-batch's part of the loss and of its gradients. `share`: of Eagle3's micro-batches, which are equal."""
    if not isinstance(setup.drafter, Eagle3):
        return _block_totals(setup, borrowed, params, step, features, batch, whole)

    def loss(params: Params) -> tuple[jax.Array, tuple[Sums, jax.Array]]:
        value, aux = eagle3_step_loss(setup, params, borrowed, features, batch)
        return value * share, aux

    (value, (sums, rows)), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return Totals(grads, value, sums, rows)


def _block_totals(
    setup: Setup,
    borrowed: Borrowed,
    params: Params,
    step: jax.Array,
    features: Features,
    pack: Pack,
    whole: SlotWeights,
) -> Totals:
    base_share = setup.weights.base_share(step)

    def context(params: Params) -> ContextKV:
        low, states = computed_in(borrowed.embedding_VxH.dtype, params, features)
        return run_context(setup.drafter, low, borrowed, states.taps_BxSxMH, pack.position_DxT)

    def loss(params: Params, context_kv: ContextKV, blocks: Blocks) -> tuple[jax.Array, tuple[Sums, jax.Array]]:
        value, (_, sums) = drafter_loss(setup, params, borrowed, features, blocks, base_share, whole, context_kv)
        return value, (sums, jnp.sum(blocks.keep_BxN))

    def some(i: jax.Array | int) -> tuple[Totals, ContextKV]:
        anchors, keep = (jax.lax.dynamic_index_in_dim(a, i, 1, keepdims=False) for a in (anchor_DxCxN, keep_DxCxN))
        one = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (value, (sums, count)), (grads, d_context) = one(params, context_kv, _blocks(setup, pack, anchors, keep))
        return Totals(grads, value, sums, count), d_context

    anchor_DxCxN, keep_DxCxN = jnp.asarray(pack.anchor_DxCxN), jnp.asarray(pack.keep_DxCxN)
    context_kv, pull = jax.vjp(context, params)
    zeros = jax.tree.map(_wide_zeros, jax.eval_shape(some, 0))
    used = jnp.max(jnp.sum(jnp.any(keep_DxCxN, axis=-1), axis=-1))
    totals, d_context = jax.lax.fori_loop(0, used, lambda i, added: _add(added, some(i)), zeros)
    (grads,) = pull(jax.tree.map(lambda d, a: d.astype(a.dtype), d_context, context_kv))
    return totals.replace(grads=_add(totals.grads, grads))


def _blocks(setup: Setup, pack: Pack, anchor_DxN: jax.Array, keep_DxN: jax.Array) -> Blocks:
    tokens, mask, position = map(jnp.asarray, (pack.token_DxT, pack.loss_mask_DxT, pack.position_DxT))
    return make_blocks(tokens, mask, anchor_DxN, keep_DxN, setup.drafter.config.num_drafts, position)


def _wide_zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """What many gradients or counts are added to: in at least float32, if they are not counts."""
    floats = jnp.issubdtype(shape.dtype, jnp.floating)
    return jnp.zeros(shape.shape, jnp.promote_types(shape.dtype, jnp.float32) if floats else shape.dtype)


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


add_totals = jax.jit(_add, donate_argnums=0)


@functools.partial(jax.jit, static_argnames="setup", donate_argnames="state")
def apply_gradients(setup: Setup, state: TrainState, totals: Totals) -> tuple[TrainState, dict[str, Any]]:
    """The optimizer's step, and the metrics of what it was taken for."""
    updates, opt_state = setup.optimizer.update(totals.grads, state.opt_state, state.params)
    state = TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1)
    norm = optax.global_norm(totals.grads)
    return state, {"loss": totals.loss, "grad_norm": norm, "blocks": totals.blocks, "sums": totals.sums}
