"""One round, jitted: draft, verify, accept, commit. All state stays on the device; the host reads what was emitted."""

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.decoding.adjust import adjusted, forbid_padding
from dspark_jax.decoding.caches import view_pools, write_pools
from dspark_jax.decoding.draft import Proposal, look_up, propose
from dspark_jax.decoding.fused import reads_head, target_head, verify_hidden
from dspark_jax.decoding.schedule import Policy, plan
from dspark_jax.decoding.sink import RowFeatures, tap_rows
from dspark_jax.decoding.state import Caches, Emitted, Logprobs, Models, Slots, Weights
from dspark_jax.decoding.verify import Verdict, block_rows, verify
from dspark_jax.models.attention import attend_rows
from dspark_jax.models.drafter import DSpark
from dspark_jax.models.eagle3 import Eagle3
from dspark_jax.models.layers import KeysValues
from dspark_jax.models.lookup import Lookup
from dspark_jax.models.target import Decoder, DecoderOutput
from dspark_jax.parallel import top_k
from dspark_jax.scheduling.scheduler import RoundCost
from pallas_kernels.ragged_attention import Rows, ragged_rows


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
    attend = attend_rows(models.target.config, rows, view_pools(caches.target, table_RxC, cached_R), models.attention)
    return models.target.apply({"params": weights.target_for(len(token_N))}, token_N, rows.position_N, attend)


@flax.struct.dataclass
class FreshRows:
    """What a step computed for the caches: keys and values of all its rows, to be written for those that count."""

    target: tuple[KeysValues, ...]
    draft: tuple[KeysValues, ...]
    carry: Any

    def padded(self, num_rows: int) -> "FreshRows":
        """With rows up to `num_rows`: steps over different numbers of rows then look alike."""
        pad = lambda a: jnp.pad(a, ((0, 0), (0, num_rows - a.shape[1]), (0, 0), (0, 0)))  # noqa: E731
        return self.replace(target=jax.tree.map(pad, self.target), draft=jax.tree.map(pad, self.draft))


def fresh_rows(
    models: Models,
    weights: Weights,
    output: DecoderOutput,
    rows: Rows,
    keep_R: jax.Array,
    next_token_N: jax.Array,
    carry: Any,
) -> FreshRows:
    """The target's keys and values, and the drafter's, made from the taps; each slot keeps its first `keep_R` rows.

    `next_token_N`: the token after each row to keep.
    """
    if not models.drafts_by_network:
        return FreshRows(output.kv, (), carry)
    variables, module = {"params": weights.drafter}, type(models.drafter)
    taps_NxMH = output.taps_NxMH[:, : len(models.drafter.config.tap_layers) * output.hidden_NxH.shape[-1]]
    draft = models.drafter.apply(
        variables, taps_NxMH, rows.position_N, next_token_N, weights.borrowed, method=module.context
    )
    last_R = jnp.clip(rows.first_R + keep_R - 1, 0, len(rows.slot_N) - 1)
    fresh = models.drafter.apply(variables, taps_NxMH[last_R], method=module.carry)
    carry = jax.tree.map(lambda new, old: jnp.where(keep_R[:, None] > 0, new, old), fresh, carry)
    return FreshRows(output.kv, draft, carry)


def commit(caches: Caches, fresh: FreshRows, table_RxC: jax.Array, rows: Rows, keep_R: jax.Array) -> Caches:
    """Writes the first `keep_R` rows of each slot and drops the others."""
    keep_N = rows.offset_N < keep_R[rows.slot_N]
    draft = write_pools(caches.draft, fresh.draft, table_RxC, rows, keep_N) if caches.draft else caches.draft
    return Caches(write_pools(caches.target, fresh.target, table_RxC, rows, keep_N), draft)


def empty_carry(drafter: DSpark | Eagle3 | Lookup | None, slots: int, dtype: jnp.dtype) -> Any:
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
) -> tuple[Caches, Any, RowFeatures | tuple[()]]:
    """Caches `count_R` prompt tokens of each slot from position `start_R` on; what lies before is cached already.

    Returns the caches, the slots' carry, which goes into the next chunk, and the features `[R, Q, ...]`.
    """
    slots, block = token_RxQ.shape
    rows = ragged_rows(count_R, start_R, slots * block, block)
    table = table_RxC[:, :context_pages]
    output = target_rows(models, weights, caches, table, token_RxQ[rows.slot_N, rows.offset_N], rows, start_R)
    following = next_token_RxQ[rows.slot_N, rows.offset_N]
    fresh = fresh_rows(models, weights, output, rows, count_R, following, carry)
    features = tap_rows(output, models.sink_taps, block_rows(rows))
    return commit(caches, fresh, table_RxC, rows, count_R), fresh.carry, features


@flax.struct.dataclass
class Outcome:
    """What a verified block comes to."""

    token_RxQ: jax.Array
    count_R: jax.Array  # emitted tokens
    accepted_R: jax.Array
    remaining_R: jax.Array
    fresh: FreshRows
    logprobs: Logprobs | tuple[()]
    features: RowFeatures | tuple[()]


def decode_round(
    models: Models,
    policy: Policy,
    weights: Weights,
    caches: Caches,
    slots: Slots,
    cost: RoundCost | None = None,
    *,
    drafts: int,
    context_pages: int,
    top_logprobs: int = -1,
) -> tuple[Caches, Slots, tuple[Any, ...]]:
    """One round of every slot with `drafts` drafted tokens each. Slots that have ended take part in nothing.

    `cost`: what the scheduler weighs, for policies that need it. The third result is what the round emitted, in the
    order of `Emitted`. `top_logprobs` -1: no logprobs.
    """
    table = slots.table_RxC[:, :context_pages]
    active_R, cached_R = slots.remaining_R > 0, slots.length_R - 1
    block_RxQ, proposal, schedule = slots.anchor_R[:, None], None, slots.schedule
    sizes, bucket, length_R = policy.buckets(len(cached_R), drafts), 0, jnp.where(active_R, drafts, 0)
    if drafts:
        proposal = draft(models, policy, weights, caches, slots, drafts=drafts, context_pages=context_pages)
        block_RxQ = jnp.concatenate([block_RxQ, proposal.token_RxK], axis=1)
        if policy.scheduled:
            chosen = plan(policy, schedule, proposal, slots.sampling.warp.temperature == 0, active_R, cost)
            length_R, bucket, schedule = chosen.length_R, chosen.bucket, chosen.schedule
        if proposal.match_R is not None:
            length_R = jnp.where(proposal.match_R > 0, length_R, 0)
    count_R = jnp.where(active_R, length_R + 1, 0)
    step = functools.partial(
        _verified, models, policy, weights, caches, slots, table, block_RxQ, proposal, count_R, top_logprobs
    )
    steps = [functools.partial(step, num_rows=rows, padded=sizes[-1]) for rows in sizes]
    out: Outcome = jax.lax.switch(bucket, steps) if len(steps) > 1 else steps[0]()
    rows = ragged_rows(count_R, cached_R, sizes[-1], drafts + 1)
    caches = commit(caches, out.fresh, slots.table_RxC, rows, out.count_R)
    last = jnp.take_along_axis(out.token_RxQ, jnp.maximum(out.count_R - 1, 0)[:, None], axis=1)[:, 0]
    if drafts and policy.running:
        schedule = schedule.observed(proposal, count_R - 1, out.accepted_R)
    slots = slots.replace(
        anchor_R=jnp.where(active_R, last, slots.anchor_R).astype(jnp.int32),
        length_R=(slots.length_R + out.count_R).astype(jnp.int32),
        remaining_R=out.remaining_R.astype(jnp.int32),
        carry=out.fresh.carry,
        adjust=slots.adjust.emitted(out.token_RxQ, out.count_R) if slots.adjust else (),
        schedule=schedule,
        history_RxT=_appended(slots, out) if models.reads_history else (),
    )
    # A drafted token counts as accepted only if it was emitted: a stop or the limit may have cut it off.
    accepted_R, verified_R = jnp.minimum(out.accepted_R, out.count_R), jnp.maximum(count_R - 1, 0)
    rows_run = jnp.asarray(sizes, jnp.int32)[bucket]
    confidence_RxK = proposal.confidence_RxK if drafts else jnp.zeros((len(cached_R), 0))
    emitted = (out.token_RxQ, out.count_R, verified_R, accepted_R, rows_run, confidence_RxK)
    return caches, slots, (*emitted, out.logprobs, out.features)


def _verified(
    models: Models,
    policy: Policy,
    weights: Weights,
    caches: Caches,
    slots: Slots,
    table_RxC: jax.Array,
    block_RxQ: jax.Array,
    proposal: Proposal | None,
    count_R: jax.Array,
    top_logprobs: int,
    *,
    num_rows: int,
    padded: int,
) -> Outcome:
    """The target over `num_rows` rows, which hold the first `count_R` tokens of every block, and its verdict.

    Reads the caches and writes nothing, so that a switch over row counts copies nothing (DESIGN rule 3).
    """
    rows = ragged_rows(count_R, slots.length_R - 1, num_rows, block_RxQ.shape[1])
    token_N = block_RxQ[rows.slot_N, rows.offset_N]
    output = target_rows(models, weights, caches, table_RxC, token_N, rows, slots.length_R - 1)
    token_ids = weights.borrowed.token_ids_Vd if weights.borrowed is not None else None
    judge = (rows, proposal, token_ids, slots.sampling, policy.sampler)

    def from_logits() -> tuple[Verdict, jax.Array]:
        raw = models.target.apply({"params": weights.target_for(num_rows)}, output.hidden_NxH, method=Decoder.logits)
        raw = forbid_padding(raw, models.num_tokens)
        return verify(_adjust_rows(models, slots, raw, rows, block_RxQ), *judge), raw

    head = target_head(models.target, weights.target, models.num_tokens)
    if reads_head(policy.kernels, head, output.hidden_NxH) and not slots.adjust and top_logprobs < 0:
        verdict = verify_hidden(output.hidden_NxH, head, *judge, policy.kernels, lambda: from_logits()[0])
    else:
        verdict, raw = from_logits()
    token_RxQ, emitted_R, remaining_R = _emit(block_RxQ, verdict, slots, slots.remaining_R > 0)
    following = token_RxQ[rows.slot_N, rows.offset_N]
    fresh = fresh_rows(models, weights, output, rows, emitted_R, following, slots.carry)
    logprobs = _logprobs(raw, rows, token_RxQ, top_logprobs) if top_logprobs >= 0 else ()
    features = tap_rows(output, models.sink_taps, block_rows(rows))
    return Outcome(token_RxQ, emitted_R, verdict.accepted_R, remaining_R, fresh.padded(padded), logprobs, features)


def draft(
    models: Models, policy: Policy, weights: Weights, caches: Caches, slots: Slots, *, drafts: int, context_pages: int
) -> Proposal:
    """`drafts` tokens after the anchor of every slot."""
    if models.reads_history:
        longest = context_pages * caches.target[0].page_size
        return look_up(models.drafter, slots.history_RxT[:, :longest], slots.length_R, drafts)
    prefixes = view_pools(caches.draft, slots.table_RxC[:, :context_pages], slots.length_R - 1)
    return propose(
        models.drafter, weights.drafter, weights.borrowed, slots.anchor_R, prefixes, slots.carry, slots.sampling,
        policy.sampler, drafts, draft_adjustment(slots, weights.borrowed.token_ids_Vd), models.num_tokens,
        models.attention, policy.kernels,
    )  # fmt: skip


def _appended(slots: Slots, out: Outcome) -> jax.Array:
    """The slots' tokens with those that a round emitted."""
    index_Q = jnp.arange(out.token_RxQ.shape[1])
    place_RxQ = jnp.where(index_Q < out.count_R[:, None], slots.length_R[:, None] + index_Q, slots.history_RxT.shape[1])
    slot_Rx1 = jnp.arange(len(slots.length_R))[:, None]
    return slots.history_RxT.at[slot_Rx1, place_RxQ].set(out.token_RxQ.astype(jnp.int32), mode="drop")


def draft_adjustment(slots: Slots, token_ids_Vd: jax.Array) -> Callable[..., jax.Array] | None:
    """What the requests change in the draft logits of a step, given the tokens drafted before it; None: nothing."""
    if not slots.adjust:
        return None
    slot_R, stops = jnp.arange(len(slots.anchor_R)), slots.sampling.stop_RxE
    return lambda logits, drafted_RxK: adjusted(logits, slots.adjust, slot_R, drafted_RxK, stops, token_ids_Vd)


def _adjust_rows(models: Models, slots: Slots, logits_NxV: jax.Array, rows: Rows, block_RxQ: jax.Array) -> jax.Array:
    """Each row's logits, adjusted by its slot's past and the drafts before it in the block."""
    if slots.adjust:
        drafted = jnp.where(jnp.arange(1, rows.block) <= rows.offset_N[:, None], block_RxQ[rows.slot_N, 1:], -1)
        logits_NxV = adjusted(logits_NxV, slots.adjust, rows.slot_N, drafted, slots.sampling.stop_RxE)
    return logits_NxV


def _logprobs(logits_NxV: jax.Array, rows: Rows, token_RxQ: jax.Array, top: int) -> Logprobs:
    """Log-probabilities `[R, Q]` of the emitted tokens, and the `top` likeliest ones."""
    wide = logits_NxV.astype(jnp.promote_types(logits_NxV.dtype, jnp.float32))
    total = jax.nn.logsumexp(wide, axis=-1)
    row = block_rows(rows)
    values, ids = top_k(wide, top)
    return Logprobs(wide[row, token_RxQ] - total[row], ids[row], values[row] - total[row, None])


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
    static_argnames=("models", "policy", "active", "drafts", "context_pages", "rounds", "top_logprobs"),
    donate_argnames=("caches", "slots"),
)
def decode(
    models: Models,
    policy: Policy,
    weights: Weights,
    caches: Caches,
    slots: Slots,
    cost: RoundCost | None = None,
    *,
    active: int,
    drafts: int,
    context_pages: int,
    rounds: int,
    top_logprobs: int = -1,
) -> tuple[Caches, Slots, Emitted]:
    """Up to `rounds` rounds of the first `active` slots in one device loop; it ends early when all have ended."""
    used = jax.tree.map(lambda a: a[:active], slots)
    sizes = {"drafts": drafts, "context_pages": context_pages, "top_logprobs": top_logprobs}

    @functools.partial(jax.jit, inline=True)  # so that a round, which is long, is traced once and not twice
    def one_round(caches, used):
        return decode_round(models, policy, weights, caches, used, cost, **sizes)

    shapes = jax.eval_shape(one_round, caches, used)[2]
    outs = jax.tree.map(lambda a: jnp.zeros((rounds, *a.shape), a.dtype), shapes)

    def body(carry):
        done, caches, used, outs = carry
        caches, used, out = one_round(caches, used)
        return done + 1, caches, used, jax.tree.map(lambda all_, one: all_.at[done].set(one), outs, out)

    def more(carry):
        return (carry[0] < rounds) & jnp.any(carry[2].remaining_R > 0)

    _, caches, used, outs = jax.lax.while_loop(more, body, (0, caches, used, outs))
    slots = jax.tree.map(lambda all_, part: all_.at[:active].set(part), slots, used)
    *numbers, logprobs, features = outs
    return caches, slots, Emitted(*numbers, used.remaining_R, logprobs, features)
