"""Exports: the reference's own files again, every consumer's layout, round trips and refusals."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from safetensors.numpy import load_file

from dspark_jax.errors import UserError
from dspark_jax.interop.drafter_io import Drafter, abstract_drafter, borrow, load_drafter
from dspark_jax.interop.export import checkpoint, export_drafter, save_drafter
from dspark_jax.interop.export_needs import CONSUMERS
from dspark_jax.interop.target_io import Target, load_target
from dspark_jax.models.config import Eagle3Config

GOLDEN_DRAFTERS = ("dspark_vanilla", "dspark_rnn", "dflash", "eagle3", "gemma4_keqv")


@pytest.fixture(scope="module")
def targets(golden) -> dict[str, Target]:
    return {name: load_target(golden / name, dtype="float32") for name in ("target", "gemma4_keqv_target")}


@pytest.fixture(scope="module")
def target(targets) -> Target:
    return targets["target"]


@pytest.fixture(scope="module")
def drafters(golden, targets) -> dict[str, Drafter]:
    """The reference's drafters."""
    return {name: load_drafter(golden / name, targets[target_of(name)]) for name in GOLDEN_DRAFTERS}


def target_of(name: str) -> str:
    return "gemma4_keqv_target" if name.startswith("gemma4") else "target"


NO_HEAD = {"markov_rank": 0, "confidence": False, "confidence_with_markov": False}
DOMINO = NO_HEAD | {"markov_rank": 8, "head_type": "domino", "gru_width": 12, "pure_prefix": 1}
SELECTOR = {"markov_rank": 8, "head_type": "selector", "selector_top_k": 4, "conv_taps": 2, "conv_group": 16}
DFLASH2 = NO_HEAD | SELECTOR | {"logits_start": 1}
LLAMA3 = {"kind": "llama3", "factor": 8.0, "original_max_position_embeddings": 256}
# A Qwen3's layers, with the widths of the Gemma4 target.
PLAIN_LAYERS = {"family": "qwen3", "activation": "silu", "value_norm": False, "sandwich": False, "layer_scalar": False}
PLAIN = {
    "attention": {"keys_as_values": False, "num_kv_heads": 2, "head_dim": 16, "scale": None},
    "rope": {"kind": "default", "theta": 1e4, "partial_rotary_factor": 1.0},
}
YARN = {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 16.0, "mscale": 0.5}

# Name -> the reference's drafter that it is like, and what differs; keys with a dot are of its layers.
VARIANTS = {
    "vanilla": ("dspark_vanilla", {}),
    "gated": ("dspark_vanilla", {"head_type": "gated"}),
    "rnn": ("dspark_rnn", {}),
    "no confidence": ("dspark_vanilla", {"confidence": False, "confidence_with_markov": False}),
    "confidence without Markov": ("dspark_vanilla", {"confidence_with_markov": False}),
    "confidence alone": ("dflash", {"confidence": True}),
    "late anchor": ("dspark_vanilla", {"logits_start": 1}),
    "late rnn": ("dspark_rnn", {"logits_start": 1}),
    "reduced": ("dspark_vanilla", {"draft_vocab_size": 100}),
    "no head": ("dflash", {}),
    "llama3 rope": ("dspark_vanilla", {"rope": LLAMA3}),
    "yarn rope": ("dspark_vanilla", {"rope": YARN}),
    "linear rope": ("dspark_vanilla", {"rope": {"kind": "linear", "factor": 2.0}}),
    "biased": ("dspark_vanilla", {"layers": {"qkv_bias": True, "o_bias": True}}),
    "windows": ("dspark_vanilla", {"attention": {"window": 6, "causal": True}}),
    "anchor windows": ("dspark_vanilla", {"attention": {"window": 6, "window_from_anchor": True}}),
    "DFlash": ("dflash", {"logits_start": 1}),
    "reduced DFlash": ("dflash", {"logits_start": 1, "draft_vocab_size": 100}),
    "windowed DFlash": ("dflash", {"logits_start": 1, "attention": {"window": 6, "causal": True}}),
    "DFlash for Gemma4": ("gemma4_keqv", NO_HEAD | PLAIN | {"logits_start": 1, "layers": PLAIN_LAYERS}),
    "unscaled DFlash for Gemma4": (
        "gemma4_keqv",
        NO_HEAD | PLAIN | {"logits_start": 1, "layers": PLAIN_LAYERS | {"embedding_scale": 1.0, "softcap": 0.0}},
    ),
    "Domino": ("dflash", DOMINO),
    "late Domino": ("dflash", DOMINO | {"logits_start": 1}),
    "DFlash2": ("dflash", DFLASH2),
    "Eagle3": ("eagle3", {}),
    "Eagle3, 3 taps": ("eagle3", {"tap_layers": (1, 2, 3)}),
    "Eagle3, Llama": ("eagle3", {"tap_layers": (1, 2, 3), "layers": {"qk_norm": False}}),
    "Eagle3, Llama, reduced": (
        "eagle3",
        {"tap_layers": (1, 2, 3), "draft_vocab_size": 100, "layers": {"qk_norm": False}},
    ),
    "Eagle3, taps normed": ("eagle3", {"tap_layers": (1, 2, 3), "fc_norm": True, "layers": {"qk_norm": False}}),
    "Eagle3, normed": ("eagle3", {"norm_before_fc": True, "feed_normed": True, "norm_before_residual": True}),
    "Gemma4": ("gemma4_keqv", {}),
    "Gemma4, rnn": ("gemma4_keqv", {"head_type": "rnn"}),
    "Gemma4 with values": ("gemma4_keqv", {"attention": {"keys_as_values": False, "num_kv_heads": 2}}),
}


@pytest.fixture(scope="module")
def make(drafters, targets):
    """A variant with random parameters, and its target."""

    @functools.cache
    def variant(name: str) -> tuple[Drafter, Target]:
        base, changes = VARIANTS[name]
        target, config = targets[target_of(base)], drafters[base].config
        kind = dataclasses.replace(config.decoder.attention[0], **changes.get("attention", {}))
        kind = dataclasses.replace(kind, rope=dataclasses.replace(kind.rope, **changes.get("rope", {})))
        decoder = dataclasses.replace(config.decoder, attention=(kind,), **changes.get("layers", {}))
        fields = {key: value for key, value in changes.items() if key not in ("attention", "rope", "layers")}
        return random_drafter(dataclasses.replace(config, decoder=decoder, **fields), target), target

    return variant


def random_drafter(config, target: Target) -> Drafter:
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda like: jnp.asarray(rng.standard_normal(like.shape), jnp.float32), abstract_drafter(config)
    )
    ids = np.sort(rng.permutation(config.decoder.vocab_size)[: config.draft_vocab_size]) if config.reduced else None
    return Drafter(config, params, borrow(target, ids))


def read(path: Path) -> tuple[dict, dict]:
    return json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")


def assert_same(back: Drafter, drafter: Drafter) -> None:
    assert back.config == drafter.config
    jax.tree.map(np.testing.assert_array_equal, (back.params, back.borrowed), (drafter.params, drafter.borrowed))


# ------------------------------------------------------------------------------------------------ the reference's files


@pytest.mark.parametrize("name", GOLDEN_DRAFTERS)
def test_deepspec_files_come_back_as_they_were(tmp_path, golden, drafters, targets, name):
    """The same keys with the same values, the same tensors to the bit: what the reference itself saved."""
    export_drafter(tmp_path / "export", drafters[name], targets[target_of(name)], "deepspec", dtype="float32")
    raw, tensors = read(tmp_path / "export")
    expected, arrays = read(golden / name)
    del expected["transformers_version"]
    if "target_model_name_or_path" in expected:
        expected["target_model_name_or_path"] = targets["target"].name
    assert raw == expected
    assert tensors.keys() == arrays.keys()
    for key, array in arrays.items():
        assert tensors[key].dtype == array.dtype
        np.testing.assert_array_equal(tensors[key], array)
    with safetensors.safe_open(tmp_path / "export" / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_weights_are_bfloat16_unless_asked_otherwise(make):
    drafter, target = make("vanilla")
    for dtype, options in ((ml_dtypes.bfloat16, {}), (np.float32, {"dtype": "float32"})):
        raw, tensors = checkpoint("deepspec", drafter, target, **options)
        assert {array.dtype for array in tensors.values()} == {np.dtype(dtype)} and raw["dtype"] == np.dtype(dtype).name


@pytest.mark.parametrize("name", GOLDEN_DRAFTERS)
def test_transformers_reads_the_config(tmp_path, drafters, targets, name):
    transformers = pytest.importorskip("transformers")
    drafter = drafters[name]
    export_drafter(tmp_path / "export", drafter, targets[target_of(name)], "deepspec")
    found, c = transformers.AutoConfig.from_pretrained(tmp_path / "export"), drafter.config.decoder
    gemma = name.startswith("gemma4")
    assert type(found).__name__ == ("Gemma4TextConfig" if gemma else "Qwen3Config")
    assert (found.hidden_size, found.num_hidden_layers, found.rms_norm_eps) == (c.hidden_size, c.num_layers, c.rms_eps)
    assert found.layer_types == ["full_attention"] * c.num_layers and not found.tie_word_embeddings
    rope = found.rope_parameters["full_attention"] if gemma else found.rope_parameters
    assert rope["rope_theta"] == c.attention[0].rope.theta
    assert found.target_layer_ids == list(drafter.config.tap_layers)


# --------------------------------------------------------------------------------------------------------- round trips

# Who runs what; whoever is not named refuses.
RUNS = {
    "vanilla": "deepspec vllm sglang speculators specforge",
    "gated": "deepspec sglang speculators specforge",
    "rnn": "deepspec sglang speculators specforge",
    "no confidence": "deepspec vllm sglang speculators specforge",
    "confidence without Markov": "deepspec vllm sglang speculators specforge",
    "confidence alone": "deepspec vllm sglang speculators specforge",
    "late anchor": "vllm speculators",
    "late rnn": "speculators",
    "reduced": "vllm speculators",
    "no head": "deepspec vllm sglang speculators specforge",
    "llama3 rope": "deepspec vllm sglang speculators specforge",
    "yarn rope": "deepspec vllm sglang speculators specforge",
    "linear rope": "deepspec vllm sglang speculators specforge",
    "biased": "deepspec vllm sglang speculators specforge",
    "windows": "vllm specforge",
    "anchor windows": "speculators",
    "DFlash": "vllm sglang speculators specforge dflash",
    "reduced DFlash": "vllm speculators",
    "windowed DFlash": "vllm specforge dflash",
    "DFlash for Gemma4": "vllm sglang specforge dflash",
    "unscaled DFlash for Gemma4": "speculators",
    "Domino": "specforge",
    "late Domino": "specforge",
    "DFlash2": "speculators dflash",
    "Eagle3": "deepspec speculators",
    "Eagle3, 3 taps": "vllm speculators",
    "Eagle3, Llama": "vllm sglang speculators specforge",
    "Eagle3, Llama, reduced": "vllm sglang speculators specforge",
    "Eagle3, taps normed": "speculators specforge",
    "Eagle3, normed": "speculators",
    "Gemma4": "deepspec vllm",
    "Gemma4, rnn": "deepspec",
    "Gemma4 with values": "deepspec vllm",
}
# Engines run these with a head that adds nothing, so they come back with one.
ZERO_HEAD = {(name, to) for name in ("no head", "confidence alone") for to in ("vllm", "sglang")}
# Nothing trains these here.
FOREIGN = {"DFlash for Gemma4", "anchor windows", "Eagle3, Llama", "Eagle3, Llama, reduced", "Eagle3, taps normed"}
SERVED = [(name, to) for name, consumers in RUNS.items() for to in consumers.split()]
REFUSED = [(name, to) for name, consumers in RUNS.items() for to in CONSUMERS if to not in consumers.split()]


@pytest.mark.parametrize(("name", "consumer"), sorted(set(SERVED) - ZERO_HEAD))
def test_round_trip(tmp_path, make, name, consumer):
    """float32 comes back bit by bit."""
    drafter, target = make(name)
    if "Eagle3" in name and consumer not in ("deepspec", "speculators"):
        # These formats do not say how many tokens to draft.
        drafter = dataclasses.replace(drafter, config=dataclasses.replace(drafter.config, num_drafts=7))
    export_drafter(tmp_path / "a", drafter, target, consumer, dtype="float32")
    assert_same(load_drafter(tmp_path / "a", target), drafter)


@pytest.mark.parametrize(
    ("name", "consumer"),
    [("rnn", "deepspec"), ("Gemma4", "vllm"), ("gated", "sglang"), ("reduced", "speculators"), ("Domino", "specforge"),
     ("DFlash2", "dflash"), ("Eagle3", "deepspec")],
)  # fmt: skip
def test_a_bfloat16_file_comes_back_as_the_same_file(tmp_path, make, name, consumer):
    drafter, target = make(name)
    export_drafter(tmp_path / "a", drafter, target, consumer)
    export_drafter(tmp_path / "b", load_drafter(tmp_path / "a", target), target, consumer)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize(("name", "consumer"), REFUSED)
def test_what_a_consumer_cannot_run_is_refused(tmp_path, make, name, consumer):
    drafter, target = make(name)
    with pytest.raises(UserError) as error:
        export_drafter(tmp_path / "export", drafter, target, consumer)
    message = str(error.value)
    assert "\n" not in message and message.startswith(f"{consumer} does not take ")
    assert message.endswith(f": export it to {' or '.join(c for c in CONSUMERS if c in RUNS[name].split())}")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "consumer", "reason"),
    [
        ("reduced", "deepspec", "a reduced vocabulary"),
        ("rnn", "vllm", "an rnn head"),
        ("late anchor", "sglang", "an anchor that does not predict"),
        ("Domino", "vllm", "Domino drafters"),
        ("Eagle3", "vllm", "5 taps"),
        ("Eagle3, 3 taps", "sglang", "norms on queries and keys"),
        ("anchor windows", "vllm", "windows that end at the anchor"),
        ("Gemma4", "speculators", "Gemma4's layers"),
    ],
)
def test_a_refusal_names_the_reason(make, name, consumer, reason):
    drafter, target = make(name)
    with pytest.raises(UserError, match=reason):
        checkpoint(consumer, drafter, target)


@pytest.mark.parametrize("taps", [(1, 2, 5), (3, 1, 2)], ids=["last layer", "not increasing"])
def test_taps_that_the_reference_refuses(make, taps):
    drafter, target = make("vanilla")
    drafter = random_drafter(dataclasses.replace(drafter.config, tap_layers=taps), target)
    with pytest.raises(UserError, match="deepspec does not take a drafter with .*tap"):
        checkpoint("deepspec", drafter, target)


@pytest.mark.parametrize("name", sorted(set(VARIANTS) - FOREIGN))
def test_our_own_format_holds_what_we_train(tmp_path, make, name):
    drafter, target = make(name)
    save_drafter(tmp_path / "a", drafter, target)
    back = load_drafter(tmp_path / "a", target)
    assert back.config == drafter.config and back.target_fingerprint == target.fingerprint
    jax.tree.map(np.testing.assert_array_equal, back.borrowed, drafter.borrowed)
    save_drafter(tmp_path / "b", back, target)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_our_own_format_refuses_what_it_cannot_say(tmp_path, make, name):
    with pytest.raises(UserError, match="our own format does not take a drafter with"):
        save_drafter(tmp_path / "drafter", *make(name))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_rounded": True}, {"tap_layers": (-1, 1, 2, 5)}, DOMINO | {"confidence": True, "draft_vocab_size": 100},
        {"markov_rank": 8, "logits_start": 1, "draft_vocab_size": 64},
    ],
    ids=["rounded rope", "last layer tapped", "Domino with confidence, reduced", "late and reduced"],
)  # fmt: skip
def test_what_only_we_train_is_saved_too(tmp_path, drafters, target, changes):
    config = drafters["dspark_vanilla"].config
    if changes.get("rope_rounded"):
        kind = config.decoder.attention[0]
        kind = dataclasses.replace(kind, rope=dataclasses.replace(kind.rope, rounded=True))
        changes = {"decoder": dataclasses.replace(config.decoder, attention=(kind,))}
    config = dataclasses.replace(config, **changes)
    save_drafter(tmp_path, random_drafter(config, target), target)
    assert load_drafter(tmp_path, target).config == config


# ------------------------------------------------------------------------------------------------------------- layouts


def test_vllm_states_what_it_would_guess(make):
    raw, tensors = checkpoint("vllm", *make("no confidence"))
    stated = {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "sample_from_anchor": True,
              "enable_confidence_head": False, "confidence_head_with_markov": False, "markov_head_type": "vanilla",
              "markov_rank": 16, "block_size": 5, "mask_token_id": 300, "target_layer_ids": [-1, 1, 2, 4]}  # fmt: skip
    assert stated.items() <= raw.items()
    assert not {"dflash_config", "eagle_aux_hidden_state_layer_ids", "draft_vocab_size"} & raw.keys()
    assert not {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"} & tensors.keys()
    assert checkpoint("vllm", *make("late anchor"))[0]["sample_from_anchor"] is False


def test_a_reduced_vocabulary_brings_its_head_and_offsets(make):
    drafter, target = make("reduced")
    ids = np.asarray(drafter.borrowed.token_ids_Vd)
    for consumer in ("vllm", "speculators"):
        raw, tensors = checkpoint(consumer, drafter, target, "float32")
        assert raw["draft_vocab_size"] == 100 and tensors["d2t"].dtype == np.int64
        np.testing.assert_array_equal(tensors["d2t"], ids - np.arange(100))
        np.testing.assert_array_equal(tensors["lm_head.weight"], target.params["embedding"][ids])
        assert tensors["markov_head.markov_w1.weight"].shape == (320, 16)
        assert tensors["markov_head.markov_w2.weight"].shape == (100, 16)
        assert "embed_tokens.weight" not in tensors
    assert tensors["t2d"].dtype == np.bool_
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), ids)


@pytest.mark.parametrize("consumer", ["vllm", "sglang"])
@pytest.mark.parametrize("name", ["no head", "confidence alone"])
def test_a_missing_head_is_written_as_one_that_adds_nothing(tmp_path, make, name, consumer):
    drafter, target = make(name)
    export_drafter(tmp_path / "export", drafter, target, consumer, dtype="float32")
    back = load_drafter(tmp_path / "export", target)
    head = back.params["markov_head"]
    assert back.config == dataclasses.replace(drafter.config, markov_rank=16, head_type="vanilla")
    assert not np.any(head["markov_w2"])
    rest = {key: value for key, value in back.params.items() if key != "markov_head"}
    jax.tree.map(np.testing.assert_array_equal, rest, drafter.params)


@pytest.mark.parametrize("consumer", ["vllm", "sglang"])
def test_tables_of_its_own_travel_with_the_drafter(tmp_path, make, consumer):
    drafter, target = make("vanilla")
    own = drafter.borrowed.replace(head_VdxH=drafter.borrowed.head_VdxH * 2)
    drafter = dataclasses.replace(drafter, borrowed=own)
    export_drafter(tmp_path / "export", drafter, target, consumer, dtype="float32")
    assert_same(load_drafter(tmp_path / "export", target), drafter)
    assert "embed_tokens.weight" not in read(tmp_path / "export")[1]
    with pytest.raises(UserError, match="vocabulary tables of its own: export it to deepspec or vllm or sglang"):
        checkpoint("speculators", drafter, target)
    save_drafter(tmp_path / "ours", drafter, target)
    head = load_drafter(tmp_path / "ours", target).borrowed.head_VdxH
    np.testing.assert_array_equal(head, own.head_VdxH.astype(jnp.bfloat16).astype(jnp.float32))


def test_tables_that_bfloat16_cannot_tell_apart_are_the_targets(make):
    drafter, target = make("vanilla")
    rounded = drafter.borrowed.embedding_VxH.astype(jnp.bfloat16).astype(jnp.float32)
    drafter = dataclasses.replace(drafter, borrowed=drafter.borrowed.replace(embedding_VxH=rounded))
    assert "embed_tokens.weight" not in checkpoint("vllm", drafter, target)[1]
    assert "embed_tokens.weight" in checkpoint("vllm", drafter, target, "float32")[1]


def test_sglang_gets_both_spellings_of_rope(make):
    raw, _ = checkpoint("sglang", *make("yarn rope"))
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] and raw["rope_scaling"] == raw["rope_parameters"]
    assert raw["rope_scaling"]["rope_type"] == "yarn" and raw["rope_scaling"]["mscale"] == 0.5
    assert "rope_scaling" not in checkpoint("sglang", *make("vanilla"))[0]


def test_speculators_envelope(make):
    drafter, target = make("vanilla")
    raw, _ = checkpoint("speculators", drafter, target)
    assert "model_type" not in raw and raw["speculators_model_type"] == "dspark"
    assert raw["aux_hidden_state_layer_ids"] == [0, 2, 3, 5]  # the layers that the tapped states enter
    assert raw["sample_from_anchor"] and raw["sliding_window_non_causal"] and raw["draft_vocab_size"] == 320
    envelope, layers = raw["speculators_config"], raw["transformer_layer_config"]
    assert envelope["proposal_methods"][0]["speculative_tokens"] == 5
    assert envelope["verifier"] == {"name_or_path": target.name, "architectures": ["Qwen3ForCausalLM"]}
    assert (layers["model_type"], layers["num_hidden_layers"], layers["vocab_size"]) == ("qwen3", 2, 320)
    late, _ = checkpoint("speculators", *make("DFlash"))
    assert late["speculators_model_type"] == "dflash" and not late["sample_from_anchor"]
    assert late["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4


@pytest.mark.parametrize("consumer", ["deepspec", "vllm", "speculators"])
def test_others_must_find_the_target(make, consumer):
    drafter, target = make("vanilla")
    packed = dataclasses.replace(target, name="wheel:package/model.gguf")
    with pytest.raises(UserError, match="--target_name"):
        checkpoint(consumer, drafter, packed)
    raw, _ = checkpoint(consumer, drafter, packed, target_name="owner/model")
    assert consumer != "speculators" or raw["speculators_config"]["verifier"]["name_or_path"] == "owner/model"


def test_specforge_nests_its_keys(make):
    nested = {"projector_type": "dspark", "target_layer_ids": [-1, 1, 2, 4], "mask_token_id": 300, "markov_rank": 16,
              "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
              "attention_mode": "gqa"}  # fmt: skip
    raw, tensors = checkpoint("specforge", *make("vanilla"))
    assert raw["architectures"] == ["DSparkDraftModel"] and nested.items() <= raw["dflash_config"].items()
    assert raw["markov_rank"] == 16 and raw["target_layer_ids"] == [-1, 1, 2, 4]
    assert not {"embed_tokens.weight", "lm_head.weight"} & tensors.keys()
    for name, shifted in (("Domino", True), ("late Domino", False)):
        settings = checkpoint("specforge", *make(name))[0]["dflash_config"]
        domino = {"projector_type": "domino", "emb_dim": 8, "gru_hidden_dim": 12, "pure_draft_prefix_len": 1}
        assert (domino | {"shift_label": shifted}).items() <= settings.items()


@pytest.mark.parametrize("consumer", ["dflash", "vllm", "sglang", "specforge"])
def test_dflash_is_zlabs_layout_everywhere(make, consumer):
    raw, tensors = checkpoint(consumer, *make("DFlash"))
    settings = {"target_layer_ids": [-1, 1, 2, 4], "mask_token_id": 300, "block_size": 5}
    assert raw["architectures"] == ["DFlashDraftModel"] and raw["dflash_config"] == settings
    assert (raw["block_size"], raw["num_target_layers"], raw["rope_theta"]) == (5, 6, 1e6)
    assert len(tensors) == 3 + 2 * 11


@pytest.mark.parametrize(
    ("consumer", "architecture", "prefix", "ids", "tables"),
    [
        ("vllm", "Eagle3LlamaForCausalLM", "layers.0.", [2, 3, 4], {"lm_head.weight", "d2t"}),
        ("sglang", "LlamaForCausalLMEagle3", "midlayer.", [1, 2, 3], {"lm_head.weight", "d2t", "t2d"}),
        ("specforge", "LlamaForCausalLMEagle3", "midlayer.", [1, 2, 3],
         {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}),
        ("speculators", "Eagle3DraftModel", "layers.0.", [2, 3, 4],
         {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}),
    ],
)  # fmt: skip
def test_eagle3_as_each_has_it(make, consumer, architecture, prefix, ids, tables):
    raw, tensors = checkpoint(consumer, *make("Eagle3, Llama, reduced"))
    key = "eagle_aux_hidden_state_layer_ids"
    assert raw["architectures"] == [architecture] and raw.get("eagle_config", raw)[key] == ids
    layer = {"hidden_norm", "input_layernorm", "post_attention_layernorm"}
    layer |= {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    expected = {f"{prefix}{name}.weight" for name in layer} | {"fc.weight", "norm.weight"}
    assert tensors.keys() == expected | tables
    whole = checkpoint(consumer, *make("Eagle3, Llama"))[1]
    if consumer in ("sglang", "specforge"):  # maps of a whole vocabulary: the identity
        assert not np.any(whole["d2t"]) and np.all(whole["t2d"])
    else:
        assert not {"d2t", "t2d"} & whole.keys()


def test_eagle3_for_gemma4(tmp_path, drafters, targets):
    """18 tensors, as the reference counts them (spec 1.4, 6)."""
    target, like = targets["gemma4_keqv_target"], drafters["gemma4_keqv"].config.decoder
    kind = dataclasses.replace(like.attention[0], causal=True)
    decoder = dataclasses.replace(like, attention=(kind,), layer_kinds=(0,))
    drafter = random_drafter(Eagle3Config(decoder, 7, (0, 1, 2, 3, 4), 6, 320), target)
    export_drafter(tmp_path / "export", drafter, target, "deepspec", dtype="float32")
    assert_same(load_drafter(tmp_path / "export", target), drafter)
    raw, tensors = read(tmp_path / "export")
    assert raw["architectures"] == ["Gemma4Eagle3Model"] and len(tensors) == 18
    assert (raw["global_head_dim"], raw["head_dim"], raw["ttt_length"]) == (32, 16, 7)


def test_vllm_knows_eagle3_with_norms_by_another_name(make):
    raw, _ = checkpoint("vllm", *make("Eagle3, 3 taps"))
    assert raw["architectures"] == ["Eagle3Qwen3ForCausalLM"] and raw["norm_before_residual"] is False
