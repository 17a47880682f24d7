"""The layers of a drafter, as its own config.json describes them: widths, rotary kinds, windows, causality."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dspark_jax.errors import UserError
from dspark_jax.interop.families import decoder_config, positive_int, rope_config
from dspark_jax.models.config import Attention, DecoderConfig

# Copied from Qwen3.5 and multimodal targets into configs of drafters that rotate whole heads (checkpoint formats 7).
_ROPE_STRAYS = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
# Whether a block sees its later slots, under the names of several engines; the first one present decides.
_CAUSAL_KEYS = ("is_causal", "dflash_query_causal", "causal")


@dataclasses.dataclass(frozen=True)
class BlockRules:
    """Who sees whom inside a block, and from where a window is measured (checkpoint formats 0.5)."""

    full_causal: bool = False
    sliding_causal: bool = True
    window_from_anchor: bool = False
    rope_entry: str | None = None  # the layer type whose rope all layers share; None: each its own


EAGLE3_RULES = BlockRules(full_causal=True)


def block_rules(config: Mapping[str, Any]) -> BlockRules:
    """The rules of every format but speculators': sliding layers are causal, full ones see the whole block."""
    if (non_causal := config.get("sliding_window_non_causal")) is not None:
        return BlockRules(sliding_causal=not non_causal)
    stated = [bool(config[key]) for key in _CAUSAL_KEYS if config.get(key) is not None]
    return BlockRules(full_causal=stated[0], sliding_causal=stated[0]) if stated else BlockRules()


def speculators_rules(config: Mapping[str, Any], non_causal: bool = False) -> BlockRules:
    """speculators' training: windows end at the anchor, and all layers take the sliding layers' rope."""
    causal = not config.get("sliding_window_non_causal", non_causal)
    return BlockRules(sliding_causal=causal, window_from_anchor=True, rope_entry="sliding_attention")


def draft_layers(config: Mapping[str, Any], rules: BlockRules, qk_norm: bool = True) -> DecoderConfig:
    """Reads the draft layers' sizes, Gemma4's or those of a Qwen3 (with norms on q and k) or Llama."""
    if "rms_norm_eps" not in config:
        raise UserError("config.json lacks 'rms_norm_eps'")
    gemma = str(config.get("model_type")).startswith("gemma4")
    settings = {**config, **_windows(config), "tie_word_embeddings": False}
    if not gemma:
        settings |= {"model_type": "qwen3", "rope_parameters": None, "rope_scaling": None}
    made = decoder_config(settings)

    def adapt(kind: Attention) -> Attention:
        causal = rules.sliding_causal if kind.window else rules.full_causal
        kind = dataclasses.replace(
            kind, causal=causal, window_from_anchor=bool(kind.window) and rules.window_from_anchor
        )
        own = "sliding_attention" if kind.window else "full_attention"
        return kind if gemma else dataclasses.replace(kind, rope=rope_config(_plain(config), rules.rope_entry or own))

    softcap = float(config.get("final_logit_softcapping") or 0.0)
    return dataclasses.replace(made, qk_norm=qk_norm, attention=tuple(map(adapt, made.attention)), softcap=softcap)


def _windows(config: Mapping[str, Any]) -> dict[str, Any]:
    """`layer_types` is the last word on windows: `use_sliding_window` is often a target's, copied."""
    types = config.get("layer_types")
    if types is None:
        return {}
    if not isinstance(types, list):
        raise UserError(f"config.json: layer_types is {types!r}, a list is needed")
    if "sliding_attention" in types:
        positive_int(config, "sliding_window")
    return {"use_sliding_window": "sliding_attention" in types}


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without the rotary keys that no Qwen3 or Llama drafter obeys."""

    def clean(rope: Any) -> Any:
        if not isinstance(rope, Mapping):
            return "default" if rope == "mrope" else rope
        return {key: clean(value) for key, value in rope.items() if key not in _ROPE_STRAYS}

    return {**config, **{key: clean(config[key]) for key in ("rope_parameters", "rope_scaling") if key in config}}
