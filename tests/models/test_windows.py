"""Sliding windows of Qwen models: parity with `transformers` past the window, and what their configs say."""

from __future__ import annotations

from typing import Any

import pytest

from dspark_jax.errors import UserError
from dspark_jax.interop.families import decoder_config
from tests.models.parity import VOCAB, check_parity, load_tapped, randomise

transformers = pytest.importorskip("transformers")

FULL, SLIDING = "full_attention", "sliding_attention"
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": 1, "use_sliding_window": True,
    "sliding_window": 6,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3, alternating": ("Qwen3", {"head_dim": 12, "layer_types": [SLIDING, FULL] * 2}),
    "qwen2, the last two": ("Qwen2", {"num_hidden_layers": 3, "max_window_layers": 1}),
    "qwen3, all": ("Qwen3", {"head_dim": 12, "max_window_layers": 0, "sliding_window": 9}),
}


@pytest.mark.parametrize("name", MODELS)
def test_parity_past_the_window(name, tmp_path):
    family, options = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**(SIZES | options), attn_implementation="eager")
    model = randomise(getattr(transformers, f"{family}ForCausalLM")(config), seed=len(name))
    model.save_pretrained(tmp_path)
    target = load_tapped(tmp_path, dtype="float32")
    assert max(kind.window for kind in target.config.attention) == config.sliding_window
    check_parity(target, model)


def windows(**changes) -> list[int]:
    """The window of every layer."""
    config = decoder_config({**SIZES, "model_type": "qwen3", **changes})
    return [config.attention[kind].window for kind in config.layer_kinds]


def test_which_layers_have_a_window():
    assert windows(layer_types=[FULL, SLIDING, FULL, SLIDING]) == [0, 6, 0, 6]
    assert windows(max_window_layers=3) == [0, 0, 0, 6]
    assert windows(max_window_layers=0) == [6] * 4
    assert windows() == [0] * 4  # the first 28 layers have none
    assert windows(layer_types=[SLIDING, FULL, FULL, FULL], max_window_layers=0) == [6, 0, 0, 0]


@pytest.mark.parametrize("off", [{"use_sliding_window": False}, {"sliding_window": None}])
def test_no_layer_has_one_where_it_is_off(off):
    # Released configs carry a sliding_window that is not in use.
    assert windows(max_window_layers=0, **off) == [0] * 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_types", [SLIDING] * 3), ("layer_types", ["sideways"] * 4), ("layer_types", SLIDING),
        ("layer_types", []), ("layer_types", [[SLIDING]] * 4),
        ("max_window_layers", "two"), ("max_window_layers", None),
    ],
)  # fmt: skip
def test_a_useless_setting_is_named(field, value):
    with pytest.raises(UserError, match=field):
        windows(**{field: value})


@pytest.mark.parametrize("window", [-3, "wide", 2.5])
def test_a_useless_window_is_named(window):
    with pytest.raises(UserError, match="sliding_window"):
        windows(max_window_layers=0, sliding_window=window)
