"""Proposals: one parallel pass over a block of every slot, then the in-block head token by token."""

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.decoding.sampling import SlotSampling, draw, log_prob_of
from dspark_jax.models.drafter import Borrowed, DSpark
from dspark_jax.models.layers import Params
from pallas_kernels import warp as warps
from pallas_kernels.noise import Key, Role, position_key
from pallas_kernels.ragged_attention import Prefix, ragged_attention, ragged_rows


@flax.struct.dataclass
class Proposal:
    """Drafted tokens and what acceptance needs to know of the distribution q they were drawn from."""

    token_RxK: jax.Array  # target ids
    log_q_RxK: jax.Array  # log q(token), computed where the token was drawn
    warped_RxKxVd: jax.Array  # warped draft logits: the residual recomputes q from them
    confidence_RxK: jax.Array  # logits


def draft_key(sampler: str, seed: Key, anchor_R: jax.Array, slot: int) -> Key:
    """The key of the noise of slot k of a block whose anchor stands at `anchor_R` (DESIGN rule 4).

    `rejection`: by anchor and slot, so that a position drafted again gets fresh noise. `coupled`: the target's own
    noise at that absolute position.
    """
    if sampler == "coupled":
        return position_key(seed, anchor_R + 1 + slot, Role.SAMPLE)
    return position_key(seed, anchor_R, Role.DRAFT, slot)


def propose(
    module: DSpark,
    params: Params,
    borrowed: Borrowed,
    anchor_R: jax.Array,
    prefix: Prefix,
    sampling: SlotSampling,
    sampler: str,
    num_tokens: int,
) -> Proposal:
    """Drafts `num_tokens` tokens after every slot's anchor, which stands right behind its cached context."""
    size = module.config.block_size
    slots, scale = len(anchor_R), module.config.decoder.head_dim**-0.5
    rows = ragged_rows(jnp.full(slots, size), prefix.length_R, slots * size, size)

    def attend(layer, q, k, v):
        return ragged_attention(q, k, v, rows, prefix, layer, causal=False, scale=scale)

    positions = rows.position_N.reshape(slots, size)
    variables = {"params": params}
    hidden = module.apply(variables, anchor_R, positions, attend, borrowed, method=DSpark.block)
    base = module.apply(variables, hidden[:, :num_tokens], borrowed, method=DSpark.base_logits)
    state = module.apply(variables, hidden[:, 0], method=DSpark.initial_state)
    previous, steps = anchor_R, []
    for k in range(num_tokens):
        logits, confidence, state = module.apply(
            variables, k, hidden[:, k], base[:, k], state, previous, method=DSpark.step
        )
        warped = warps.apply(logits, sampling.warp)
        key = draft_key(sampler, sampling.seed, prefix.length_R, k)
        index = draw(warped, sampling.warp.temperature, key, borrowed.token_ids_Vd)
        previous = borrowed.token_ids_Vd[index]
        steps.append((previous, log_prob_of(warped, index), warped, confidence))
    return Proposal(*(jnp.stack(parts, axis=1) for parts in zip(*steps, strict=True)))
