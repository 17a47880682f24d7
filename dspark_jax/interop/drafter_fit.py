"""Whether a drafter can serve a target, said before anything large is read."""

from collections.abc import Iterable

from dspark_jax.errors import UserError
from dspark_jax.interop.target_io import Target
from dspark_jax.models.config import DrafterConfig, Eagle3Config
from dspark_jax.models.heads import HEADS
from dspark_jax.models.lookup import Lookup


def check_fit(
    config: DrafterConfig | Eagle3Config | Lookup,
    target: Target,
    special_ids: Iterable[int] = (),
    reference_taps: range | None = None,
) -> None:
    """Raises UserError when this drafter cannot serve this target, naming what differs.

    `special_ids`: end and padding tokens besides the target's own. `reference_taps`: where a format asks for
    increasing tap ids, those it allows.
    """
    if isinstance(config, Lookup):
        _check_lookup(config)
        return
    c, t = config.decoder, target.config
    pairs = {
        "hidden size": (config.target_hidden_size or c.hidden_size, t.hidden_size),
        "vocabulary": (c.vocab_size, t.vocab_size),
        "number of target layers": (config.num_target_layers, t.num_layers),
    }
    for what, (drafter, own) in pairs.items():
        if drafter != own:
            raise UserError(
                f"this drafter was made for another target: its {what} is {drafter}, {target.name} has {own}"
            )
    _check_taps(config.tap_layers, t.num_layers, reference_taps)
    if not 0 < config.draft_vocab_size <= t.vocab_size:
        raise UserError(f"a draft vocabulary of {config.draft_vocab_size} is no part of the target's {t.vocab_size}")
    if isinstance(config, DrafterConfig):
        _check_mask(config.mask_token_id, target, special_ids)
        _check_block(config)


def _check_lookup(config: Lookup) -> None:
    if config.num_drafts < 1 or config.longest < 1:
        raise UserError(
            f"a lookup of {config.num_drafts} drafts after n-grams of up to {config.longest}: both are at least 1"
        )


def _check_taps(taps: tuple[int, ...], num_layers: int, reference: range | None) -> None:
    allowed = range(-1, num_layers) if reference is None else reference
    if reference is not None and list(taps) != sorted(set(taps)):
        raise UserError(f"tap layers {list(taps)} must increase")
    if not taps or len(set(taps)) < len(taps) or any(i not in allowed for i in taps):
        raise UserError(f"tap layers {list(taps)} must be different and lie in {allowed[0]} .. {allowed[-1]}")


def _check_mask(mask: int, target: Target, special_ids: Iterable[int]) -> None:
    tokenizer = target.tokenizer
    taken = {*target.config.eos_token_ids, *special_ids}
    taken |= {tokenizer.eos_token_id, tokenizer.pad_token_id} if tokenizer else set()
    whole = isinstance(mask, int) and not isinstance(mask, bool)
    if not whole or not 0 <= mask < target.config.vocab_size or mask in taken:
        raise UserError(f"mask token {mask!r} must be inside the vocabulary, and no end or padding token")


def _check_block(c: DrafterConfig) -> None:
    if c.logits_start not in (0, 1) or c.block_size <= c.logits_start:
        raise UserError(f"a block of {c.block_size} whose slots predict from slot {c.logits_start} on drafts nothing")
    if c.markov_rank and c.head_type not in HEADS:
        raise UserError(f"unknown in-block head {c.head_type!r}: this version has {', '.join(HEADS)}")
    if c.confidence_with_markov and not (c.markov_rank and c.head_type in ("vanilla", "gated", "rnn")):
        raise UserError("a confidence head with Markov input needs a Markov head (markov_rank above 0)")
    if c.markov_rank and c.head_type == "domino" and not (c.gru_width > 0 and 0 <= c.pure_prefix <= c.num_drafts):
        raise UserError(f"a Domino head of width {c.gru_width} with a pure prefix of {c.pure_prefix} cannot be made")
    if c.markov_rank and c.head_type == "selector" and not 0 < c.selector_top_k <= c.draft_vocab_size:
        raise UserError(f"a selector cannot choose among {c.selector_top_k} of {c.draft_vocab_size} words")
    if c.conv_taps and (c.conv_group < 1 or c.decoder.hidden_size % c.conv_group):
        raise UserError(f"convolution groups of {c.conv_group} do not divide a width of {c.decoder.hidden_size}")
