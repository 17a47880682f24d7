"""DFlash, the parallel backbone: a block attends to itself and to the target's tapped states (spec 1.6)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax.models.config import Attention, DecoderConfig, DrafterConfig
from dspark_jax.models.layers import (
    Attend,
    DecoderLayer,
    KeysValues,
    LayerAttend,
    Linear,
    RopeTable,
    rms_norm,
    rope_tables,
    scan_layers,
    stacked_layers,
)
from dspark_jax.parallel import replicated


class DFlash(nn.Module):
    """Context rows give keys and values only, block rows queries too. One projection of the taps serves all layers."""

    config: DrafterConfig

    def setup(self) -> None:
        c = self.config.decoder
        self.fc = Linear(c.hidden_size)
        self.hidden_norm = rms_norm(c)
        self.layers = stacked_layers(self, c, self._layer)
        self.norm = rms_norm(c)

    def _layer(self, config: DecoderConfig, kind: Attention, parent: nn.Module | None) -> DecoderLayer:
        d = self.config
        if not d.conv_taps:
            return DecoderLayer(config, kind, parent=parent)
        return ConvolvedLayer(config, kind, d.block_size, d.conv_taps, d.conv_group, parent=parent)

    def context(self, taps_NxMH: jax.Array, position_N: jax.Array) -> tuple[KeysValues, ...]:
        """Keys and values `[L, N, KV, D]` of context rows, for each kind of attention."""
        c = self.config.decoder
        z = self.hidden_norm(replicated(self.fc(taps_NxMH)))
        ropes = rope_tables(c, position_N, z.dtype)

        def body(carry, layer, params):
            # The context does not go through input_layernorm; the block does.
            module = self._layer(c, c.attention[layer.kind], parent=None)
            return carry, module.apply({"params": params}, z, ropes[layer.kind], method="context_kv")

        return scan_layers(c, body, (), self.layers)[1]

    def __call__(self, x_NxH: jax.Array, position_N: jax.Array, attend: LayerAttend) -> jax.Array:
        """Hidden states `[N, H]` of block rows, after the final norm, from their token embeddings."""
        c = self.config.decoder
        ropes = rope_tables(c, position_N, x_NxH.dtype)

        def body(x, layer, params):
            module = self._layer(c, c.attention[layer.kind], parent=None)
            x, _ = module.apply({"params": params}, x, ropes[layer.kind], lambda *qkv: attend(layer, *qkv))
            return x, ()

        return self.norm(scan_layers(c, body, x_NxH, self.layers)[0])


class BlockConvolution(nn.Module):
    """DFlash2's dynamic depthwise convolution around a sub-layer; it never crosses a block.

    Row r becomes the sum over taps t of (base[t] + projected[t]) * row r - t. Both sides of the sub-layer take their
    coefficients from its input; a group of features shares the projected part.
    """

    block_size: int
    taps: int
    group: int

    @nn.compact
    def __call__(self, x_NxH: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Coefficients `[N, taps, H]` of the input side and of the output side."""
        width = x_NxH.shape[-1]
        base = self.param("base_kernel", _identity_kernel, (2, self.taps, width))
        zeros = nn.initializers.zeros
        features = 2 * self.taps * (width // self.group)
        projected = Linear(features, kernel_init=zeros, name="kernel_projection")(x_NxH)
        projected = projected.reshape(-1, 2, self.taps, width // self.group)
        coefficients = base + jnp.repeat(projected, self.group, axis=-1)
        return coefficients[:, 0], coefficients[:, 1]

    def convolve(self, x_NxH: jax.Array, coefficients_NxTxH: jax.Array) -> jax.Array:
        """Rows of one side, each mixed with its predecessors in the block."""
        slot_Nx1 = (jnp.arange(len(x_NxH)) % self.block_size)[:, None]
        shifted = [jnp.where(slot_Nx1 >= t, jnp.roll(x_NxH, t, axis=0), 0) for t in range(self.taps)]
        return sum(coefficients_NxTxH[:, t] * rows for t, rows in enumerate(shifted))


def _identity_kernel(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """The row itself and nothing of its predecessors: DFlash2 starts as DFlash."""
    return jnp.zeros(shape, dtype).at[:, 0].set(1)


class ConvolvedLayer(DecoderLayer):
    """A draft layer with convolutions around attention and MLP (DFlash2)."""

    block_size: int
    conv_taps: int
    conv_group: int

    def setup(self) -> None:
        super().setup()
        sizes = (self.block_size, self.conv_taps, self.conv_group)
        self.attention_conv, self.mlp_conv = BlockConvolution(*sizes), BlockConvolution(*sizes)

    def __call__(self, x_NxH: jax.Array, rope: RopeTable, attend: Attend) -> tuple[jax.Array, KeysValues]:
        h = self.input_layernorm(x_NxH)
        before, after = self.attention_conv(h)
        out, kv = self.attention(self.attention_conv.convolve(h, before), rope, attend)
        x_NxH = x_NxH + self.attention_conv.convolve(out, after)
        h = self.post_attention_layernorm(x_NxH)
        before, after = self.mlp_conv(h)
        return x_NxH + self.mlp_conv.convolve(self.mlp(self.mlp_conv.convolve(h, before)), after), kv
