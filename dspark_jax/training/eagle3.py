"""Eagle3's training-time test: the drafter reads its own states for T steps, as it will when it drafts (spec 5.3).

Row i of a sequence pairs the target's features at position i with token i + 1. Step t goes on from row i's last state
with token i + 1 + t at rotary position i + t, and says token i + 2 + t.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.data.batches import Batch
from dspark_jax.models.drafter import Borrowed
from dspark_jax.models.eagle3 import Eagle3
from dspark_jax.models.layers import KeysValues, Params
from dspark_jax.training.features import Features
from dspark_jax.training.losses import target_log_prob, total_variation
from pallas_kernels.anchor_attention import anchor_attention


@dataclasses.dataclass(frozen=True)
class Eagle3Loss:
    """How many steps a row is unrolled; step t counts step_decay ** t."""

    steps: int = 7
    step_decay: float = 0.8


@flax.struct.dataclass
class StepTerms:
    """One step of the test: the loss, and for every row whether and how well the drafter agrees with the target."""

    loss: jax.Array
    agree_BxS: jax.Array
    accept_BxS: jax.Array


def training_time_test(
    module: Eagle3,
    params: Params,
    borrowed: Borrowed,
    taps_BxSxMH: jax.Array,
    token_BxS: jax.Array,
    length_B: jax.Array,
    steps: int,
    judge: Callable[[int, jax.Array], Any],
) -> list[Any]:
    """`judge(t, draft logits [B, S, Vd])` of every step t; the logits themselves are recomputed for the gradient."""
    batch, length = token_BxS.shape
    index = jnp.arange(length)
    variables = {"params": params}

    def step(t: int, state: jax.Array, cached: tuple[KeysValues, ...]) -> tuple[jax.Array, KeysValues, Any]:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            fresh = tuple(a.reshape(batch, length, *a.shape[1:]) for a in (k, v))
            return _attend(module, q, (*cached, fresh), index < length_B[:, None] - t)

        token, position = shift(token_BxS, 1 + t).reshape(-1), jnp.tile(index + t, batch)
        state, logits, kv = module.apply(variables, state, token, position, attend, borrowed, method=Eagle3.advance)
        kv = tuple(a.reshape(batch, length, *a.shape[1:]) for a in kv)
        return state, kv, judge(t, logits.reshape(batch, length, -1))

    state = module.apply(variables, taps_BxSxMH.reshape(batch * length, -1), method=Eagle3.carry)
    cached, outs = (), []
    for t in range(steps):
        # Without this the logits of all steps would be alive at once.
        state, kv, out = jax.checkpoint(step, static_argnums=0)(t, state, cached)
        cached, outs = (*cached, kv), [*outs, out]
    return outs


def _attend(module: Eagle3, q_NxHxD: jax.Array, chunks: tuple[KeysValues, ...], keep_BxS: jax.Array) -> jax.Array:
    """Row i of the last chunk sees the rows before it in the first chunk, and row i of every chunk.

    That is a block of its own for each row, with the row as its anchor and a slot for each step.
    """
    kind = module.config.decoder.attention[0]
    batch, length = keep_BxS.shape
    k_own, v_own = (jnp.stack(parts, axis=2) for parts in zip(*chunks, strict=True))  # [B, S, T, KV, D]
    anchor = jnp.broadcast_to(jnp.arange(length), (batch, length))
    q = q_NxHxD.reshape(batch, length, 1, *q_NxHxD.shape[1:])
    out = anchor_attention(
        q, *chunks[0], k_own, v_own, anchor, keep_BxS, kind.softmax_scale, causal=True, window=kind.window
    )
    return out.reshape(q_NxHxD.shape)


def shift(array_BxS: jax.Array, count: int) -> jax.Array:
    """Row i becomes row i + count; zeros behind the last (`[B, S, ...]`)."""
    rest = array_BxS[:, count:]
    return jnp.pad(rest, [(0, 0), (0, array_BxS.shape[1] - rest.shape[1])] + [(0, 0)] * (array_BxS.ndim - 2))


def position_masks(loss_mask_BxS: jax.Array, length_B: jax.Array, steps: int) -> jax.Array:
    """`[T, B, S]` the rows that count at each step: the last token of a sequence has no successor to learn."""
    last = jnp.arange(loss_mask_BxS.shape[1]) == length_B[:, None] - 1
    first = (loss_mask_BxS > 0.5) & ~last
    return jnp.stack([shift(first, t) for t in range(steps)])


def eagle3_loss(
    module: Eagle3,
    settings: Eagle3Loss,
    params: Params,
    borrowed: Borrowed,
    features: Features,
    batch: Batch,
    sequences: jax.Array | int | None = None,
) -> tuple[jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
    """The loss of a batch and the metrics' sums.

    A step's loss is the sum over its rows of the cross entropy with the target's whole distribution, over B·S: rows
    that are masked or padding count in the divisor. `sequences`: B of the whole update, of which this batch is a part;
    None: it is all. A reduced drafter learns the part of the distribution that it can
    speak, and has the rest missed.
    """
    config = module.config
    target_BxSxVd = target_log_prob(features, borrowed, config.decoder.softcap)
    mask_TxBxS = position_masks(batch.loss_mask_BxS, batch.length_B, settings.steps)
    own = jnp.sum(jnp.asarray(batch.length_B) > 0)  # an empty sequence fills the last device's share
    size = (own if sequences is None else sequences) * mask_TxBxS.shape[-1]

    def judge(t: int, logits: jax.Array) -> StepTerms:
        log_p = shift(target_BxSxVd, 1 + t)
        cross_entropy = -jnp.sum(jnp.exp(log_p) * jax.nn.log_softmax(logits.astype(log_p.dtype)), axis=-1)
        accept = jnp.clip(1 - total_variation(logits, log_p, config.reduced), 0, 1)
        agree = jnp.argmax(logits, axis=-1) == jnp.argmax(log_p, axis=-1)
        loss = jnp.sum(jnp.where(mask_TxBxS[t], cross_entropy, 0)) / size
        return StepTerms(loss, agree, jax.lax.stop_gradient(accept))

    taps, token, length = features.taps_BxSxMH, batch.token_BxS, batch.length_B
    terms = training_time_test(module, params, borrowed, taps, token, length, settings.steps, judge)
    loss = sum(settings.step_decay**t * one.loss for t, one in enumerate(terms))
    sums = metric_sums(jax.tree.map(lambda *parts: jnp.stack(parts), *terms), mask_TxBxS)
    share = own * mask_TxBxS.shape[-1] / size
    return loss, sums | {"step_loss": (sums["step_loss"][0], sums["step_loss"][1] * share)}


def metric_sums(terms: StepTerms, mask_TxBxS: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Each metric as (numerator, denominator), to be summed over steps and hosts. `terms` are stacked `[T, ...]`.

    `accuracy` of a reduced drafter is agreement with the most likely token among those it speaks.
    """
    first = mask_TxBxS[0]

    def rate(hit_TxBxS: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sum(hit_TxBxS * mask_TxBxS, axis=(1, 2)), jnp.sum(mask_TxBxS, axis=(1, 2))

    def tokens(hit_TxBxS: jax.Array) -> tuple[jax.Array, jax.Array]:
        survival = jnp.cumprod(hit_TxBxS * mask_TxBxS, axis=0)
        return jnp.sum(first * (1 + jnp.sum(survival, axis=0))), jnp.sum(first)

    return {
        "step_loss": (terms.loss, jnp.ones_like(terms.loss)),
        "accuracy": rate(terms.agree_BxS),
        "accept_rate": rate(terms.accept_BxS),
        "tau_greedy": tokens(terms.agree_BxS),
        "tau_probabilistic": tokens(terms.accept_BxS),
    }
