"""What a config says of its drafter and of how it is trained, as the static settings of networks and losses."""

from typing import Any

import jax
from ml_collections import ConfigDict

from dspark_jax.errors import UserError
from dspark_jax.interop.drafter_fit import check_fit
from dspark_jax.interop.target_io import Target
from dspark_jax.models.config import DrafterConfig, Eagle3Config, draft_decoder
from dspark_jax.training.eagle3 import Eagle3Loss
from dspark_jax.training.losses import MEANS, LossWeights
from pallas_kernels.backends import KERNELS, choose

MARKOV_HEADS = ("vanilla", "gated", "rnn")


def new_drafter_config(config: ConfigDict, target: Target) -> DrafterConfig | Eagle3Config:
    """The drafter that a config asks for, with the target's widths (spec 1.2). UserError when it cannot be."""
    make = {"block": _block_drafter, "eagle3": _eagle3_drafter}.get(config.drafter.kind)
    if make is None:
        raise UserError(f"unknown drafter.kind {config.drafter.kind!r}: it is block or eagle3")
    made = make(config, target)
    check_fit(made, target)
    return made


def loss_settings(config: ConfigDict) -> LossWeights | Eagle3Loss:
    """The loss that goes with the config's kind of drafter."""
    d, t = config.drafter, config.train
    if not 0 <= t.ema < 1:
        raise UserError(f"train.ema={t.ema}: it is a decay, 0 (off) to below 1")
    if not 0 <= t.dpace <= 1:
        raise UserError(f"train.dpace={t.dpace}: it is D-PACE's alpha, 0 (off) to 1")
    if d.kind == "eagle3":
        if t.dpace:
            raise UserError("train.dpace weighs the slots of a block, which Eagle3 has not: leave it 0")
        return Eagle3Loss(d.ttt_length, t.step_decay)
    if not 0 <= t.curriculum <= 1:
        raise UserError(f"train.curriculum={t.curriculum}: it is a part of the run, 0 to 1")
    if t.loss_mean not in MEANS:
        raise UserError(f"unknown train.loss_mean {t.loss_mean!r}: it is one of {', '.join(MEANS)}")
    confidence = t.confidence_weight if d.confidence else 0.0
    curriculum = round(t.curriculum * t.steps)
    return LossWeights(t.ce_weight, t.l1_weight, confidence, t.decay_gamma, curriculum, t.loss_mean, t.dpace)


def chosen_kernels(config: ConfigDict, arrays: Any) -> str:
    """What `train.kernels` means for a program over `arrays`: a GPU's kernels only where it names them."""
    if config.train.kernels not in KERNELS:
        raise UserError(f"unknown train.kernels {config.train.kernels!r}: known are {', '.join(KERNELS)}")
    return choose(config.train.kernels, jax.tree.leaves(arrays), ("tpu", "gpu"))[0]


def _block_drafter(config: ConfigDict, target: Target) -> DrafterConfig:
    d, t = config.drafter, target.config
    if d.head_type == "selector":
        raise UserError("a selector head is read from DFlash2's files; how it was trained is not published")
    has_table = d.markov_rank > 0 and d.head_type in MARKOV_HEADS
    return DrafterConfig(
        decoder=draft_decoder(t, d.num_layers, rope_rounded=d.rope_rounded),
        block_size=d.block_size,
        mask_token_id=_mask_token_id(config, target),
        tap_layers=tuple(d.tap_layers),
        num_target_layers=t.num_layers,
        draft_vocab_size=d.draft_vocab_size or t.vocab_size,
        logits_start=d.logits_start,
        markov_rank=d.markov_rank,
        head_type=d.head_type,
        gru_width=d.gru_width if d.head_type == "domino" else 0,
        pure_prefix=d.pure_prefix if d.head_type == "domino" else 0,
        confidence=d.confidence,
        confidence_with_markov=d.confidence and d.confidence_with_markov and has_table,
        num_anchors=config.train.num_anchors,
    )


def _eagle3_drafter(config: ConfigDict, target: Target) -> Eagle3Config:
    d, t = config.drafter, target.config
    if d.num_layers != 1 or d.ttt_length < 1:
        raise UserError("an Eagle3 drafter has drafter.num_layers=1 and drafts drafter.ttt_length tokens, at least 1")
    return Eagle3Config(
        decoder=draft_decoder(t, 1, causal=True, rope_rounded=d.rope_rounded),
        num_drafts=d.ttt_length,
        tap_layers=tuple(d.tap_layers),
        num_target_layers=t.num_layers,
        draft_vocab_size=d.draft_vocab_size or t.vocab_size,
    )


def _mask_token_id(config: ConfigDict, target: Target) -> int:
    """The id that a config gives, or that the target's tokenizer has for the name it gives."""
    d = config.drafter
    if d.mask_token_id >= 0:
        return d.mask_token_id
    found = target.tokenizer.token_id(d.mask_token) if target.tokenizer else None
    if found is None:
        raise UserError(
            f"mask token {d.mask_token!r} is not in the target's vocabulary: drafter.mask_token names an unused "
            "special token, or drafter.mask_token_id gives its id"
        )
    return found
