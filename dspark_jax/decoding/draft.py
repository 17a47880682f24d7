"""Proposals: a block of every slot in one parallel pass, its in-block head token by token; Eagle3 pass by pass."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.decoding.sampling import SlotSampling, draw, log_prob_of
from dspark_jax.models.attention import attend_rows
from dspark_jax.models.drafter import Borrowed, DSpark
from dspark_jax.models.eagle3 import Eagle3
from dspark_jax.models.layers import KeysValues, Params
from dspark_jax.models.lookup import Lookup
from pallas_kernels import warp as warps
from pallas_kernels.noise import Key, Role, position_key
from pallas_kernels.ragged_attention import Prefix, ragged_rows, step_attention


@flax.struct.dataclass
class Proposal:
    """Drafted tokens and what acceptance needs to know of the distribution q they were drawn from."""

    token_RxK: jax.Array  # target ids
    log_q_RxK: jax.Array  # log q(token), computed where the token was drawn
    # Warped draft logits: the residual recomputes q from them. `()`: q is 1 at the drafted tokens.
    warped_RxKxVd: jax.Array | tuple[()]
    confidence_RxK: jax.Array  # logits
    match_R: jax.Array | None = None  # of a lookup: the length of the n-gram it found; 0: it has nothing to offer


NEVER = -1e4  # a logit whose confidence is 0


def look_up(module: Lookup, history_RxT: jax.Array, length_R: jax.Array, num_tokens: int) -> Proposal:
    """Copies `num_tokens` tokens out of every slot's own text, whose first `length_R` tokens are committed.

    The drafts are a function of committed tokens: q is 1 at each of them, and whatever a schedule makes of them is a
    function of the past. Where nothing matches, the confidence is 0.
    """
    token_RxK, match_R = module.continuation(history_RxT, length_R)
    token_RxK = token_RxK[:, :num_tokens]
    confidence_R = jnp.where(match_R > 0, jnp.inf, NEVER)
    log_q_RxK = jnp.zeros(token_RxK.shape)
    return Proposal(token_RxK, log_q_RxK, (), confidence_R[:, None] + log_q_RxK, match_R)


def draft_key(sampler: str, seed: Key, anchor_R: jax.Array, slot: jax.Array | int) -> Key:
    """The key of the noise of slot k of a block whose anchor stands at `anchor_R` (DESIGN rule 4).

    `rejection`: by anchor and slot, so that a position drafted again gets fresh noise. `coupled`: the target's own
    noise at that absolute position.
    """
    if sampler == "coupled":
        return position_key(seed, anchor_R + 1 + slot, Role.SAMPLE)
    return position_key(seed, anchor_R, Role.DRAFT, slot)


# step(k, state, previous token [R]) -> (logits [R, Vd], confidence logits [R], state)
Step = Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, jax.Array, Any]]


def propose(
    module: DSpark | Eagle3,
    params: Params,
    borrowed: Borrowed,
    anchor_R: jax.Array,
    prefixes: tuple[Prefix, ...],
    carry: Any,
    sampling: SlotSampling,
    sampler: str,
    num_tokens: int,
    adjust: Callable[[jax.Array, jax.Array], jax.Array] = lambda logits, drafted: logits,
    attention: str = "auto",
) -> Proposal:
    """Drafts `num_tokens` tokens after every slot's anchor, which stands right behind its cached context.

    `carry`: what the drafter keeps of each slot's last committed row (`module.carry`). `adjust(logits, drafted)`: what
    the requests change in the logits of a step, given the tokens drafted before it (`[R, K]`, -1 for those to come).
    `attention`: backend of `ragged_attention`.
    """
    parts = (module, params, borrowed, anchor_R, prefixes, carry, num_tokens)
    step, state = _begin_block(*parts, attention) if isinstance(module, DSpark) else _begin_eagle3(*parts)

    # A loop, although the steps are few: unrolled they take as many times longer to compile.
    def draft_one(loop, k):
        state, previous, drafted_RxK = loop
        logits, confidence, state = step(k, state, previous)
        warped = warps.apply(adjust(logits, drafted_RxK), sampling.warp)
        key = draft_key(sampler, sampling.seed, prefixes[0].length_R, k)
        index = draw(warped, sampling.warp, key, borrowed.token_ids_Vd)
        token = borrowed.token_ids_Vd[index].astype(jnp.int32)
        return (state, token, drafted_RxK.at[:, k].set(token)), (log_prob_of(warped, index), warped, confidence)

    nothing = jnp.full((len(anchor_R), num_tokens), -1, jnp.int32)
    (_, _, token_RxK), rest = jax.lax.scan(draft_one, (state, anchor_R, nothing), jnp.arange(num_tokens))
    return Proposal(token_RxK, *(jnp.moveaxis(part, 0, 1) for part in rest))


def _begin_block(
    module: DSpark,
    params: Params,
    borrowed: Borrowed,
    anchor_R: jax.Array,
    prefixes: tuple[Prefix, ...],
    carry: Any,
    num_tokens: int,
    attention: str,
) -> tuple[Step, Any]:
    """The parallel pass; a step is the in-block head's."""
    size, slots = module.config.block_size, len(anchor_R)
    rows = ragged_rows(jnp.full(slots, size), prefixes[0].length_R, slots * size, size)
    attend = attend_rows(module.config.decoder, rows, prefixes, attention)
    positions = rows.position_N.reshape(slots, size)

    def call(method: Callable, *args: Any) -> Any:
        return module.apply({"params": params}, *args, method=method)

    hidden = call(DSpark.block, anchor_R, positions, attend, borrowed)
    predicting = module.predicting(hidden, num_tokens)
    base = call(DSpark.base_logits, predicting, borrowed)

    def step(k: jax.Array, state: Any, previous: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        return call(DSpark.step, k, predicting[:, k], base[:, k], state, previous, borrowed)

    return step, call(DSpark.initial_state, hidden, anchor_R, borrowed)


def _begin_eagle3(
    module: Eagle3,
    params: Params,
    borrowed: Borrowed,
    anchor_R: jax.Array,
    prefixes: tuple[Prefix, ...],
    carry: jax.Array,
    num_tokens: int,
) -> tuple[Step, Any]:
    """A step is a pass over one row a slot: the last committed row first, then the drafts'.

    The last committed row pairs the target's features before the anchor with the anchor. Its keys and values are
    cached already; only its state, which the anchor has just completed, is computed here. A request whose anchor is its
    first token has no such row: its drafts start from nothing.
    """
    kind = module.config.decoder.attention[0]
    prefix = prefixes[0].replace(length_R=jnp.maximum(prefixes[0].length_R - 1, 0))

    def step(k: jax.Array, state: Any, previous: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        hidden, cached = state

        def with_own(kv: KeysValues) -> tuple[jax.Array, ...]:
            return tuple(rows.at[:, k].set(new) for rows, new in zip(cached, kv, strict=True))

        def attend(q: jax.Array, *kv: jax.Array) -> jax.Array:
            return step_attention(q, *with_own(kv), k, prefix, 0, scale=kind.softmax_scale, window=kind.window)

        hidden, logits, kv = module.apply(
            {"params": params}, hidden, previous, prefix.length_R + k, attend, borrowed, method=Eagle3.advance
        )
        return logits, jnp.full(previous.shape, jnp.inf, logits.dtype), (hidden, with_own(kv))

    own = jnp.zeros((len(anchor_R), num_tokens, kind.num_kv_heads, kind.head_dim), carry.dtype)
    return step, (carry, (own, own))
