"""Our own and DeepSpec's checkpoints: round trips, and one clear line for whatever does not fit the target."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.errors import UserError
from dspark_jax.interop.drafter_io import Drafter, abstract_drafter, borrow, load_drafter
from dspark_jax.interop.export import save_drafter
from dspark_jax.interop.target_io import Target, load_target


@pytest.fixture(scope="module")
def target(golden_target) -> Target:
    return load_target(golden_target, dtype="float32")


@pytest.fixture(scope="module")
def drafter(golden, target) -> Drafter:
    return load_drafter(golden / "dspark_vanilla", target)


def new_drafter(drafter: Drafter, target: Target, **changes) -> Drafter:
    """Fresh parameters; `draft_vocab_size` below the target's picks that many ids."""
    config = dataclasses.replace(drafter.config, **changes)
    ids = None
    if config.reduced:
        ids = np.sort(np.random.default_rng(0).permutation(target.config.vocab_size)[: config.draft_vocab_size])
    rng = np.random.default_rng(3)
    draw = lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)  # noqa: E731
    return Drafter(config, jax.tree.map(draw, abstract_drafter(config)), borrow(target, ids))


def assert_trees_equal(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def in_bfloat16(tree):
    return jax.tree.map(lambda a: np.asarray(a).astype(ml_dtypes.bfloat16).astype(np.float32), tree)


# -------------------------------------------------------------------------------------------------------- round trips


def test_golden_drafter(golden, drafter):
    """The values themselves are checked by greedy decoding and by the training forward."""
    c, tensors = drafter.config, load_file(golden / "dspark_vanilla" / "model.safetensors")
    assert (c.block_size, c.mask_token_id, c.tap_layers, c.num_target_layers) == (5, 300, (-1, 1, 2, 4), 6)
    assert (c.markov_rank, c.head_type, c.confidence, c.confidence_with_markov, c.reduced) == (
        16,
        "vanilla",
        True,
        True,
        False,
    )
    assert (c.decoder.num_layers, c.decoder.qk_norm, c.decoder.attention[0].rope.theta) == (2, True, 1e6)
    np.testing.assert_array_equal(drafter.params["backbone"]["fc"]["kernel"], tensors["fc.weight"].T)
    np.testing.assert_array_equal(drafter.params["markov_head"]["markov_w1"], tensors["markov_head.markov_w1.weight"])
    np.testing.assert_array_equal(
        drafter.params["backbone"]["layers"][0]["mlp"]["up_proj"]["kernel"][1], tensors["layers.1.mlp.up_proj.weight"].T
    )
    np.testing.assert_array_equal(drafter.borrowed.token_ids_Vd, np.arange(320))


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"draft_vocab_size": 100}, {"markov_rank": 0, "confidence_with_markov": False},
        {"confidence": False, "confidence_with_markov": False}, {"confidence_with_markov": False, "block_size": 7},
    ],
    ids=["full", "reduced", "no head", "no confidence", "confidence without Markov"],
)  # fmt: skip
def test_round_trip(tmp_path, drafter, target, changes):
    made = new_drafter(drafter, target, **changes)
    save_drafter(tmp_path / "drafter", made, target)
    back = load_drafter(tmp_path / "drafter", target)
    assert back.config == made.config and back.target_fingerprint == target.fingerprint
    assert_trees_equal(back.params, in_bfloat16(made.params))
    assert_trees_equal(back.borrowed, made.borrowed)  # the tables are the target's, in its precision
    assert back.borrowed.token_ids_Vd.dtype == jnp.int32


def test_saving_what_was_loaded_changes_nothing(tmp_path, drafter, target):
    save_drafter(tmp_path / "a", new_drafter(drafter, target, draft_vocab_size=64), target)
    save_drafter(tmp_path / "b", load_drafter(tmp_path / "a", target), target)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]  # no temporary directory is left


def test_files_hold_no_copies_of_the_target_and_offsets_in_d2t(tmp_path, drafter, target):
    made = new_drafter(drafter, target, draft_vocab_size=100)
    save_drafter(tmp_path, made, target)
    tensors = load_file(tmp_path / "model.safetensors")
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(tensors)
    assert {a.dtype for name, a in tensors.items() if name != "d2t"} == {np.dtype(ml_dtypes.bfloat16)}
    np.testing.assert_array_equal(tensors["d2t"] + np.arange(100), made.borrowed.token_ids_Vd)


def test_saving_over_an_older_drafter(tmp_path, drafter, target):
    save_drafter(tmp_path, new_drafter(drafter, target, draft_vocab_size=100), target)
    save_drafter(tmp_path, new_drafter(drafter, target), target)
    assert not load_drafter(tmp_path, target).config.reduced


def test_dtype_follows_the_target(golden, golden_target):
    target = load_target(golden_target, dtype="bfloat16")
    drafter = load_drafter(golden / "dspark_vanilla", target)
    assert {a.dtype for a in jax.tree.leaves(drafter.params)} == {jnp.dtype(jnp.bfloat16)}
    assert drafter.borrowed.head_VdxH.dtype == jnp.bfloat16


# ------------------------------------------------------------------------------------------------------------ misfits


@pytest.fixture
def copy(golden, tmp_path) -> Path:
    """A directory of the golden drafter that a test may spoil."""
    shutil.copytree(golden / "dspark_vanilla", tmp_path / "spoilt", copy_function=shutil.copyfile)
    return tmp_path / "spoilt"


def refuses(path: Path, target: Target, *words: str) -> None:
    with pytest.raises(UserError) as error:
        load_drafter(path, target)
    message = str(error.value)
    assert "\n" not in message and len(message) < 300
    for word in words:
        assert word in message, message


def edit(path: Path, **changes) -> None:
    raw = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 95}, ("hidden size is 95", "96")),
        ({"vocab_size": 319}, ("vocabulary is 319", "320")),
        ({"num_target_layers": 5}, ("number of target layers is 5", "6")),
        ({"target_layer_ids": [-1, 1, 2, 6]}, ("tap layers", "6")),
        ({"target_layer_ids": [-2, 1, 2, 4]}, ("tap layers", "-2")),
        ({"target_layer_ids": [1, -1, 2, 4]}, ("tap layers",)),
        ({"target_layer_ids": [1, 1, 2, 4]}, ("tap layers",)),
        ({"target_layer_ids": [-1, 1, 2, 5]}, ("tap layers", "-1 .. 4")),  # the reference's is after the final norm
        ({"target_layer_ids": [-1, 1, 4, 2]}, ("tap layers", "increase")),
        ({"target_layer_ids": "1,2"}, ("target_layer_ids", "list")),
        ({"target_layer_ids": [-1, 1, 2, 2.5]}, ("target_layer_ids", "2.5")),
        ({"target_layer_ids": []}, ("tap layers",)),
        ({"mask_token_id": 320}, ("mask token 320",)),
        ({"mask_token_id": -1}, ("mask token -1",)),
        ({"mask_token_id": 257}, ("mask token 257", "end")),
        ({"pad_token_id": 300}, ("mask token 300", "padding")),
        ({"eos_token_id": [257, 300]}, ("mask token 300", "end")),
        ({"mask_token_id": "300"}, ("mask token '300'",)),
        ({"mask_token_id": True}, ("mask token True",)),
        ({"target_hidden_size": 64}, ("hidden size is 64", "96")),
        ({"architectures": ["LlamaForCausalLM"]}, ("architecture 'LlamaForCausalLM'",)),
        ({"architectures": []}, ("architecture",)),
        ({"architectures": ...}, ("architecture",)),
        ({"markov_head_type": "banana"}, ("head 'banana'",)),
        ({"markov_rank": 0}, ("Markov",)),
        ({"markov_rank": -1}, ("markov_rank is -1",)),
        ({"markov_rank": 8}, ("'markov_head.markov_w1.weight' has shape [320, 16]", "[320, 8]")),
        ({"confidence_head_with_markov": False}, ("'confidence_head.proj.weight' has shape [1, 112]", "[1, 96]")),
        ({"enable_confidence_head": False}, ("does not account for", "'confidence_head.proj.")),
        ({"target_layer_ids": [-1, 1, 2]}, ("'fc.weight' has shape [96, 384]", "[96, 288]")),
        ({"block_size": 1, "sample_from_anchor": False}, ("block of 1",)),
        ({"draft_vocab_size": 100}, ("'markov_head.markov_w2.weight' has shape [320, 16]", "[100, 16]")),
        ({"block_size": 0}, ("block_size",)),
        ({"block_size": "five"}, ("block_size",)),
        ({"num_hidden_layers": 3}, ("layers.2.",)),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, ("'spiral'",)),
    ],
    ids=str,
)
def test_config_that_does_not_fit(copy, target, changes, words):
    edit(copy, **changes)
    refuses(copy, target, *words)


@pytest.mark.parametrize(
    "key",
    [
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "num_target_layers",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
        "head_dim",
        "rms_norm_eps",
    ],
)
def test_missing_key(copy, target, key):
    edit(copy, **{key: ...})
    refuses(copy, target, f"lacks '{key}'")


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_damaged_config(copy, target, text):
    (copy / "config.json").write_text(text)
    refuses(copy, target, "config.json")


def spoil(path: Path, change) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(
    "name",
    ["fc.weight", "layers.1.self_attn.q_norm.weight", "confidence_head.proj.bias", "markov_head.markov_w2.weight"],
)
def test_missing_tensor(copy, target, name):
    spoil(copy, lambda tensors: tensors.pop(name))
    refuses(copy, target, f"lacks the tensor '{name}'")


@pytest.mark.parametrize(
    "name", ["fc.weight", "layers.0.mlp.down_proj.weight", "lm_head.weight", "embed_tokens.weight"]
)
def test_tensor_of_another_shape(copy, target, name):
    spoil(copy, lambda tensors: tensors.update({name: np.ascontiguousarray(tensors[name][:-1])}))
    refuses(copy, target, f"tensor '{name}' has shape")


@pytest.mark.parametrize("keep", [-1, 100, 4, 0])
def test_truncated_file(copy, target, keep):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refuses(copy, target, "model.safetensors", "truncated")


def test_no_weights(copy, target):
    (copy / "model.safetensors").unlink()
    refuses(copy, target, "no safetensors")


@pytest.mark.parametrize("what", ["repeated ids", "outside", "missing"])
def test_bad_draft_vocabulary(tmp_path, drafter, target, what):
    save_drafter(tmp_path, new_drafter(drafter, target, draft_vocab_size=100), target)

    def change(tensors):
        offsets = tensors.pop("d2t")
        if what != "missing":
            tensors["d2t"] = offsets - np.arange(100) if what == "repeated ids" else offsets + 320

    spoil(tmp_path, change)
    refuses(tmp_path, target, "lacks the tensor 'd2t'" if what == "missing" else "d2t is no increasing map")


def test_draft_vocabulary_of_target_ids(tmp_path, drafter, target):
    """N2: some trainers store target ids where offsets are expected."""
    made = new_drafter(drafter, target, draft_vocab_size=100)
    save_drafter(tmp_path, made, target)
    spoil(tmp_path, lambda tensors: tensors.update(d2t=tensors["d2t"] + np.arange(100)))
    assert_trees_equal(load_drafter(tmp_path, target).borrowed, made.borrowed)


def test_our_own_files_may_tap_the_last_layer_and_in_any_order(tmp_path, drafter, target):
    """What is trained here taps what layers put out, the last one's too."""
    made = new_drafter(drafter, target, tap_layers=(5, -1, 2, 4))
    save_drafter(tmp_path, made, target)
    assert load_drafter(tmp_path, target).config == made.config


@pytest.mark.parametrize("size", [5, 7])
def test_block_size_that_a_caller_asks_for(golden, target, size):
    if size == 5:
        assert load_drafter(golden / "dspark_vanilla", target, block_size=size).config.block_size == 5
    else:
        with pytest.raises(UserError, match="block size is 5, not 7"):
            load_drafter(golden / "dspark_vanilla", target, block_size=size)


def test_no_such_directory(tmp_path, target):
    refuses(tmp_path / "nothing", target, "nothing")
