"""The frozen target: one decoder for all families, with taps on its residual stream."""

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.models.config import DecoderConfig
from dspark_jax.models.few_rows import product
from dspark_jax.models.layers import (
    DecoderLayer,
    KeysValues,
    LayerAttend,
    Linear,
    embed,
    normal_init,
    rms_norm,
    rope_tables,
    scan_layers,
    soft_cap,
    stacked_layers,
)
from dspark_jax.parallel import replicated


@flax.struct.dataclass
class DecoderOutput:
    """What one pass over N rows leaves behind. Nothing is written anywhere: the caller commits what it accepts."""

    hidden_NxH: jax.Array  # after the final norm; `Decoder.logits` maps it to the vocabulary
    taps_NxMH: jax.Array  # raw residual stream after the tapped layers, concatenated in the order asked for
    kv: tuple[KeysValues, ...]  # for each kind of attention, its layers' keys and values [L, N, KV, D]


class Decoder(nn.Module):
    """A causal language model of any family over N flat rows.

    A tap id l is the raw output of layer l (0-based), before the next norm; -1 is the embedding output (spec 1.3).
    """

    config: DecoderConfig
    tap_layers: tuple[int, ...] = ()

    def setup(self) -> None:
        c = self.config
        self.embedding = self.param("embedding", normal_init, (c.vocab_size, c.hidden_size))
        self.layers = stacked_layers(self, c)
        self.norm = rms_norm(c)
        if not c.tied:
            self.lm_head = Linear(c.vocab_size)

    def __call__(self, token_N: jax.Array, position_N: jax.Array, attend: LayerAttend) -> DecoderOutput:
        c = self.config
        x = embed(c, self.embedding, token_N)
        ropes = rope_tables(c, position_N, x.dtype)
        # Layers that nobody taps write to a spare last slot.
        tap_slot = [self.tap_layers.index(i) if i in self.tap_layers else -1 for i in range(-1, c.num_layers)]
        slots = jnp.asarray(tap_slot) % (len(self.tap_layers) + 1)
        taps = jnp.zeros((len(self.tap_layers) + 1, *x.shape), x.dtype).at[slots[0]].set(x)

        def body(carry, layer, params):
            x, taps = carry
            module = DecoderLayer(c, c.attention[layer.kind], parent=None)
            x, kv = module.apply({"params": params}, x, ropes[layer.kind], lambda *qkv: attend(layer, *qkv))
            x = replicated(x)
            return (x, taps.at[slots[layer.number + 1]].set(x)), kv

        (x, taps), kv = scan_layers(c, body, (x, taps), self.layers)
        hidden = self.norm(x)
        if self.is_initializing():
            self.logits(hidden)
        taps = jnp.moveaxis(taps[:-1], 0, -2).reshape(*x.shape[:-1], -1)
        return DecoderOutput(hidden, replicated(taps), kv)

    def logits(self, hidden_NxH: jax.Array) -> jax.Array:
        """`[N, V]` logits of hidden states after the final norm."""
        tied = self.config.tied
        logits = product(hidden_NxH, self.embedding) if tied else self.lm_head(hidden_NxH)
        return soft_cap(logits, self.config.softcap)
