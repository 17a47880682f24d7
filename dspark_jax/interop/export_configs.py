"""The config.json of a drafter for every consumer (`checkpoint_formats.md` 11; spec 1.2, 5.1, 6), and for ourselves.

Each function gives the keys of one layout, for drafters that `export_needs` let through.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dspark_jax.errors import UserError
from dspark_jax.interop.checkpoint_files import locate, read_json
from dspark_jax.interop.drafter_keys import OWN_BLOCK_SETTINGS, OWN_EAGLE3_SETTINGS
from dspark_jax.interop.export_needs import kind_of
from dspark_jax.interop.families import text_config
from dspark_jax.interop.target_io import Target
from dspark_jax.models.config import DecoderConfig, DrafterConfig, Eagle3Config, Rope

Json = dict[str, Any]

SPECULATORS_VERSION = "0.9.0"  # whose layout is written

# What a draft config copies from its target's though no network reads it, and its value where that has none.
_INHERITED = {
    "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "initializer_range": 0.02, "use_cache": True,
}  # fmt: skip
_GEMMA4_INHERITED = {
    "enable_moe_block": False, "hidden_size_per_layer_input": 0, "moe_intermediate_size": None, "num_experts": None,
    "num_kv_shared_layers": 0, "top_k_experts": None, "use_bidirectional_attention": None,
    "use_double_wide_mlp": False,
}  # fmt: skip
# Which settings of a rope each kind reads.
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale",
        "mscale_all_dim", "truncate",
    ),
    "proportional": ("partial_rotary_factor", "factor"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Recipient:
    """For whom a config is written: its drafter's target, the name by which others find that, the weights' dtype."""

    target: Target
    target_name: str
    dtype: str


# ------------------------------------------------------------------------------------------------------------- layers


def target_json(target: Target) -> Mapping[str, Any]:
    """The target's own config.json; {} where it has none (a GGUF file, a model made in memory)."""
    try:
        path = locate(target.name)
    except UserError:
        return {}
    return read_json(path / "config.json") if path.is_dir() else {}


def layers_json(c: DecoderConfig, to: Recipient) -> Json:
    """The keys that describe the draft layers: a copy of the target's config, with the drafter's own sizes."""
    sliding = [kind.window > 0 for kind in c.attention]
    shared = {
        "dtype": to.dtype, "vocab_size": c.vocab_size, "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size, "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads, "rms_norm_eps": c.rms_eps, "attention_bias": c.qkv_bias,
        "max_position_embeddings": c.max_length, "tie_word_embeddings": False,
        "layer_types": ["sliding_attention" if sliding[k] else "full_attention" for k in c.layer_kinds],
    }  # fmt: skip
    family = _gemma4_json if c.family == "gemma4" else _qwen3_json
    return _inherited(_INHERITED, to.target) | shared | family(c, to.target)


def _inherited(defaults: Mapping[str, Any], target: Target) -> Json:
    raw, tokenizer, ends = text_config(target_json(target)), target.tokenizer, list(target.config.eos_token_ids)
    own = {"eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    if tokenizer is not None:
        own |= {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return {name: raw.get(name, own.get(name, default)) for name, default in defaults.items()}


def _qwen3_json(c: DecoderConfig, target: Target) -> Json:
    """Keys of a Qwen3, or of a Llama where there are no norms on q and k."""
    kind, window = c.attention[0], max(kind.window for kind in c.attention)
    sizes = {"num_key_value_heads": kind.num_kv_heads, "head_dim": kind.head_dim, "hidden_act": "silu"}
    rest = {"rope_parameters": rope_json(kind.rope), "use_sliding_window": window > 0, "sliding_window": window or None}
    inherited = _inherited({"max_window_layers": 28}, target)
    return {"model_type": "qwen3" if c.qk_norm else "llama"} | inherited | sizes | rest


def _gemma4_json(c: DecoderConfig, target: Target) -> Json:
    """Keys of Gemma4's text decoder. What belongs to sliding layers, which drafters lack, is the target's."""
    full, windowed = c.attention[0], max(target.config.attention, key=lambda kind: kind.window)
    raw = target_json(target)
    text_type = text_config(raw).get("model_type", "gemma4").removesuffix("_text")
    kv_heads = windowed.num_kv_heads if full.keys_as_values else full.num_kv_heads
    # The reference's own files have the two stray keys beside the layer types (spec 6).
    ropes = {
        "full_attention": rope_json(full.rope), "sliding_attention": rope_json(windowed.rope),
        "rope_theta": None, "rope_type": "default",
    }  # fmt: skip
    return _inherited(_GEMMA4_INHERITED | {"vocab_size_per_layer_input": c.vocab_size}, target) | {
        "model_type": f"{text_type}_text", "target_text_model_type": f"{text_type}_text",
        "target_model_type": str(raw.get("model_type", text_type)).removesuffix("_text"),
        "head_dim": windowed.head_dim, "global_head_dim": full.head_dim, "num_key_value_heads": kv_heads,
        "num_global_key_value_heads": full.num_kv_heads, "attention_k_eq_v": full.keys_as_values,
        "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": c.softcap or None,
        "sliding_window": windowed.window or None, "rope_parameters": ropes,
    }  # fmt: skip


def rope_json(rope: Rope) -> Json:
    """`rope_parameters` as `transformers` 5 writes them."""
    settings = {name: getattr(rope, name) for name in _ROPE_KEYS[rope.kind]}
    if rope.kind == "proportional" and rope.factor == 1:
        del settings["factor"]
    return {"rope_theta": rope.theta, "rope_type": rope.kind} | {k: v for k, v in settings.items() if v is not None}


def _old_rope(c: DecoderConfig) -> Json:
    """The keys of `transformers` 4, which older engines read."""
    rope = c.attention[0].rope
    return {"rope_theta": rope.theta} | ({} if rope.kind == "default" else {"rope_scaling": rope_json(rope)})


# ------------------------------------------------------------------------------------------------------------ layouts


def deepspec_json(config: DrafterConfig | Eagle3Config, to: Recipient) -> Json:
    """DeepSpec's keys, all of which its loader demands (spec 1.2, 5.1)."""
    family = "Gemma4" if config.decoder.family == "gemma4" else "Qwen3"
    shared = layers_json(config.decoder, to) | {
        "target_layer_ids": list(config.tap_layers), "num_target_layers": config.num_target_layers,
    }  # fmt: skip
    if isinstance(config, Eagle3Config):
        # The weight of later steps in the loss is the recipe's; nothing that loads the file uses it.
        return shared | {
            "architectures": [f"{family}Eagle3Model"], "target_model_name_or_path": to.target_name,
            "ttt_length": config.num_drafts, "step_loss_decay": 0.8, "draft_num_hidden_layers": 1,
        }  # fmt: skip
    block = {"architectures": [f"{family}DSparkModel"], **_block(config), "num_anchors": config.num_anchors}
    return shared | block | _heads(config)


def own_json(config: DrafterConfig | Eagle3Config, to: Recipient) -> Json:
    """Our own files: DeepSpec's keys, and one for every setting that DeepSpec does not have."""
    block = isinstance(config, DrafterConfig)
    own = {name: getattr(config, name) for name in (OWN_BLOCK_SETTINGS if block else OWN_EAGLE3_SETTINGS)}
    own = {name: value for name, value in own.items() if value}
    if block and config.logits_start:
        own["sample_from_anchor"] = False
    if config.target_hidden_size:
        own["target_hidden_size"] = config.target_hidden_size
    if config.reduced:
        own["draft_vocab_size"] = config.draft_vocab_size
    if config.decoder.attention[0].rope.rounded:
        own["rope_rounded"] = True
    return deepspec_json(config, to) | own | {"target_fingerprint": to.target.fingerprint}


def vllm_json(config: DrafterConfig | Eagle3Config, to: Recipient) -> Json:
    """vLLM's own classes (8.1). What has a default there is stated: defaults differ between its versions."""
    reduced = {"draft_vocab_size": config.draft_vocab_size} if config.reduced else {}
    if isinstance(config, Eagle3Config):
        family = "Qwen3" if config.decoder.qk_norm else "Llama"
        return layers_json(config.decoder, to) | {
            "architectures": [f"Eagle3{family}ForCausalLM"], "draft_vocab_size": config.draft_vocab_size,
            "eagle_aux_hidden_state_layer_ids": _entered(config), "num_target_layers": config.num_target_layers,
            "norm_before_residual": config.norm_before_residual,
        }  # fmt: skip
    if kind_of(config) == "DFlash":
        return dflash_json(config, to) | reduced
    stated = {
        "sample_from_anchor": config.logits_start == 0,
        "confidence_head_with_markov": config.confidence_with_markov,
    }
    return deepspec_json(config, to) | stated | reduced


def sglang_json(config: DrafterConfig | Eagle3Config, to: Recipient) -> Json:
    """SGLang's classes (8.2)."""
    if isinstance(config, Eagle3Config):
        return _eagle3_original(config, to)
    if kind_of(config) == "DFlash":
        return dflash_json(config, to)
    return deepspec_json(config, to) | _old_rope(config.decoder)


def speculators_json(config: DrafterConfig | Eagle3Config, to: Recipient) -> Json:
    """speculators' envelope (2.1): the draft layers' config nested, tap ids counted from the embedding."""
    algorithm, fields = _speculators_fields(config)
    method = {
        "proposal_type": "greedy", "speculative_tokens": config.num_drafts,
        "verifier_accept_k": 1, "accept_tolerance": 0.0,
    }  # fmt: skip
    architectures = target_json(to.target).get("architectures") or []
    name = {"dspark": "DSpark", "dflash": "DFlash", "dflash2": "DFlash2", "eagle3": "Eagle3"}[algorithm]
    return fields | {
        "architectures": [f"{name}DraftModel"], "speculators_model_type": algorithm,
        "speculators_version": SPECULATORS_VERSION, "dtype": to.dtype, "tie_word_embeddings": False,
        "draft_vocab_size": config.draft_vocab_size, "target_hidden_size": None,
        "transformer_layer_config": layers_json(config.decoder, to),
        "speculators_config": {
            "algorithm": algorithm, "proposal_methods": [method], "default_proposal_method": "greedy",
            "verifier": {"name_or_path": to.target_name, "architectures": architectures},
        },
    }  # fmt: skip


def _speculators_fields(config: DrafterConfig | Eagle3Config) -> tuple[str, Json]:
    """The algorithm's name and its own keys (2.2 to 2.6)."""
    if isinstance(config, Eagle3Config):
        return "eagle3", {
            "eagle_aux_hidden_state_layer_ids": _entered(config), "norm_output": config.feed_normed,
            "norm_before_residual": config.norm_before_residual, "norm_before_fc": config.norm_before_fc,
            "fc_norm": config.fc_norm, "embed_requires_grad": False,
        }  # fmt: skip
    block = {
        "block_size": config.block_size, "mask_token_id": config.mask_token_id, "num_anchors": config.num_anchors,
        "aux_hidden_state_layer_ids": _entered(config), "sample_from_anchor": config.logits_start == 0,
        # Also for drafters without windows: vLLM would run all their layers causally otherwise (0.5).
        "sliding_window_non_causal": not any(kind.causal for kind in config.decoder.attention),
    }  # fmt: skip
    if kind_of(config) == "DFlash":
        return "dflash", block
    if config.conv_taps:
        return "dflash2", block | _dflash2(config)
    heads = {"markov_head_type": "vanilla", "confidence_head_with_markov": False} | _heads(config)
    return "dspark", block | heads


def specforge_json(config: DrafterConfig | Eagle3Config, to: Recipient) -> Json:
    """SpecForge's layouts (3, 4): z-lab's, with the head's keys nested."""
    if isinstance(config, Eagle3Config):
        return _eagle3_original(config, to) | ({"fc_norm": True} if config.fc_norm else {})
    made = dflash_json(config, to) | {"draft_vocab_size": config.draft_vocab_size}
    if kind_of(config) == "DFlash":
        return made
    if config.head_type == "domino":
        made["architectures"] = ["DominoDraftModel"]
        made["dflash_config"] |= {
            "projector_type": "domino", "emb_dim": config.markov_rank, "gru_hidden_dim": config.gru_width,
            "pure_draft_prefix_len": config.pure_prefix, "shift_label": config.logits_start == 0,
        }  # fmt: skip
        return made
    kind = config.decoder.attention[0]
    heads = {"confidence_head_with_markov": False} | _heads(config)
    made["dflash_config"] |= heads | {
        "projector_type": "dspark", "confidence_head_alpha": float(config.confidence),
        "attention_mode": "gqa" if kind.num_kv_heads < config.decoder.num_heads else "mha",
    }  # fmt: skip
    return made | heads | _taps_and_mask(config) | {"architectures": ["DSparkDraftModel"]}


def dflash_json(config: DrafterConfig, to: Recipient) -> Json:
    """z-lab's DFlash (1) and DFlash2 (6)."""
    c = config.decoder
    made = layers_json(c, to) | _old_rope(c) | {
        "architectures": ["DFlashDraftModel"], "block_size": config.block_size, "num_anchors": config.num_anchors,
        "num_target_layers": config.num_target_layers,
        "dflash_config": _taps_and_mask(config) | {"block_size": config.block_size},
    }  # fmt: skip
    if c.softcap:
        made["final_logit_softcapping"] = c.softcap
    if config.conv_taps:
        made["architectures"] = ["DFlash2DraftModel"]
        made["dflash_config"] |= _dflash2(config)
    return made


def _eagle3_original(config: Eagle3Config, to: Recipient) -> Json:
    """EAGLE-3 as SGLang and SpecForge have it (3, 5)."""
    c = config.decoder
    made = layers_json(c, to) | _old_rope(c) | {
        "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": config.draft_vocab_size,
        "num_target_layers": config.num_target_layers,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(config.tap_layers)},
    }  # fmt: skip
    if config.target_hidden_size:
        made["target_hidden_size"] = config.target_hidden_size
    return made


# -------------------------------------------------------------------------------------------------------------- pieces


def _entered(config: DrafterConfig | Eagle3Config) -> list[int]:
    """Tap ids as the layers that the tapped states enter (0.2)."""
    return [i + 1 for i in config.tap_layers]


def _taps_and_mask(config: DrafterConfig) -> Json:
    return {"target_layer_ids": list(config.tap_layers), "mask_token_id": config.mask_token_id}


def _block(config: DrafterConfig) -> Json:
    return {"block_size": config.block_size, **_taps_and_mask(config)}


def _heads(config: DrafterConfig) -> Json:
    """Markov and confidence heads; DeepSpec has no keys for what a head that is not there would be like."""
    made: Json = {"markov_rank": config.markov_rank, "enable_confidence_head": config.confidence}
    if config.markov_rank:
        made["markov_head_type"] = config.head_type
    if config.confidence:
        made["confidence_head_with_markov"] = config.confidence_with_markov
    return made


def _dflash2(config: DrafterConfig) -> Json:
    return {
        "selector_rank": config.markov_rank, "selector_top_k": config.selector_top_k,
        "conv_kernel_size": config.conv_taps, "conv_group_size": config.conv_group,
    }  # fmt: skip
