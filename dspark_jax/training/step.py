"""The drafter over the target's features, and its loss."""

import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

from dspark_jax.data.batches import Batch
from dspark_jax.models.attention import attend_blocks
from dspark_jax.models.drafter import Borrowed, DSpark
from dspark_jax.models.eagle3 import Eagle3
from dspark_jax.models.layers import KeysValues, Params
from dspark_jax.parallel import is_part
from dspark_jax.training.anchors import Blocks
from dspark_jax.training.eagle3 import Eagle3Loss, eagle3_loss, position_masks
from dspark_jax.training.features import Features
from dspark_jax.training.losses import LossTerms, LossWeights, SlotWeights, block_loss, metric_sums, weigh
from pallas_kernels.distribution_loss import Rows, Targets, Vocabulary

Sums = dict[str, tuple[jax.Array, jax.Array]]  # metric -> numerator, denominator
ContextKV = tuple[KeysValues, ...]  # for each kind of attention, [L, B·S, KV, D]


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a training program is compiled for (static). `Eagle3Loss` goes with Eagle3, which has no anchors."""

    drafter: DSpark | Eagle3
    weights: LossWeights | Eagle3Loss
    num_anchors: int
    optimizer: optax.GradientTransformation
    kernels: str = "xla"  # or "tpu", "gpu"; see `backends.choose`
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
    """Teacher-forced draft logits `[B, N, K, Vd]` and confidence logits `[B, N, K]` of packed blocks (spec 1.7).

    The loss does without those logits (`drafter_loss`); this is for a look at them.
    """
    hidden = run_backbone(module, params, borrowed, run_context(module, params, borrowed, taps_BxSxMH), blocks)
    factor, confidence = run_heads(module, params, borrowed, hidden, blocks)
    variables, shape = {"params": params}, blocks.previous_BxNxK.shape
    base = module.apply(variables, module.predicting(hidden), borrowed, method=DSpark.base_logits)
    logits = module.apply(variables, base, factor, method=DSpark.corrected)
    return logits.reshape(*shape, -1), confidence.reshape(shape)


def run_context(
    module: DSpark, params: Params, borrowed: Borrowed, taps_BxSxMH: jax.Array, position_BxS: jax.Array | None = None
) -> ContextKV:
    """What all blocks of the packs read: each layer's keys and values of the tapped states (`DFlash.context`).

    `position_BxS`: as in `make_blocks`.
    """
    batch, length = taps_BxSxMH.shape[:2]
    position = jnp.tile(jnp.arange(length), batch) if position_BxS is None else position_BxS.reshape(-1)
    taps, unused = taps_BxSxMH.reshape(batch * length, -1), jnp.zeros(batch * length, jnp.int32)
    return module.apply({"params": params}, taps, position, unused, borrowed, method=DSpark.context)


def run_backbone(
    module: DSpark, params: Params, borrowed: Borrowed, context_kv: ContextKV, blocks: Blocks, kernels: str = "xla"
) -> jax.Array:
    """The blocks' hidden states `[B·N, block_size, H]`."""
    c = module.config
    variables = {"params": params}
    start = blocks.anchor_BxN - blocks.position_BxN
    attend = attend_blocks(c.decoder, context_kv, blocks.anchor_BxN, start, blocks.keep_BxN, c.block_size, kernels)
    anchor_token = jnp.where(blocks.keep_BxN, blocks.previous_BxNxK[..., 0], c.mask_token_id)
    slot_position = (blocks.position_BxN[..., None] + jnp.arange(c.block_size)).reshape(-1, c.block_size)
    return module.apply(variables, anchor_token.reshape(-1), slot_position, attend, borrowed, method=DSpark.block)


def run_heads(
    module: DSpark, params: Params, borrowed: Borrowed, hidden: jax.Array, blocks: Blocks
) -> tuple[jax.Array | None, jax.Array]:
    """The in-block head's factors `[B·N, K, r]`, None without a head, and the confidence logits `[B·N, K]`."""
    previous = blocks.previous_BxNxK.reshape(-1, blocks.previous_BxNxK.shape[-1])
    return module.apply({"params": params}, hidden, previous, borrowed, method=DSpark.teacher_forced)


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
    whole: SlotWeights | None = None,
    context_kv: ContextKV | None = None,
) -> tuple[jax.Array, tuple[LossTerms, Sums]]:
    """The loss of a batch of blocks, its terms and the metrics' sums. `base_share`, `whole`: see `block_loss`.

    `context_kv`: the features' own, as `run_context` gives them; None: they are computed here, for sequences.
    """
    learnt = blocks.eval_BxNxK
    *given, confidence = _judged(setup, params, borrowed, features, blocks, context_kv)
    loss, terms, accept = block_loss(*given, confidence, learnt, setup.weights, base_share, whole, setup.kernels)
    return loss, (terms, metric_sums(terms, accept, confidence, learnt))


def drafter_weights(
    setup: Setup, params: Params, borrowed: Borrowed, features: Features, blocks: Blocks, context_kv: ContextKV
) -> SlotWeights:
    """What the slots of `drafter_loss` weigh together, where it takes the drafter to know (D-PACE)."""
    *given, _ = _judged(setup, params, borrowed, features, blocks, context_kv)
    return weigh(*given, blocks.eval_BxNxK, setup.weights, setup.kernels).sum()


def _judged(
    setup: Setup, params: Params, borrowed: Borrowed, features: Features, blocks: Blocks, context_kv: ContextKV | None
) -> tuple[Rows, Targets, Vocabulary, jax.Array]:
    """The blocks' slots as rows of the loss, what they are compared with, and the confidence logits `[B, N, K]`."""
    module, c = setup.drafter, setup.drafter.config
    params, features = computed_in(borrowed.embedding_VxH.dtype, params, features)
    if context_kv is None:
        context_kv = run_context(module, params, borrowed, features.taps_BxSxMH)
    hidden = run_backbone(module, params, borrowed, context_kv, blocks, setup.kernels)
    factor, confidence = run_heads(module, params, borrowed, hidden, blocks)
    batch, length, width = features.last_hidden_BxSxH.shape
    source = blocks.source_BxNxK + length * jnp.arange(batch)[:, None, None]
    rows = Rows(
        module.predicting(hidden).reshape(-1, width),
        None if factor is None else factor.reshape(-1, factor.shape[-1]),
        draft_labels(borrowed, blocks.label_BxNxK).reshape(-1),
        source.reshape(-1),
    )
    targets = Targets(features.last_hidden_BxSxH.reshape(-1, width), features.log_total_BxS.reshape(-1))
    correction = module.apply({"params": params}, method=DSpark.correction)
    vocabulary = Vocabulary(borrowed.head_VdxH, correction, c.decoder.softcap, c.reduced)
    return rows, targets, vocabulary, confidence.reshape(blocks.eval_BxNxK.shape)


def computed_in(dtype: jnp.dtype, params: Params, features: Features) -> tuple[Params, Features]:
    """Parameters and features in the target's dtype; the optimizer keeps float32."""
    return jax.tree.map(lambda a: a.astype(dtype), params, is_leaf=is_part), features.astype(dtype)


def eagle3_step_loss(
    setup: Setup, params: Params, borrowed: Borrowed, features: Features, batch: Batch, rows: jax.Array | int
) -> tuple[jax.Array, tuple[Sums, jax.Array]]:
    """The loss of a batch's part of an update of `rows` sequences, the metrics' sums, and how many rows are learnt."""
    params, features = computed_in(borrowed.embedding_VxH.dtype, params, features)
    params = nn.meta.unbox(params)  # its one layer is read in every step of the test
    value, sums = eagle3_loss(setup.drafter, setup.weights, params, borrowed, features, batch, rows)
    return value, (sums, jnp.sum(position_masks(batch.loss_mask_BxS, batch.length_B, 1)))


def averaged(ema: Params | None, params: Params, decay: float, step: jax.Array) -> Params | None:
    """The average after a step. Its decay rises to `decay`: the first steps' weights are soon forgotten."""
    if ema is None:
        return None
    decay = jnp.minimum(decay, (1 + step) / (10 + step))
    return jax.tree.map(lambda mean, new: (decay * mean + (1 - decay) * new).astype(new.dtype), ema, params)
