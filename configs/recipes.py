"""How published drafters are trained: DeepSpec's three recipes (spec 8.1) and Domino's (arXiv 2605.29707).

A step takes 512 sequences, as the reference's gradient accumulation does. Its ten epochs over 1.35 million answers are
26360 steps.
"""

from collections.abc import Collection

from ml_collections import ConfigDict

from configs.base import get_base
from dspark_jax.errors import UserError

KINDS = ("dspark", "dflash", "eagle3", "domino")


def choose(arg: str, sizes: Collection[str]) -> tuple[str, str]:
    """Size and kind of a config's argument "SIZE" or "SIZE,KIND". Raises UserError on anything else."""
    size, _, kind = arg.partition(",")
    kind = kind or "dspark"
    if size not in sizes or kind not in KINDS:
        raise UserError(f"unknown config {arg!r}: write SIZE,KIND with one of {', '.join(sizes)}; {', '.join(KINDS)}")
    return size, kind


def recipe(kind: str) -> ConfigDict:
    """The config of a kind of drafter; the caller adds its target, taps and mask token."""
    c = get_base()
    c.seed = 42
    c.target.dtype = "bfloat16"
    c.data.prompts = "open_perfectblend.jsonl"
    c.data.num_prompts = 1_350_000
    c.data.temperatures = (0.7,)
    c.data.max_answer_tokens = c.data.max_length = 4096
    c.train.steps = 26_360
    c.train.batch_size = 512
    c.train.checkpoint_every = 3000
    change = {"dspark": _dspark, "dflash": _dflash, "eagle3": _eagle3, "domino": _domino}
    change[kind](c)
    return c


def _dspark(c: ConfigDict) -> None:
    """The defaults of `configs/base.py`."""


def _dflash(c: ConfigDict) -> None:
    """DeepSpec's DFlash: a DSpark drafter without heads, on cross-entropy alone."""
    c.drafter.markov_rank = 0
    c.drafter.confidence = False
    c.train.ce_weight, c.train.l1_weight = 1.0, 0.0


def _eagle3(c: ConfigDict) -> None:
    c.seed = 0
    c.drafter.kind = "eagle3"
    c.drafter.num_layers = 1


def _domino(c: ConfigDict) -> None:
    c.drafter.block_size = 16
    c.drafter.head_type = "domino"
    c.drafter.confidence = False
    c.train.num_anchors = 256
    c.train.ce_weight, c.train.l1_weight = 1.0, 0.0
    c.train.decay_gamma = 7.0
    c.train.curriculum = 1.0
