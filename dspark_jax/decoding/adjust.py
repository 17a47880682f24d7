"""What a request changes in the logits before they are warped: penalties, bias, a minimum of tokens (DESIGN rule 4).

Every row is adjusted by its own past: the request's tokens, and the drafted tokens that stand before the row in its
block. Target, drafter and plain decoding share these functions.
"""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.parallel import replicated


@flax.struct.dataclass
class Adjust:
    """Every slot's adjustments and what they look back on. Slots hold `()` while no request asks for any."""

    repetition_R: jax.Array
    presence_R: jax.Array
    frequency_R: jax.Array
    bias_RxV: jax.Array
    missing_R: jax.Array  # tokens to emit before a stop token may come
    prompt_RxV: jax.Array  # True for tokens of the prompt
    count_RxV: jax.Array  # times a token was emitted

    @classmethod
    def of(cls, params: SamplingParams, prompt_ids: Sequence[int], vocab: int) -> "Adjust":
        """One slot's entries."""
        bias, prompt = np.zeros(vocab, np.float32), np.zeros(vocab, bool)
        for token, value in params.logit_bias:
            bias[token] = value
        prompt[np.asarray(prompt_ids, int)] = True
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        return cls(*map(np.float32, penalties), bias, np.int32(params.min_tokens), prompt, np.zeros(vocab, np.int32))

    @classmethod
    def neutral(cls, slots: int, vocab: int) -> "Adjust":
        """Slots that change nothing."""
        one = cls.of(SamplingParams(), (), vocab)
        return jax.tree.map(lambda a: jnp.repeat(jnp.asarray(a)[None], slots, axis=0), one)

    def emitted(self, token_RxQ: jax.Array, count_R: jax.Array) -> "Adjust":
        """After a round in which every slot emitted its first `count_R` tokens."""
        vocab, slots = self.count_RxV.shape[1], jnp.arange(len(count_R))[:, None]
        whole = jax.tree.map(replicated, self)  # a reduced drafter looks its words up in these tables
        token_RxQ = jnp.where(jnp.arange(token_RxQ.shape[1]) < count_R[:, None], token_RxQ, vocab)
        return whole.replace(
            count_RxV=replicated(whole.count_RxV.at[slots, token_RxQ].add(1, mode="drop")),
            missing_R=jnp.maximum(self.missing_R - count_R, 0).astype(jnp.int32),
        )


def adjusted(
    logits_NxV: jax.Array,
    adjust: Adjust,
    slot_N: jax.Array,
    drafted_NxJ: jax.Array,
    stop_RxE: jax.Array,
    token_ids_V: jax.Array | None = None,
) -> jax.Array:
    """Logits of rows whose slots have drafted `drafted_NxJ` since (-1: nothing).

    `token_ids_V`: target ids of a reduced vocabulary. In this order: repetition, presence and frequency penalty, bias,
    minimum of tokens (`transformers`, too, has the penalties before the minimum).
    """
    vocab, row = adjust.count_RxV.shape[1], jnp.arange(len(slot_N))[:, None]

    def mark(table: jax.Array, ids: jax.Array, value: int | bool, add: bool = False) -> jax.Array:
        at = table.at[row, jnp.where(ids < 0, vocab, ids)]
        return at.add(value, mode="drop") if add else at.set(value, mode="drop")

    count = mark(adjust.count_RxV[slot_N], drafted_NxJ, 1, add=True)
    missing = adjust.missing_R[slot_N] > jnp.sum(drafted_NxJ >= 0, axis=1)
    forbidden = mark(jnp.zeros(count.shape, bool), stop_RxE[slot_N], True) & missing[:, None]
    parts = (count, forbidden, adjust.prompt_RxV[slot_N], adjust.bias_RxV[slot_N])
    if token_ids_V is not None and len(token_ids_V) < vocab:
        parts = (replicated(part)[:, token_ids_V] for part in parts)
    count, forbidden, prompt, bias = parts
    repetition, presence, frequency = (
        a[slot_N][:, None].astype(logits_NxV.dtype)
        for a in (adjust.repetition_R, adjust.presence_R, adjust.frequency_R)
    )
    repeated = jnp.where(logits_NxV > 0, logits_NxV / repetition, logits_NxV * repetition)
    logits = jnp.where(prompt | (count > 0), repeated, logits_NxV)
    logits = logits - presence * (count > 0) - frequency * count + bias.astype(logits.dtype)
    return jnp.where(forbidden, -jnp.inf, logits)


def forbid_padding(logits: jax.Array, num_tokens: int, token_ids_V: jax.Array | None = None) -> jax.Array:
    """-inf for ids from `num_tokens` on: rows of a padded vocabulary that no token stands for."""
    if token_ids_V is None and num_tokens >= logits.shape[-1]:
        return logits
    ids = jnp.arange(logits.shape[-1]) if token_ids_V is None else token_ids_V
    return jnp.where(ids < num_tokens, logits, -jnp.inf)
