"""Drafters on disk, under DeepSpec's names: config.json and model.safetensors (spec 1.2, 1.4).

Our own files hold what was trained and borrow the target's embedding and head; a reduced vocabulary adds `d2t`
(target id = draft id + d2t[draft id]). DeepSpec's own files carry copies of both tables, which are used as they are.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors.numpy

from dspark_jax.errors import UserError
from dspark_jax.interop.checkpoint_files import SafetensorsDirectory, locate, read_json
from dspark_jax.interop.drafter_tensors import (
    abstract_drafter,
    drafter_module,
    drafter_tensors,
    init_drafter,
    params_from_tensors,
)
from dspark_jax.interop.families import positive_int, rope_config, take_tensor
from dspark_jax.interop.target_io import Target
from dspark_jax.models.config import Attention, DecoderConfig, DrafterConfig, Eagle3Config
from dspark_jax.models.drafter import Borrowed, DSpark
from dspark_jax.models.eagle3 import Eagle3
from dspark_jax.models.heads import HEADS
from dspark_jax.models.layers import Params

ARCHITECTURE = "Qwen3DSparkModel"

__all__ = ["Drafter", "abstract_drafter", "borrow", "check_fit", "init_drafter", "load_drafter", "save_drafter"]


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A drafter bound to its target: its own parameters, and the tables it borrows."""

    config: DrafterConfig | Eagle3Config
    params: Params
    borrowed: Borrowed
    target_fingerprint: str = ""  # of the target it was trained for; "" where its file does not say

    @property
    def module(self) -> DSpark | Eagle3:
        return drafter_module(self.config)


def borrow(target: Target, token_ids: np.ndarray | None = None) -> Borrowed:
    """The target's embedding and the head's rows for `token_ids` (None: the whole vocabulary)."""
    vocab = target.config.vocab_size
    head = target.params["embedding"] if target.config.tied else target.params["lm_head"]["kernel"].T
    ids = jnp.arange(vocab) if token_ids is None else jnp.asarray(token_ids)
    return Borrowed(target.params["embedding"], head if token_ids is None else head[ids], ids.astype(jnp.int32))


def load_drafter(source: str | Path, target: Target) -> Drafter:
    """Loads a drafter (directory or hub id) for `target`. Raises UserError when the two do not fit together."""
    path = locate(source)
    raw = read_json(path / "config.json")
    config = drafter_config(raw, target)
    tensors = SafetensorsDirectory(path)
    params = params_from_tensors(config, tensors, target.dtype)
    return Drafter(config, params, _tables(tensors, config, target), raw.get("target_fingerprint", ""))


def _tables(tensors: Mapping[str, Any], config: DrafterConfig, target: Target) -> Borrowed:
    """Embedding, head and draft ids: from the file where it has them, else from the target."""
    vocab, hidden, spoken = config.decoder.vocab_size, config.decoder.hidden_size, config.draft_vocab_size
    ids = None
    if config.reduced:
        ids = take_tensor(tensors, "d2t", (spoken,), np.int64) + np.arange(spoken)
        if ids.min() < 0 or ids.max() >= vocab or (np.diff(ids) <= 0).any():
            raise UserError(
                "d2t is no increasing map into the target's vocabulary: offsets (target id - draft id) are expected"
            )
    borrowed = borrow(target, ids)
    if "embed_tokens.weight" in tensors:
        table = take_tensor(tensors, "embed_tokens.weight", (vocab, hidden), target.dtype)
        borrowed = borrowed.replace(embedding_VxH=jnp.asarray(table))
    if "lm_head.weight" in tensors:
        table = take_tensor(tensors, "lm_head.weight", (spoken, hidden), target.dtype)
        borrowed = borrowed.replace(head_VdxH=jnp.asarray(table))
    return borrowed


def drafter_config(raw: Mapping[str, Any], target: Target) -> DrafterConfig:
    """Reads a drafter's config.json and checks it against the target it is to serve."""
    architecture = (raw.get("architectures") or ["?"])[0]
    if architecture != ARCHITECTURE:
        raise UserError(f"unknown drafter architecture {architecture!r}: this version reads {ARCHITECTURE}")
    try:
        rank = raw["markov_rank"]
        confidence = raw["enable_confidence_head"]
        config = DrafterConfig(
            decoder=_draft_decoder(raw),
            block_size=positive_int(raw, "block_size"),
            mask_token_id=raw["mask_token_id"],
            tap_layers=tuple(raw["target_layer_ids"]),
            num_target_layers=positive_int(raw, "num_target_layers"),
            draft_vocab_size=positive_int(raw, "draft_vocab_size", positive_int(raw, "vocab_size")),
            markov_rank=rank,
            head_type=raw["markov_head_type"].lower() if rank else "vanilla",
            confidence=confidence,
            confidence_with_markov=raw["confidence_head_with_markov"] if confidence else False,
            num_anchors=raw["num_anchors"],
        )
    except KeyError as error:
        raise UserError(f"the drafter's config.json lacks {error.args[0]!r}") from None
    check_fit(config, target)
    return config


def _draft_decoder(raw: Mapping[str, Any]) -> DecoderConfig:
    """The draft layers' sizes: always Qwen3-shaped (q and k norms), full attention."""
    bias = bool(raw.get("attention_bias", False))
    attention = Attention(
        num_kv_heads=positive_int(raw, "num_key_value_heads"),
        head_dim=positive_int(raw, "head_dim"),
        rope=rope_config(raw),
        causal=False,
    )
    return DecoderConfig(
        family="qwen3",
        vocab_size=positive_int(raw, "vocab_size"),
        hidden_size=positive_int(raw, "hidden_size"),
        intermediate_size=positive_int(raw, "intermediate_size"),
        num_heads=positive_int(raw, "num_attention_heads"),
        attention=(attention,),
        layer_kinds=(0,) * positive_int(raw, "num_hidden_layers"),
        rms_eps=raw["rms_norm_eps"],
        max_length=positive_int(raw, "max_position_embeddings", 2048),
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        tied=False,
    )


def check_fit(config: DrafterConfig, target: Target) -> None:
    """Raises UserError when this drafter cannot serve this target, naming what differs."""
    c, t = config.decoder, target.config
    pairs = {
        "hidden size": (c.hidden_size, t.hidden_size),
        "vocabulary": (c.vocab_size, t.vocab_size),
        "number of target layers": (config.num_target_layers, t.num_layers),
    }
    for what, (drafter, own) in pairs.items():
        if drafter != own:
            raise UserError(
                f"this drafter was made for another target: its {what} is {drafter}, {target.name} has {own}"
            )
    taps = config.tap_layers
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < -1 or taps[-1] >= t.num_layers:
        raise UserError(f"tap layers {list(taps)} must increase and lie in -1 .. {t.num_layers - 1}")
    tokenizer = target.tokenizer
    taken = {*t.eos_token_ids} | ({tokenizer.eos_token_id, tokenizer.pad_token_id} if tokenizer else set())
    if not 0 <= config.mask_token_id < t.vocab_size or config.mask_token_id in taken:
        raise UserError(f"mask token {config.mask_token_id} must be inside the vocabulary, and no end or padding token")
    if config.markov_rank and config.head_type not in HEADS:
        raise UserError(f"unknown in-block head {config.head_type!r}: this version has {', '.join(HEADS)}")
    if config.confidence_with_markov and not config.markov_rank:
        raise UserError("a confidence head with Markov input needs a Markov head (markov_rank above 0)")


def save_drafter(path: str | Path, drafter: Drafter, target: Target) -> None:
    """Writes config.json and model.safetensors (bfloat16), the whole directory or nothing."""
    path, config = Path(path), drafter.config
    tensors = {
        name: array.astype(ml_dtypes.bfloat16) for name, array in drafter_tensors(config, drafter.params).items()
    }
    if config.reduced:
        ids = np.asarray(drafter.borrowed.token_ids_Vd, np.int64)
        tensors["d2t"] = ids - np.arange(len(ids))
    fresh = path.with_name(path.name + ".tmp")
    fresh.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(tensors, fresh / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(config_json(config, target), indent=2, sort_keys=True)
    (fresh / "config.json").write_text(text + "\n", encoding="utf-8")
    path.mkdir(exist_ok=True)
    for file in ("model.safetensors", "config.json"):
        os.replace(fresh / file, path / file)
    fresh.rmdir()


def config_json(config: DrafterConfig, target: Target) -> dict[str, Any]:
    """The config.json of a drafter, with DeepSpec's keys and those of our own files."""
    c, attention = config.decoder, config.decoder.attention[0]
    rope = attention.rope
    parameters = {"rope_theta": rope.theta, "rope_type": rope.kind}
    if rope.kind != "default":
        extra = dataclasses.asdict(rope)
        parameters |= {k: v for k, v in extra.items() if k not in ("theta", "kind") and v is not None}
    raw = {
        "architectures": [ARCHITECTURE], "model_type": "qwen3", "dtype": "bfloat16",
        "vocab_size": c.vocab_size, "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers, "num_attention_heads": c.num_heads,
        "num_key_value_heads": attention.num_kv_heads, "head_dim": attention.head_dim,
        "hidden_act": "silu", "rms_norm_eps": c.rms_eps, "attention_bias": c.qkv_bias, "attention_dropout": 0.0, "max_position_embeddings": c.max_length, "rope_parameters": parameters,
        "layer_types": ["full_attention"] * c.num_layers, "tie_word_embeddings": False, "initializer_range": 0.02,
        "use_sliding_window": False, "sliding_window": None, "use_cache": True,
        "block_size": config.block_size, "mask_token_id": config.mask_token_id, "num_anchors": config.num_anchors,
        "target_layer_ids": list(config.tap_layers), "num_target_layers": config.num_target_layers,
        "markov_rank": config.markov_rank, "enable_confidence_head": config.confidence,
        "target_fingerprint": target.fingerprint,
    }  # fmt: skip
    if config.markov_rank:
        raw["markov_head_type"] = config.head_type
    if config.confidence:
        raw["confidence_head_with_markov"] = config.confidence_with_markov
    if config.reduced:
        raw["draft_vocab_size"] = config.draft_vocab_size
    return raw
