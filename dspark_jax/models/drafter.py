"""DSpark = DFlash backbone + in-block head + confidence head (paper section 3)."""

from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.models.config import DrafterConfig
from dspark_jax.models.dflash import DFlash
from dspark_jax.models.heads import HEADS, ConfidenceHead
from dspark_jax.models.target import LayerAttend


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

    def context(self, taps_NxMH: jax.Array, position_N: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of context rows in every draft layer; see `DFlash.context`."""
        return self.backbone.context(taps_NxMH, position_N)

    def block(self, anchor_B: jax.Array, position_BxK: jax.Array, attend: LayerAttend, borrowed: Borrowed) -> jax.Array:
        """One parallel pass over B blocks [anchor, mask, ...]: hidden states `[B, K, H]` after the final norm."""
        blocks, size = position_BxK.shape
        tokens = jnp.full((blocks, size), self.config.mask_token_id).at[:, 0].set(anchor_B)
        embedded = borrowed.embedding_VxH[tokens.reshape(-1)]
        return self.backbone(embedded, position_BxK.reshape(-1), attend).reshape(blocks, size, -1)

    def base_logits(self, hidden_BxKxH: jax.Array, borrowed: Borrowed) -> jax.Array:
        """`[B, K, Vd]` logits of slots before the in-block head; a caller that drafts fewer slots passes fewer."""
        return jnp.einsum("bkh,vh->bkv", hidden_BxKxH, borrowed.head_VdxH)

    def initial_state(self, hidden_BxH: jax.Array) -> Any:
        return self.markov_head.initial_state(hidden_BxH) if self.config.markov_rank else ()

    def step(
        self, k: jax.Array | int, hidden_BxH: jax.Array, logits_BxVd: jax.Array, state: Any, previous_B: jax.Array
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Slot k of every block: corrected logits `[B, Vd]`, confidence logit `[B]`, head state.

        Both are functions of the tokens before slot k alone: the token drawn at k cannot leak into its confidence.
        Without a confidence head the logit is +inf: every drafted token is trusted.
        """
        c = self.config
        if c.markov_rank:
            factor, state = self.markov_head.factor(k, hidden_BxH, state, previous_B)
            logits_BxVd = logits_BxVd + self.markov_head.bias(factor)
        if not c.confidence:
            return logits_BxVd, jnp.full(previous_B.shape, jnp.inf, logits_BxVd.dtype), state
        embedded = self.markov_head.embed(previous_B) if c.confidence_with_markov else None
        return logits_BxVd, self.confidence_head(hidden_BxH, embedded), state

    def teacher_forced(
        self, hidden_BxKxH: jax.Array, logits_BxKxVd: jax.Array, previous_BxK: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Corrected logits and confidence logits of every slot, given the true previous tokens (training)."""
        state, logits, confidences = self.initial_state(hidden_BxKxH[:, 0]), [], []
        for k in range(hidden_BxKxH.shape[1]):
            step = self.step(k, hidden_BxKxH[:, k], logits_BxKxVd[:, k], state, previous_BxK[:, k])
            logits.append(step[0])
            confidences.append(step[1])
            state = step[2]
        return jnp.stack(logits, axis=1), jnp.stack(confidences, axis=1)

    def __call__(self, taps_NxMH: jax.Array, anchor_B: jax.Array, borrowed: Borrowed) -> jax.Array:
        """Touches every parameter, for `init`."""
        zeros = jnp.zeros((len(anchor_B), self.config.block_size), jnp.int32)
        self.context(taps_NxMH, jnp.zeros(taps_NxMH.shape[0], jnp.int32))
        hidden = self.block(anchor_B, zeros, lambda layer, q, k, v: q, borrowed)
        return self.teacher_forced(hidden, self.base_logits(hidden, borrowed), zeros)[0]
