"""One training step: the drafter's blocks over the target's features, the loss, AdamW. One jitted program."""

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
from dspark_jax.models.layers import Params
from dspark_jax.training.anchors import Blocks, make_blocks, sample_anchors
from dspark_jax.training.features import Features
from dspark_jax.training.losses import LossTerms, LossWeights, loss_terms, metric_sums


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a training program is compiled for (static)."""

    drafter: DSpark
    weights: LossWeights
    num_anchors: int
    optimizer: optax.GradientTransformation


@flax.struct.dataclass
class TrainState:
    """Everything a checkpoint holds: float32 parameters, optimizer state, and the number of steps taken."""

    params: Params
    opt_state: Any
    step: jax.Array


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


def make_optimizer(schedule: optax.Schedule, weight_decay: float, max_grad_norm: float) -> optax.GradientTransformation:
    """AdamW behind a global-norm clip (spec 8.2)."""
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), optax.adamw(schedule, weight_decay=weight_decay))


def draft_blocks(
    module: DSpark, params: Params, borrowed: Borrowed, taps_BxSxMH: jax.Array, blocks: Blocks
) -> tuple[jax.Array, jax.Array]:
    """Teacher-forced draft logits `[B, N, K, Vd]` and confidence logits `[B, N, K]` of packed blocks (spec 1.7)."""
    c = module.config
    batch, length = taps_BxSxMH.shape[:2]
    num_blocks, drafts = blocks.label_BxNxK.shape[1:]
    variables = {"params": params}
    position, unused = jnp.tile(jnp.arange(length), batch), jnp.zeros(batch * length, jnp.int32)
    context_kv = module.apply(
        variables, taps_BxSxMH.reshape(batch * length, -1), position, unused, borrowed, method=DSpark.context
    )
    attend = attend_blocks(c.decoder, context_kv, blocks.anchor_BxN, blocks.keep_BxN, c.block_size)
    anchor_token = jnp.where(blocks.keep_BxN, blocks.previous_BxNxK[..., 0], c.mask_token_id)
    slot_position = (blocks.anchor_BxN[..., None] + jnp.arange(c.block_size)).reshape(-1, c.block_size)
    hidden = module.apply(variables, anchor_token.reshape(-1), slot_position, attend, borrowed, method=DSpark.block)
    base = module.apply(variables, module.predicting(hidden), borrowed, method=DSpark.base_logits)
    previous = blocks.previous_BxNxK.reshape(-1, drafts)
    logits, confidence = module.apply(variables, hidden, base, previous, borrowed, method=DSpark.teacher_forced)
    return logits.reshape(batch, num_blocks, drafts, -1), confidence.reshape(batch, num_blocks, drafts)


def draft_labels(borrowed: Borrowed, label: jax.Array) -> jax.Array:
    """Target ids as indices of the draft vocabulary, -1 where it lacks them."""
    ids = borrowed.token_ids_Vd
    index = jnp.minimum(jnp.searchsorted(ids, label), len(ids) - 1)
    return jnp.where(ids[index] == label, index, -1)


def target_log_prob(borrowed: Borrowed, features: Features, source_BxNxK: jax.Array) -> jax.Array:
    """`[B, N, K, Vd]` the target's log-probabilities of the draft vocabulary, at each slot's source position."""
    logits = features.last_hidden_BxSxH @ borrowed.head_VdxH.T
    wide = jnp.promote_types(logits.dtype, jnp.float32)
    log_prob = logits.astype(wide) - features.log_total_BxS[..., None]
    flat = source_BxNxK.reshape(len(source_BxNxK), -1, 1)
    return jnp.take_along_axis(log_prob, flat, axis=1).reshape(*source_BxNxK.shape, -1)


def drafter_loss(
    setup: Setup, params: Params, borrowed: Borrowed, features: Features, blocks: Blocks
) -> tuple[jax.Array, tuple[LossTerms, dict[str, tuple[jax.Array, jax.Array]]]]:
    """The loss of a batch, its terms and the metrics' sums."""
    # Compute in the target's dtype; the optimizer keeps float32.
    dtype = borrowed.embedding_VxH.dtype
    params = jax.tree.map(lambda a: a.astype(dtype), params)
    features = features.astype(dtype)
    logits, confidence = draft_blocks(setup.drafter, params, borrowed, features.taps_BxSxMH, blocks)
    terms, accept = loss_terms(
        logits,
        confidence,
        target_log_prob(borrowed, features, blocks.source_BxNxK),
        draft_labels(borrowed, blocks.label_BxNxK),
        blocks.eval_BxNxK,
        setup.weights,
        setup.drafter.config.reduced,
    )
    return terms.total(setup.weights), (terms, metric_sums(terms, accept, confidence, blocks.eval_BxNxK))


@functools.partial(jax.jit, static_argnames="setup", donate_argnames="state")
def train_step(
    setup: Setup, borrowed: Borrowed, state: TrainState, features: Features, batch: Batch, seed_key: jax.Array
) -> tuple[TrainState, dict[str, Any]]:
    """One update. The anchors depend on the seed and the step alone, so that a resumed run repeats an unbroken one."""
    key = jax.random.fold_in(seed_key, state.step)
    anchors, keep = sample_anchors(key, batch.loss_mask_BxS, setup.num_anchors)
    blocks = make_blocks(batch.token_BxS, batch.loss_mask_BxS, anchors, keep, setup.drafter.config.num_drafts)
    loss = functools.partial(drafter_loss, setup, borrowed=borrowed, features=features, blocks=blocks)
    (value, (_, sums)), grads = jax.value_and_grad(lambda p: loss(params=p), has_aux=True)(state.params)
    updates, opt_state = setup.optimizer.update(grads, state.opt_state, state.params)
    state = TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1)
    metrics = {"loss": value, "grad_norm": optax.global_norm(grads), "blocks": jnp.sum(keep), "sums": sums}
    return state, metrics
