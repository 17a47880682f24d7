"""In-block heads, which make a block coherent, and the confidence head, which says how far to trust it (spec 2, 3).

Every in-block head has one interface (DESIGN rule 6): `factor(k, h_k, state, previous) -> (e_k [r], state)`, and the
bias on the base logits is e_k W2^T. k counts drafts, whichever slot predicts them. A new head is one module with these
methods and a line in `HEADS`.
"""

from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.models.config import DrafterConfig
from dspark_jax.models.few_rows import product
from dspark_jax.models.layers import Linear, normal_init
from dspark_jax.parallel import top_k


@flax.struct.dataclass
class Previous:
    """The token before the one to predict: its id in the target's vocabulary, and its embedding in the target."""

    token: jax.Array  # [...]
    embedding: jax.Array  # [..., H]


class MarkovHead(nn.Module):
    """The vanilla head: the factor is the previous token's embedding, B = W1[x_{k-1}] W2 (paper section 3)."""

    config: DrafterConfig

    def setup(self) -> None:
        c = self.config
        self.markov_w1 = self.param("markov_w1", normal_init, (c.decoder.vocab_size, c.markov_rank))
        self.markov_w2 = self.param("markov_w2", normal_init, (c.draft_vocab_size, c.markov_rank))

    def embed(self, token: jax.Array) -> jax.Array:
        """`[..., r]` rows of W1, which target ids index, reduced drafter or not. The confidence head reads them."""
        return self.markov_w1[token]

    def initial_state(self, hidden: jax.Array) -> Any:
        """The state before the first draft. `hidden [..., H]` gives its shape and dtype."""
        return ()

    def replay(self, hidden: jax.Array, state: Any, previous: Previous) -> Any:
        """The state after an anchor's slot that predicts nothing (logits_start 1), from its hidden state."""
        return state

    def factor(self, k: jax.Array | int, hidden: jax.Array, state: Any, previous: Previous) -> tuple[jax.Array, Any]:
        return self.embed(previous.token), state

    @property
    def correction(self) -> jax.Array:
        """`[Vd, r]` the table that makes a bias of a factor."""
        return self.markov_w2

    def correct(self, logits: jax.Array, factor: jax.Array) -> jax.Array:
        """Base logits `[..., Vd]` with the bias of a factor `[..., r]`."""
        return logits + product(factor, self.correction)


class GatedHead(MarkovHead):
    """The embedding, gated by the slot's hidden state: sigmoid(W[h_k; e_k]) * e_k."""

    def setup(self) -> None:
        super().setup()
        self.gate_proj = Linear(self.config.markov_rank, use_bias=True)

    def factor(self, k: jax.Array | int, hidden: jax.Array, state: Any, previous: Previous) -> tuple[jax.Array, Any]:
        e = self.embed(previous.token)
        return nn.sigmoid(self.gate_proj(jnp.concatenate([hidden, e], axis=-1))) * e, state


class RNNHead(MarkovHead):
    """A gated state over the block, 0 at its start; the factor is the cell's output (spec 2)."""

    def setup(self) -> None:
        super().setup()
        self.joint_proj = Linear(3 * self.config.markov_rank, use_bias=True)

    def initial_state(self, hidden: jax.Array) -> jax.Array:
        return jnp.zeros((*hidden.shape[:-1], self.config.markov_rank), hidden.dtype)

    def replay(self, hidden: jax.Array, state: Any, previous: Previous) -> jax.Array:
        # Trained from slot 0 on, whether or not slot 0 predicts.
        return self.factor(0, hidden, state, previous)[1]

    def factor(self, k: jax.Array | int, hidden: jax.Array, state: Any, previous: Previous) -> tuple[jax.Array, Any]:
        joint = self.joint_proj(jnp.concatenate([state, self.embed(previous.token), hidden], axis=-1))
        gate, candidate, output = jnp.split(joint, 3, axis=-1)
        keep = nn.sigmoid(gate)
        return jnp.tanh(output), keep * state + (1 - keep) * jnp.tanh(candidate)


class DominoHead(nn.Module):
    """A GRU over the block's prefix, anchor included; the factor is silu(W_a [h_k; g_k]) (arXiv 2605.29707).

    The first `pure_prefix` drafts are the backbone's alone.
    """

    config: DrafterConfig

    def setup(self) -> None:
        c = self.config
        self.input_gates, self.state_gates = Linear(3 * c.gru_width), Linear(3 * c.gru_width)
        self.down_proj = Linear(c.markov_rank)
        self.up_proj = self.param("up_proj", normal_init, (c.draft_vocab_size, c.markov_rank))

    def initial_state(self, hidden: jax.Array) -> jax.Array:
        return jnp.zeros((*hidden.shape[:-1], self.config.gru_width), hidden.dtype)

    def replay(self, hidden: jax.Array, state: Any, previous: Previous) -> jax.Array:
        return state  # the anchor is consumed by the first draft

    def factor(self, k: jax.Array | int, hidden: jax.Array, state: Any, previous: Previous) -> tuple[jax.Array, Any]:
        # Gate order: reset, update, new; the reset gate acts on the recurrent product.
        reset_x, update_x, new_x = jnp.split(self.input_gates(previous.embedding), 3, axis=-1)
        reset_g, update_g, new_g = jnp.split(self.state_gates(state), 3, axis=-1)
        update = nn.sigmoid(update_x + update_g)
        state = (1 - update) * jnp.tanh(new_x + nn.sigmoid(reset_x + reset_g) * new_g) + update * state
        factor = nn.silu(self.down_proj(jnp.concatenate([hidden, state], axis=-1)))
        return jnp.where(k < self.config.pure_prefix, 0, factor), state

    @property
    def correction(self) -> jax.Array:
        return self.up_proj

    def correct(self, logits: jax.Array, factor: jax.Array) -> jax.Array:
        return logits + product(factor, self.correction)


class SelectorHead(nn.Module):
    """DFlash2's path selector: among the backbone's best candidates, + <A[x_{k-1}] * (R h_k), B[candidate]>."""

    config: DrafterConfig

    def setup(self) -> None:
        c = self.config
        self.predecessor = self.param("predecessor", normal_init, (c.decoder.vocab_size, c.markov_rank))
        self.successor = self.param("successor", normal_init, (c.draft_vocab_size, c.markov_rank))
        self.hidden_projection = Linear(c.markov_rank)

    def initial_state(self, hidden: jax.Array) -> Any:
        return ()

    def replay(self, hidden: jax.Array, state: Any, previous: Previous) -> Any:
        return state

    def factor(self, k: jax.Array | int, hidden: jax.Array, state: Any, previous: Previous) -> tuple[jax.Array, Any]:
        return self.predecessor[previous.token] * self.hidden_projection(hidden), state

    def correct(self, logits: jax.Array, factor: jax.Array) -> jax.Array:
        least = top_k(logits, self.config.selector_top_k)[0][..., -1:]
        scores = logits + product(factor, self.successor)
        return jnp.where(logits >= least, scores, -jnp.inf)


HEADS = {"vanilla": MarkovHead, "gated": GatedHead, "rnn": RNNHead, "domino": DominoHead, "selector": SelectorHead}


class ConfidenceHead(nn.Module):
    """The logit of P(token k survives | all before it survived), from [h_k; W1[x_{k-1}]] or h_k alone."""

    @nn.compact
    def __call__(self, hidden: jax.Array, previous_embedding: jax.Array | None) -> jax.Array:
        features = hidden if previous_embedding is None else jnp.concatenate([hidden, previous_embedding], axis=-1)
        return Linear(1, use_bias=True, name="proj")(features)[..., 0]
