"""Gemma4's text decoder: parity with `transformers`, with and without a cache, what configs say, what is refused."""

from __future__ import annotations

import copy
import dataclasses
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.errors import UserError
from dspark_jax.interop.families import decoder_config, rope_config
from dspark_jax.interop.target_io import load_target
from dspark_jax.models.layers import RMSNorm, rope_frequencies
from tests.models.parity import (
    VOCAB,
    assert_close,
    check_parity,
    edit_config,
    edit_tensors,
    load_tapped,
    message,
    randomise,
    read_config,
    run_torch,
    tokens_of,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = 8
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 0, "max_position_embeddings": 64, "eos_token_id": 1, "rms_norm_eps": 1e-3,
}  # fmt: skip
# Fast enough to turn within the tests' 40 positions.
ROPES = {
    FULL: {"rope_type": "proportional", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 100.0},
}
MODELS: dict[str, dict[str, Any]] = {
    "five to one, keys as values": {
        "num_hidden_layers": 6, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "rope_parameters": ROPES,
        "final_logit_softcapping": 3.0,
    },
    "irregular, own values": {
        # Without keys as values, the global layers have as many heads as the others, whatever the config says.
        "num_hidden_layers": 3, "layer_types": [FULL, SLIDING, FULL], "num_global_key_value_heads": 1,
        "rope_parameters": ROPES, "tie_word_embeddings": False,
    },
    "all full, more global heads": {
        "num_hidden_layers": 2, "layer_types": [FULL, FULL], "attention_k_eq_v": True, "num_global_key_value_heads": 4,
    },
    "small": {
        "num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "rope_parameters": ROPES, "final_logit_softcapping": 3.0,
    },
}  # fmt: skip
ALL_MODELS = pytest.mark.parametrize("name", MODELS)


def text_config(name: str) -> transformers.Gemma4TextConfig:
    return transformers.Gemma4TextConfig(**copy.deepcopy(SIZES | MODELS[name]), attn_implementation="eager")


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Callable[[str], tuple[transformers.PreTrainedModel, Path]]:
    """saved(name): the random model of that name and the directory it was saved to, made once."""

    @functools.cache
    def make(name: str) -> tuple[transformers.PreTrainedModel, Path]:
        model = randomise(transformers.Gemma4ForCausalLM(text_config(name)), seed=1)
        directory = tmp_path_factory.mktemp("gemma4")
        model.save_pretrained(directory)
        return model, directory

    return make


@pytest.fixture
def copied(saved, tmp_path) -> Path:
    """A copy of the small model's directory, to be changed."""
    return Path(shutil.copytree(saved("small")[1], tmp_path / "model"))


# ---------------------------------------------------------------------------------------------- parity, float32


@pytest.mark.parametrize("name", list(MODELS)[:3])
def test_dense_and_cached_rows_equal_those_of_transformers(name, saved):
    model, directory = saved(name)
    check_parity(load_tapped(directory, dtype="float32"), model)


def test_greedy_generation_equals_that_of_transformers(saved):
    model, directory = saved("small")
    prompts = [tokens_of(1, length, seed=length)[0].tolist() for length in (3, WINDOW + 1, 21)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    engine = Engine(load_target(directory, dtype="float32"), strategy="off", max_slots=4, rounds_per_dispatch=24)
    for prompt, out in zip(prompts, engine.generate(prompts, params), strict=True):
        inputs = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(inputs), "do_sample": False, "eos_token_id": None}
        expected = model.generate(inputs, max_new_tokens=24, **options)[0, len(prompt) :]
        assert out.token_ids == expected.tolist()


def test_a_multimodal_directory_holds_the_same_model(saved, tmp_path):
    model, directory = saved("small")
    config = transformers.Gemma4Config(text_config=text_config("small"), vision_config=None, audio_config=None)
    whole = transformers.Gemma4ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(model.model.state_dict())
    whole.save_pretrained(tmp_path)
    vision = {"model.vision_tower.patch.weight": np.ones((2, 2), np.float32)}
    edit_tensors(tmp_path, lambda tensors: tensors.update(vision))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 50, 1]}')
    target, alone = load_target(tmp_path, dtype="float32"), load_target(directory, dtype="float32")
    assert target.config.eos_token_ids == (1, 50) and alone.config.eos_token_ids == (1,)
    assert dataclasses.replace(target.config, eos_token_ids=(1,)) == alone.config
    jax.tree.map(np.testing.assert_array_equal, target.params, alone.params)
    # The text's part of the config says how it ends, where nothing else does.
    (tmp_path / "generation_config.json").unlink()
    assert load_target(tmp_path, dtype="float32").config.eos_token_ids == (1,)
    edit_config(tmp_path, quantization_config={"quant_method": "fp8"})
    assert "fp8" in message(tmp_path)


def test_the_golden_target(golden):
    target = load_target(golden / "gemma4_keqv_target", dtype="float32")
    model = transformers.Gemma4ForCausalLM.from_pretrained(golden / "gemma4_keqv_target", attn_implementation="eager")
    assert target.config.eos_token_ids == (1,) and target.config.softcap == 30.0
    tokens = tokens_of(2, 48)
    assert_close(target(tokens).logits, run_torch(model, tokens).logits, 1e-4)


# ------------------------------------------------------------------------------------------------------ bfloat16


def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(saved):
    model, directory = saved("small")
    tokens = tokens_of(2)
    exact = run_torch(model, tokens).logits.numpy()
    half = run_torch(copy.deepcopy(model).bfloat16(), tokens).logits.float().numpy()
    ours = np.asarray(load_target(directory, dtype="bfloat16")(tokens).logits, np.float32)
    rms = lambda difference: np.sqrt(np.mean(difference**2))  # noqa: E731
    assert rms(ours - exact) < 1.2 * rms(half - exact)
    assert rms(half - exact) < 0.1 * rms(exact)


def test_the_embedding_scale_is_rounded_in_bfloat16(saved):
    # 32 ** 0.5 = 5.6569 becomes 5.65625; a factor of float32 would round a few hundred products otherwise.
    model, directory = saved("small")
    tokens = tokens_of(2)
    hidden = run_torch(copy.deepcopy(model).bfloat16(), tokens, output_hidden_states=True).hidden_states[0]
    taps = load_target(directory, dtype="bfloat16", tap_layers=(-1,))(tokens).taps
    np.testing.assert_array_equal(np.asarray(taps, np.float32), hidden.float().numpy())


def test_norms_are_scaled_before_the_cast_to_bfloat16():
    from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

    rng = np.random.default_rng(0)
    x, scale = (rng.standard_normal(shape).astype(jnp.bfloat16) for shape in ((256, 32), (32,)))
    module = Gemma4RMSNorm(32, 1e-6)
    module.weight.data = torch.from_numpy(scale.astype(np.float32)).bfloat16()
    with torch.no_grad():
        expected = module(torch.from_numpy(x.astype(np.float32)).bfloat16()).float().numpy()
    norm = lambda wide: np.asarray(RMSNorm(1e-6, wide_scale=wide).apply({"params": {"scale": scale}}, x), np.float32)  # noqa: E731
    assert np.mean(norm(True) != expected) < 0.001 and np.mean(norm(False) != expected) > 0.1


# ------------------------------------------------------------------------------------------------------- configs


OLDER = SIZES | {"model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh"}


def older(**changes) -> dict[str, Any]:
    """A config.json as `transformers` wrote it before it had sizes per layer."""
    return copy.deepcopy(OLDER) | changes


@ALL_MODELS
def test_sizes_per_layer_mean_the_same_as_global_ones(name, saved):
    newer = read_config(saved(name)[1])
    assert "per_layer_config" in newer and "global_head_dim" not in newer
    assert decoder_config(newer) == decoder_config(older(**MODELS[name]))


def test_what_a_config_leaves_out_is_what_transformers_takes():
    given = {name: value for name, value in OLDER.items() if name != "global_head_dim"}
    for count in (7, 12):
        config = decoder_config(given | {"num_hidden_layers": count})
        theirs = transformers.Gemma4TextConfig(**{name: value for name, value in given.items() if name != "model_type"}
                                               | {"num_hidden_layers": count})  # fmt: skip
        kinds = [FULL if config.attention[kind].window == 0 else SLIDING for kind in config.layer_kinds]
        assert kinds == theirs.layer_types
        full, windowed = config.attention
        assert (full.head_dim, windowed.head_dim, windowed.window) == (512, 8, WINDOW)
        for attention, kind in ((full, FULL), (windowed, SLIDING)):
            expected = theirs.rope_parameters[kind]
            assert (attention.rope.kind, attention.rope.theta) == (expected["rope_type"], expected["rope_theta"])
            assert attention.rope.partial_rotary_factor == expected.get("partial_rotary_factor", 1.0)


def test_the_last_layer_is_full_whatever_the_config_says(saved):
    # As in `transformers`, whose checkpoints therefore have a full layer's tensors there.
    kinds = decoder_config(older(layer_types=[FULL, *[SLIDING] * 4])).layer_kinds
    assert kinds == (0, 1, 1, 1, 0)


@pytest.mark.parametrize("part", [1.0, 0.5, 0.25, 0.3])
def test_proportional_frequencies_equal_those_of_transformers(part):
    ropes = {**ROPES, FULL: {**ROPES[FULL], "partial_rotary_factor": part, "factor": 2.0}}
    kinds = [SLIDING, FULL, FULL, SLIDING, FULL]
    config = transformers.Gemma4TextConfig(**SIZES, layer_types=kinds, rope_parameters=ropes)
    module = transformers.models.gemma4.modeling_gemma4.Gemma4TextRotaryEmbedding(config)
    for kind, dim in ((FULL, 16), (SLIDING, 8)):
        frequencies, factor = rope_frequencies(rope_config({"rope_parameters": ropes}, kind), dim)
        np.testing.assert_allclose(frequencies, getattr(module, f"{kind}_inv_freq").double().numpy(), rtol=1e-6)
        assert factor == 1.0


def test_stray_rope_keys_beside_the_layers_are_ignored():
    # Released drafters carry them.
    strays = {**ROPES, "rope_theta": None, "rope_type": "default"}
    for kind in (FULL, SLIDING):
        clean = rope_config({"rope_parameters": ROPES}, kind)
        assert rope_config({"rope_parameters": strays}, kind) == clean
        assert rope_config({"rope_parameters": strays | {"rope_theta": 5.0, "factor": 9.0}}, kind) == clean


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("enable_moe_block", True), ("hidden_size_per_layer_input", 16), ("num_kv_shared_layers", 2),
        ("use_double_wide_mlp", True), ("attention_bias", True), ("use_bidirectional_attention", "all"),
        ("hidden_activation", "gelu"), ("layer_types", [FULL, SLIDING]), ("layer_types", [FULL] * 4 + ["chunked"]),
        ("layer_types", "full_attention"), ("layer_types", []), ("sliding_window", None), ("sliding_window", 0),
        ("global_head_dim", 0), ("head_dim", None), ("num_key_value_heads", 3),
        ("per_layer_config", {"4": {"head_dim": 16}, "0": {"head_dim": 16}}), ("per_layer_config", {"0": {}}),
        ("per_layer_config", {"4": {"sliding_window": 3}}), ("per_layer_config", {"4": 16}), ("per_layer_config", [16]),
        ("rope_parameters", {FULL: {"rope_type": "sideways"}}), ("rope_parameters", "fast"),
    ],
)  # fmt: skip
def test_what_is_not_supported_or_makes_no_sense_is_named(field, value):
    with pytest.raises(UserError) as caught:
        decoder_config(older(**{field: value}))
    text, named = str(caught.value), {"hidden_activation": "activation", "rope_parameters": "rope"}
    assert named.get(field, field) in text and "\n" not in text


def test_both_directions_matter_to_images_only():
    assert decoder_config(older(use_bidirectional_attention="vision")) == decoder_config(older())


@pytest.mark.parametrize("suffix", ["self_attn.v_proj.weight", "per_layer_projection.weight", "mlp.router.weight"])
def test_a_tensor_that_its_config_does_not_account_for_is_named(suffix, copied):
    # Layer 1 is full: its keys are its values.
    name = f"model.layers.1.{suffix}"
    edit_tensors(copied, lambda tensors: tensors.update({name: np.zeros((16, 32), np.float32)}))
    assert name in message(copied)


@pytest.mark.parametrize("name", ["model.layers.0.layer_scalar", "model.layers.1.pre_feedforward_layernorm.weight"])
def test_a_missing_tensor_is_named(name, copied):
    edit_tensors(copied, lambda tensors: tensors.pop(name))
    assert name in message(copied)
