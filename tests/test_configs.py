"""The shipped configs: the published hyper-parameters, and networks of the published sizes, by abstract evaluation."""

import dataclasses
import math
import re
import sys

import jax
import numpy as np
import pytest

from configs import gemma4, qwen3
from dspark_jax.door import parse_config
from dspark_jax.errors import UserError
from dspark_jax.interop.drafter_tensors import abstract_drafter
from dspark_jax.interop.target_io import Target
from dspark_jax.models.config import Attention, DecoderConfig, Rope
from dspark_jax.training.drafters import loss_settings, new_drafter_config
from dspark_jax.training.eagle3 import Eagle3Loss
from dspark_jax.training.losses import LossWeights


def qwen(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> DecoderConfig:
    attention = Attention(num_kv_heads=8, head_dim=128, rope=Rope(1e6))
    return DecoderConfig(
        "qwen3", 151936, hidden, intermediate, heads, (attention,), (0,) * layers, max_length=40960, qk_norm=True,
        tied=tied,
    )  # fmt: skip


def gemma() -> DecoderConfig:
    rope = Rope(1e6, kind="proportional", partial_rotary_factor=0.25)
    full = Attention(num_kv_heads=1, head_dim=512, rope=rope, keys_as_values=True, scale=1.0)
    sliding = Attention(num_kv_heads=8, head_dim=256, rope=Rope(1e4), window=1024, scale=1.0)
    return DecoderConfig(
        "gemma4", 262144, 3840, 15360, 16, (full, sliding), (1, 1, 1, 1, 1, 0) * 8, activation="gelu_tanh",
        qk_norm=True, value_norm=True, sandwich=True, layer_scalar=True, embedding_scale=3840**0.5, softcap=30.0,
    )  # fmt: skip


# Spec 1.1.
TARGETS = {
    "4b": ("Qwen/Qwen3-4B", qwen(2560, 9728, 36, 32, tied=True)),
    "8b": ("Qwen/Qwen3-8B", qwen(4096, 12288, 36, 32, tied=False)),
    "14b": ("Qwen/Qwen3-14B", qwen(5120, 17408, 40, 40, tied=False)),
    "12b": ("google/gemma-4-12B-it", gemma()),
}
# Spec 1.4: tensors in the file, millions of parameters in the file (both vocabulary tables included), and trained.
SIZES = {
    ("4b", "dspark"): (64, 1393.1, 615.2), ("4b", "dflash"): (60, 1315.3, 537.4), ("4b", "eagle3"): (16, 927.3, 149.4),
    ("8b", "dspark"): (64, 2371.1, 1126.4), ("8b", "dflash"): (60, 2293.3, 1048.6),
    ("8b", "eagle3"): (16, 1546.7, 302.0),
    ("14b", "dspark"): (64, 3416.3, 1860.4), ("14b", "dflash"): (60, 3338.5, 1782.6),
    ("14b", "eagle3"): (16, 2053.9, 498.1),
    ("12b", "dspark"): (74, 3430.4, 1417.2), ("12b", "dflash"): (70, 3296.2, 1283.0),
    ("12b", "eagle3"): (18, 2362.3, 349.0),
}  # fmt: skip
KINDS = ("dspark", "dflash", "eagle3", "domino")
ALL = [(size, kind) for size in TARGETS for kind in KINDS]
TAPS = {"4b": (1, 9, 17, 25, 33), "8b": (1, 9, 17, 25, 33), "14b": (1, 10, 19, 28, 37), "12b": (5, 17, 29, 41, 46)}


def config_of(size: str, kind: str):
    return (gemma4 if size == "12b" else qwen3).get_config(f"{size},{kind}")


def drafter_of(size: str, kind: str):
    name, decoder = TARGETS[size]
    config = config_of(size, kind)
    assert config.target.path == name
    return new_drafter_config(config, Target(decoder, None, None, name))


def sizes_of(size: str, kind: str) -> tuple[int, int, int]:
    """Tensors and parameters of the file, with both tables, and the parameters that are trained."""
    drafter = drafter_of(size, kind)
    leaves = jax.tree_util.tree_leaves_with_path(abstract_drafter(drafter))
    tensors = count = constants = 0
    for path, leaf in leaves:
        # A stacked leaf is one tensor for each layer.
        tensors += leaf.shape[0] if "layers" in {getattr(key, "key", None) for key in path} else 1
        count += math.prod(leaf.shape)
        constants += math.prod(leaf.shape) if path[-1].key == "layer_scalar" else 0
    tables = 2 * drafter.decoder.vocab_size * drafter.decoder.hidden_size
    return tensors + 2, count + tables, count - constants


@pytest.mark.parametrize(("size", "kind"), SIZES)
def test_networks_have_the_published_sizes(size, kind):
    tensors, total, trained = sizes_of(size, kind)
    assert (tensors, round(total / 1e6, 1), round(trained / 1e6, 1)) == SIZES[size, kind]


@pytest.mark.parametrize("size", TARGETS)
def test_domino_is_dflash_and_a_gru_head(size):
    """W_ih [3g, H], W_hh [3g, g], W_a [e, H + g], W_b [V, e], without biases."""
    hidden, vocab = TARGETS[size][1].hidden_size, TARGETS[size][1].vocab_size
    e, g = 256, 1024
    head = 3 * g * (hidden + g) + e * (hidden + g) + vocab * e
    plain, domino = sizes_of(size, "dflash"), sizes_of(size, "domino")
    assert np.subtract(domino, plain).tolist() == [4, head, head]


@pytest.mark.parametrize(("size", "kind"), ALL)
def test_training_follows_the_reference(size, kind):
    """Spec 8.1; Domino's own where its paper says so (peers_and_failure_reports.md 1.1)."""
    c = config_of(size, kind)
    t = c.train
    assert (t.lr, t.warmup_ratio, t.weight_decay, t.max_grad_norm) == (6e-4, 0.04, 0.0, 1.0)
    assert (t.batch_size, t.log_every, t.checkpoint_every, c.data.max_length) == (512, 10, 3000, 4096)
    assert c.target.dtype == "bfloat16" and c.seed == (0 if kind == "eagle3" else 42)
    expected = {
        "dspark": LossWeights(ce=0.1, l1=0.9, confidence=1.0, decay_gamma=4.0),
        "dflash": LossWeights(ce=1.0, l1=0.0, confidence=0.0, decay_gamma=4.0),
        "eagle3": Eagle3Loss(steps=7, step_decay=0.8),
        "domino": LossWeights(ce=1.0, l1=0.0, confidence=0.0, decay_gamma=7.0, curriculum=t.steps),
    }
    assert loss_settings(c) == expected[kind]


@pytest.mark.parametrize(("size", "kind"), ALL)
def test_drafters_follow_the_reference(size, kind):
    made = drafter_of(size, kind)
    target = TARGETS[size][1]
    assert made.tap_layers == TAPS[size] and made.num_target_layers == target.num_layers and not made.reduced
    assert made.decoder.num_layers == (1 if kind == "eagle3" else 5)
    (attention,) = made.decoder.attention
    full = target.attention[0]
    assert attention == dataclasses.replace(full, causal=kind == "eagle3") and not attention.window
    if kind == "eagle3":
        assert made.num_drafts == 7
        return
    assert made.mask_token_id == (4 if size == "12b" else 151669) and made.logits_start == 0
    block, anchors, rank, head = {
        "dspark": (7, 512, 256, "vanilla"),
        "dflash": (7, 512, 0, "vanilla"),
        "domino": (16, 256, 256, "domino"),
    }[kind]
    assert (made.block_size, made.num_anchors, made.markov_rank, made.head_type) == (block, anchors, rank, head)
    assert made.confidence == made.confidence_with_markov == (kind == "dspark")
    assert (made.gru_width, made.pure_prefix) == ((1024, 1) if kind == "domino" else (0, 0))


@pytest.mark.parametrize("module", [qwen3, gemma4])
def test_the_papers_rows_add_up(module):
    """The printed mean of every row is the mean of its nine numbers, to the rounding of the numbers."""
    rows = re.findall(r"^ +\d+b \w+((?: +\d\.\d+)+)$", module.__doc__, re.MULTILINE)
    assert len(rows) == (9 if module is qwen3 else 3)
    for row in rows:
        *values, mean = map(float, row.split())
        assert len(values) == 9 and abs(sum(values) / 9 - mean) < 0.006


@pytest.mark.parametrize(
    ("given", "path", "kind"),
    [
        ("configs/qwen3.py", "Qwen/Qwen3-4B", "block"),
        ("configs/qwen3.py:14b", "Qwen/Qwen3-14B", "block"),
        ("configs/qwen3.py:8b,eagle3", "Qwen/Qwen3-8B", "eagle3"),
        ("configs/gemma4.py:12b,domino", "google/gemma-4-12B-it", "block"),
    ],
)
def test_the_door_takes_size_and_kind(given, path, kind, monkeypatch):
    argv = ["train.py", f"--config={given}", "--config.train.steps=5"]
    monkeypatch.setattr(sys, "argv", argv)
    config, _ = parse_config(argv)
    assert (config.target.path, config.drafter.kind, config.train.steps) == (path, kind, 5)


@pytest.mark.parametrize("arg", ["32b", "4b,dspork", "4b;dflash", "dflash", "4b,dflash,1", "12b"])
def test_an_unknown_argument_is_refused_in_one_line(arg):
    with pytest.raises(UserError, match=r"unknown config.*4b, 8b, 14b; dspark, dflash, eagle3, domino"):
        parse_config(["train.py", f"--config=configs/qwen3.py:{arg}"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "eagle4"}, "eagle4"),
        ({"kind": "eagle3", "num_layers": 2}, "num_layers=1"),
        ({"kind": "eagle3", "num_layers": 1, "ttt_length": 0}, "ttt_length"),
        ({"mask_token_id": -1, "mask_token": "<mask>"}, "drafter.mask_token_id"),
        ({"mask_token_id": 151936}, "mask token"),
        ({"head_type": "selector"}, "selector"),
        ({"head_type": "domino", "gru_width": 0, "confidence": False}, "Domino"),
        ({"logits_start": 2}, "predict"),
        ({"tap_layers": (1, 36)}, "tap layers"),
    ],
)
def test_a_drafter_that_cannot_be_is_named(changes, message):
    config = config_of("4b", "dspark")
    config.drafter.update(changes)
    with pytest.raises(UserError, match=message):
        new_drafter_config(config, Target(TARGETS["4b"][1], None, None, "tiny"))


def test_confidence_reads_a_markov_table_only_where_there_is_one():
    config = config_of("4b", "dspark")
    for head_type, rank, expected in (("rnn", 16, True), ("domino", 16, False), ("vanilla", 0, False)):
        config.drafter.update({"head_type": head_type, "markov_rank": rank})
        made = new_drafter_config(config, Target(TARGETS["4b"][1], None, None, "tiny"))
        assert made.confidence and made.confidence_with_markov == expected


@pytest.mark.parametrize("part", [-0.1, 1.5])
def test_a_curriculum_is_a_part_of_the_run(part):
    config = config_of("4b", "domino")
    config.train.curriculum = part
    with pytest.raises(UserError, match="train.curriculum"):
        loss_settings(config)
