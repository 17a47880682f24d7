"""What verification needs of every row's distribution, in jnp, with the logits in memory."""

import flax.struct
import jax
import jax.numpy as jnp

from pallas_kernels.noise import Key, gumbel

LANES = 128
DEPTH = 4  # candidates kept of each residue class of ids modulo LANES


@flax.struct.dataclass
class Head:
    """The target's output head: logits = soft cap of hidden · weights; ids from `num_tokens` on never come out.

    A device's part of it begins with word `first`.
    """

    weight: jax.Array  # [V, H]; [H, V] when `transposed`
    num_tokens: int = flax.struct.field(pytree_node=False)
    softcap: float = flax.struct.field(pytree_node=False, default=0.0)
    transposed: bool = flax.struct.field(pytree_node=False, default=False)
    first: jax.Array | None = None  # None: 0

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[1 if self.transposed else 0]

    @property
    def ids(self) -> jax.Array:
        """`[V]` of its words."""
        return jnp.arange(self.vocab_size, dtype=jnp.int32) + (0 if self.first is None else self.first)

    def logits(self, hidden_NxH: jax.Array) -> jax.Array:
        """`[N, V]` in the hidden states' dtype, rounded before and after the soft cap; -inf from `num_tokens` on."""
        logits = jnp.einsum("nh,hv->nv" if self.transposed else "nh,vh->nv", hidden_NxH, self.weight)
        if self.softcap:
            wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
            logits = (self.softcap * jnp.tanh(wide / self.softcap)).astype(logits.dtype)
        return jnp.where(self.ids < self.num_tokens, logits, -jnp.inf)


@flax.struct.dataclass
class Query:
    """What is asked of each of N rows."""

    token_N: jax.Array  # the drafted token to judge
    temperature_N: jax.Array  # above 0, or 1 for rows without noise
    noisy_N: jax.Array  # whether the scores get Gumbel noise
    key_N: Key  # of that noise


@flax.struct.dataclass
class RowStatistics:
    """What is left of `[N, V]` logits. Scores are logits / temperature, plus noise where asked for.

    C candidates: of each of some classes of ids the same number of best scores, best first, `[N, number, classes]`
    flattened; here DEPTH of each residue class modulo LANES. So whatever is not a candidate scores at most the worst
    candidate of its class. Where a class has fewer tokens, the score is -inf.
    """

    log_total_N: jax.Array  # log of the sum of exp(logit)
    log_total_warped_N: jax.Array  # of exp(logit / temperature)
    token_logit_N: jax.Array
    score_NxC: jax.Array
    logit_NxC: jax.Array
    id_NxC: jax.Array
    classes: int = flax.struct.field(pytree_node=False, default=LANES)

    @property
    def bound_N(self) -> jax.Array:
        """No token outside the candidates scores more."""
        return jnp.max(self.score_NxC[:, -self.classes :], axis=-1)


def row_statistics(hidden_NxH: jax.Array, head: Head, query: Query) -> RowStatistics:
    """The statistics of N rows, by way of `[N, V]` logits and scores. At least float32."""
    logits = head.logits(hidden_NxH)
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    warped = logits / query.temperature_N[:, None].astype(logits.dtype)
    noise = gumbel(tuple(word[:, None] for word in query.key_N), head.ids).astype(logits.dtype)
    score = jnp.where(query.noisy_N[:, None], warped + noise, warped)
    classes = max(-(-head.vocab_size // LANES), DEPTH)
    padding = ((0, 0), (0, classes * LANES - head.vocab_size))
    by_class = jnp.pad(score, padding, constant_values=-jnp.inf).reshape(len(score), classes, LANES)
    best, place = jax.lax.top_k(jnp.swapaxes(by_class, 1, 2), DEPTH)  # [N, LANES, DEPTH]
    place_NxC = jnp.swapaxes(place * LANES + jnp.arange(LANES)[:, None], 1, 2).reshape(len(score), -1)
    is_token = head.ids == query.token_N[:, None]
    return RowStatistics(
        log_total_N=jax.nn.logsumexp(logits, axis=-1),
        log_total_warped_N=jax.nn.logsumexp(warped, axis=-1),
        token_logit_N=jnp.max(jnp.where(is_token, logits, -jnp.inf), axis=-1),
        score_NxC=jnp.swapaxes(best, 1, 2).reshape(len(score), -1),
        logit_NxC=jnp.take_along_axis(jnp.pad(logits, padding, constant_values=-jnp.inf), place_NxC, axis=-1),
        id_NxC=place_NxC.astype(jnp.int32) + head.ids[0],
    )
