"""Models in GGUF files, given back as Hugging Face would store them.

The weights are dequantised to float32 one tensor at a time, when asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import log, pi
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.gguf_reader import ReaderTensor
from gguf.quants import dequantize

from dspark_jax.errors import UserError
from dspark_jax.interop.tokenizer import Tokenizer

# Causal language model classes of the architectures that this file can read.
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN3_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class GgufModel:
    """A model read from a GGUF file.

    Attributes:
        config: As in Hugging Face's config.json.
        tensors: By Hugging Face name, in float32, matrices as [out, in]; every look-up dequantises anew.
        tokenizer: The file's tokenizer with its chat template.
        eos_token_ids: Ids that end an answer (end of sequence, of turn and of message), no id twice.
    """

    config: dict[str, Any]
    tensors: Mapping[str, np.ndarray]
    tokenizer: Tokenizer
    eos_token_ids: list[int]


@dataclass(frozen=True)
class _Metadata:
    """Key-value fields of a file, with clear errors for those that are missing."""

    path: Path
    fields: dict[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """The field's value; "{arch}." in `key` stands for the architecture."""
        return self.fields.get(key.format(arch=self.fields.get("general.architecture")), default)

    def need(self, key: str) -> Any:
        """The field's value; raises `UserError` where there is none."""
        value = self.get(key)
        if value is None:
            name = key.format(arch=self.fields.get("general.architecture"))
            raise UserError(f"{self.path}: the GGUF file lacks the field {name}; convert it again")
        return value


def read_gguf(path: str | Path) -> GgufModel:
    """Reads a Llama, Qwen2 or Qwen3 model from a GGUF file.

    Only metadata is read at once; the file stays mapped until the tensors are dropped.

    Args:
        path: The .gguf file, whole (not one of several split parts).

    Raises:
        UserError: The file is missing, truncated, not GGUF, or of a kind that is not supported.
    """
    path = Path(path)
    reader, metadata = _open(path)
    architecture = metadata.need("general.architecture")
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise UserError(f"{path}: architecture {architecture!r} is not supported (known: {known}); use another model")
    if metadata.get("split.count", 1) > 1:
        raise UserError(f"{path}: one part of a split GGUF file; join the parts with llama-gguf-split --merge first")
    found = {tensor.name: tensor for tensor in reader.tensors}
    _check_types(path, found)
    rope_factors = found.pop(_ROPE_FACTORS, None)
    names = _names(path, architecture, metadata.need("{arch}.block_count"), found)
    config = _config(metadata, found, rope_factors)
    return GgufModel(
        config=config,
        tensors=_Tensors(config, found, names),
        tokenizer=_tokenizer(metadata),
        eos_token_ids=_eos_token_ids(metadata),
    )


def _open(path: Path) -> tuple[GGUFReader, _Metadata]:
    """Maps the file and decodes its fields; raises `UserError` where it is not a complete GGUF file."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the path of a .gguf file")
    try:
        # The reader takes every tensor's bytes from the map at once, so a file that is too short fails here.
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, LookupError, OverflowError) as error:
        raise UserError(f"{path}: not a complete GGUF file ({error}); fetch it again") from error
    return reader, _Metadata(path, fields)


def _check_types(path: Path, found: dict[str, ReaderTensor]) -> None:
    """Raises `UserError` for a quantisation that cannot be undone, before any weight is asked for."""
    for kind in {tensor.tensor_type for tensor in found.values()}:
        block = np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8)
        try:
            _dequantise(block, kind)
        except NotImplementedError as error:
            raise UserError(f"{path}: quantisation {kind.name} is not supported; take another, such as Q8_0") from error


def _dequantise(data: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    return np.array(dequantize(data, kind), np.float32)


def _names(path: Path, architecture: str, layers: int, found: dict[str, ReaderTensor]) -> dict[str, str]:
    """GGUF names of the tensors in the file to Hugging Face names; raises `UserError` for strange or missing ones."""
    stems = _LAYER_NAMES | (_QWEN3_NAMES if architecture == "qwen3" else {})
    weights = dict(_TOP_NAMES)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        weights |= {f"blk.{layer}.{stem}.weight": f"{prefix}{name}.weight" for stem, name in stems.items()}
    biases = {gguf.removesuffix("weight") + "bias": hf.removesuffix("weight") + "bias" for gguf, hf in weights.items()}
    names = weights | biases
    # A tensor left aside (experts, extra norms) would mean a model that computes something else.
    if strange := sorted(found.keys() - names.keys()):
        raise UserError(f"{path}: tensor {strange[0]} is not part of a plain {architecture} model; use another model")
    if missing := sorted(weights.keys() - found.keys() - {"output.weight"}):
        raise UserError(f"{path}: tensor {missing[0]} is missing; fetch or convert the file again")
    return {name: names[name] for name in found}


class _Tensors(Mapping[str, np.ndarray]):
    """The file's tensors by Hugging Face name, each read and dequantised when it is looked up."""

    def __init__(self, config: dict[str, Any], found: dict[str, ReaderTensor], names: dict[str, str]) -> None:
        self._stored = {names[gguf_name]: tensor for gguf_name, tensor in found.items()}
        self._heads = {}
        if config["model_type"] == "llama":
            self._heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self._stored[name]
        values = _dequantise(tensor.data, tensor.tensor_type)
        heads = self._heads.get(name.split(".")[-2])
        return values if heads is None else _split_rotary_pairs(values, heads)

    def __contains__(self, name: object) -> bool:
        return name in self._stored  # Mapping's own test would dequantise

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def _split_rotary_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * head_dim, ...] of a Llama q or k projection (or bias) from GGUF's order to Hugging Face's.

    GGUF holds the two rows of a rotary pair side by side, Hugging Face half a head apart.
    """
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _config(metadata: _Metadata, found: dict[str, ReaderTensor], rope_factors: ReaderTensor | None) -> dict[str, Any]:
    """The config.json of the model; raises `UserError` for features that are not supported."""
    architecture = metadata.need("general.architecture")
    hidden_size = metadata.need("{arch}.embedding_length")
    heads = metadata.need("{arch}.attention.head_count")
    head_dim = metadata.get("{arch}.attention.key_length", hidden_size // heads)
    _check_features(metadata, head_dim)
    return {
        "model_type": architecture,
        "architectures": [_ARCHITECTURES[architecture]],
        "vocab_size": int(found["token_embd.weight"].shape[-1]),
        "hidden_size": hidden_size,
        "intermediate_size": metadata.need("{arch}.feed_forward_length"),
        "num_hidden_layers": metadata.need("{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(metadata.need("{arch}.attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope_parameters(metadata, rope_factors),
        "max_position_embeddings": metadata.need("{arch}.context_length"),
        "tie_word_embeddings": "output.weight" not in found,
        "attention_bias": "blk.0.attn_q.bias" in found,
        "mlp_bias": "blk.0.ffn_gate.bias" in found,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "mask_token_id": metadata.get("tokenizer.ggml.mask_token_id"),
    }


def _check_features(metadata: _Metadata, head_dim: int) -> None:
    """Raises `UserError` for fields that change the computation in ways not supported here."""
    for key in ("head_count", "head_count_kv"):
        if isinstance(metadata.get("{arch}.attention." + key), list):
            raise UserError(f"{metadata.path}: {key} differs between layers, which is not supported; use another model")
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.get("{arch}." + key, head_dim) != head_dim:
            raise UserError(f"{metadata.path}: {key} differs from the head size {head_dim}; use another model")
    if metadata.get("{arch}.attention.sliding_window"):
        raise UserError(f"{metadata.path}: sliding-window attention is not supported in GGUF files; use another model")


def _shortest(value: float) -> float:
    """A stored float32 as the shortest decimal that gives it: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_parameters(metadata: _Metadata, factors: ReaderTensor | None) -> dict[str, Any]:
    """Rotary settings as in config.json: of type default, linear, yarn or llama3; raises `UserError` for others."""
    theta = _shortest(metadata.get("{arch}.rope.freq_base", 10000.0))
    kind = metadata.get("{arch}.rope.scaling.type", "none")
    if factors is not None and kind == "none":
        return _llama3_rope(metadata.path, theta, _dequantise(factors.data, factors.tensor_type))
    if factors is not None or kind not in ("none", "linear", "yarn"):
        raise UserError(f"{metadata.path}: rotary scaling {kind!r} is not supported here; use another model")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    factor = _shortest(metadata.need("{arch}.rope.scaling.factor"))
    rope = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    return rope if kind == "linear" else rope | _yarn_details(metadata, factor)


def _yarn_details(metadata: _Metadata, factor: float) -> dict[str, Any]:
    """What the file says of YaRN besides its factor."""
    names = {
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    given = {hf_name: metadata.get("{arch}.rope.scaling." + name) for name, hf_name in names.items()}
    # GGUF's factor multiplies YaRN's own temperature; Hugging Face's replaces it.
    if (attention := metadata.get("{arch}.rope.scaling.attn_factor")) is not None:
        given["attention_factor"] = attention * (0.1 * log(factor) + 1.0)
    return {name: value for name, value in given.items() if value is not None}


def _llama3_rope(path: Path, theta: float, divisors: np.ndarray) -> dict[str, Any]:
    """Llama 3's rotary settings from the numbers [head_dim / 2] that divide the inverse frequencies.

    The file holds the outcome of the scaling alone. All published Llama 3 models differ in `factor` only, which
    is the largest divisor; the settings are returned if they give the same divisors, else `UserError` is raised.
    """
    factor, low, high, length = float(divisors.max()), 1.0, 4.0, 8192
    turns = length / (2 * pi) * theta ** -(np.arange(len(divisors)) / len(divisors))
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    if not np.allclose(divisors, 1.0 / ((1.0 - blend) / factor + blend), rtol=1e-4):
        raise UserError(f"{path}: {_ROPE_FACTORS} does not hold Llama 3's rotary scaling; use a Hugging Face directory")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }


def _tokenizer(metadata: _Metadata) -> Tokenizer:
    """The file's tokenizer; raises `UserError` where its fields are missing or of an unknown kind."""
    pre = metadata.need("tokenizer.ggml.pre")
    keys = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return Tokenizer.from_gguf_fields(
        tokens=metadata.need("tokenizer.ggml.tokens"),
        merges=metadata.need("tokenizer.ggml.merges"),
        token_types=metadata.need("tokenizer.ggml.token_type"),
        model=metadata.need("tokenizer.ggml.model"),
        pre=pre,
        token_ids={name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()},
        # Llama 3 files written before this field existed still want the token.
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"),
        chat_template=metadata.get("tokenizer.chat_template") or None,
        source=str(metadata.path),
    )


def _eos_token_ids(metadata: _Metadata) -> list[int]:
    """Ids of the end of sequence, turn and message, in this order, as far as the file names them."""
    ids = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    return list(dict.fromkeys(i for i in ids if i is not None))
