"""DFlash, the parallel backbone: a block attends to itself and to the target's tapped states (spec 1.6)."""

import flax.linen as nn
import jax

from dspark_jax.models.config import DrafterConfig
from dspark_jax.models.layers import DecoderLayer, Linear, RMSNorm, rope_table, scan_layers, stacked_layers
from dspark_jax.models.target import LayerAttend


class DFlash(nn.Module):
    """Context rows give keys and values only, block rows queries too. One projection of the taps serves all layers."""

    config: DrafterConfig

    def setup(self) -> None:
        c = self.config.decoder
        self.fc = Linear(c.hidden_size)
        self.hidden_norm = RMSNorm(c.rms_eps)
        self.layers = stacked_layers(self, c)
        self.norm = RMSNorm(c.rms_eps)

    def context(self, taps_NxMH: jax.Array, position_N: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values `[L, N, KV, D]` of context rows, in every draft layer."""
        c = self.config.decoder
        z = self.hidden_norm(self.fc(taps_NxMH))
        rope = rope_table(c.rope, c.head_dim, position_N, z.dtype)

        def body(carry, layer):
            # The context does not go through input_layernorm; the block does.
            return carry, DecoderLayer(c, parent=None).apply({"params": layer[1]}, z, rope, method="context_kv")

        return scan_layers(body, (), self.layers)[1]

    def __call__(self, x_NxH: jax.Array, position_N: jax.Array, attend: LayerAttend) -> jax.Array:
        """Hidden states `[N, H]` of block rows, after the final norm, from their token embeddings."""
        c = self.config.decoder
        rope = rope_table(c.rope, c.head_dim, position_N, x_NxH.dtype)

        def body(x, layer):
            index, params = layer
            x, _ = DecoderLayer(c, parent=None).apply({"params": params}, x, rope, lambda *qkv: attend(index, *qkv))
            return x, ()

        return self.norm(scan_layers(body, x_NxH, self.layers)[0])
