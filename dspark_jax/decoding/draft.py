"""Proposals: a block of every slot in one parallel pass, its in-block head token by token; Eagle3 pass by pass."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.decoding.draft_steps import Adjust, Drafting, begin
from dspark_jax.decoding.sampling import SlotSampling
from dspark_jax.models.drafter import Borrowed, DSpark
from dspark_jax.models.eagle3 import Eagle3
from dspark_jax.models.layers import Params
from dspark_jax.models.lookup import Lookup
from pallas_kernels.draft_law import Law
from pallas_kernels.noise import Key, Role, position_key
from pallas_kernels.ragged_attention import Prefix


@flax.struct.dataclass
class Proposal:
    """Drafted tokens and what acceptance needs to know of the distribution q they were drawn from."""

    token_RxK: jax.Array  # target ids
    log_q_RxK: jax.Array  # log q(token), computed where the token was drawn
    law: Law | tuple[()]  # q, of which the residual asks; `()`: it is 1 at the drafted tokens
    confidence_RxK: jax.Array  # logits
    match_R: jax.Array | None = None  # of a lookup: the length of the n-gram it found; 0: it has nothing to offer
    log_largest_RxK: jax.Array | None = None  # log of the largest q, which is known before the token is


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
    adjust: Adjust | None = None,
    num_words: int | None = None,
    attention: str = "auto",
    kernels: str = "xla",
) -> Proposal:
    """Drafts `num_tokens` tokens after every slot's anchor, which stands right behind its cached context.

    `carry`: what the drafter keeps of each slot's last committed row (`module.carry`). `adjust(logits, drafted)`: what
    the requests change in the logits of a step, given the tokens drafted before it (`[R, K]`, -1 for those to come).
    `num_words`: target ids from there on are never drafted. `attention`: backend of `ragged_attention`. `kernels`:
    "tpu" and "gpu" draw by the kernel of `markov_sampler` where it can.
    """
    num_words = len(borrowed.embedding_VxH) if num_words is None else num_words
    steps = begin(
        Drafting(
            module, params, borrowed, anchor_R, prefixes, carry, sampling, num_tokens, adjust, num_words, attention,
            kernels,
        )
    )  # fmt: skip

    # A loop, although the steps are few: unrolled they take as many times longer to compile.
    def draft_one(loop, k):
        state, previous, drafted_RxK = loop
        key = draft_key(sampler, sampling.seed, prefixes[0].length_R, k)
        drawn, part, confidence, state = steps.draw(k, state, previous, drafted_RxK, key)
        token = borrowed.token_ids_Vd[drawn.index_R].astype(jnp.int32)
        return (state, token, drafted_RxK.at[:, k].set(token)), (drawn.log_q_R, part, confidence, drawn.log_largest_R)

    nothing = jnp.full((len(anchor_R), num_tokens), -1, jnp.int32)
    (_, _, token_RxK), rest = jax.lax.scan(draft_one, (steps.state, anchor_R, nothing), jnp.arange(num_tokens))
    log_q, parts, confidence, log_largest = (jnp.moveaxis(a, 0, 1) for a in rest)
    return Proposal(token_RxK, log_q, steps.law(parts), confidence, log_largest_RxK=log_largest)
