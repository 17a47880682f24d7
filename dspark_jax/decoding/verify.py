"""Acceptance: how many drafted tokens the target confirms, and the token that follows them."""

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.decoding.draft import Proposal
from dspark_jax.decoding.sampling import SlotSampling, argmax, draw, log_prob_of
from pallas_kernels import warp as warps
from pallas_kernels.noise import Role, position_key, uniform
from pallas_kernels.ragged_attention import Rows


@flax.struct.dataclass
class Verdict:
    """Accepted drafts of each slot and the target's own next token (replacement or bonus)."""

    accepted_R: jax.Array
    next_R: jax.Array


def verify(
    logits_NxV: jax.Array,
    rows: Rows,
    proposal: Proposal | None,
    token_ids_Vd: jax.Array | None,
    sampling: SlotSampling,
    sampler: str,
) -> Verdict:
    """`logits_NxV`: the target's logits of each slot's anchor and drafts. Exact for every sampler (method.md)."""
    if sampler == "coupled":
        return _verify_coupled(logits_NxV, rows, proposal, sampling)
    return _verify_rejection(logits_NxV, rows, proposal, token_ids_Vd, sampling)


def block_rows(rows: Rows) -> jax.Array:
    """`[R, Q]` flat index of each slot's rows, clipped past its end."""
    return jnp.clip(rows.first_R[:, None] + jnp.arange(rows.block), 0, len(rows.slot_N) - 1)


def _leading(accept_RxK: jax.Array, rows: Rows) -> jax.Array:
    """Length of the accepted prefix; only a slot's first count - 1 drafts were verified."""
    verified = jnp.arange(accept_RxK.shape[1]) < rows.count_R[:, None] - 1
    return jnp.sum(jnp.cumprod(accept_RxK & verified, axis=1), axis=1)


def _verify_coupled(logits_NxV: jax.Array, rows: Rows, proposal: Proposal | None, sampling: SlotSampling) -> Verdict:
    """The target draws every position with noise keyed by position alone; a draft is accepted iff it is that token."""
    warp = sampling.warp.rows(rows.slot_N)
    seed = tuple(word[rows.slot_N] for word in sampling.seed)
    key = position_key(seed, rows.position_N + 1, Role.SAMPLE)
    choice_RxQ = draw(warps.apply(logits_NxV, warp), warp, key)[block_rows(rows)]
    if proposal is None:
        return Verdict(jnp.zeros_like(rows.count_R), choice_RxQ[:, 0])
    accepted = _leading(proposal.token_RxK == choice_RxQ[:, : proposal.token_RxK.shape[1]], rows)
    return Verdict(accepted, jnp.take_along_axis(choice_RxQ, accepted[:, None], axis=1)[:, 0])


def _verify_rejection(
    logits_NxV: jax.Array, rows: Rows, proposal: Proposal | None, token_ids_Vd: jax.Array | None, sampling: SlotSampling
) -> Verdict:
    """Accept x with probability min(1, p/q); the first rejected position draws from max(p - q, 0)."""
    greedy_R = sampling.warp.temperature == 0
    block = block_rows(rows)
    best_N = argmax(logits_NxV)

    def verdict(accept_RxK: jax.Array | None) -> tuple[Verdict, jax.Array]:
        """What the target would say greedily behind the accepted drafts, and the row that says it."""
        accepted = jnp.zeros_like(rows.count_R) if accept_RxK is None else _leading(accept_RxK, rows)
        row_R = jnp.take_along_axis(block, accepted[:, None], axis=1)[:, 0]
        return Verdict(accepted, best_N[row_R]), row_R

    match = None if proposal is None else proposal.token_RxK == best_N[block][:, : proposal.token_RxK.shape[1]]

    if not sampling.warp.sampled:
        return verdict(match)[0]

    def sampled() -> Verdict:
        warped_NxV = warps.apply(logits_NxV, sampling.warp.rows(rows.slot_N))
        accept = match
        if proposal is not None:
            accept = jnp.where(greedy_R[:, None], match, _accept_sampled(warped_NxV, rows, block, proposal, sampling))
        out, row_R = verdict(accept)
        position_R = rows.position_N[row_R] + 1
        drawn = _draw_next(warped_NxV[row_R], position_R, out.accepted_R, rows, proposal, token_ids_Vd, sampling)
        return Verdict(out.accepted_R, jnp.where(greedy_R, out.next_R, drawn))

    return jax.lax.cond(jnp.all(greedy_R), lambda: verdict(match)[0], sampled)


def _accept_sampled(
    warped_NxV: jax.Array, rows: Rows, block: jax.Array, proposal: Proposal, sampling: SlotSampling
) -> jax.Array:
    """`[R, K]` whether u < p(x)/q(x), in logarithms, with q as it was when x was drawn."""
    drafts = proposal.token_RxK.shape[1]
    token_N = proposal.token_RxK[rows.slot_N, jnp.minimum(rows.offset_N, drafts - 1)]
    log_p_N = log_prob_of(warped_NxV, token_N)
    position = rows.position_N[block][:, :drafts] + 1
    u = uniform(position_key(tuple(word[:, None] for word in sampling.seed), position, Role.ACCEPT))
    return jnp.log(u) < log_p_N[block][:, :drafts] - proposal.log_q_RxK


def _draw_next(
    warped_RxV: jax.Array,
    position_R: jax.Array,
    accepted_R: jax.Array,
    rows: Rows,
    proposal: Proposal | None,
    token_ids_Vd: jax.Array | None,
    sampling: SlotSampling,
) -> jax.Array:
    """The token behind the accepted drafts: from the target's distribution, or after a rejection from what it leaves.

    Both are drawn at once, each with noise of its own role: a slot needs only one of them, and noise is dear.
    """
    scores, role = warped_RxV, Role.SAMPLE
    if proposal is not None:
        rejected_R = accepted_R < rows.count_R - 1
        slot = jnp.minimum(accepted_R, proposal.token_RxK.shape[1] - 1)[:, None]
        if isinstance(proposal.law, tuple):
            left = _others(warped_RxV, jnp.take_along_axis(proposal.token_RxK, slot, axis=1))
        else:
            left = _residual(warped_RxV, proposal.law.row(slot[:, 0]), token_ids_Vd)
        scores = jnp.where(rejected_R[:, None], left, warped_RxV)
        role = jnp.where(rejected_R, Role.RESIDUAL, Role.SAMPLE)
    return draw(scores, sampling.warp, position_key(sampling.seed, position_R, role))


def _residual(warped_RxV: jax.Array, draft_RxVd: jax.Array, token_ids_Vd: jax.Array) -> jax.Array:
    """Logarithm of max(p - q, 0), not normalised. Where rounding leaves no mass, of p: there p and q are equal.

    `draft_RxVd`: warped draft logits of the rejected draft.
    """
    q = jax.nn.softmax(draft_RxVd, axis=-1)
    p = jax.nn.softmax(warped_RxV, axis=-1)
    left = jnp.maximum(p - _over_words(q.astype(p.dtype), token_ids_Vd, p.shape[-1]), 0)
    return jnp.log(jnp.where(jnp.sum(left, axis=-1, keepdims=True) > 0, left, p))


def _others(warped_RxV: jax.Array, rejected_Rx1: jax.Array) -> jax.Array:
    """The residual of a draft that was certain: p without that token; p itself where there is no other."""
    others = jnp.where(jnp.arange(warped_RxV.shape[-1]) == rejected_Rx1, -jnp.inf, warped_RxV)
    return jnp.where(jnp.max(others, axis=-1, keepdims=True) > -jnp.inf, others, warped_RxV)


def _over_words(q_RxVd: jax.Array, token_ids_Vd: jax.Array, vocab: int) -> jax.Array:
    """`[R, V]` probabilities of a drafter that may speak a part of the vocabulary only: 0 elsewhere.

    Words look their column up. Scattering columns would send all of them to every device of a mesh.
    """
    spoken = len(token_ids_Vd)
    if spoken == vocab:
        return q_RxVd
    column_V = jnp.full(vocab, spoken).at[token_ids_Vd].set(jnp.arange(spoken))
    return jnp.take(q_RxVd, column_V, axis=1, mode="fill", fill_value=0)
