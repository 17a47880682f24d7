"""Layers shared by the target and the drafters. Parameters are `[in, out]`; their dtype is the dtype of the compute."""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.models.config import DecoderConfig, Rope

Params = Any
# attend(q [N,H,D], k [N,KV,D], v [N,KV,D]) -> [N,H,D]; the caller decides what each row may see.
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

normal_init = nn.initializers.normal(0.02)


class Linear(nn.Module):
    """y = x W (+ b), W stored `[in, out]`: XLA:CPU multiplies few rows faster this way than by `[out, in]`."""

    features: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = x @ self.param("kernel", normal_init, (x.shape[-1], self.features))
        return y + self.param("bias", nn.initializers.zeros, (self.features,)) if self.use_bias else y


class RMSNorm(nn.Module):
    """x / rms(x) in at least float32, cast back to x's dtype, then scaled (the order of the reference, spec 1.5)."""

    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return normed.astype(x.dtype) * scale


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x)."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        gate = Linear(c.intermediate_size, c.mlp_bias, name="gate_proj")(x)
        up = Linear(c.intermediate_size, c.mlp_bias, name="up_proj")(x)
        return Linear(c.hidden_size, c.mlp_bias, name="down_proj")(nn.silu(gate) * up)


class DecoderLayer(nn.Module):
    """One pre-norm transformer layer over flat rows; what a row attends to is the caller's business.

    The target and the DFlash backbone share it: the backbone adds `context_kv`, keys and values of context rows that
    produce no queries.
    """

    config: DecoderConfig

    def setup(self) -> None:
        c = self.config
        self.input_layernorm = RMSNorm(c.rms_eps)
        self.q_proj = Linear(c.num_heads * c.head_dim, c.qkv_bias)
        self.k_proj = Linear(c.num_kv_heads * c.head_dim, c.qkv_bias)
        self.v_proj = Linear(c.num_kv_heads * c.head_dim, c.qkv_bias)
        self.o_proj = Linear(c.hidden_size, c.o_bias)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.rms_eps)
            self.k_norm = RMSNorm(c.rms_eps)
        self.post_attention_layernorm = RMSNorm(c.rms_eps)
        self.mlp = GatedMLP(c)

    def context_kv(self, x_NxH: jax.Array, rope: "RopeTable") -> tuple[jax.Array, jax.Array]:
        """Rotated keys and values `[N, KV, D]` of rows that are already normalised."""
        k = self.k_proj(x_NxH).reshape(*x_NxH.shape[:-1], self.config.num_kv_heads, self.config.head_dim)
        v = self.v_proj(x_NxH).reshape(k.shape)
        return rotate(self.k_norm(k) if self.config.qk_norm else k, rope), v

    def __call__(
        self, x_NxH: jax.Array, rope: "RopeTable", attend: Attend
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Returns the residual stream after this layer and the rows' (k, v) `[N, KV, D]`."""
        c = self.config
        h = self.input_layernorm(x_NxH)
        q = self.q_proj(h).reshape(*h.shape[:-1], c.num_heads, c.head_dim)
        k, v = self.context_kv(h, rope)
        out = attend(rotate(self.q_norm(q) if c.qk_norm else q, rope), k, v)
        x_NxH = x_NxH + self.o_proj(out.reshape(*h.shape[:-1], c.num_heads * c.head_dim))
        return x_NxH + self.mlp(self.post_attention_layernorm(x_NxH)), (k, v)


def stacked_layers(module: nn.Module, config: DecoderConfig) -> Params:
    """The module's parameter "layers": one `DecoderLayer`'s parameters with a leading `[L]` axis."""

    def init(key: jax.Array) -> Params:
        x = jnp.zeros((1, config.hidden_size))
        rope = rope_table(config.rope, config.head_dim, jnp.zeros((1,), jnp.int32), x.dtype)
        one = lambda k: DecoderLayer(config, parent=None).init(k, x, rope, lambda q, k, v: q)["params"]  # noqa: E731
        return jax.vmap(one)(jax.random.split(key, config.num_layers))

    return module.param("layers", init)


def scan_layers(body: Callable, carry: Any, layers: Params) -> tuple[Any, Any]:
    """Runs `body(carry, (index, layer_params)) -> (carry, out)` over stacked layers; outs come back `[L, ...]`."""
    count = jax.tree.leaves(layers)[0].shape[0]
    return jax.lax.scan(body, carry, (jnp.arange(count), layers))


# ---------------------------------------------------------------------------------------------------------- rotary

RopeTable = tuple[jax.Array, jax.Array]  # cos, sin, each [N, D/2]


def rope_frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies `[D/2]` in float64 and the factor on cos and sin, for every rope kind."""
    freq = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        return freq / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, freq), 1.0
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, freq, head_dim), _yarn_attention_factor(rope)
    return freq, 1.0


def _llama3_frequencies(rope: Rope, freq: np.ndarray) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    turns = rope.original_max_position_embeddings * freq / (2 * math.pi)
    keep = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return freq * (keep + (1 - keep) / rope.factor)


def _yarn_frequencies(rope: Rope, freq: np.ndarray, head_dim: int) -> np.ndarray:
    """Interpolates frequencies that turn less than `beta_slow` times, keeps those above `beta_fast` (YaRN)."""

    def dim_that_turns(times: float) -> float:
        length = rope.original_max_position_embeddings
        return head_dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_that_turns(rope.beta_fast), dim_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return freq * (1 - ramp + ramp / rope.factor)


def _yarn_attention_factor(rope: Rope) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def rope_table(rope: Rope, head_dim: int, position_N: jax.Array, dtype: jnp.dtype) -> RopeTable:
    """cos and sin `[N, D/2]` at absolute positions, computed in at least float32, then cast to `dtype`."""
    freq, factor = rope_frequencies(rope, head_dim)
    wide = jnp.promote_types(dtype, jnp.float32)
    angle = position_N.astype(wide)[..., None] * jnp.asarray(freq, wide)
    return (jnp.cos(angle) * factor).astype(dtype), (jnp.sin(angle) * factor).astype(dtype)


def rotate(x_NxHxD: jax.Array, rope: RopeTable) -> jax.Array:
    """Rotates the split halves of every head (spec 1.5)."""
    cos, sin = (t[..., None, :] for t in rope)
    a, b = jnp.split(x_NxHxD, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
