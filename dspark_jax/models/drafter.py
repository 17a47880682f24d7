"""DSpark = DFlash backbone + in-block head + confidence head (paper section 3)."""

from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.models.config import DrafterConfig
from dspark_jax.models.dflash import DFlash
from dspark_jax.models.few_rows import product
from dspark_jax.models.heads import HEADS, ConfidenceHead, Previous
from dspark_jax.models.layers import KeysValues, LayerAttend, embed, soft_cap


@flax.struct.dataclass
class Borrowed:
    """What a drafter takes from its frozen target: embeddings, the head's rows it speaks, and their token ids."""

    embedding_VxH: jax.Array
    head_VdxH: jax.Array
    token_ids_Vd: jax.Array  # draft id -> target id, increasing


class DSpark(nn.Module):
    """Trainable parts only; the vocabulary tables are passed in (`Borrowed`)."""

    config: DrafterConfig

    def setup(self) -> None:
        c = self.config
        self.backbone = DFlash(c)
        if c.markov_rank:
            self.markov_head = HEADS[c.head_type](c)
        if c.confidence:
            self.confidence_head = ConfidenceHead()

    def context(
        self, taps_NxMH: jax.Array, position_N: jax.Array, next_token_N: jax.Array, borrowed: Borrowed
    ) -> tuple[KeysValues, ...]:
        """Keys and values of context rows; see `DFlash.context`. The tokens after them are of no interest here."""
        return self.backbone.context(taps_NxMH, position_N)

    def carry(self, taps_RxMH: jax.Array) -> Any:
        """What the next block needs of the last committed row besides the context: nothing."""
        return ()

    def block(self, anchor_B: jax.Array, position_BxK: jax.Array, attend: LayerAttend, borrowed: Borrowed) -> jax.Array:
        """One parallel pass over B blocks [anchor, mask, ...]: hidden states `[B, K, H]` after the final norm."""
        blocks, size = position_BxK.shape
        tokens = jnp.full((blocks, size), self.config.mask_token_id).at[:, 0].set(anchor_B)
        embedded = embed(self.config.decoder, borrowed.embedding_VxH, tokens.reshape(-1))
        return self.backbone(embedded, position_BxK.reshape(-1), attend).reshape(blocks, size, -1)

    def predicting(self, hidden_BxKxH: jax.Array, num_drafts: int | None = None) -> jax.Array:
        """The hidden states `[B, G, H]` of the slots that predict; a caller that drafts fewer tokens gets fewer."""
        start, count = self.config.logits_start, self.config.num_drafts if num_drafts is None else num_drafts
        return hidden_BxKxH[:, start : start + count]

    def base_logits(self, hidden_BxGxH: jax.Array, borrowed: Borrowed) -> jax.Array:
        """`[B, G, Vd]` logits of slots before the in-block head."""
        logits = product(hidden_BxGxH, borrowed.head_VdxH)
        return soft_cap(logits, self.config.decoder.softcap)

    def initial_state(self, hidden_BxKxH: jax.Array, anchor_B: jax.Array, borrowed: Borrowed) -> Any:
        """The in-block head's state before the first draft."""
        if not self.config.markov_rank:
            return ()
        first = hidden_BxKxH[:, 0]
        state = self.markov_head.initial_state(first)
        return self.markov_head.replay(first, state, self._previous(anchor_B, borrowed)) if self._skips else state

    @property
    def _skips(self) -> bool:
        return self.config.logits_start > 0

    def _previous(self, token_B: jax.Array, borrowed: Borrowed) -> Previous:
        return Previous(token_B, embed(self.config.decoder, borrowed.embedding_VxH, token_B))

    def step(
        self,
        k: jax.Array | int,
        hidden_BxH: jax.Array,
        logits_BxVd: jax.Array,
        state: Any,
        previous_B: jax.Array,
        borrowed: Borrowed,
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Draft k of every block: corrected logits `[B, Vd]`, confidence logit `[B]`, head state.

        Both are functions of the tokens before draft k alone: the token drawn at k cannot leak into its confidence.
        Without a confidence head the logit is +inf: every drafted token is trusted.
        """
        factor, confidence, state = self.factor(k, hidden_BxH, state, previous_B, borrowed)
        return self.corrected(logits_BxVd, factor), confidence, state

    def factor(
        self, k: jax.Array | int, hidden_BxH: jax.Array, state: Any, previous_B: jax.Array, borrowed: Borrowed
    ) -> tuple[jax.Array | None, jax.Array, Any]:
        """As `step`, but the head's factor `[B, r]` instead of logits; None without a head."""
        c, factor = self.config, None
        if c.markov_rank:
            factor, state = self.markov_head.factor(k, hidden_BxH, state, self._previous(previous_B, borrowed))
        if not c.confidence:
            return factor, jnp.full(previous_B.shape, jnp.inf, hidden_BxH.dtype), state
        embedded = self.markov_head.embed(previous_B) if c.confidence_with_markov else None
        return factor, self.confidence_head(hidden_BxH, embedded), state

    def corrected(self, logits: jax.Array, factor: jax.Array | None) -> jax.Array:
        """Base logits `[..., Vd]` with the bias of the head's factor `[..., r]`."""
        return logits if factor is None else self.markov_head.correct(logits, factor)

    def correction(self) -> jax.Array | None:
        """`[Vd, r]` the head's table; None without a head."""
        return self.markov_head.correction if self.config.markov_rank else None

    def teacher_forced(
        self, hidden_BxKxH: jax.Array, previous_BxG: jax.Array, borrowed: Borrowed
    ) -> tuple[jax.Array | None, jax.Array]:
        """Factors `[B, G, r]` and confidence logits of every draft, given the true previous tokens (training)."""
        state = self.initial_state(hidden_BxKxH, previous_BxG[:, 0], borrowed)
        predicting, factors, confidences = self.predicting(hidden_BxKxH), [], []
        for k in range(self.config.num_drafts):
            factor, confidence, state = self.factor(k, predicting[:, k], state, previous_BxG[:, k], borrowed)
            factors.append(factor)
            confidences.append(confidence)
        return jnp.stack(factors, axis=1) if self.config.markov_rank else None, jnp.stack(confidences, axis=1)

    def __call__(self, taps_NxMH: jax.Array, anchor_B: jax.Array, borrowed: Borrowed) -> jax.Array:
        """Touches every parameter, for `init`."""
        c, zeros = self.config, jnp.zeros((taps_NxMH.shape[0],), jnp.int32)
        self.context(taps_NxMH, zeros, zeros, borrowed)
        positions = jnp.zeros((len(anchor_B), c.block_size), jnp.int32)
        hidden = self.block(anchor_B, positions, lambda layer, q, k, v: q, borrowed)
        factor, _ = self.teacher_forced(hidden, positions[:, : c.num_drafts], borrowed)
        return self.corrected(self.base_logits(self.predicting(hidden), borrowed), factor)
