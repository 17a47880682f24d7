"""Drafters to compare: each is the config's own with a few settings changed."""

from typing import Any

from ml_collections import ConfigDict

from dspark_jax.errors import UserError

_NO_HEAD = {"drafter.markov_rank": 0, "drafter.confidence": False}
_ONLY_CE = {"train.ce_weight": 1.0, "train.l1_weight": 0.0}

# The kinds, as their papers train them, at the config's widths and block; then what DSpark is made of, one at a time.
CHANGES: dict[str, dict[str, Any]] = {
    "dspark": {},
    "gated": {"drafter.head_type": "gated"},
    "rnn": {"drafter.head_type": "rnn"},
    "domino": {"drafter.head_type": "domino", "drafter.confidence": False, "train.curriculum": 1.0, **_ONLY_CE},
    "dflash": {**_NO_HEAD, **_ONLY_CE},
    "eagle3": {"drafter.kind": "eagle3", "drafter.num_layers": 1},
    "no_head": {"drafter.markov_rank": 0},
    "no_tv": _ONLY_CE,
    "rope_rounded": {"drafter.rope_rounded": True},
    **{f"block{size}": {"drafter.block_size": size} for size in (4, 8, 12, 16)},
    **{f"layers{count}": {"drafter.num_layers": count} for count in (1, 2, 3, 4, 5)},
}


def changed(config: ConfigDict, variant: str) -> ConfigDict:
    """A copy of a config with a variant's changes. UserError on a variant that is not known."""
    if variant not in CHANGES:
        raise UserError(f"unknown variant {variant!r}: it is one of {', '.join(CHANGES)}")
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict(CHANGES[variant])
    return config
