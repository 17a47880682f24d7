"""In-block heads, which make a block coherent, and the confidence head, which says how far to trust it (spec 2, 3).

Every in-block head has one interface (DESIGN rule 6): `factor(k, h_k, state, previous token) -> (e_k [r], state)`,
and the bias on the base logits is e_k W2^T. A new head is one module with `embed`, `initial_state`, `factor`, `bias`.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax.models.config import DrafterConfig
from dspark_jax.models.layers import Linear, normal_init


class MarkovHead(nn.Module):
    """The vanilla head: the factor is the previous token's embedding, B = W1[x_{k-1}] W2 (paper section 3)."""

    config: DrafterConfig

    def setup(self) -> None:
        c = self.config
        self.markov_w1 = self.param("markov_w1", normal_init, (c.decoder.vocab_size, c.markov_rank))
        self.markov_w2 = self.param("markov_w2", normal_init, (c.draft_vocab_size, c.markov_rank))

    def embed(self, previous: jax.Array) -> jax.Array:
        """`[..., r]` rows of W1. `previous` are token ids of the target's vocabulary, reduced drafter or not."""
        return self.markov_w1[previous]

    def initial_state(self, hidden: jax.Array) -> Any:
        return ()

    def factor(self, k: jax.Array | int, hidden: jax.Array, state: Any, previous: jax.Array) -> tuple[jax.Array, Any]:
        return self.embed(previous), state

    def bias(self, factor: jax.Array) -> jax.Array:
        """`[..., Vd]` logit bias of a factor `[..., r]`."""
        return jnp.einsum("...r,vr->...v", factor, self.markov_w2)


class GatedHead(MarkovHead):
    """The embedding, gated by the slot's hidden state: sigmoid(W[h_k; e_k]) * e_k."""

    def setup(self) -> None:
        super().setup()
        self.gate_proj = Linear(self.config.markov_rank, use_bias=True)

    def factor(self, k: jax.Array | int, hidden: jax.Array, state: Any, previous: jax.Array) -> tuple[jax.Array, Any]:
        e = self.embed(previous)
        return nn.sigmoid(self.gate_proj(jnp.concatenate([hidden, e], axis=-1))) * e, state


class RNNHead(MarkovHead):
    """A gated state over the block, 0 at its start; the factor is the cell's output (spec 2)."""

    def setup(self) -> None:
        super().setup()
        self.joint_proj = Linear(3 * self.config.markov_rank, use_bias=True)

    def initial_state(self, hidden: jax.Array) -> jax.Array:
        return jnp.zeros((*hidden.shape[:-1], self.config.markov_rank), hidden.dtype)

    def factor(self, k: jax.Array | int, hidden: jax.Array, state: Any, previous: jax.Array) -> tuple[jax.Array, Any]:
        joint = self.joint_proj(jnp.concatenate([state, self.embed(previous), hidden], axis=-1))
        gate, candidate, output = jnp.split(joint, 3, axis=-1)
        keep = nn.sigmoid(gate)
        return jnp.tanh(output), keep * state + (1 - keep) * jnp.tanh(candidate)


HEADS = {"vanilla": MarkovHead, "gated": GatedHead, "rnn": RNNHead}


class ConfidenceHead(nn.Module):
    """The logit of P(token k survives | all before it survived), from [h_k; W1[x_{k-1}]] or h_k alone."""

    @nn.compact
    def __call__(self, hidden: jax.Array, previous_embedding: jax.Array | None) -> jax.Array:
        features = hidden if previous_embedding is None else jnp.concatenate([hidden, previous_embedding], axis=-1)
        return Linear(1, use_bias=True, name="proj")(features)[..., 0]
