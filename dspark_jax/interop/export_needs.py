"""What a drafter needs of the program that is to run it, and what each consumer has (`checkpoint_formats.md`).

A consumer that lacks something would often load the file all the same and draft badly, so the export is refused.
"""

from collections.abc import Iterator

from dspark_jax.errors import UserError
from dspark_jax.interop.target_io import Target
from dspark_jax.models.config import DrafterConfig, Eagle3Config

GATED, RNN, HEADLESS = "a gated head", "an rnn head", "no in-block head"
LATE, EARLY = "an anchor that does not predict", "an anchor that predicts"
REDUCED, TABLES, CONFIDENCE = "a reduced vocabulary", "vocabulary tables of its own", "a confidence head"
GEMMA4, SCALED, UNSCALED = "Gemma4's layers", "scaled embeddings", "unscaled embeddings of a target that scales them"
CAPPED, WIDTH, MLP_BIAS = "capped logits", "another width than its target", "biases in its MLP"
WINDOWS, ANCHOR_WINDOWS, OPEN_WINDOWS = "sliding windows", "windows that end at the anchor", "windows that see ahead"
CAUSAL, ROPES = "causal attention inside a block", "layers that rotate differently"
LAST_TAP, EMBEDDING_TAP, TAP_ORDER = "a tap on the last layer", "a tap on the embedding", "taps that do not increase"
QK_NORM, NO_QK_NORM, FED_NORM = "norms on queries and keys", "no norms on queries and keys", "a normed state fed back"
FC_NORM, FC_NORMS, RESIDUAL_NORM = "a norm before fc", "norms of each tap", "a normed residual"
TAPS_3, TAPS_5, TAPS_N = "3 taps", "5 taps", "neither 3 nor 5 taps"
NO_SELECTOR = "convolutions without a selector, or a selector without them"

_DFLASH = {WINDOWS, SCALED, CAPPED, TAP_ORDER, EMBEDDING_TAP}
_EAGLE3 = {EMBEDDING_TAP, TAP_ORDER}
_OURS = {WIDTH, REDUCED, TABLES, UNSCALED, GEMMA4, LAST_TAP, EMBEDDING_TAP, TAP_ORDER, WINDOWS}
_SPECULATORS = {REDUCED, ANCHOR_WINDOWS, OPEN_WINDOWS, UNSCALED, TAP_ORDER, EMBEDDING_TAP}

# Consumer -> kind of drafter that it runs -> what such a drafter may need.
SERVED: dict[str, dict[str, set[str]]] = {
    "deepspec": {
        "DSpark": {GATED, RNN, HEADLESS, TABLES, GEMMA4, EMBEDDING_TAP},
        "Eagle3": {QK_NORM, TAPS_5, TABLES, GEMMA4},
    },
    "vllm": {
        "DSpark": {HEADLESS, LATE, REDUCED, TABLES, GEMMA4, WINDOWS, EMBEDDING_TAP, TAP_ORDER},
        "DFlash": _DFLASH | {REDUCED},
        "Eagle3": _EAGLE3 | {QK_NORM, NO_QK_NORM, TAPS_3, REDUCED, TABLES, RESIDUAL_NORM},
    },
    "sglang": {
        "DSpark": {GATED, RNN, HEADLESS, TABLES, EMBEDDING_TAP},
        "DFlash": _DFLASH - {WINDOWS},
        "Eagle3": _EAGLE3 | {NO_QK_NORM, TAPS_3, REDUCED},
    },
    "speculators": {
        "DSpark": _SPECULATORS | {GATED, RNN, HEADLESS, LATE},
        "DFlash": _SPECULATORS,
        "DFlash2": (_SPECULATORS | {EARLY}) - {REDUCED},
        "Eagle3": _EAGLE3 | {QK_NORM, NO_QK_NORM, TAPS_3, TAPS_5, TAPS_N, REDUCED, TABLES, FED_NORM, FC_NORM,
                             FC_NORMS, RESIDUAL_NORM},
    },
    "specforge": {
        "DSpark": {GATED, RNN, HEADLESS, WINDOWS, EMBEDDING_TAP, TAP_ORDER},
        "DFlash": _DFLASH,
        "Domino": {WINDOWS, LATE, EMBEDDING_TAP, TAP_ORDER},
        "Eagle3": _EAGLE3 | {NO_QK_NORM, TAPS_3, REDUCED, TABLES, FC_NORMS, WIDTH},
    },
    "dflash": {"DFlash": _DFLASH, "DFlash2": _DFLASH},
    "ours": {
        "DSpark": _OURS | {GATED, RNN, HEADLESS, LATE},
        "DFlash": _OURS,
        "Domino": _OURS | {LATE, CONFIDENCE},
        "DFlash2": _OURS | {EARLY, CONFIDENCE, NO_SELECTOR},
        "Eagle3": _OURS | {QK_NORM, TAPS_3, TAPS_5, TAPS_N, FED_NORM, FC_NORM, FC_NORMS, RESIDUAL_NORM},
    },
}  # fmt: skip

CONSUMERS = tuple(name for name in SERVED if name != "ours")


def kind_of(config: DrafterConfig | Eagle3Config) -> str:
    """The kind of a drafter, as formats tell them apart. A DFlash whose anchor predicts is a DSpark without head."""
    if isinstance(config, Eagle3Config):
        return "Eagle3"
    head = config.head_type if config.markov_rank else ""
    if head == "domino":
        return "Domino"
    if head == "selector" or config.conv_taps:
        return "DFlash2"
    return "DFlash" if config.logits_start == 1 and not head and not config.confidence else "DSpark"


def refuse_unserved(consumer: str, config: DrafterConfig | Eagle3Config, target: Target, own_tables: bool) -> None:
    """Raises UserError, naming what is missing and the consumers that have it, unless `consumer` runs such a drafter.

    `own_tables`: whether its embedding or head differ from the target's.
    """
    kind, needed = kind_of(config), set(needs(config, target, own_tables))
    able = [name for name in CONSUMERS if kind in SERVED[name] and needed <= SERVED[name][kind]]
    served = SERVED[consumer].get(kind)
    if served is not None and needed <= served:
        return
    lacks = " and ".join(sorted(needed - served)) if served is not None else ""
    what = f"a drafter with {lacks}" if lacks else f"{kind} drafters"
    advice = f"export it to {' or '.join(able)}" if able else "neither does any other consumer"
    raise UserError(f"{'our own format' if consumer == 'ours' else consumer} does not take {what}: {advice}")


def needs(config: DrafterConfig | Eagle3Config, target: Target, own_tables: bool) -> Iterator[str]:
    """What the program that runs a drafter must be able to do, beyond the plain form of its kind."""
    kind, c, taps = kind_of(config), config.decoder, config.tap_layers
    found = {
        REDUCED: config.reduced,
        TABLES: own_tables,
        GEMMA4: c.family == "gemma4",
        MLP_BIAS: c.mlp_bias,
        WIDTH: config.target_hidden_size not in (0, c.hidden_size),
        LAST_TAP: config.num_target_layers - 1 in taps,
        EMBEDDING_TAP: -1 in taps,
        TAP_ORDER: list(taps) != sorted(taps),
        ROPES: len({kind.rope for kind in c.attention}) > 1,
    }
    if c.family != "gemma4":
        scaled = c.embedding_scale != 1
        lent_scaled = kind in ("DFlash", "DFlash2") and target.config.embedding_scale != 1
        found |= {SCALED: scaled, UNSCALED: lent_scaled and not scaled, CAPPED: c.softcap > 0}
    own = _eagle3_needs(config) if isinstance(config, Eagle3Config) else _block_needs(config, kind)
    return (need for need, holds in (found | own).items() if holds)


def _block_needs(config: DrafterConfig, kind: str) -> dict[str, bool]:
    attention, head = config.decoder.attention, config.head_type if config.markov_rank else ""
    windows = [a for a in attention if a.window]
    return {
        GATED: head == "gated",
        RNN: head == "rnn",
        HEADLESS: kind == "DSpark" and not head,
        LATE: kind in ("DSpark", "Domino") and config.logits_start == 1,
        EARLY: kind == "DFlash2" and config.logits_start == 0,
        CONFIDENCE: kind != "DSpark" and config.confidence,
        NO_SELECTOR: kind == "DFlash2" and (head != "selector" or not config.conv_taps),
        NO_QK_NORM: not config.decoder.qk_norm,
        CAUSAL: any(a.causal and not a.window for a in attention),
        WINDOWS: any(not a.window_from_anchor for a in windows),
        ANCHOR_WINDOWS: any(a.window_from_anchor for a in windows),
        OPEN_WINDOWS: any(not a.causal for a in windows),
    }


def _eagle3_needs(config: Eagle3Config) -> dict[str, bool]:
    count, norms = len(config.tap_layers), config.decoder.qk_norm
    return {
        TAPS_3: count == 3,
        TAPS_5: count == 5,
        TAPS_N: count not in (3, 5),
        QK_NORM: norms and config.decoder.family != "gemma4",
        NO_QK_NORM: not norms,
        WINDOWS: any(a.window for a in config.decoder.attention),
        FED_NORM: config.feed_normed,
        FC_NORM: config.norm_before_fc,
        FC_NORMS: config.fc_norm,
        RESIDUAL_NORM: config.norm_before_residual,
    }
