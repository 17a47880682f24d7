"""Eagle3, the autoregressive baseline: one layer that reads the last token and the state before it (spec 5).

Row i pairs the target's features at position i with token i + 1 and stands at rotary position i.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax.models.config import Eagle3Config
from dspark_jax.models.drafter import Borrowed
from dspark_jax.models.few_rows import product
from dspark_jax.models.layers import (
    Attend,
    DecoderLayer,
    KeysValues,
    Linear,
    RMSNorm,
    RopeTable,
    embed,
    rms_norm,
    rope_table,
    soft_cap,
    stacked_layers,
)
from dspark_jax.parallel import replicated


class Eagle3Layer(DecoderLayer):
    """Attention over [norm(embedding); norm(state)]; the residual stream is the state (spec 5.2)."""

    norm_before_residual: bool = False

    def setup(self) -> None:
        super().setup()
        self.hidden_norm = rms_norm(self.config)

    def context_of(self, embedded_NxH: jax.Array, state_NxH: jax.Array, rope: RopeTable) -> KeysValues:
        return self.context_kv(self._inputs(embedded_NxH, state_NxH), rope)

    def _inputs(self, embedded_NxH: jax.Array, state_NxH: jax.Array) -> jax.Array:
        return jnp.concatenate([self.input_layernorm(embedded_NxH), self.hidden_norm(state_NxH)], axis=-1)

    def __call__(
        self, embedded_NxH: jax.Array, state_NxH: jax.Array, rope: RopeTable, attend: Attend
    ) -> tuple[jax.Array, KeysValues]:
        residual = self.hidden_norm(state_NxH) if self.norm_before_residual else state_NxH
        return self.mix(residual, self._inputs(embedded_NxH, state_NxH), rope, attend)


class Eagle3(nn.Module):
    """Trainable parts only; the vocabulary tables are passed in (`Borrowed`)."""

    config: Eagle3Config

    def setup(self) -> None:
        c = self.config
        self.fc = Linear(c.decoder.hidden_size)
        if c.norm_before_fc:
            self.input_norm = rms_norm(c.decoder)
        if c.fc_norm:
            self.fc_norm = [RMSNorm(c.decoder.rms_eps) for _ in c.tap_layers]
        self.layers = stacked_layers(self, c.decoder, self._layer, inputs=2)
        self.norm = rms_norm(c.decoder)

    def _layer(self, config, kind, parent: nn.Module | None) -> Eagle3Layer:
        return Eagle3Layer(config, kind, self.config.norm_before_residual, parent=parent)

    def _apply_layer(self, *args, method: str = "__call__"):
        kind = self.config.decoder.attention[0]
        layers = self.layers[0]
        params = layers[0] if isinstance(layers, tuple) else jax.tree.map(lambda a: a[0], layers)
        return self._layer(self.config.decoder, kind, None).apply({"params": params}, *args, method=method)

    def _rope(self, position_N: jax.Array, dtype: jnp.dtype) -> RopeTable:
        kind = self.config.decoder.attention[0]
        return rope_table(kind.rope, kind.head_dim, position_N, dtype)

    def carry(self, taps_RxMH: jax.Array) -> jax.Array:
        """`[R, H]` the tapped states, fused: the state of a row whose token the target has read."""
        c = self.config
        if c.norm_before_fc:
            taps_RxMH = self.input_norm(taps_RxMH)
        if c.fc_norm:
            parts = jnp.split(taps_RxMH, len(c.tap_layers), axis=-1)
            taps_RxMH = jnp.concatenate([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], axis=-1)
        return replicated(self.fc(taps_RxMH))

    def context(
        self, taps_NxMH: jax.Array, position_N: jax.Array, next_token_N: jax.Array, borrowed: Borrowed
    ) -> tuple[KeysValues, ...]:
        """Keys and values `[1, N, KV, D]` of rows whose token and successor are both committed."""
        state = self.carry(taps_NxMH)
        embedded = embed(self.config.decoder, borrowed.embedding_VxH, next_token_N)
        k, v = self._apply_layer(embedded, state, self._rope(position_N, state.dtype), method="context_of")
        return ((k[None], v[None]),)

    def advance(
        self, state_NxH: jax.Array, token_N: jax.Array, position_N: jax.Array, attend: Attend, borrowed: Borrowed
    ) -> tuple[jax.Array, jax.Array, KeysValues]:
        """One pass over N rows: the state to feed on, the draft logits `[N, Vd]`, and the rows' keys and values."""
        c = self.config
        embedded = embed(c.decoder, borrowed.embedding_VxH, token_N)
        state, kv = self._apply_layer(embedded, state_NxH, self._rope(position_N, state_NxH.dtype), attend)
        normed = self.norm(state)
        logits = soft_cap(product(normed, borrowed.head_VdxH), c.decoder.softcap)
        return normed if c.feed_normed else state, logits, kv

    def __call__(self, taps_NxMH: jax.Array, anchor_B: jax.Array, borrowed: Borrowed) -> jax.Array:
        """Touches every parameter, for `init`."""
        state = self.carry(taps_NxMH)
        zeros = jnp.zeros(len(state), jnp.int32)
        return self.advance(state, zeros, zeros, lambda q, k, v: q, borrowed)[1]
