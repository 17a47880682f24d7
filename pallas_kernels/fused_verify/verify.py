"""Acceptance, bonus and residual from what one pass over the head leaves of every row.

The noise of a row is that of the one draw that may be asked of it: the bonus token's in a request's last row, the
residual's in the others. So the best candidate of a last row *is* its bonus token. The residual's winner maximises
log(p - q) + noise, which is at most log p + noise: a candidate that beats by the first what no other token exceeds by
the second has won, and q is read at candidates only. Where none does, the rejected rows' logits are made, `[R, V]`.

Rows with top-k or min-p get no noise: their candidates are the largest logits, and as long as what they keep lies
above what may be missing, the candidates are the whole law. top-p acts on what top-k leaves.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels.draft_law import Law
from pallas_kernels.fused_verify import reference, tpu
from pallas_kernels.fused_verify.reference import Head, Query, RowStatistics
from pallas_kernels.mesh import dividing
from pallas_kernels.noise import Key, Role, gumbel, position_key, uniform
from pallas_kernels.ragged_attention import Rows
from pallas_kernels.warp import Warp, thresholds


@flax.struct.dataclass
class Drafts:
    """Drafted tokens and the law q that they were drawn from."""

    token_RxK: jax.Array  # target ids
    log_q_RxK: jax.Array  # log q(token), computed where the token was drawn
    law: Law | tuple[()]  # q; `()`: it is 1 at the drafted token
    token_ids_Vd: jax.Array | None  # target ids of the draft vocabulary, increasing


@flax.struct.dataclass
class Verified:
    """Accepted drafts of each request, the target's next token, and log-probabilities under the raw logits.

    `logprob_RxQ`: of the accepted drafts and, behind them, of the next token; what follows means nothing.
    """

    accepted_R: jax.Array
    next_R: jax.Array
    logprob_RxQ: jax.Array
    unsure_R: jax.Array  # True where the residual took the logits of the rejected row
    complete: jax.Array  # False: a top-k or min-p keeps more than the candidates; nothing here is to be used


@flax.struct.dataclass
class Choice:
    """A token of each row, and its raw logit."""

    id: jax.Array
    logit: jax.Array


@flax.struct.dataclass
class Law:
    """Of N rows p(v) = exp(logit / temperature - log_total), and 0 where the logit is below `limit_N`."""

    limited_N: jax.Array  # whether there is a limit
    limit_N: jax.Array
    log_total_N: jax.Array
    drawn: Choice  # a draw


@flax.struct.dataclass
class Rejected:
    """Of each request the row of its first rejected draft, and that draft; if all were accepted, its last row."""

    row_R: jax.Array
    draft_R: jax.Array
    stats: RowStatistics  # of R rows
    query: Query
    law: Law


def serves(warp: Warp) -> jax.Array:
    """Whether `fused_verify` knows all that the requests ask for: it has no top-p without a top-k."""
    return ~jnp.any((warp.temperature > 0) & (warp.top_p < 1) & (warp.top_k == 0))


def row_statistics(hidden_NxH: jax.Array, head: Head, query: Query, backend: str = "auto") -> RowStatistics:
    """What verification needs of N rows. "auto": the kernel where the program is compiled for a TPU, else XLA.

    "gpu": a Hopper, which a program that is compiled for GPUs does not know of itself; see `backends.choose`. On a mesh
    that is set (`jax.set_mesh`) each device looks at its own words, and statistics are all that they exchange.
    """
    axes = dividing(head.vocab_size)
    if not axes or backend == "gpu":
        return _row_statistics(hidden_NxH, head, query, backend)

    def local(hidden_NxH: jax.Array, weight: jax.Array, query: Query) -> RowStatistics:
        own = head.replace(weight=weight)
        own = own.replace(first=jax.lax.axis_index(axes).astype(jnp.int32) * own.vocab_size)
        return _of_all_words(_row_statistics(hidden_NxH, own, query, backend), axes)

    words = P(None, axes) if head.transposed else P(axes)
    # What a kernel returns says nothing of the axes over which it is the same everywhere.
    split = jax.shard_map(local, in_specs=(P(), words, P()), out_specs=P(), check_vma=False)
    return split(hidden_NxH, head.weight, query)


def _of_all_words(stats: RowStatistics, axes: tuple[str, ...]) -> RowStatistics:
    """The statistics over all devices' words of each device's own. Each has classes of its own."""

    def log_total(log_total_N: jax.Array) -> jax.Array:
        return jax.nn.logsumexp(jax.lax.all_gather(log_total_N, axes), axis=0)

    def candidates(a_NxC: jax.Array) -> jax.Array:
        by_class = a_NxC.reshape(len(a_NxC), -1, stats.classes)
        return jax.lax.all_gather(by_class, axes, axis=2, tiled=True).reshape(len(a_NxC), -1)

    return RowStatistics(
        log_total_N=log_total(stats.log_total_N),
        log_total_warped_N=log_total(stats.log_total_warped_N),
        token_logit_N=jax.lax.pmax(stats.token_logit_N, axes),
        score_NxC=candidates(stats.score_NxC),
        logit_NxC=candidates(stats.logit_NxC),
        id_NxC=candidates(stats.id_NxC),
        classes=stats.classes * jax.lax.axis_size(axes),
    )


def _row_statistics(hidden_NxH: jax.Array, head: Head, query: Query, backend: str) -> RowStatistics:
    if backend == "auto" and hidden_NxH.dtype.itemsize <= 4:
        return jax.lax.platform_dependent(
            hidden_NxH, head, query, tpu=tpu.row_statistics, default=reference.row_statistics
        )
    if backend == "gpu":
        from pallas_kernels.fused_verify import gpu  # what it imports may change with any JAX: nobody else needs it

        return gpu.row_statistics(hidden_NxH, head, query)
    return (tpu if backend == "tpu" else reference).row_statistics(hidden_NxH, head, query)


def fused_verify(
    hidden_NxH: jax.Array,
    head: Head,
    rows: Rows,
    drafts: Drafts | None,
    warp: Warp,
    seed: Key,
    sampler: str,
    backend: str = "auto",
) -> Verified:
    """How many drafts of each request the target confirms, and the token that follows them (exact: method.md).

    `hidden_NxH`: the target's, after the final norm, of each request's anchor and drafts. The tokens are those that
    the same seeds give with all logits in memory, but for ties within rounding; `serves` says for which warps, and the
    result's `complete` whether the candidates sufficed for them. Requests without rows get values that mean nothing.
    `backend`: "auto", "tpu", "gpu" or "xla", as for `row_statistics`.
    """
    verified, rejected = from_candidates(hidden_NxH, head, rows, drafts, warp, seed, sampler, backend)
    if rejected is None:
        return verified

    def settled() -> Verified:
        choice = _residual_from_logits(hidden_NxH[rejected.row_R], head, rejected, drafts)
        logprob_RxQ = _with_next(verified.logprob_RxQ, verified.accepted_R, choice, rejected.stats)
        unsure_R = verified.unsure_R
        return verified.replace(
            next_R=jnp.where(unsure_R, choice.id, verified.next_R),
            logprob_RxQ=jnp.where(unsure_R[:, None], logprob_RxQ, verified.logprob_RxQ),
        )

    return jax.lax.cond(jnp.any(verified.unsure_R), settled, lambda: verified)


def from_candidates(
    hidden_NxH: jax.Array,
    head: Head,
    rows: Rows,
    drafts: Drafts | None,
    warp: Warp,
    seed: Key,
    sampler: str,
    backend: str = "auto",
) -> tuple[Verified, Rejected | None]:
    """`fused_verify` but for the next token of requests that are `unsure_R`."""
    rejection = drafts is not None and sampler == "rejection"
    query = _query(rows, drafts, warp, seed, rejection)
    stats = row_statistics(hidden_NxH, head, query, backend)
    law, complete_N = _law_of_rows(stats, query, warp.rows(rows.slot_N))
    block_RxQ = jnp.clip(rows.first_R[:, None] + jnp.arange(rows.block), 0, len(rows.slot_N) - 1)
    accepted_R = jnp.zeros_like(rows.count_R)
    if drafts is not None:
        accept_N = query.token_N == law.drawn.id
        if rejection:
            sampled_N = _accept_sampled(stats, query, law, rows, drafts, seed)
            accept_N = jnp.where(warp.temperature[rows.slot_N] > 0, sampled_N, accept_N)
        # Only a request's first count - 1 drafts were verified.
        verified = jnp.arange(rows.block) < rows.count_R[:, None] - 1
        accepted_R = jnp.sum(jnp.cumprod(accept_N[block_RxQ] & verified, axis=1), axis=1)
    row_R = jnp.take_along_axis(block_RxQ, accepted_R[:, None], axis=1)[:, 0]
    stats_R, query_R, law_R = jax.tree.map(lambda a: a[row_R], (stats, query, law))
    rejected, choice, unsure_R = None, law_R.drawn, jnp.zeros(accepted_R.shape, bool)
    if rejection:
        rejected = Rejected(row_R, jnp.minimum(accepted_R, drafts.token_RxK.shape[1] - 1), stats_R, query_R, law_R)
        residual, sure_R = _residual_among_candidates(rejected, drafts)
        rejected_R = (accepted_R < rows.count_R - 1) & (warp.temperature > 0)
        choice = jax.tree.map(lambda a, b: jnp.where(rejected_R, a, b), residual, choice)
        unsure_R = rejected_R & ~sure_R
    drafted_RxQ = (stats.token_logit_N - stats.log_total_N)[block_RxQ]
    logprob_RxQ = _with_next(drafted_RxQ, accepted_R, choice, stats_R)
    complete = jnp.all(complete_N | ~rows.valid_N)
    return Verified(accepted_R, choice.id, logprob_RxQ, unsure_R, complete), rejected


def _with_next(logprob_RxQ: jax.Array, accepted_R: jax.Array, choice: Choice, stats: RowStatistics) -> jax.Array:
    """Log-probabilities of drafts, with the next token's behind the accepted ones."""
    following = (choice.logit - stats.log_total_N)[:, None]
    return jnp.where(jnp.arange(logprob_RxQ.shape[1]) == accepted_R[:, None], following, logprob_RxQ)


def _query(rows: Rows, drafts: Drafts | None, warp: Warp, seed: Key, rejection: bool) -> Query:
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
    temperature_N = warp.temperature[slot_N]
    noisy_N = (temperature_N > 0) & ~_limited(warp)[slot_N]
    return Query(token_N, jnp.where(temperature_N > 0, temperature_N, 1), noisy_N, key_N)


def _limited(warp: Warp) -> jax.Array:
    return (warp.temperature > 0) & ((warp.top_k > 0) | (warp.top_p < 1) | (warp.min_p > 0))


def _law_of_rows(stats: RowStatistics, query: Query, warp: Warp) -> tuple[Law, jax.Array]:
    """p of N rows and a draw from it, and `[N]` whether the candidates tell it."""
    first = slice(stats.classes)
    best_N = _best(stats.score_NxC[:, first], stats.id_NxC[:, first], stats.logit_NxC[:, first])
    limited_N, no_limit_N = _limited(warp), jnp.full_like(stats.log_total_N, -jnp.inf)
    plain = Law(limited_N, no_limit_N, stats.log_total_warped_N, best_N), jnp.ones(limited_N.shape, bool)

    def with_limits() -> tuple[Law, jax.Array]:
        scaled = stats.logit_NxC / query.temperature_N[:, None]
        kept = scaled >= thresholds(scaled, warp)[:, None]
        # Of logits: a token's own quotient may be rounded otherwise elsewhere in the program.
        limit_N = jnp.min(jnp.where(kept, stats.logit_NxC, jnp.inf), axis=-1)
        kept = jnp.where(kept, scaled, -jnp.inf)
        noise = gumbel(tuple(word[:, None] for word in query.key_N), stats.id_NxC).astype(kept.dtype)
        drawn = _best(kept + noise, stats.id_NxC, stats.logit_NxC)
        log_total_N = jax.nn.logsumexp(kept, axis=-1)
        law = Law(limited_N, limit_N, log_total_N, drawn)
        law = jax.tree.map(lambda a, b: jnp.where(limited_N, a, b), law, plain[0])
        return law, ~limited_N | (limit_N > jnp.max(stats.logit_NxC[:, -stats.classes :], axis=-1))

    return jax.lax.cond(jnp.any(limited_N), with_limits, lambda: plain)


def _best(score_RxC: jax.Array, id_RxC: jax.Array, logit_RxC: jax.Array) -> Choice:
    """The token of the best score; of equal ones the smallest id."""
    best = score_RxC == jnp.max(score_RxC, axis=-1, keepdims=True)
    id_R = jnp.min(jnp.where(best, id_RxC, jnp.iinfo(jnp.int32).max), axis=-1)
    logit_R = jnp.max(jnp.where(best & (id_RxC == id_R[:, None]), logit_RxC, -jnp.inf), axis=-1)
    return Choice(id_R, logit_R)


def _accept_sampled(stats: RowStatistics, query: Query, law: Law, rows: Rows, drafts: Drafts, seed: Key) -> jax.Array:
    """`[N]` whether u < p(x)/q(x), in logarithms, with q as it was when x was drawn."""
    slot_N = rows.slot_N
    log_q_N = drafts.log_q_RxK[slot_N, jnp.minimum(rows.offset_N, drafts.log_q_RxK.shape[1] - 1)]
    log_p_N = stats.token_logit_N / query.temperature_N - law.log_total_N
    log_p_N = jnp.where(stats.token_logit_N >= law.limit_N, log_p_N, -jnp.inf)
    key_N = position_key(tuple(word[slot_N] for word in seed), rows.position_N + 1, Role.ACCEPT)
    return jnp.log(uniform(key_N)) < log_p_N - log_q_N


def _residual_scores(
    rejected: Rejected, logit_RxC: jax.Array, id_RxC: jax.Array, q_RxC: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """log p + noise and log(p - q) + noise of some tokens; -inf where q is more than p."""
    law, query = rejected.law, rejected.query
    log_p = logit_RxC / query.temperature_N[:, None] - law.log_total_N[:, None]
    log_p = jnp.where(logit_RxC >= law.limit_N[:, None], log_p, -jnp.inf)
    left = jnp.exp(log_p) - q_RxC
    noise = gumbel(tuple(word[:, None] for word in query.key_N), id_RxC).astype(log_p.dtype)
    return log_p + noise, jnp.where(left > 0, jnp.log(left), -jnp.inf) + noise


def _residual_among_candidates(rejected: Rejected, drafts: Drafts) -> tuple[Choice, jax.Array]:
    """A draw from max(p - q, 0), normalised, if it is a candidate; whether it is. All that limits keep are."""
    stats, law = rejected.stats, rejected.law
    q_RxC = _law_at(drafts, rejected.draft_R, stats.id_NxC)
    plain, score_RxC = _residual_scores(rejected, stats.logit_NxC, stats.id_NxC, q_RxC)
    sure_R = law.limited_N | (jnp.max(score_RxC, axis=-1) > stats.bound_N - law.log_total_N)
    return _best(_or_plain(score_RxC, plain), stats.id_NxC, stats.logit_NxC), sure_R


def _residual_from_logits(hidden_RxH: jax.Array, head: Head, rejected: Rejected, drafts: Drafts) -> Choice:
    """The same draw over all tokens."""
    logits = head.logits(hidden_RxH).astype(rejected.stats.logit_NxC.dtype)
    id_RxV = jnp.broadcast_to(jnp.arange(head.vocab_size, dtype=jnp.int32), logits.shape)
    plain, score = _residual_scores(rejected, logits, id_RxV, _law(drafts, rejected.draft_R, head.vocab_size))
    return _best(_or_plain(score, plain), id_RxV, logits)


def _or_plain(score_RxC: jax.Array, plain_RxC: jax.Array) -> jax.Array:
    """Where rounding leaves the residual no mass, p is drawn from: there p and q are equal."""
    return jnp.where(jnp.any(score_RxC > -jnp.inf, axis=-1, keepdims=True), score_RxC, plain_RxC)


def _place(drafts: Drafts, id_RxC: jax.Array) -> jax.Array:
    """Draft ids of target ids; of those that the drafter does not know, some draft id."""
    place = jnp.searchsorted(drafts.token_ids_Vd, id_RxC)
    return jnp.minimum(place, len(drafts.token_ids_Vd) - 1)


def _law_at(drafts: Drafts, draft_R: jax.Array, id_RxC: jax.Array) -> jax.Array:
    """`[R, C]` q of each request's draft `draft_R` at some target ids."""
    request_Rx1, draft_Rx1 = jnp.arange(len(draft_R))[:, None], draft_R[:, None]
    token_Rx1 = drafts.token_RxK[request_Rx1, draft_Rx1]
    if isinstance(drafts.law, tuple):
        return (id_RxC == token_Rx1).astype(drafts.log_q_RxK.dtype)
    place = _place(drafts, id_RxC)
    log_q = drafts.law.at(draft_R, place) - _log_total(drafts, draft_R)
    return jnp.where(drafts.token_ids_Vd[place] == id_RxC, jnp.exp(log_q), 0)


def _law(drafts: Drafts, draft_R: jax.Array, vocab_size: int) -> jax.Array:
    """`[R, V]` q of each request's draft `draft_R`."""
    if isinstance(drafts.law, tuple):
        return _law_at(drafts, draft_R, jnp.arange(vocab_size)[None])
    q = jnp.exp(drafts.law.row(draft_R) - _log_total(drafts, draft_R))
    if q.shape[1] == vocab_size:
        return q
    return jnp.zeros((len(draft_R), vocab_size), q.dtype).at[:, drafts.token_ids_Vd].set(q)


def _log_total(drafts: Drafts, draft_R: jax.Array) -> jax.Array:
    """`[R, 1]` log of the sum of the exponentials of each request's warped draft logits: the drafted token tells."""
    request = jnp.arange(len(draft_R))
    place_Rx1 = _place(drafts, drafts.token_RxK[request, draft_R][:, None])
    return drafts.law.at(draft_R, place_Rx1) - drafts.log_q_RxK[request, draft_R][:, None]
