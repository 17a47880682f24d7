"""One training step: the frozen target's features, the drafter's blocks, the loss, AdamW. All in one jitted program."""

import dataclasses
import functools
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from dspark_jax.interop.target_io import hidden_states
from dspark_jax.models.drafter import Borrowed, DSpark
from dspark_jax.models.layers import Params
from dspark_jax.models.target import Decoder
from dspark_jax.training.anchors import Blocks, make_blocks, sample_anchors
from dspark_jax.training.losses import LossTerms, LossWeights, loss_terms, metric_sums
from pallas_kernels.anchor_attention import anchor_attention


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a training program is compiled for (static)."""

    target: Decoder
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


@flax.struct.dataclass
class Features:
    """The frozen target's view of a batch: taps, and log-probabilities of the tokens that the drafter speaks."""

    taps_BxSxMH: jax.Array
    log_prob_BxSxVd: jax.Array


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


def target_features(setup: Setup, params: Params, borrowed: Borrowed, token_BxS: jax.Array) -> Features:
    """Runs the frozen target; nothing is kept beyond the step, so no feature cache is needed."""
    batch, length = token_BxS.shape
    output = hidden_states(setup.target, params, token_BxS)
    ids = borrowed.token_ids_Vd

    def log_prob(hidden_SxH):
        logits = setup.target.apply({"params": params}, hidden_SxH, method=Decoder.logits)
        wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        spoken = wide[:, ids] if setup.drafter.config.reduced else wide
        return spoken - jax.nn.logsumexp(wide, axis=-1, keepdims=True)

    # One sequence at a time: the full-vocabulary logits of a batch would be the largest array of the step.
    log_prob_BxSxVd = jax.lax.map(log_prob, output.hidden_NxH.reshape(batch, length, -1))
    taps = output.taps_NxMH.reshape(batch, length, -1)
    return jax.lax.stop_gradient(Features(taps, log_prob_BxSxVd))


def draft_blocks(
    module: DSpark, params: Params, borrowed: Borrowed, taps_BxSxMH: jax.Array, blocks: Blocks
) -> tuple[jax.Array, jax.Array]:
    """Teacher-forced draft logits `[B, N, K, Vd]` and confidence logits `[B, N, K]` of packed blocks (spec 1.7)."""
    c = module.config
    batch, length = taps_BxSxMH.shape[:2]
    num_blocks, size = blocks.label_BxNxK.shape[1:]
    variables = {"params": params}
    position = jnp.tile(jnp.arange(length), batch)
    k_context, v_context = module.apply(
        variables, taps_BxSxMH.reshape(batch * length, -1), position, method=DSpark.context
    )
    scale = c.decoder.head_dim**-0.5

    def attend(layer, q, k, v):
        def packed(a):
            return a.reshape(batch, num_blocks, size, *a.shape[1:])

        def of_layer(a):
            return a[layer].reshape(batch, length, *a.shape[2:])

        out = anchor_attention(
            packed(q),
            of_layer(k_context),
            of_layer(v_context),
            packed(k),
            packed(v),
            blocks.anchor_BxN,
            blocks.keep_BxN,
            scale,
        )
        return out.reshape(q.shape)

    anchor_token = jnp.where(blocks.keep_BxN, blocks.previous_BxNxK[..., 0], c.mask_token_id)
    slot_position = blocks.anchor_BxN[..., None] + jnp.arange(size)
    hidden, base = module.apply(
        variables, anchor_token.reshape(-1), slot_position.reshape(-1, size), attend, borrowed, method=DSpark.block
    )
    previous = blocks.previous_BxNxK.reshape(-1, size)
    logits, confidence = module.apply(variables, hidden, base, previous, method=DSpark.teacher_forced)
    return logits.reshape(batch, num_blocks, size, -1), confidence.reshape(batch, num_blocks, size)


def draft_labels(borrowed: Borrowed, label: jax.Array) -> jax.Array:
    """Target ids as indices of the draft vocabulary, -1 where it lacks them."""
    ids = borrowed.token_ids_Vd
    index = jnp.minimum(jnp.searchsorted(ids, label), len(ids) - 1)
    return jnp.where(ids[index] == label, index, -1)


def drafter_loss(
    setup: Setup, params: Params, borrowed: Borrowed, features: Features, blocks: Blocks
) -> tuple[jax.Array, tuple[LossTerms, dict[str, tuple[jax.Array, jax.Array]]]]:
    """The loss of a batch, its terms and the metrics' sums."""
    # Compute in the target's dtype; the optimizer keeps float32.
    params = jax.tree.map(lambda a: a.astype(features.taps_BxSxMH.dtype), params)
    logits, confidence = draft_blocks(setup.drafter, params, borrowed, features.taps_BxSxMH, blocks)
    flat = blocks.source_BxNxK.reshape(blocks.source_BxNxK.shape[0], -1)
    target = jnp.take_along_axis(features.log_prob_BxSxVd, flat[..., None], axis=1).reshape(logits.shape)
    terms, accept = loss_terms(
        logits,
        confidence,
        target,
        draft_labels(borrowed, blocks.label_BxNxK),
        blocks.eval_BxNxK,
        setup.weights,
        setup.drafter.config.reduced,
    )
    return terms.total(setup.weights), (terms, metric_sums(terms, accept, confidence, blocks.eval_BxNxK))


@functools.partial(jax.jit, static_argnames="setup", donate_argnames="state")
def train_step(
    setup: Setup,
    target_params: Params,
    borrowed: Borrowed,
    state: TrainState,
    token_BxS: jax.Array,
    loss_mask_BxS: jax.Array,
    seed_key: jax.Array,
) -> tuple[TrainState, dict[str, Any]]:
    """One update. The anchors depend on the seed and the step alone, so that a resumed run repeats an unbroken one."""
    features = target_features(setup, target_params, borrowed, token_BxS)
    anchors, keep = sample_anchors(jax.random.fold_in(seed_key, state.step), loss_mask_BxS, setup.num_anchors)
    blocks = make_blocks(token_BxS, loss_mask_BxS, anchors, keep, setup.drafter.config.block_size)
    loss = functools.partial(drafter_loss, setup, borrowed=borrowed, features=features, blocks=blocks)
    (value, (_, sums)), grads = jax.value_and_grad(lambda p: loss(params=p), has_aux=True)(state.params)
    updates, opt_state = setup.optimizer.update(grads, state.opt_state, state.params)
    state = TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1)
    metrics = {"loss": value, "grad_norm": optax.global_norm(grads), "blocks": jnp.sum(keep), "sums": sums}
    return state, metrics
