"""What a Hugging Face config.json says, family by family, and how its tensors are named."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from dspark_jax.errors import UserError
from dspark_jax.models.config import Attention, DecoderConfig, Rope
from dspark_jax.parallel import Place

FAMILIES = ("llama", "qwen2", "qwen3", "gemma4")
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "proportional")
_ROPE_NUMBERS = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale",
                 "mscale_all_dim")  # fmt: skip
_GEMMA4_TYPES = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
_GEMMA4_ROPES = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

# Suffix in the checkpoint -> place in `DecoderLayer`'s parameters. Kernels are stored [out, in] there, [in, out] here.
_PROJECTIONS = {
    **{f"self_attn.{name}_proj": (f"{name}_proj",) for name in "qkvo"},
    **{f"mlp.{name}_proj": ("mlp", f"{name}_proj") for name in ("gate", "up", "down")},
}
_NORMS = ("input_layernorm", "post_attention_layernorm")
_SANDWICH_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")


def decoder_config(config: Mapping[str, Any], eos_token_ids: tuple[int, ...] = ()) -> DecoderConfig:
    """Reads a config.json. Raises UserError, naming it, on whatever is missing, useless or not supported."""
    kind = config.get("model_type")
    family = "gemma4" if kind in _GEMMA4_TYPES else kind
    if family not in FAMILIES:
        raise UserError(f"unknown architecture {family!r}: this version reads {', '.join(FAMILIES)}")
    config = text_config(config)
    _refuse_unsupported(config, family)
    make = _gemma4 if family == "gemma4" else _llama_like
    made = make(config, family, tuple(eos_token_ids))
    for attention in made.attention:
        if attention.head_dim % 2 or made.num_heads % attention.num_kv_heads:
            raise UserError(
                f"head_dim {attention.head_dim} must be even, and num_attention_heads {made.num_heads} "
                f"a multiple of num_key_value_heads {attention.num_kv_heads}"
            )
    return made


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a multimodal model's config that describes its text decoder; others' configs as they are."""
    nested = config.get("text_config")
    if not nested:
        return config
    outside = {name: config.get(name) for name in ("eos_token_id", "quantization_config")}
    return {**nested, **{name: value for name, value in outside.items() if value is not None}}


def _llama_like(config: Mapping[str, Any], family: str, eos: tuple[int, ...]) -> DecoderConfig:
    heads = positive_int(config, "num_attention_heads")
    hidden = positive_int(config, "hidden_size")
    # Qwen2 has biases on q, k and v whatever its config says, and none on o.
    bias = bool(config.get("attention_bias", False))
    full = Attention(
        num_kv_heads=positive_int(config, "num_key_value_heads", heads),
        head_dim=positive_int(config, "head_dim", hidden // heads),
        rope=rope_config(config),
    )
    attention, kinds = layer_attention(config, full, _sliding_layers(config))
    return DecoderConfig(
        family=family,
        vocab_size=positive_int(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive_int(config, "intermediate_size"),
        num_heads=heads,
        attention=attention,
        layer_kinds=kinds,
        rms_eps=config.get("rms_norm_eps", 1e-6),
        max_length=positive_int(config, "max_position_embeddings", 2048),
        qk_norm=family == "qwen3",
        qkv_bias=bias or family == "qwen2",
        o_bias=bias and family != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)),
        tied=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=eos,
    )


def _sliding_layers(config: Mapping[str, Any]) -> list[bool]:
    """Which layers of a Qwen have a window: by `layer_types`, else those from `max_window_layers` on."""
    count = positive_int(config, "num_hidden_layers")
    if not (config.get("use_sliding_window") and config.get("sliding_window")):
        return [False] * count
    types, first = config.get("layer_types"), config.get("max_window_layers", 28)
    if types is not None:
        return sliding_flags(types, count)
    if not isinstance(first, int):
        raise UserError(f"config.json: max_window_layers is {first!r}, a whole number is needed")
    return [i >= first for i in range(count)]


def sliding_flags(layer_types: Any, count: int) -> list[bool]:
    """Which layers `layer_types` calls sliding. UserError unless it names a known kind for every layer."""
    known = ("full_attention", "sliding_attention")
    if not isinstance(layer_types, list) or len(layer_types) != count or any(kind not in known for kind in layer_types):
        raise UserError(f"config.json: layer_types must say full_attention or sliding_attention for all {count} layers")
    return [kind == "sliding_attention" for kind in layer_types]


def layer_attention(
    config: Mapping[str, Any], full: Attention, sliding: list[bool], windowed: Attention | None = None
) -> tuple[tuple[Attention, ...], tuple[int, ...]]:
    """The kinds of attention in use and the kind of every layer. `windowed`: the sliding layers' (None: as `full`)."""
    if not any(sliding):
        return (full,), (0,) * len(sliding)
    windowed = dataclasses.replace(windowed or full, window=positive_int(config, "sliding_window"))
    if all(sliding):
        return (windowed,), (0,) * len(sliding)
    return (full, windowed), tuple(int(flag) for flag in sliding)


def _gemma4(config: Mapping[str, Any], family: str, eos: tuple[int, ...]) -> DecoderConfig:
    """Gemma4's text decoder (spec 6): sliding layers with heads of their own, full ones with keys as values."""
    for name in ("enable_moe_block", "hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp",
                 "attention_bias"):  # fmt: skip
        if config.get(name):
            raise UserError(f"Gemma4 with {name}={config[name]!r} is not supported")
    if config.get("use_bidirectional_attention") == "all":
        raise UserError("Gemma4 with use_bidirectional_attention='all' is not supported: it is no causal model")
    hidden = positive_int(config, "hidden_size")
    full, windowed = gemma4_attention(config)
    attention, kinds = layer_attention(config, full, _gemma4_sliding(config), windowed)
    return DecoderConfig(
        family=family,
        vocab_size=positive_int(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive_int(config, "intermediate_size"),
        num_heads=positive_int(config, "num_attention_heads"),
        attention=attention,
        layer_kinds=kinds,
        rms_eps=config.get("rms_norm_eps", 1e-6),
        max_length=positive_int(config, "max_position_embeddings", 131072),
        activation="gelu_tanh",
        qk_norm=True,
        value_norm=True,
        sandwich=True,
        layer_scalar=True,
        embedding_scale=hidden**0.5,
        softcap=float(config.get("final_logit_softcapping") or 0.0),
        tied=bool(config.get("tie_word_embeddings", True)),
        eos_token_ids=eos,
    )


def _gemma4_sliding(config: Mapping[str, Any]) -> list[bool]:
    """Which layers of a Gemma4 have a window: by default five of six. The last one never has, whatever the config."""
    types, count = config.get("layer_types"), positive_int(config, "num_hidden_layers")
    flags = [(i + 1) % 6 != 0 for i in range(count)] if types is None else sliding_flags(types, count)
    return [*flags[:-1], False]


def gemma4_attention(config: Mapping[str, Any]) -> tuple[Attention, Attention]:
    """Gemma4's full and sliding attention, both of scale 1."""
    windowed = Attention(
        num_kv_heads=positive_int(config, "num_key_value_heads"),
        head_dim=positive_int(config, "head_dim"),
        rope=rope_config(_gemma4_ropes(config), "sliding_attention"),
        scale=1.0,
    )
    kv_heads, head_dim = _gemma4_full_sizes(config, windowed)
    rope = rope_config(_gemma4_ropes(config), "full_attention")
    return Attention(kv_heads, head_dim, rope, keys_as_values=bool(config.get("attention_k_eq_v")), scale=1.0), windowed


def _gemma4_full_sizes(config: Mapping[str, Any], windowed: Attention) -> tuple[int, int]:
    """`num_kv_heads` and `head_dim` of the full layers, which may have their own.

    `transformers` gives them layer by layer in newer files, under names with "global" in older ones.
    """
    layers = config.get("per_layer_config")
    if layers is None:
        shared, same = config.get("attention_k_eq_v"), windowed.num_kv_heads
        heads = positive_int(config, "num_global_key_value_heads", same) if shared else same
        return heads, positive_int(config, "global_head_dim", 512)
    full = {str(i) for i, sliding in enumerate(_gemma4_sliding(config)) if not sliding}
    sizes = list(layers.values()) if isinstance(layers, Mapping) else [layers]
    if not sizes:
        return windowed.num_kv_heads, windowed.head_dim
    alike = isinstance(sizes[0], Mapping) and all(size == sizes[0] for size in sizes)
    if not alike or set(layers) != full or set(sizes[0]) - {"head_dim", "num_key_value_heads"}:
        raise UserError(
            "config.json: per_layer_config must give all full_attention layers, and them alone, "
            "one head_dim and one num_key_value_heads"
        )
    heads = positive_int(sizes[0], "num_key_value_heads", windowed.num_kv_heads)
    return heads, positive_int(sizes[0], "head_dim", windowed.head_dim)


def _gemma4_ropes(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with Gemma4's own rope for every type of layer that it leaves out."""
    given = config.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or (given and not any(isinstance(part, Mapping) for part in given.values())):
        return config
    return {**config, "rope_parameters": {**_GEMMA4_ROPES, **given}}


def _refuse_unsupported(config: Mapping[str, Any], family: str) -> None:
    """What a config may ask for and this code would silently compute otherwise."""
    name, known = ("hidden_activation", "gelu_pytorch_tanh") if family == "gemma4" else ("hidden_act", "silu")
    if config.get(name, known) != known:
        raise UserError(f"activation {config[name]!r} is not supported for {family}: only {known} is")
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


def rope_config(config: Mapping[str, Any], layer_type: str | None = None) -> Rope:
    """Reads `rope_parameters`, or the older `rope_theta` with `rope_scaling`.

    `layer_type`: the entry to take where there is one for each type of layer; keys beside those entries are strays.
    """
    parts = [config.get(name) or {} for name in ("rope_parameters", "rope_scaling")]
    if not all(isinstance(part, Mapping) for part in parts):
        raise UserError("config.json: the rope settings must be an object with rope_type and rope_theta")
    rope = {**parts[0], **parts[1]}
    if layer_type is not None and isinstance(rope.get(layer_type), Mapping):
        rope = rope[layer_type]
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_KINDS or any(isinstance(value, Mapping) for value in rope.values()):
        what = kind if kind not in ROPE_KINDS else "one per layer type"
        raise UserError(f"rope type {what!r} is not supported: known are {', '.join(ROPE_KINDS)}")
    part = float(rope.get("partial_rotary_factor") or 1.0)
    if part != 1.0 and kind != "proportional":
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
            factor=float(rope.get("factor") or (context / length if kind == "yarn" else 1.0)),
            original_max_position_embeddings=int(length),
            truncate=bool(rope.get("truncate", True)),
            partial_rotary_factor=part,
            rounded=bool(config.get("rope_rounded", False)),
            **numbers,
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"config.json: a rope setting is no number ({error})") from None


def layer_entries(config: DecoderConfig, kind: int) -> dict[str, tuple[str, ...]]:
    """Checkpoint suffix (after "layers.N.") -> path in the parameters, for the tensors that layers of a kind have."""
    biased = {"o_proj": config.o_bias} | dict.fromkeys(("q_proj", "k_proj", "v_proj"), config.qkv_bias)
    entries: dict[str, tuple[str, ...]] = {}
    for name, path in _PROJECTIONS.items():
        if path == ("v_proj",) and config.attention[kind].keys_as_values:
            continue
        entries[f"{name}.weight"] = (*path, "kernel")
        if biased.get(path[-1], config.mlp_bias):
            entries[f"{name}.bias"] = (*path, "bias")
    norms = {name: name for name in (*_NORMS, *(_SANDWICH_NORMS if config.sandwich else ()))}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm"}
    entries |= {f"{name}.weight": (place, "scale") for name, place in norms.items()}
    return entries | ({"layer_scalar": ("layer_scalar",)} if config.layer_scalar else {})


def layer_names(config: DecoderConfig, prefix: str = "") -> set[str]:
    """Every tensor of a checkpoint's layers."""
    return {f"{prefix}layers.{i}.{name}" for i, kind in enumerate(config.layer_kinds)
            for name in layer_entries(config, kind)}  # fmt: skip


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
    tensors: Mapping[str, Any],
    prefix: str,
    like: tuple[Any, ...],
    config: DecoderConfig,
    dtype: jnp.dtype,
    extra: Mapping[str, tuple[tuple[str, ...], bool]] | None = None,
    place: Place = lambda path, array: jnp.asarray(array),
) -> tuple[Any, ...]:
    """Stacked layer parameters of every kind. `like`: abstract layers (`[L, ...]` leaves) that give the shapes.

    `extra`: tensors that a drafter's layers have besides (suffix -> path, stored transposed). `place` puts each stack
    on the devices.
    """

    def stack(kind: int) -> Any:
        layers: dict[str, Any] = {}
        numbers = [i for i, k in enumerate(config.layer_kinds) if k == kind]
        for suffix, path, transposed in _layer_items(config, kind, extra):
            shape = at(like[kind], path).shape[1:]
            stored = shape[::-1] if transposed else shape
            arrays = [take_tensor(tensors, f"{prefix}layers.{i}.{suffix}", stored, dtype) for i in numbers]
            stacked = np.stack([a.T if transposed else a for a in arrays])
            put(layers, path, place(("layers", kind, *path), stacked))
        return layers

    return tuple(stack(kind) for kind in range(len(config.attention)))


def layers_to_tensors(
    stacks: tuple[Any, ...], config: DecoderConfig, extra: Mapping[str, tuple[tuple[str, ...], bool]] | None = None
) -> dict[str, np.ndarray]:
    """The inverse of `layers_from_tensors`, with names relative to the checkpoint's root."""
    tensors = {}
    for kind, layers in enumerate(stacks):
        numbers = [i for i, k in enumerate(config.layer_kinds) if k == kind]
        for suffix, path, transposed in _layer_items(config, kind, extra):
            for i, array in zip(numbers, np.asarray(at(layers, path)), strict=True):
                tensors[f"layers.{i}.{suffix}"] = np.ascontiguousarray(array.T if transposed else array)
    return tensors


def _layer_items(config: DecoderConfig, kind: int, extra: Any) -> list[tuple[str, tuple[str, ...], bool]]:
    own = [(name, path, path[-1] == "kernel") for name, path in layer_entries(config, kind).items()]
    return own + [(name, path, transposed) for name, (path, transposed) in (extra or {}).items()]


def at(tree: Any, path: tuple[str, ...]) -> Any:
    """The leaf of nested dicts at a path."""
    for key in path:
        tree = tree[key]
    return tree


def put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Sets a leaf of nested dicts, making the dicts on the way."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
