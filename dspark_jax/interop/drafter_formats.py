"""Drafters of every layout we cover, brought to one form (`checkpoint_formats.md`, whose sections are named below).

A layout is a test and a reader; the first test that holds decides (10). What a file may hold beyond our networks is
refused by name: computing something else would only show as poor acceptance.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from dspark_jax.errors import UserError
from dspark_jax.interop.draft_layers import block_rules, draft_layers, speculators_rules
from dspark_jax.interop.drafter_keys import (
    OWN_BLOCK_SETTINGS,
    Canonical,
    Renames,
    Source,
    entered_layers,
    has_qk_norm,
    head_rows,
    layer_ids,
    logits_start,
    need,
    other_width,
    reference_taps,
    spread_taps,
)
from dspark_jax.interop.eagle3_formats import deepspec_eagle3, original_eagle3, speculators_eagle3
from dspark_jax.interop.families import positive_int
from dspark_jax.models.config import DecoderConfig, DrafterConfig

_NO_HEAD = {"markov_rank": 0, "confidence": False, "confidence_with_markov": False}
_LEGACY = (("logit_head.", ""),)


def canonical_form(raw: Mapping[str, Any], tensors: Mapping[str, Any], target: DecoderConfig) -> Canonical:
    """Recognises a drafter's layout and reads its config.json. UserError names what is missing or not covered."""
    source = Source(raw, tensors, target)
    for what, found in _NOT_COVERED:
        if found(source):
            raise UserError(f"this drafter is not supported: {what}")
    for holds, read in _LAYOUTS:
        if holds(source):
            return read(source)
    known = "DeepSpec, z-lab, SpecForge, speculators, Domino, LFM2, AngelSpec and EAGLE-3 layouts are read"
    raise UserError(f"unknown drafter architecture {source.architecture!r}: {known}")


# --------------------------------------------------------------------------------------------------- DSpark and DFlash


def _deepspec(source: Source) -> Canonical:
    """DeepSpec's DSpark and DFlash, and our own files (spec 1.2). Its loader has no defaults."""
    raw = source.raw
    needed = ["head_dim", "target_layer_ids", "num_target_layers", "num_anchors", "enable_confidence_head"]
    needed += ["markov_rank"] + (["markov_head_type"] if raw.get("markov_rank") else [])
    needed += ["confidence_head_with_markov"] if raw.get("enable_confidence_head") else []
    for key in needed:
        need(raw, key)
    head = _markov_head(source, raw) | {name: positive_int(raw, name) for name in OWN_BLOCK_SETTINGS if name in raw}
    made = _block_drafter(source, raw, draft_layers(raw, block_rules(raw)), 0, head)
    return dataclasses.replace(made, reference_taps=reference_taps(source, first=-1))


def _specforge_dspark(source: Source) -> Canonical:
    """SpecForge's DSpark: DeepSpec's networks, the keys nested, the tables the target's (3)."""
    return _nested(source, 0, _markov_head(source, {"markov_rank": 0, **source.settings}))


def _lfm2(source: Source) -> Canonical:
    """LiquidAI's DSpark: taps and mask nested, rotary pairs interleaved (7)."""
    return _nested(source, 0, _markov_head(source, source.settings))


def _dflash(source: Source) -> Canonical:
    """z-lab's DFlash, SpecForge's too: the anchor's slot predicts nothing (1)."""
    if source.settings.get("markov_rank") or source.has("markov_head."):
        raise UserError(
            "this drafter is not supported: DFlash with a Markov head is a hybrid, "
            "and its config does not tell whether the anchor's slot predicts"
        )
    return _nested(source, 1, _NO_HEAD, scaled=True)


def _dflash2(source: Source) -> Canonical:
    """DFlash2 in z-lab's layout (6)."""
    return _nested(source, 1, _selector(source.settings), scaled=True)


def _domino(source: Source) -> Canonical:
    """Domino, the original's and SpecForge's (4)."""
    settings = source.settings
    head = _NO_HEAD | {
        "markov_rank": positive_int(settings, "emb_dim"),
        "head_type": "domino",
        "gru_width": positive_int(settings, "gru_hidden_dim"),
        "pure_prefix": settings.get("pure_draft_prefix_len") or 0,
        "confidence": bool(settings.get("enable_confidence_head")),
    }
    shifted = settings.get("shift_label")
    return _nested(source, 1, head, stated=None if shifted is None else {"shift_label": 0 if shifted else 1})


def _angelspec(source: Source) -> Canonical:
    """AngelSpec's DFlash and DSpark: other names, and `num_target_layers` counts the taps (7)."""
    layers = positive_int(source.raw, "target_num_hidden_layers", source.target.num_layers)
    settings = {**source.settings, "num_target_layers": layers}
    head, first = _NO_HEAD, "markov_head.markov_w1.weight"
    if first in source.tensors:
        head = _markov_head(source, {"markov_rank": source.tensors[first].shape[1], **settings})
    renames = (("context_proj.", "fc."), ("context_norm.", "hidden_norm."), ("final_norm.", "norm."))
    return _block_drafter(source, settings, draft_layers(settings, block_rules(settings)), 1, head, renames=renames)


def _speculators(source: Source) -> Canonical:
    """vLLM's speculators: the draft layers' config is nested, tap ids count from the embedding (2)."""
    method = source.method
    if method == "eagle3":
        return speculators_eagle3(source)
    if method not in ("dflash", "dspark", "dflash2"):
        raise UserError(f"this drafter is not supported: speculators' {method!r}")
    layers = source.layers
    settings = {"block_size": 8, **source.raw, "hidden_size": layers.get("hidden_size")}
    if method == "dspark":
        head = _markov_head(source, {"markov_rank": 256, **settings})
    else:
        head = _selector(settings) if method == "dflash2" else _NO_HEAD
    rules = speculators_rules(settings, non_causal=method == "dflash2")
    decoder = draft_layers(layers, rules, has_qk_norm(source, layers))
    return _block_drafter(source, settings, decoder, 1, head, entered_layers(settings, "aux_hidden_state_layer_ids"))


def _nested(
    source: Source,
    default_start: int,
    head: Mapping[str, Any],
    scaled: bool = False,
    stated: Mapping[str, int] | None = None,
) -> Canonical:
    """A layout that keeps its own keys in `dflash_config`. `scaled`: it takes the target's embedding with its scale."""
    settings, layers = source.settings, source.target.num_layers
    decoder = draft_layers(settings, block_rules(settings))
    if scaled:
        decoder = dataclasses.replace(decoder, embedding_scale=source.target.embedding_scale)
    taps = spread_taps(layers, decoder.num_layers) if settings.get("target_layer_ids") is None else None
    return _block_drafter(source, settings, decoder, default_start, head, taps, _LEGACY, stated)


def _block_drafter(
    source: Source,
    settings: Mapping[str, Any],
    decoder: DecoderConfig,
    default_start: int,
    head: Mapping[str, Any],
    taps: tuple[int, ...] | None = None,
    renames: Renames = (),
    stated: Mapping[str, int] | None = None,
) -> Canonical:
    """`settings`: the drafter's keys; `head`: fields of its heads; `taps` None: as `target_layer_ids` says."""
    _refuse_gates(source, decoder)
    rows = head_rows(source, settings, decoder.vocab_size)
    config = DrafterConfig(
        decoder=decoder,
        block_size=positive_int(settings, "block_size"),
        mask_token_id=need(settings, "mask_token_id"),
        tap_layers=layer_ids(settings, "target_layer_ids") if taps is None else taps,
        num_target_layers=positive_int(settings, "num_target_layers", source.target.num_layers),
        draft_vocab_size=min(rows, decoder.vocab_size),
        logits_start=logits_start(settings, default_start, stated),
        target_hidden_size=other_width(settings, decoder.hidden_size),
        num_anchors=positive_int(settings, "num_anchors", 512),
        **head,
    )
    halves = settings.get("rope_is_neox_style", settings.get("is_neox_style"))
    return Canonical(config, renames, interleaved=halves is False, padded=rows > decoder.vocab_size)


def _refuse_gates(source: Source, decoder: DecoderConfig) -> None:
    """`attn_output_gate` in a config may be the target's, copied; twice the rows in q_proj are a gate (7, 10)."""
    name, rows = "layers.0.self_attn.q_proj.weight", decoder.num_heads * decoder.attention[0].head_dim
    if name in source.tensors and source.tensors[name].shape[0] == 2 * rows:
        raise UserError(
            f"this drafter is not supported: gated attention (Ornith), {name} has two rows for each of {rows}"
        )


# --------------------------------------------------------------------------------------------------------------- heads


def _markov_head(source: Source, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Markov and confidence heads. What the config leaves out about the confidence head, its weight says."""
    rank, name = need(settings, "markov_rank"), "confidence_head.proj.weight"
    if not isinstance(rank, int) or rank < 0:
        raise UserError(f"config.json: markov_rank is {rank!r}, a whole number of at least 0 is needed")
    inputs = next((source.tensors[n].shape[-1] for n in (name, f"logit_head.{name}") if n in source.tensors), 0)
    enabled, with_markov = settings.get("enable_confidence_head"), settings.get("confidence_head_with_markov")
    confidence = bool(inputs if enabled is None else enabled)
    reads_markov = inputs > positive_int(settings, "hidden_size") if with_markov is None else bool(with_markov)
    return {
        "markov_rank": rank,
        "head_type": str(settings.get("markov_head_type") or "vanilla").lower() if rank else "vanilla",
        "confidence": confidence,
        "confidence_with_markov": confidence and reads_markov,
    }


def _selector(settings: Mapping[str, Any]) -> dict[str, Any]:
    """DFlash2's candidate selector and the sizes of its convolutions (6)."""
    if (settings.get("output_multiplier") or 1) != 1:
        raise UserError("this drafter is not supported: DFlash2 with an output_multiplier")
    return _NO_HEAD | {
        "markov_rank": positive_int(settings, "selector_rank"),
        "head_type": "selector",
        "selector_top_k": positive_int(settings, "selector_top_k"),
        "conv_taps": positive_int(settings, "conv_kernel_size"),
        "conv_group": positive_int(settings, "conv_group_size"),
    }


# --------------------------------------------------------------------------------------------------------- recognition

Test = Callable[[Source], Any]

_NOT_COVERED: tuple[tuple[str, Test], ...] = (
    ("DeepSeek-V4's embedded DSpark", lambda s: s.model_type.startswith("deepseek_v4") or s.has("mtp.")),
    ("P-EAGLE", lambda s: s.method == "peagle" or s.has("mask_hidden")),
    ("xpress", lambda s: s.method == "xpress" or s.has("refiner_head.")),
    ("DFly", lambda s: s.model_type == "dfly"),
    ("gated attention (Ornith)", lambda s: s.raw.get("enable_qwen35_gated_q_proj")),
    ("attention sinks (Nemotron)", lambda s: s.raw.get("attention_sink_bias") or s.has("attention_sink_bias")),
    ("log-SNR embeddings (Bonsai)", lambda s: s.has("log_snr_embed.")),
    ("fused or gated projections (Laguna)", lambda s: s.has(".qkv_proj.") or s.has(".g_proj.")),
    (
        "quantised weights; take its bfloat16 checkpoint",
        lambda s: s.raw.get("quantization_config") or any(map(s.has, ("weight_scale", "qweight", "weight_packed"))),
    ),
)

# AngelSpec stands before the two layouts whose tests its files would pass.
_LAYOUTS: tuple[tuple[Test, Callable[[Source], Canonical]], ...] = (
    (lambda s: s.method or s.raw.get("speculators_config"), _speculators),
    (lambda s: s.nested.get("projector_type") == "dspark", _specforge_dspark),
    (lambda s: s.nested.get("projector_type") in ("domino", "causal_v5"), _domino),
    (lambda s: s.architecture == "DFlash2DraftModel" or s.nested.get("selector_rank"), _dflash2),
    (lambda s: s.model_type in ("dflash", "dspark") or s.has("context_proj."), _angelspec),
    (lambda s: "DSpark" in s.architecture and s.nested and "target_layer_ids" not in s.raw, _lfm2),
    (
        lambda s: (
            s.architecture in ("Qwen3DSparkModel", "Gemma4DSparkModel")
            or ("DSpark" in s.architecture and {"target_layer_ids", "markov_rank"} <= set(s.raw))
        ),
        _deepspec,
    ),
    (lambda s: s.nested or s.architecture == "DFlashDraftModel", _dflash),
    (lambda s: s.architecture in ("Qwen3Eagle3Model", "Gemma4Eagle3Model", "Eagle3DraftModel"), deepspec_eagle3),
    (lambda s: s.has("midlayer.") or s.has("layers.0.hidden_norm."), original_eagle3),
)
