"""Layers shared by the target and the drafters. Parameters are `[in, out]`; their dtype is the dtype of the compute."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.models.config import Attention, DecoderConfig, Rope
from dspark_jax.models.few_rows import product
from dspark_jax.parallel import layer_by_layer, replicated

Params = Any
# attend(q [N,H,D], k [N,KV,D], v [N,KV,D]) -> [N,H,D]; the caller decides what each row may see.
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
KeysValues = tuple[jax.Array, jax.Array]


class Layer(NamedTuple):
    """Which layer is running, for callers that keep something per layer."""

    kind: int  # index into `DecoderConfig.attention`, static
    index: jax.Array | int  # among the layers of its kind
    number: jax.Array | int  # among all layers


# attend(layer, q [N,H,D], k [N,KV,D], v [N,KV,D]) -> [N,H,D]
LayerAttend = Callable[[Layer, jax.Array, jax.Array, jax.Array], jax.Array]

normal_init = nn.initializers.normal(0.02)


class Linear(nn.Module):
    """y = x W (+ b), W stored `[in, out]` as "kernel", or `[out, in]` as "by_row" (see `few_rows`)."""

    features: int
    use_bias: bool = False
    kernel_init: nn.initializers.Initializer = normal_init

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.has_variable("params", "by_row"):
            y = product(x, self.get_variable("params", "by_row"))
        else:
            y = x @ self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        return y + self.param("bias", nn.initializers.zeros, (self.features,)) if self.use_bias else y


class RMSNorm(nn.Module):
    """x / rms(x) in at least float32, cast back to x's dtype, then scaled (spec 1.5); `wide_scale`: scaled before the
    cast (Gemma, spec 6)."""

    eps: float
    wide_scale: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        normed = unit_rms(x, self.eps)
        return (normed * scale).astype(x.dtype) if self.wide_scale else normed.astype(x.dtype) * scale


def unit_rms(x: jax.Array, eps: float) -> jax.Array:
    """x / rms(x), in at least float32."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


def rms_norm(config: DecoderConfig) -> RMSNorm:
    """A norm in the order of operations of the config's family."""
    return RMSNorm(config.rms_eps, wide_scale=config.family == "gemma4")


ACTIVATIONS = {"silu": nn.silu, "gelu_tanh": lambda x: nn.gelu(x, approximate=True)}


class GatedMLP(nn.Module):
    """down(activation(gate x) * up x)."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        gate = ACTIVATIONS[c.activation](Linear(c.intermediate_size, c.mlp_bias, name="gate_proj")(x))
        up = Linear(c.intermediate_size, c.mlp_bias, name="up_proj")(x)
        return replicated(Linear(c.hidden_size, c.mlp_bias, name="down_proj")(gate * up))


class DecoderLayer(nn.Module):
    """One pre-norm transformer layer over flat rows; what a row attends to is the caller's business.

    The target and the drafters share it: a drafter adds `context_kv`, keys and values of context rows that produce no
    queries.
    """

    config: DecoderConfig
    kind: Attention

    def setup(self) -> None:
        c, kind = self.config, self.kind
        self.input_layernorm = rms_norm(c)
        self.q_proj = Linear(c.num_heads * kind.head_dim, c.qkv_bias)
        self.k_proj = Linear(kind.num_kv_heads * kind.head_dim, c.qkv_bias)
        if not kind.keys_as_values:
            self.v_proj = Linear(kind.num_kv_heads * kind.head_dim, c.qkv_bias)
        self.o_proj = Linear(c.hidden_size, c.o_bias)
        if c.qk_norm:
            self.q_norm, self.k_norm = rms_norm(c), rms_norm(c)
        self.post_attention_layernorm = rms_norm(c)
        if c.sandwich:
            self.pre_feedforward_layernorm, self.post_feedforward_layernorm = rms_norm(c), rms_norm(c)
        if c.layer_scalar:
            self.scalar = self.param("layer_scalar", nn.initializers.ones, (1,))
        self.mlp = GatedMLP(c)

    def context_kv(self, x_NxH: jax.Array, rope: "RopeTable") -> KeysValues:
        """Rotated keys and values `[N, KV, D]` of rows that are already normalised."""
        c, kind = self.config, self.kind
        k = in_heads(self.k_proj(x_NxH), kind.num_kv_heads)
        v = k if kind.keys_as_values else in_heads(self.v_proj(x_NxH), kind.num_kv_heads)
        if c.value_norm:
            v = unit_rms(v, c.rms_eps).astype(v.dtype)
        return rotate(self.k_norm(k) if c.qk_norm else k, rope), v

    def attention(self, h_NxH: jax.Array, rope: "RopeTable", attend: Attend) -> tuple[jax.Array, KeysValues]:
        """The attention of normalised rows, projected back to the stream's width, and the rows' (k, v)."""
        c = self.config
        q = in_heads(self.q_proj(h_NxH), c.num_heads)
        k, v = self.context_kv(h_NxH, rope)
        out = attend(rotate(self.q_norm(q) if c.qk_norm else q, rope), k, v)
        return replicated(self.o_proj(out.reshape(*h_NxH.shape[:-1], -1))), (k, v)

    def feed_forward(self, x_NxH: jax.Array) -> jax.Array:
        """The second half of the layer, residual included."""
        if not self.config.sandwich:
            return x_NxH + self.mlp(self.post_attention_layernorm(x_NxH))
        x_NxH = x_NxH + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x_NxH)))
        # The scalar is a constant of the checkpoint, never trained (spec 6).
        return x_NxH * jax.lax.stop_gradient(self.scalar) if self.config.layer_scalar else x_NxH

    def mix(
        self, residual_NxH: jax.Array, h_NxH: jax.Array, rope: "RopeTable", attend: Attend
    ) -> tuple[jax.Array, KeysValues]:
        """Attention over normalised rows `h` added to the residual stream, then the MLP."""
        out, kv = self.attention(h_NxH, rope, attend)
        out = self.post_attention_layernorm(out) if self.config.sandwich else out
        return self.feed_forward(residual_NxH + out), kv

    def __call__(self, x_NxH: jax.Array, rope: "RopeTable", attend: Attend) -> tuple[jax.Array, KeysValues]:
        """Returns the residual stream after this layer and the rows' (k, v) `[N, KV, D]`."""
        return self.mix(x_NxH, self.input_layernorm(x_NxH), rope, attend)


def in_heads(x: jax.Array, heads: int) -> jax.Array:
    """`[..., heads·D]` to `[..., heads, D]`.

    Behind the barrier a TPU's compiler does not see the heads, for whose layout it would turn the projections of all
    layers around: a copy of them in every call.
    """
    return jax.lax.optimization_barrier(x).reshape(*x.shape[:-1], heads, -1)


def stacked_layers(
    module: nn.Module, config: DecoderConfig, make_layer: Callable[..., DecoderLayer] = DecoderLayer, inputs: int = 1
) -> tuple[Params, ...]:
    """The module's parameter "layers": for each kind of attention, its layers' parameters with a leading `[L]` axis.

    `make_layer(config, kind, parent=)`; `inputs`: how many arrays `[N, H]` the layer reads.
    """

    def init(key: jax.Array) -> tuple[Params, ...]:
        x = jnp.zeros((1, config.hidden_size))

        def one(kind: Attention, key: jax.Array) -> Params:
            rope = rope_table(kind.rope, kind.head_dim, jnp.zeros((1,), jnp.int32), x.dtype)
            layer = make_layer(config, kind, parent=None)
            return layer.init(key, *[x] * inputs, rope, lambda q, k, v: q)["params"]

        keys = jax.random.split(key, len(config.attention))
        counts = [config.layer_kinds.count(j) for j in range(len(config.attention))]
        return tuple(
            jax.vmap(lambda k, kind=kind: one(kind, k))(jax.random.split(key, count))
            for kind, key, count in zip(config.attention, keys, counts, strict=True)
        )

    # Read as they are: parts of weights (`parallel.Part`) become whole layer by layer.
    return module.param("layers", init) if module.is_initializing() else module.get_variable("params", "layers")


def scan_layers(
    config: DecoderConfig, body: Callable[[Any, Layer, Params], tuple[Any, Any]], carry: Any, stacks: tuple[Params, ...]
) -> tuple[Any, tuple[Any, ...]]:
    """Runs `body(carry, layer, params) -> (carry, out)` over all layers in order.

    Returns the last carry and, for each kind, its layers' outs stacked `[L_kind, ...]`. One scan step is one period of
    the pattern of kinds: a single layer where all are alike. Layers that lie apart (see `few_rows`) run without a scan.
    """
    if isinstance(stacks[0], tuple):
        return _run_layers(config, body, carry, stacks)
    period = config.layer_kinds[: config.period]
    steps, counts = config.num_layers // config.period, [period.count(j) for j in range(len(stacks))]

    # Never an axis of length 1: XLA:CPU finds another layout for it and copies all the weights to get there.
    def group(a: jax.Array, n: int) -> jax.Array:
        return a if n == 1 else a.reshape(steps, n, *a.shape[1:])

    def step(carry: Any, xs: Any) -> tuple[Any, Any]:
        t, params = xs
        outs: list[list[Any]] = [[] for _ in stacks]
        for i, kind in enumerate(period):
            j, n = len(outs[kind]), counts[kind]
            layer = Layer(kind, t * n + j, t * len(period) + i)
            carry, out = body(carry, layer, jax.tree.map(lambda a, j=j, n=n: a if n == 1 else a[j], params[kind]))
            outs[kind].append(out)
        return carry, tuple(out[0] if len(out) == 1 else jax.tree.map(lambda *a: jnp.stack(a), *out) for out in outs)

    grouped = tuple(jax.tree.map(lambda a, n=n: group(a, n), stack) for stack, n in zip(stacks, counts, strict=True))
    carry, outs = jax.lax.scan(layer_by_layer(step, stacks), carry, (jnp.arange(steps), grouped))
    flat = lambda a: a.reshape(-1, *a.shape[2:])  # noqa: E731
    return carry, tuple(out if n == 1 else jax.tree.map(flat, out) for out, n in zip(outs, counts, strict=True))


def _run_layers(
    config: DecoderConfig,
    body: Callable[[Any, Layer, Params], tuple[Any, Any]],
    carry: Any,
    layers: tuple[tuple[Params, ...], ...],
) -> tuple[Any, tuple[Any, ...]]:
    outs: list[list[Any]] = [[] for _ in layers]
    for number, kind in enumerate(config.layer_kinds):
        index = len(outs[kind])
        carry, out = body(carry, Layer(kind, index, number), layers[kind][index])
        outs[kind].append(out)
    return carry, tuple(jax.tree.map(lambda *a: jnp.stack(a), *out) for out in outs)


def soft_cap(logits: jax.Array, cap: float) -> jax.Array:
    """cap * tanh(logits / cap); 0: as they are."""
    return cap * jnp.tanh(logits / cap) if cap else logits


def embed(config: DecoderConfig, table_VxH: jax.Array, token: jax.Array) -> jax.Array:
    """`[..., H]` scaled embeddings; the factor is rounded to the table's dtype first (spec 6)."""
    rows = replicated(table_VxH[token])
    return rows if config.embedding_scale == 1.0 else rows * jnp.asarray(config.embedding_scale, rows.dtype)


# ---------------------------------------------------------------------------------------------------------- rotary

RopeTable = tuple[jax.Array, jax.Array]  # cos, sin, each [N, D/2]


def rope_tables(config: DecoderConfig, position_N: jax.Array, dtype: jnp.dtype) -> tuple[RopeTable, ...]:
    """One table for each kind of attention."""
    return tuple(rope_table(kind.rope, kind.head_dim, position_N, dtype) for kind in config.attention)


def rope_frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies `[D/2]` in float64 and the factor on cos and sin, for every rope kind."""
    freq = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        return freq / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, freq), 1.0
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, freq, head_dim), _yarn_attention_factor(rope)
    if rope.kind == "proportional":
        turning = int(rope.partial_rotary_factor * head_dim // 2)  # the other pairs stand still
        return np.where(np.arange(head_dim // 2) < turning, freq, 0.0) / rope.factor, 1.0
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
    if rope.rounded:
        freq = freq.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)
    wide = jnp.promote_types(dtype, jnp.float32)
    angle = position_N.astype(wide)[..., None] * jnp.asarray(freq, wide)
    return (jnp.cos(angle) * factor).astype(dtype), (jnp.sin(angle) * factor).astype(dtype)


def rotate(x_NxHxD: jax.Array, rope: RopeTable) -> jax.Array:
    """Rotates the split halves of every head (spec 1.5)."""
    cos, sin = (t[..., None, :] for t in rope)
    a, b = jnp.split(x_NxHxD, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
