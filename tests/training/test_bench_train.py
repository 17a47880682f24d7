"""`bench --train` on a tiny model: what it counts, and that memory stands still. Speeds are never asserted."""

import json

import numpy as np
import pytest

from dspark_jax.data.batches import Sample
from dspark_jax.data.packing import micro_batches
from dspark_jax.errors import UserError
from dspark_jax.evaluation import bench as door
from dspark_jax.models.config import Attention, DecoderConfig, DrafterConfig, Rope
from dspark_jax.training import bench
from dspark_jax.training.counting import drafter_flops, target_flops

CONFIG = """
from configs.base import get_base

def get_config():
    c = get_base()
    c.target.path = {target!r}
    c.drafter.kind, c.drafter.num_layers, c.drafter.block_size, c.drafter.tap_layers = {kind!r}, 1, 3, (0, 2)
    c.drafter.mask_token_id, c.drafter.markov_rank, c.drafter.draft_vocab_size = 300, 4, 64
    c.data.max_length = 64
    c.train.batch_size, c.train.num_anchors, c.train.blocks_at_once, c.train.micro_steps = 4, 4, 4, 2
    return c
"""


def run(folder, target, kind="block"):
    config, out = folder / "tiny.py", folder / "train.json"
    config.write_text(CONFIG.format(target=str(target), kind=kind))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "MATRIX", {"cpu": 64})
        door.main(["bench", "--train", f"--config={config}", "--repeats=7", f"--json={out}"])
    return json.loads(out.read_text())


@pytest.mark.slow
def test_the_report_adds_up_and_memory_stands_still(golden_target, tmp_path, capsys):
    report = run(tmp_path, golden_target)
    assert (report["blocks"], report["packs"], report["tokens"]) == (16, 2, 16 + 32 + 48 + 64)
    assert report["features"] == "online" and report["compilations_after_warm_up"] == 0
    floor = sum(report["gflop"].values()) / report["matrix_gflop_per_s"] * 1e3
    assert report["floor_ms"] == pytest.approx(floor)
    assert report["times_floor"] == pytest.approx((report["step_ms"] + report["features_ms"]) / floor)
    few, many = report["memory"]["temporary_bytes_by_block_slots"].items()
    assert (few[0], many[0]) == ("8", "64") and many[1] < 1.02 * few[1]
    assert "times the floor" in capsys.readouterr().out


def test_eagle3_has_no_blocks_to_measure(golden_target, tmp_path):
    with pytest.raises(UserError, match="Eagle3"):
        run(tmp_path, golden_target, kind="eagle3")


def test_operations_are_counted_by_hand():
    """One layer of width 8: q and o 8 x 8, k and v 8 x 4, MLP 3 of 8 x 12; taps 16 x 8, head 11 x 8, Markov 11 x 4."""
    kind = Attention(num_kv_heads=1, head_dim=4, rope=Rope(100.0), causal=False)
    decoder = DecoderConfig("qwen3", 13, 8, 12, 2, (kind,), (0,), qk_norm=True, tied=False)
    config = DrafterConfig(decoder, 3, 12, (0, 1), 3, 11, markov_rank=4, confidence=False)
    mask = np.zeros(20)
    mask[[5, 6, 9, 10]] = 1  # anchors 5 and 9
    parts = micro_batches([Sample(0, 0, [1] * 20, mask)], 1, 4, 4, seed=0)
    layer = 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 12
    assert drafter_flops(config, parts) == {
        "context": 2 * 20 * (2 * 16 * 8 + 3 * 2 * 8 * 4),
        "blocks": 2 * 6 * 3 * layer,
        "attention": 3 * 2 * 2 * 8 * (3 * (5 + 3) + 3 * (9 + 3)),
        "heads": 2 * (6 * (3 * 11 * 4 + 2 * 11 * 8) + 6 * 11 * 8),
    }
    target = 2 * (20 * (layer + 13 * 8) + 2 * 8 * (20 * 21 // 2))
    assert target_flops(decoder, [20]) == target
