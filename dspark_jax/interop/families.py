"""What a Hugging Face config.json says, family by family, and how its tensors are named."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from dspark_jax.errors import UserError
from dspark_jax.models.config import DecoderConfig, Rope

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_ROPE_NUMBERS = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale",
                 "mscale_all_dim")  # fmt: skip

# Suffix in the checkpoint -> place in `DecoderLayer`'s parameters. Kernels are stored [out, in] there, [in, out] here.
_PROJECTIONS = {
    **{f"self_attn.{name}_proj": (f"{name}_proj",) for name in "qkvo"},
    **{f"mlp.{name}_proj": ("mlp", f"{name}_proj") for name in ("gate", "up", "down")},
}
_NORMS = {
    "input_layernorm": ("input_layernorm",),
    "post_attention_layernorm": ("post_attention_layernorm",),
    "self_attn.q_norm": ("q_norm",),
    "self_attn.k_norm": ("k_norm",),
}


def decoder_config(config: Mapping[str, Any], eos_token_ids: tuple[int, ...] = ()) -> DecoderConfig:
    """Reads a config.json. Raises UserError, naming it, on whatever is missing, useless or not supported."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UserError(f"unknown architecture {family!r}: this version reads {', '.join(FAMILIES)}")
    _refuse_unsupported(config, family)
    heads = positive_int(config, "num_attention_heads")
    hidden = positive_int(config, "hidden_size")
    # Qwen2 has biases on q, k and v whatever its config says, and none on o.
    bias = bool(config.get("attention_bias", False))
    made = DecoderConfig(
        family=family,
        vocab_size=positive_int(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive_int(config, "intermediate_size"),
        num_layers=positive_int(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=positive_int(config, "num_key_value_heads", heads),
        head_dim=positive_int(config, "head_dim", hidden // heads),
        rope=rope_config(config),
        rms_eps=config.get("rms_norm_eps", 1e-6),
        max_length=positive_int(config, "max_position_embeddings", 2048),
        qk_norm=family == "qwen3",
        qkv_bias=bias or family == "qwen2",
        o_bias=bias and family != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)),
        tied=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=tuple(eos_token_ids),
    )
    if made.head_dim % 2 or made.num_heads % made.num_kv_heads:
        raise UserError(
            f"head_dim {made.head_dim} must be even, and num_attention_heads {made.num_heads} "
            f"a multiple of num_key_value_heads {made.num_kv_heads}"
        )
    return made


def _refuse_unsupported(config: Mapping[str, Any], family: str) -> None:
    """What a config may ask for and this code would silently compute otherwise."""
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"activation {config['hidden_act']!r} is not supported for {family}: only silu is")
    if config.get("use_sliding_window") and config.get("sliding_window"):
        raise UserError(f"sliding-window attention is not supported for {family} yet: set use_sliding_window to false")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UserError(f"quantised weights ({method}) are not read: take the bfloat16 checkpoint of this model")


def positive_int(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A size of a config.json; an absent or null one takes the default. UserError names a useless or missing one."""
    if name not in config and default is None:
        raise UserError(f"config.json lacks {name!r}")
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"config.json: {name} is {value!r}, a positive whole number is needed")
    return value


def rope_config(config: Mapping[str, Any]) -> Rope:
    """Reads `rope_parameters`, or the older `rope_theta` with `rope_scaling`."""
    parts = [config.get(name) or {} for name in ("rope_parameters", "rope_scaling")]
    if not all(isinstance(part, Mapping) for part in parts):
        raise UserError("config.json: the rope settings must be an object with rope_type and rope_theta")
    rope = {**parts[0], **parts[1]}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_KINDS or any(isinstance(value, Mapping) for value in rope.values()):
        what = kind if kind not in ROPE_KINDS else "one per layer type"
        raise UserError(f"rope type {what!r} is not supported: known are {', '.join(ROPE_KINDS)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError("rope with a partial_rotary_factor is not supported")
    context = config.get("max_position_embeddings") or 2048
    outside = config.get("original_max_position_embeddings")  # takes precedence, as in `transformers`
    length = outside or rope.get("original_max_position_embeddings") or context
    if kind in ("linear", "llama3") and not rope.get("factor"):
        raise UserError(f"rope type {kind!r} needs a factor in config.json")
    try:
        numbers = {name: float(rope[name]) for name in _ROPE_NUMBERS if rope.get(name) is not None}
        return Rope(
            theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            kind=kind,
            factor=float(rope.get("factor") or context / length),
            original_max_position_embeddings=int(length),
            truncate=bool(rope.get("truncate", True)),
            **numbers,
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"config.json: a rope setting is no number ({error})") from None


def layer_entries(config: DecoderConfig) -> dict[str, tuple[str, ...]]:
    """Checkpoint suffix (after "layers.N.") -> path in the layer's parameters, for the tensors this config has."""
    biased = {"o_proj": config.o_bias} | dict.fromkeys(("q_proj", "k_proj", "v_proj"), config.qkv_bias)
    entries = {}
    for name, path in _PROJECTIONS.items():
        entries[f"{name}.weight"] = (*path, "kernel")
        if biased.get(path[-1], config.mlp_bias):
            entries[f"{name}.bias"] = (*path, "bias")
    for name, path in _NORMS.items():
        if config.qk_norm or not name.startswith("self_attn"):
            entries[f"{name}.weight"] = (*path, "scale")
    return entries


def take_tensor(tensors: Mapping[str, Any], name: str, shape: tuple[int, ...], dtype: jnp.dtype) -> np.ndarray:
    """One tensor in `dtype`, its shape checked. Raises UserError when it is missing or of another size."""
    if name not in tensors:
        raise UserError(f"checkpoint lacks the tensor {name!r}: is it complete, and of this architecture?")
    array = np.asarray(tensors[name])
    if array.shape != shape:
        raise UserError(f"tensor {name!r} has shape {list(array.shape)}, the config asks for {list(shape)}")
    if jnp.issubdtype(dtype, jnp.floating) and array.dtype.kind not in "fV":  # bfloat16 is a void to numpy
        raise UserError(f"tensor {name!r} holds {array.dtype}: only float weights are read")
    return array.astype(dtype)


def refuse_unexpected(tensors: Mapping[str, Any], known: set[str], prefix: str) -> None:
    """A tensor that the config does not account for means that the model would compute something else."""
    strange = [n for n in tensors if n.startswith(prefix) and n not in known and not n.endswith("rotary_emb.inv_freq")]
    if strange:
        raise UserError(f"the checkpoint has a tensor that its config does not account for: {strange[0]!r}")


def layers_from_tensors(
    tensors: Mapping[str, Any], prefix: str, like: Any, config: DecoderConfig, dtype: jnp.dtype
) -> Any:
    """Stacked layer parameters. `like`: abstract layers (`[L, ...]` leaves) that give the shapes."""
    layers: dict[str, Any] = {}
    for suffix, path in layer_entries(config).items():
        leaf = like
        for key in path:
            leaf = leaf[key]
        count, *shape = leaf.shape
        stored = tuple(reversed(shape))
        arrays = [take_tensor(tensors, f"{prefix}layers.{i}.{suffix}", stored, dtype).T for i in range(count)]
        node = layers
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = jnp.asarray(np.stack(arrays))
    return layers


def layers_to_tensors(layers: Any, config: DecoderConfig) -> dict[str, np.ndarray]:
    """The inverse of `layers_from_tensors`, with names relative to the checkpoint's root."""
    tensors = {}
    for suffix, path in layer_entries(config).items():
        leaf = layers
        for key in path:
            leaf = leaf[key]
        for i, array in enumerate(np.asarray(leaf)):
            tensors[f"layers.{i}.{suffix}"] = np.ascontiguousarray(array.T)
    return tensors
