"""What the readers of drafter layouts share: a drafter's files, what they become, and keys that every producer spells
and counts in its own way (`checkpoint_formats.md`, whose sections are named below)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dspark_jax.errors import UserError
from dspark_jax.interop.families import positive_int
from dspark_jax.models.config import DecoderConfig, DrafterConfig, Eagle3Config

Renames = tuple[tuple[str, str], ...]

# Fields of our configs that DeepSpec has no key for; our files have them under their own names.
OWN_BLOCK_SETTINGS = ("gru_width", "pure_prefix", "selector_top_k", "conv_taps", "conv_group")
OWN_EAGLE3_SETTINGS = ("norm_before_residual", "feed_normed", "fc_norm", "norm_before_fc")


@dataclasses.dataclass(frozen=True)
class Source:
    """What a drafter's directory holds, and the target it is to serve."""

    raw: Mapping[str, Any]  # config.json
    tensors: Mapping[str, Any]
    target: DecoderConfig

    @property
    def architecture(self) -> str:
        return str((self.raw.get("architectures") or ["?"])[0])

    @property
    def model_type(self) -> str:
        return str(self.raw.get("model_type"))

    @property
    def nested(self) -> Mapping[str, Any]:
        return part(self.raw, "dflash_config")

    @property
    def settings(self) -> dict[str, Any]:
        """config.json with what `dflash_config` says on top."""
        return {**self.raw, **{key: value for key, value in self.nested.items() if value is not None}}

    @property
    def method(self) -> str | None:
        """speculators' name of the method."""
        return self.raw.get("speculators_model_type") or part(self.raw, "speculators_config").get("algorithm")

    @property
    def layers(self) -> Mapping[str, Any]:
        """speculators' config of the draft layers."""
        need(self.raw, "transformer_layer_config")
        return part(self.raw, "transformer_layer_config")

    def has(self, part: str) -> bool:
        """Whether a tensor's name has this part."""
        return any(part in name for name in self.tensors)


@dataclasses.dataclass(frozen=True)
class Canonical:
    """A drafter as our networks know it, and how its tensors become theirs (`CanonicalTensors`)."""

    config: DrafterConfig | Eagle3Config
    renames: Renames = ()
    interleaved: bool = False
    padded: bool = False  # its head has rows past the vocabulary
    reference_taps: range | None = None  # DeepSpec's allowed tap ids, which must increase; None: any, in any order


def need(config: Mapping[str, Any], key: str) -> Any:
    """A value that has no default."""
    if config.get(key) is None:
        raise UserError(f"the drafter's config.json lacks {key!r}")
    return config[key]


def part(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object inside config.json; {} where there is none."""
    found = config.get(key) or {}
    if not isinstance(found, Mapping):
        raise UserError(f"config.json: {key} is {found!r}, an object is needed")
    return found


def layer_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """A list of layer ids, in its own order."""
    found = need(config, key)
    if not isinstance(found, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in found):
        raise UserError(f"config.json: {key} is {found!r}, a list of layer numbers is needed")
    return tuple(found)


def entered_layers(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Tap ids of speculators and vLLM: 0 is the embedding, i the state that enters layer i (0.2)."""
    return tuple(i - 1 for i in layer_ids(config, key))


def spread_taps(num_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """z-lab's taps where the config names none: one for each draft layer, from layer 1 to the last but two (0.2)."""
    if num_draft_layers == 1:
        return (num_layers // 2,)
    return tuple(round(1 + j * (num_layers - 4) / (num_draft_layers - 1)) for j in range(num_draft_layers))


def stated_drafts(config: Mapping[str, Any]) -> int | None:
    """speculators' `speculative_tokens` of the default proposal method; None where the file does not say."""
    envelope = part(config, "speculators_config")
    methods = envelope.get("proposal_methods") or []
    default = [m for m in methods if m.get("proposal_type") == envelope.get("default_proposal_method")]
    return (default or methods or [{}])[0].get("speculative_tokens")


def logits_start(config: Mapping[str, Any], default: int, stated: Mapping[str, int] | None = None) -> int:
    """0 where the anchor's slot predicts, 1 where it only conditions (0.3).

    `stated`: what a key of the format's own says; `default`: the format's habit where nothing is said. Keys that
    disagree are an error: read wrongly, every draft is one token off.
    """
    block, count, flag = positive_int(config, "block_size"), stated_drafts(config), config.get("sample_from_anchor")
    starts = dict(stated or {})
    if flag is not None:
        starts["sample_from_anchor"] = 0 if flag else 1
    if isinstance(count, int) and 0 < count <= block:
        starts["speculative_tokens"] = block - count
    if len(set(starts.values())) > 1 or max(starts.values(), default=0) > 1:
        claims = ", ".join(f"{key} says {block - start}" for key, start in starts.items())
        raise UserError(
            f"config.json does not settle whether the anchor's slot predicts: "
            f"a block of {block} drafts {block} or {block - 1} tokens, but {claims}"
        )
    return next(iter(starts.values()), default)


def head_rows(source: Source, settings: Mapping[str, Any], vocab: int) -> int:
    """Rows of the drafter's head: its words, and more than the vocabulary where it is padded."""
    mapped = len(source.tensors["d2t"]) if "d2t" in source.tensors else vocab
    return positive_int(settings, "draft_vocab_size", mapped)


def other_width(settings: Mapping[str, Any], hidden_size: int) -> int:
    """The target's hidden size where it is not the drafter's own, else 0."""
    width = positive_int(settings, "target_hidden_size", hidden_size)
    return 0 if width == hidden_size else width


def reference_taps(source: Source, first: int) -> range | None:
    """The tap ids that DeepSpec allows: its last layer's state is taken after the final norm (spec 1.3).

    Our own files, which name their target, are free of that: they were trained on what the layer puts out.
    """
    return None if source.raw.get("target_fingerprint") else range(first, source.target.num_layers - 1)


def has_qk_norm(source: Source, layers: Mapping[str, Any]) -> bool:
    """Llama-shaped draft layers have no norms on q and k, unless the file holds them."""
    return layers.get("model_type") != "llama" or source.has(".q_norm.") or source.has(".k_norm.")
