"""One round, jitted: draft, verify, accept, commit. All state stays on the device; the host reads what was emitted."""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.decoding.caches import Pools, view_pools, write_pools
from dspark_jax.decoding.draft import propose
from dspark_jax.decoding.sampling import SlotSampling
from dspark_jax.decoding.verify import Verdict, verify
from dspark_jax.models.attention import attend_rows
from dspark_jax.models.drafter import Borrowed, DSpark
from dspark_jax.models.eagle3 import Eagle3
from dspark_jax.models.layers import Params
from dspark_jax.models.target import Decoder, DecoderOutput
from pallas_kernels.ragged_attention import Rows, ragged_rows


@dataclasses.dataclass(frozen=True)
class Models:
    """The networks of a round, without their weights (static). `drafter` None: plain decoding."""

    target: Decoder
    drafter: DSpark | Eagle3 | None
    sampler: str


@flax.struct.dataclass
class Weights:
    """The weights of a round, never changed by it."""

    target: Params
    drafter: Params = None
    borrowed: Borrowed | None = None


@flax.struct.dataclass
class Caches:
    """Target keys and values, and the drafter's keys and values of the same positions (its context)."""

    target: Pools
    draft: Pools | None


@flax.struct.dataclass
class Slots:
    """Every slot's request. The cache holds its tokens but the last one, the anchor, which the next round runs."""

    anchor_R: jax.Array  # last committed token
    length_R: jax.Array  # committed tokens, prompt and anchor included; the anchor stands at length - 1
    remaining_R: jax.Array  # tokens that may still be emitted; 0 when the request has ended
    table_RxC: jax.Array  # its pages
    carry: Any  # what its drafter keeps of the row before the anchor, `[R, ...]`
    sampling: SlotSampling


@flax.struct.dataclass
class Emitted:
    """What a dispatch of D rounds produced, for the host."""

    token_DxRxQ: jax.Array
    count_DxR: jax.Array  # emitted tokens; 0 once a request has ended
    verified_DxR: jax.Array  # drafts that were verified
    accepted_DxR: jax.Array  # drafts that were accepted and emitted
    remaining_R: jax.Array  # after the dispatch


def target_rows(
    models: Models,
    weights: Weights,
    caches: Caches,
    table_RxC: jax.Array,
    token_N: jax.Array,
    rows: Rows,
    cached_R: jax.Array,
) -> DecoderOutput:
    """The target over N rows behind the slots' cached prefixes. Reads the cache, writes nothing."""
    attend = attend_rows(models.target.config, rows, view_pools(caches.target, table_RxC, cached_R))
    return models.target.apply({"params": weights.target}, token_N, rows.position_N, attend)


def commit(
    models: Models,
    weights: Weights,
    caches: Caches,
    table_RxC: jax.Array,
    output: DecoderOutput,
    rows: Rows,
    keep_R: jax.Array,
    next_token_N: jax.Array,
    carry: Any,
) -> tuple[Caches, Any]:
    """Writes the first `keep_R` rows of each slot: the target's keys and values, and the drafter's, made from the taps.

    `next_token_N`: the token after each row to keep. Returns the caches and the slots' new carry.
    """
    keep_N = rows.offset_N < keep_R[rows.slot_N]
    target = write_pools(caches.target, output.kv, table_RxC, rows, keep_N)
    if models.drafter is None:
        return Caches(target, None), carry
    variables, module = {"params": weights.drafter}, type(models.drafter)
    kv = models.drafter.apply(
        variables, output.taps_NxMH, rows.position_N, next_token_N, weights.borrowed, method=module.context
    )
    last_R = jnp.clip(rows.first_R + keep_R - 1, 0, len(keep_N) - 1)
    fresh = models.drafter.apply(variables, output.taps_NxMH[last_R], method=module.carry)
    carry = jax.tree.map(lambda new, old: jnp.where(keep_R[:, None] > 0, new, old), fresh, carry)
    return Caches(target, write_pools(caches.draft, kv, table_RxC, rows, keep_N)), carry


def empty_carry(drafter: DSpark | Eagle3 | None, slots: int, dtype: jnp.dtype) -> Any:
    """The carry of slots that have committed nothing."""
    if not isinstance(drafter, Eagle3):
        return ()
    return jnp.zeros((slots, drafter.config.decoder.hidden_size), dtype)


@functools.partial(jax.jit, static_argnames=("models", "context_pages"), donate_argnames="caches")
def prefill(
    models: Models,
    weights: Weights,
    caches: Caches,
    table_RxC: jax.Array,
    token_RxQ: jax.Array,
    next_token_RxQ: jax.Array,
    start_R: jax.Array,
    count_R: jax.Array,
    carry: Any,
    context_pages: int,
) -> tuple[Caches, Any]:
    """Caches `count_R` prompt tokens of each slot from position `start_R` on; what lies before is cached already.

    Returns the caches and the slots' carry, which goes into the next chunk.
    """
    slots, block = token_RxQ.shape
    rows = ragged_rows(count_R, start_R, slots * block, block)
    table = table_RxC[:, :context_pages]
    output = target_rows(models, weights, caches, table, token_RxQ[rows.slot_N, rows.offset_N], rows, start_R)
    following = next_token_RxQ[rows.slot_N, rows.offset_N]
    return commit(models, weights, caches, table_RxC, output, rows, count_R, following, carry)


def decode_round(
    models: Models, weights: Weights, caches: Caches, slots: Slots, drafts: int, context_pages: int
) -> tuple[Caches, Slots, tuple[jax.Array, jax.Array, jax.Array, jax.Array]]:
    """One round of every slot with `drafts` drafted tokens each. Slots that have ended take part in nothing."""
    table = slots.table_RxC[:, :context_pages]
    active_R = slots.remaining_R > 0
    cached_R = slots.length_R - 1
    proposal, token_ids = None, None
    block_RxQ = slots.anchor_R[:, None]
    if drafts:
        proposal = propose(
            models.drafter,
            weights.drafter,
            weights.borrowed,
            slots.anchor_R,
            view_pools(caches.draft, table, cached_R),
            slots.carry,
            slots.sampling,
            models.sampler,
            drafts,
        )
        token_ids = weights.borrowed.token_ids_Vd
        block_RxQ = jnp.concatenate([block_RxQ, proposal.token_RxK], axis=1)
    count_R = jnp.where(active_R, drafts + 1, 0)
    rows = ragged_rows(count_R, cached_R, block_RxQ.size, drafts + 1)
    output = target_rows(models, weights, caches, table, block_RxQ[rows.slot_N, rows.offset_N], rows, cached_R)
    logits = models.target.apply({"params": weights.target}, output.hidden_NxH, method=Decoder.logits)
    verdict = verify(logits, rows, proposal, token_ids, slots.sampling, models.sampler)
    emitted_RxQ, emitted_R, remaining_R = _emit(block_RxQ, verdict, slots, active_R)
    following = emitted_RxQ[rows.slot_N, rows.offset_N]
    caches, carry = commit(models, weights, caches, slots.table_RxC, output, rows, emitted_R, following, slots.carry)
    last = jnp.take_along_axis(emitted_RxQ, jnp.maximum(emitted_R - 1, 0)[:, None], axis=1)[:, 0]
    slots = slots.replace(
        anchor_R=jnp.where(active_R, last, slots.anchor_R).astype(jnp.int32),
        length_R=(slots.length_R + emitted_R).astype(jnp.int32),
        remaining_R=remaining_R.astype(jnp.int32),
        carry=carry,
    )
    # A drafted token counts as accepted only if it was emitted: a stop or the limit may have cut it off.
    return (
        caches,
        slots,
        (emitted_RxQ, emitted_R, jnp.maximum(count_R - 1, 0), jnp.minimum(verdict.accepted_R, emitted_R)),
    )


def _emit(
    block_RxQ: jax.Array, verdict: Verdict, slots: Slots, active_R: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Accepted drafts and the next token, cut at the first stop token and at the token limit.

    Returns tokens `[R, Q]`, how many of them count, and the tokens that remain (0: ended).
    """
    index = jnp.arange(block_RxQ.shape[1])
    shifted = jnp.roll(block_RxQ, -1, axis=1)  # drafts, moved to the front
    token_RxQ = jnp.where(index == verdict.accepted_R[:, None], verdict.next_R[:, None], shifted)
    count_R = jnp.minimum(verdict.accepted_R + 1, slots.remaining_R)
    stop_RxQ = jnp.any(token_RxQ[:, :, None] == slots.sampling.stop_RxE[:, None], axis=-1) & (index < count_R[:, None])
    stopped_R = jnp.any(stop_RxQ, axis=1)
    count_R = jnp.where(stopped_R, jnp.argmax(stop_RxQ, axis=1) + 1, count_R)
    count_R = jnp.where(active_R, count_R, 0)
    remaining_R = jnp.where(stopped_R, 0, slots.remaining_R - count_R)
    return token_RxQ, count_R, jnp.where(active_R, remaining_R, slots.remaining_R)


@functools.partial(
    jax.jit,
    static_argnames=("models", "active", "drafts", "context_pages", "rounds"),
    donate_argnames=("caches", "slots"),
)
def decode(
    models: Models,
    weights: Weights,
    caches: Caches,
    slots: Slots,
    active: int,
    drafts: int,
    context_pages: int,
    rounds: int,
) -> tuple[Caches, Slots, Emitted]:
    """Up to `rounds` rounds of the first `active` slots in one device loop; it ends early when all have ended."""
    used = jax.tree.map(lambda a: a[:active], slots)
    zeros = jnp.zeros((rounds, active), jnp.int32)
    outs = (jnp.zeros((rounds, active, drafts + 1), jnp.int32), zeros, zeros, zeros)

    def body(carry):
        done, caches, used, outs = carry
        caches, used, out = decode_round(models, weights, caches, used, drafts, context_pages)
        return (
            done + 1,
            caches,
            used,
            tuple(all_.at[done].set(one.astype(all_.dtype)) for all_, one in zip(outs, out, strict=True)),
        )

    def more(carry):
        return (carry[0] < rounds) & jnp.any(carry[2].remaining_R > 0)

    _, caches, used, outs = jax.lax.while_loop(more, body, (0, caches, used, outs))
    slots = jax.tree.map(lambda all_, part: all_.at[:active].set(part), slots, used)
    return caches, slots, Emitted(*outs, used.remaining_R)
