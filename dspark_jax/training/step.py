"""One training step: the drafter over the target's features, the loss, AdamW. One jitted program."""

import dataclasses
import functools
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from dspark_jax.data.batches import Batch
from dspark_jax.models.attention import attend_blocks
from dspark_jax.models.drafter import Borrowed, DSpark
from dspark_jax.models.eagle3 import Eagle3
from dspark_jax.models.layers import Params
from dspark_jax.training.anchors import Blocks, make_blocks, sample_anchors
from dspark_jax.training.eagle3 import Eagle3Loss, eagle3_loss, position_masks
from dspark_jax.training.features import Features
from dspark_jax.training.losses import LossTerms, LossWeights, loss_terms, metric_sums, target_log_prob

Sums = dict[str, tuple[jax.Array, jax.Array]]  # metric -> numerator, denominator


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a training program is compiled for (static). `Eagle3Loss` goes with Eagle3, which has no anchors."""

    drafter: DSpark | Eagle3
    weights: LossWeights | Eagle3Loss
    num_anchors: int
    optimizer: optax.GradientTransformation
    ema: float = 0.0  # decay of the averaged parameters; 0: there are none


@flax.struct.dataclass
class TrainState:
    """Everything a checkpoint holds: float32 parameters, optimizer state, steps taken, and the parameters' average."""

    params: Params
    opt_state: Any
    step: jax.Array
    ema: Params | None = None

    @property
    def weights(self) -> Params:
        """What is validated and exported: the average, where one is kept."""
        return self.params if self.ema is None else self.ema


def new_state(params: Params, setup: Setup) -> TrainState:
    """The state before the first step."""
    # A copy: the step donates its state, and no buffer can be given away twice.
    ema = jax.tree.map(jnp.copy, params) if setup.ema else None
    return TrainState(params, setup.optimizer.init(params), jnp.zeros((), jnp.int32), ema)


@functools.cache
def learning_rate(peak: float, total_steps: int, warmup_ratio: float) -> optax.Schedule:
    """Linear warm-up, then a cosine with the reference's hand-over factor (spec 8.2)."""
    warmup = int(warmup_ratio * total_steps)
    rest = max(total_steps - warmup, 1)
    # The reference chains two schedulers; the second starts one step late, which scales its cosine by this much.
    handoff = 2 / (1 + math.cos(math.pi / rest)) if rest > 1 else 1.0

    def schedule(step: jax.Array) -> jax.Array:
        cosine = handoff * (1 + jnp.cos(jnp.pi * (step - warmup) / rest)) / 2
        return peak * jnp.where(step < warmup, (step + 1) / max(warmup, 1), cosine)

    return schedule


def draft_blocks(
    module: DSpark, params: Params, borrowed: Borrowed, taps_BxSxMH: jax.Array, blocks: Blocks
) -> tuple[jax.Array, jax.Array]:
    """Teacher-forced draft logits `[B, N, K, Vd]` and confidence logits `[B, N, K]` of packed blocks (spec 1.7)."""
    hidden, base = run_backbone(module, params, borrowed, taps_BxSxMH, blocks)
    return run_heads(module, params, borrowed, hidden, base, blocks)


def run_backbone(
    module: DSpark, params: Params, borrowed: Borrowed, taps_BxSxMH: jax.Array, blocks: Blocks
) -> tuple[jax.Array, jax.Array]:
    """The blocks' hidden states `[B·N, block_size, H]` and their logits before the head `[B·N, K, Vd]`."""
    c = module.config
    batch, length = taps_BxSxMH.shape[:2]
    variables = {"params": params}
    position, unused = jnp.tile(jnp.arange(length), batch), jnp.zeros(batch * length, jnp.int32)
    context_kv = module.apply(
        variables, taps_BxSxMH.reshape(batch * length, -1), position, unused, borrowed, method=DSpark.context
    )
    attend = attend_blocks(c.decoder, context_kv, blocks.anchor_BxN, blocks.keep_BxN, c.block_size)
    anchor_token = jnp.where(blocks.keep_BxN, blocks.previous_BxNxK[..., 0], c.mask_token_id)
    slot_position = (blocks.anchor_BxN[..., None] + jnp.arange(c.block_size)).reshape(-1, c.block_size)
    hidden = module.apply(variables, anchor_token.reshape(-1), slot_position, attend, borrowed, method=DSpark.block)
    return hidden, module.apply(variables, module.predicting(hidden), borrowed, method=DSpark.base_logits)


def run_heads(
    module: DSpark, params: Params, borrowed: Borrowed, hidden: jax.Array, base: jax.Array, blocks: Blocks
) -> tuple[jax.Array, jax.Array]:
    """Draft and confidence logits of the backbone's output, as `draft_blocks` returns them."""
    shape = blocks.previous_BxNxK.shape
    previous = blocks.previous_BxNxK.reshape(-1, shape[-1])
    method = DSpark.teacher_forced
    logits, confidence = module.apply({"params": params}, hidden, base, previous, borrowed, method=method)
    return logits.reshape(*shape, -1), confidence.reshape(shape)


def draft_labels(borrowed: Borrowed, label: jax.Array) -> jax.Array:
    """Target ids as indices of the draft vocabulary, -1 where it lacks them."""
    ids = borrowed.token_ids_Vd
    index = jnp.minimum(jnp.searchsorted(ids, label), len(ids) - 1)
    return jnp.where(ids[index] == label, index, -1)


def drafter_loss(
    setup: Setup,
    params: Params,
    borrowed: Borrowed,
    features: Features,
    blocks: Blocks,
    base_share: jax.Array | float = 0.0,
) -> tuple[jax.Array, tuple[LossTerms, Sums]]:
    """The loss of a batch of blocks, its terms and the metrics' sums. `base_share`: of the backbone's logits in CE."""
    module, weights, reduced = setup.drafter, setup.weights, setup.drafter.config.reduced
    params, features = _computed_in(borrowed.embedding_VxH.dtype, params, features)
    hidden, base = run_backbone(module, params, borrowed, features.taps_BxSxMH, blocks)
    logits, confidence = run_heads(module, params, borrowed, hidden, base, blocks)
    log_prob_BxSxVd = target_log_prob(features, borrowed, module.config.decoder.softcap)
    source = blocks.source_BxNxK.reshape(len(blocks.source_BxNxK), -1, 1)
    log_prob = jnp.take_along_axis(log_prob_BxSxVd, source, axis=1).reshape(logits.shape)
    label, learnt = draft_labels(borrowed, blocks.label_BxNxK), blocks.eval_BxNxK
    base = base.reshape(logits.shape)
    terms, accept = loss_terms(logits, confidence, log_prob, label, learnt, weights, reduced, base)
    return terms.total(weights, base_share), (terms, metric_sums(terms, accept, confidence, learnt))


def _computed_in(dtype: jnp.dtype, params: Params, features: Features) -> tuple[Params, Features]:
    """Parameters and features in the target's dtype; the optimizer keeps float32."""
    return jax.tree.map(lambda a: a.astype(dtype), params), features.astype(dtype)


def _eagle3_step_loss(
    setup: Setup, params: Params, borrowed: Borrowed, features: Features, batch: Batch
) -> tuple[jax.Array, tuple[Sums, jax.Array]]:
    params, features = _computed_in(borrowed.embedding_VxH.dtype, params, features)
    value, sums = eagle3_loss(setup.drafter, setup.weights, params, borrowed, features, batch)
    return value, (sums, jnp.sum(position_masks(batch.loss_mask_BxS, batch.length_B, 1)))


def _block_step_loss(
    setup: Setup, params: Params, borrowed: Borrowed, features: Features, batch: Batch, key: jax.Array, step: jax.Array
) -> tuple[jax.Array, tuple[Sums, jax.Array]]:
    anchors, keep = sample_anchors(key, batch.loss_mask_BxS, setup.num_anchors)
    blocks = make_blocks(batch.token_BxS, batch.loss_mask_BxS, anchors, keep, setup.drafter.config.num_drafts)
    base_share = setup.weights.base_share(step)
    value, (_, sums) = drafter_loss(setup, params, borrowed, features, blocks, base_share)
    return value, (sums, jnp.sum(keep))


def batch_loss(
    setup: Setup, params: Params, borrowed: Borrowed, features: Features, batch: Batch, key: jax.Array, step: jax.Array
) -> tuple[jax.Array, tuple[Sums, jax.Array]]:
    """The loss of a batch, the metrics' sums, and how many blocks (of Eagle3: rows) it was taken over.

    `key` draws the anchors.
    """
    if isinstance(setup.drafter, Eagle3):
        return _eagle3_step_loss(setup, params, borrowed, features, batch)
    return _block_step_loss(setup, params, borrowed, features, batch, key, step)


@functools.partial(jax.jit, static_argnames="setup", donate_argnames="state")
def train_step(
    setup: Setup, borrowed: Borrowed, state: TrainState, features: Features, batch: Batch, seed_key: jax.Array
) -> tuple[TrainState, dict[str, Any]]:
    """One update. The anchors depend on the seed and the step alone, so that a resumed run repeats an unbroken one."""

    def loss(params: Params) -> tuple[jax.Array, tuple[Sums, jax.Array]]:
        key = jax.random.fold_in(seed_key, state.step)
        return batch_loss(setup, params, borrowed, features, batch, key, state.step)

    (value, (sums, blocks)), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    updates, opt_state = setup.optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    state = TrainState(params, opt_state, state.step + 1, averaged(state.ema, params, setup.ema, state.step))
    return state, {"loss": value, "grad_norm": optax.global_norm(grads), "blocks": blocks, "sums": sums}


def averaged(ema: Params | None, params: Params, decay: float, step: jax.Array) -> Params | None:
    """The average after a step. Its decay rises to `decay`: the first steps' weights are soon forgotten."""
    if ema is None:
        return None
    decay = jnp.minimum(decay, (1 + step) / (10 + step))
    return jax.tree.map(lambda mean, new: (decay * mean + (1 - decay) * new).astype(new.dtype), ema, params)
