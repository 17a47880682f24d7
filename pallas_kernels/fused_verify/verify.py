"""Acceptance, bonus and residual from what one pass over the head leaves of every row.

The noise of a row is that of the one draw that may be asked of it: the bonus token's in a request's last row, the
residual's in the others. So the best candidate of a last row *is* its bonus token. The residual's winner maximises
log(p - q) + noise, which is at most log p + noise: a candidate that beats by the first what no other token exceeds by
the second has won, and q is read at candidates only. Where none does, the rejected rows' logits are made, `[R, V]`.
"""

import flax.struct
import jax
import jax.numpy as jnp

from pallas_kernels.fused_verify import reference, tpu
from pallas_kernels.fused_verify.reference import LANES, Head, Query, RowStatistics
from pallas_kernels.noise import Key, Role, gumbel, position_key, uniform
from pallas_kernels.ragged_attention import Rows
from pallas_kernels.warp import Warp

BACKENDS = ("auto", "tpu", "xla")


@flax.struct.dataclass
class Drafts:
    """Drafted tokens and the law q that they were drawn from."""

    token_RxK: jax.Array  # target ids
    log_q_RxK: jax.Array  # log q(token), computed where the token was drawn
    warped_RxKxVd: jax.Array | tuple[()]  # warped draft logits; `()`: q is 1 at the drafted token
    token_ids_Vd: jax.Array | None  # target ids of the draft vocabulary, increasing


@flax.struct.dataclass
class Verified:
    """Accepted drafts of each request, the target's next token, and log-probabilities under the raw logits.

    `logprob_RxQ`: of the accepted drafts and, behind them, of the next token; what follows means nothing.
    """

    accepted_R: jax.Array
    next_R: jax.Array
    logprob_RxQ: jax.Array


@flax.struct.dataclass
class Choice:
    """A token of each row, and its raw logit."""

    id: jax.Array
    logit: jax.Array


def serves(warp: Warp) -> jax.Array:
    """Whether `fused_verify` knows all that the requests ask for: it has no top-k, top-p or min-p."""
    return ~jnp.any((warp.temperature > 0) & ((warp.top_k > 0) | (warp.top_p < 1) | (warp.min_p > 0)))


def row_statistics(hidden_NxH: jax.Array, head: Head, query: Query, backend: str = "auto") -> RowStatistics:
    """What verification needs of N rows. "auto": the kernel where the program is compiled for a TPU, else XLA."""
    if backend == "auto" and hidden_NxH.dtype.itemsize <= 4:
        return jax.lax.platform_dependent(
            hidden_NxH, head, query, tpu=tpu.row_statistics, default=reference.row_statistics
        )
    return (tpu if backend == "tpu" else reference).row_statistics(hidden_NxH, head, query)


def fused_verify(
    hidden_NxH: jax.Array,
    head: Head,
    rows: Rows,
    drafts: Drafts | None,
    temperature_R: jax.Array,
    seed: Key,
    sampler: str,
    backend: str = "auto",
) -> Verified:
    """How many drafts of each request the target confirms, and the token that follows them (exact: method.md).

    `hidden_NxH`: the target's, after the final norm, of each request's anchor and drafts. The tokens are those that
    the same seeds give with all logits in memory, but for ties within rounding. Requests without rows get values that
    mean nothing.
    """
    rejection = drafts is not None and sampler == "rejection"
    query = _query(rows, drafts, temperature_R, seed, rejection)
    stats = row_statistics(hidden_NxH, head, query, backend)
    best_N = _best(stats.score_NxC[:, :LANES], stats.id_NxC[:, :LANES], stats.logit_NxC[:, :LANES])
    block_RxQ = jnp.clip(rows.first_R[:, None] + jnp.arange(rows.block), 0, len(rows.slot_N) - 1)
    accepted_R = jnp.zeros_like(rows.count_R)
    if drafts is not None:
        accept_N = query.token_N == best_N.id
        if rejection:
            accept_N = jnp.where(query.noisy_N, _accept_sampled(stats, query, rows, drafts, seed), accept_N)
        # Only a request's first count - 1 drafts were verified.
        verified = jnp.arange(rows.block) < rows.count_R[:, None] - 1
        accepted_R = jnp.sum(jnp.cumprod(accept_N[block_RxQ] & verified, axis=1), axis=1)
    row_R = jnp.take_along_axis(block_RxQ, accepted_R[:, None], axis=1)[:, 0]
    at_row = jax.tree.map(lambda a: a[row_R], (stats, query, best_N))
    chosen = at_row[2]
    if rejection:
        rejected_R = (accepted_R < rows.count_R - 1) & (temperature_R > 0)
        residual = _residual(hidden_NxH[row_R], head, *at_row[:2], drafts, accepted_R, rejected_R)
        chosen = jax.tree.map(lambda a, b: jnp.where(rejected_R, a, b), residual, chosen)
    log_total_R = at_row[0].log_total_N
    drafted_RxQ = (stats.token_logit_N - stats.log_total_N)[block_RxQ]
    next_here = jnp.arange(rows.block) == accepted_R[:, None]
    logprob_RxQ = jnp.where(next_here, (chosen.logit - log_total_R)[:, None], drafted_RxQ)
    return Verified(accepted_R, chosen.id, logprob_RxQ)


def _query(rows: Rows, drafts: Drafts | None, temperature_R: jax.Array, seed: Key, rejection: bool) -> Query:
    """Each row judges the draft behind it, if there is one, and draws with the noise of the position behind it."""
    slot_N, position_N = rows.slot_N, rows.position_N + 1
    seed_N = tuple(word[slot_N] for word in seed)
    token_N = jnp.zeros_like(slot_N)
    if drafts is not None:
        token_N = drafts.token_RxK[slot_N, jnp.minimum(rows.offset_N, drafts.token_RxK.shape[1] - 1)]
    key_N = position_key(seed_N, position_N, Role.SAMPLE)
    if rejection:
        last_N = rows.offset_N == rows.count_R[slot_N] - 1
        residual = position_key(seed_N, position_N, Role.RESIDUAL)
        key_N = tuple(jnp.where(last_N, *words) for words in zip(key_N, residual, strict=True))
    temperature_N = temperature_R[slot_N]
    return Query(token_N, jnp.where(temperature_N > 0, temperature_N, 1), temperature_N > 0, key_N)


def _best(score_RxC: jax.Array, id_RxC: jax.Array, logit_RxC: jax.Array) -> Choice:
    """The token of the best score; of equal ones the smallest id."""
    best = score_RxC == jnp.max(score_RxC, axis=-1, keepdims=True)
    id_R = jnp.min(jnp.where(best, id_RxC, jnp.iinfo(jnp.int32).max), axis=-1)
    logit_R = jnp.max(jnp.where(best & (id_RxC == id_R[:, None]), logit_RxC, -jnp.inf), axis=-1)
    return Choice(id_R, logit_R)


def _accept_sampled(stats: RowStatistics, query: Query, rows: Rows, drafts: Drafts, seed: Key) -> jax.Array:
    """`[N]` whether u < p(x)/q(x), in logarithms, with q as it was when x was drawn."""
    slot_N = rows.slot_N
    log_q_N = drafts.log_q_RxK[slot_N, jnp.minimum(rows.offset_N, drafts.log_q_RxK.shape[1] - 1)]
    log_p_N = stats.token_logit_N / query.temperature_N - stats.log_total_warped_N
    key_N = position_key(tuple(word[slot_N] for word in seed), rows.position_N + 1, Role.ACCEPT)
    return jnp.log(uniform(key_N)) < log_p_N - log_q_N


def _residual(
    hidden_RxH: jax.Array,
    head: Head,
    stats: RowStatistics,
    query: Query,
    drafts: Drafts,
    accepted_R: jax.Array,
    rejected_R: jax.Array,
) -> Choice:
    """A token from max(p - q, 0), normalised, where `rejected_R`; all arguments are of the rejected rows.

    Where rounding leaves no mass, from p: there p and q are equal.
    """
    slot_R = jnp.minimum(accepted_R, drafts.token_RxK.shape[1] - 1)

    def scores(logit_RxC: jax.Array, id_RxC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """log p + noise and log(p - q) + noise."""
        log_p = logit_RxC / query.temperature_N[:, None] - stats.log_total_warped_N[:, None]
        left = jnp.exp(log_p) - _law(drafts, slot_R, id_RxC)
        noise = gumbel(tuple(word[:, None] for word in query.key_N), id_RxC).astype(log_p.dtype)
        return log_p + noise, jnp.where(left > 0, jnp.log(left), -jnp.inf) + noise

    _, score_RxC = scores(stats.logit_NxC, stats.id_NxC)
    chosen = _best(score_RxC, stats.id_NxC, stats.logit_NxC)
    sure_R = jnp.max(score_RxC, axis=-1) > stats.bound_N - stats.log_total_warped_N

    def from_logits() -> Choice:
        logits = head.logits(hidden_RxH).astype(stats.logit_NxC.dtype)
        id_RxV = jnp.broadcast_to(jnp.arange(head.vocab_size, dtype=jnp.int32), logits.shape)
        plain, score = scores(logits, id_RxV)
        return _best(jnp.where(jnp.any(score > -jnp.inf, axis=-1, keepdims=True), score, plain), id_RxV, logits)

    unsure_R = rejected_R & ~sure_R
    full = jax.lax.cond(jnp.any(unsure_R), from_logits, lambda: chosen)
    return jax.tree.map(lambda a, b: jnp.where(unsure_R, a, b), full, chosen)


def _law(drafts: Drafts, slot_R: jax.Array, id_RxC: jax.Array) -> jax.Array:
    """`[R, C]` q of each request's draft `slot_R` at some target ids."""
    request = jnp.arange(len(slot_R))
    token_Rx1 = drafts.token_RxK[request, slot_R][:, None]
    if isinstance(drafts.warped_RxKxVd, tuple):
        return (id_RxC == token_Rx1).astype(drafts.log_q_RxK.dtype)
    place = jnp.searchsorted(drafts.token_ids_Vd, jnp.concatenate([id_RxC, token_Rx1], axis=1))
    place = jnp.minimum(place, len(drafts.token_ids_Vd) - 1)
    known_RxC = drafts.token_ids_Vd[place[:, :-1]] == id_RxC
    warped = drafts.warped_RxKxVd[request[:, None], slot_R[:, None], place]
    # log q of the drafted token gives the sum that normalises q.
    log_q = warped[:, :-1] - warped[:, -1:] + drafts.log_q_RxK[request, slot_R][:, None]
    return jnp.where(known_RxC, jnp.exp(log_q), 0)
