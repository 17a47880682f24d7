"""Eagle3 drafters of every layout we cover (`checkpoint_formats.md`, whose sections are named below; spec 5.1)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dspark_jax.errors import UserError
from dspark_jax.interop.draft_layers import EAGLE3_RULES, BlockRules, draft_layers
from dspark_jax.interop.drafter_keys import (
    OWN_EAGLE3_SETTINGS,
    Canonical,
    Renames,
    Source,
    entered_layers,
    has_qk_norm,
    head_rows,
    layer_ids,
    need,
    other_width,
    part,
    reference_taps,
    stated_drafts,
)
from dspark_jax.interop.families import positive_int
from dspark_jax.models.config import Eagle3Config

_IDS = "eagle_aux_hidden_state_layer_ids"
_DRAFTS = 7  # what files that do not say were trained for


def deepspec_eagle3(source: Source) -> Canonical:
    """DeepSpec's Eagle3 (spec 5.1), and our own files."""
    raw = source.raw
    for key in ("ttt_length", "num_target_layers"):
        need(raw, key)
    made = _eagle3(source, raw, layer_ids(raw, "target_layer_ids"), qk_norm=True)
    own = {name: raw[name] for name in OWN_EAGLE3_SETTINGS if name in raw}
    config = dataclasses.replace(made.config, **own)
    return dataclasses.replace(made, config=config, reference_taps=reference_taps(source, first=0))


def speculators_eagle3(source: Source) -> Canonical:
    """speculators' Eagle3 (2.4). Its `norm_output` feeds the normed state back; SpecForge's says something else."""
    raw, layers = source.raw, source.layers
    rules = dataclasses.replace(EAGLE3_RULES, rope_entry="sliding_attention")
    made = _eagle3(source, layers, _taps(source), has_qk_norm(source, layers), rules)
    config = dataclasses.replace(made.config, feed_normed=bool(raw.get("norm_output")))
    return dataclasses.replace(made, config=config)


def original_eagle3(source: Source) -> Canonical:
    """EAGLE-3's own files and SpecForge's: a Llama layer whatever the target (3, 5)."""
    raw = source.raw
    if raw.get("norm_output") is False:
        raise UserError("this drafter is not supported: Eagle3 without the norm before its head (norm_output false)")
    return _eagle3(source, raw, _taps(source), source.has(".q_norm."), renames=(("midlayer.", "layers.0."),))


def _taps(source: Source) -> tuple[int, ...]:
    """Under one key, SpecForge's nested list names the layers tapped, a flat one those entered next (0.2)."""
    nested, layers = part(source.raw, "eagle_config"), source.target.num_layers
    if nested.get(_IDS) is not None:
        return layer_ids(nested, _IDS)
    if source.raw.get(_IDS) is not None:
        return entered_layers(source.raw, _IDS)
    return 1, layers // 2 - 1, layers - 4


def _eagle3(
    source: Source,
    layers: Mapping[str, Any],
    taps: tuple[int, ...],
    qk_norm: bool,
    rules: BlockRules = EAGLE3_RULES,
    renames: Renames = (),
) -> Canonical:
    """An Eagle3 drafter, its layer described by `layers`; its tensors, too, tell of norms before `fc`."""
    raw, decoder = source.raw, draft_layers(layers, rules, qk_norm)
    if decoder.num_layers != 1:
        raise UserError(f"this drafter is not supported: Eagle3 with {decoder.num_layers} layers; one is")
    rows = head_rows(source, raw, decoder.vocab_size)
    config = Eagle3Config(
        decoder=decoder,
        num_drafts=positive_int(raw, "ttt_length", stated_drafts(raw) or _DRAFTS),
        tap_layers=taps,
        num_target_layers=positive_int(raw, "num_target_layers", source.target.num_layers),
        draft_vocab_size=min(rows, decoder.vocab_size),
        target_hidden_size=other_width(raw, decoder.hidden_size),
        norm_before_residual=bool(raw.get("norm_before_residual")),
        fc_norm=bool(raw.get("fc_norm")) or source.has("fc_norm."),
        norm_before_fc=bool(raw.get("norm_before_fc")) or source.has("input_norm."),
    )
    return Canonical(config, renames, padded=rows > decoder.vocab_size)
