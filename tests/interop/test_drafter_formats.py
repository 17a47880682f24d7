"""Every layout that a drafter may come in: read to the last bit, or refused by name."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.errors import UserError
from dspark_jax.interop.drafter_io import Drafter, load_drafter
from dspark_jax.interop.target_io import Target, load_target
from dspark_jax.models.config import draft_decoder
from dspark_jax.models.layers import DecoderLayer, rope_table
from tests.interop.layouts import (
    FULL,
    GEMMA,
    HEAD_DIM,
    HIDDEN,
    LLAMA,
    QWEN,
    SPOKEN,
    VOCAB,
    all_nested,
    angelspec,
    attention_of,
    block,
    deepspec,
    deepspec_eagle3,
    dflash,
    dflash2,
    domino,
    domino_file,
    eagle3,
    files_of,
    flat_rope,
    headless,
    lfm2,
    make_target,
    midlayer,
    random_params,
    random_tables,
    selector,
    specforge_domino,
    specforge_dspark,
    specforge_eagle3,
    speculators_dflash,
    speculators_dflash2,
    speculators_dspark,
    speculators_eagle3,
    vllm_eagle3,
    vocabulary_map,
    windowed,
    write,
)

YARN = dataclasses.replace(FULL.rope, kind="yarn", factor=4.0, original_max_position_embeddings=128)
REDUCED = {"draft_vocab_size": len(SPOKEN)}
OWN_HEAD = {"lm_head.weight": random_tables(spoken=len(SPOKEN))["lm_head.weight"]}
OWN_EMBEDDING = {"embed_tokens.weight": random_tables()["embed_tokens.weight"]}
NARROW = dataclasses.replace(QWEN, hidden_size=24)
NO_MARKOV_INPUT = {"confidence_with_markov": False}
NO_CONFIDENCE = {"confidence": False, "confidence_with_markov": False}


def told(writer, **options):
    return functools.partial(writer, **options)


# The drafter, the producer that writes it, the vocabulary tables in its file.
LAYOUTS = {
    "DeepSpec DSpark": (block(), deepspec, random_tables()),
    "DeepSpec DSpark, gated": (block(head_type="gated"), deepspec, {}),
    "DeepSpec DSpark, rnn": (block(head_type="rnn", **NO_MARKOV_INPUT), told(deepspec, markov_head_type="RNN"), {}),
    "DeepSpec DSpark, biased": (block(dataclasses.replace(QWEN, qkv_bias=True, o_bias=True), **NO_CONFIDENCE),
                                told(deepspec, attention_bias=True), {}),
    "DeepSpec DSpark, causal": (block(attention_of(QWEN, causal=True)), told(deepspec, dflash_query_causal=True), {}),
    "DeepSpec DSpark, s=1": (block(logits_start=1), told(deepspec, sample_from_anchor=False), {}),
    "DeepSpec DFlash": (headless(), deepspec, random_tables()),
    "DeepSpec Gemma4 DSpark": (block(GEMMA), deepspec, random_tables()),
    "DeepSpec Gemma4 DFlash": (headless(GEMMA), deepspec, {}),
    "DeepSpec Eagle3": (eagle3(num_drafts=5), deepspec_eagle3, random_tables()),
    "DeepSpec Gemma4 Eagle3": (eagle3(GEMMA), deepspec_eagle3, {}),
    "z-lab DFlash": (headless(logits_start=1), dflash, {}),
    "z-lab DFlash, order of taps": (headless(logits_start=1, tap_layers=(8, -1, 3)), dflash, {}),
    "z-lab DFlash, nested": (headless(logits_start=1), all_nested, {}),
    "z-lab DFlash, flat": (headless(logits_start=1, tap_layers=(1, 6)), flat_rope, {}),
    "SpecForge DFlash, sliding": (headless(windowed(causal=True), logits_start=1), dflash, {}),
    "SpecForge DSpark": (block(attention_of(QWEN, rope=YARN)), specforge_dspark, {}),
    "SpecForge DSpark, no Markov input": (block(attention_of(QWEN, rope=YARN), **NO_MARKOV_INPUT),
                                          specforge_dspark, {}),
    "SpecForge Domino": (domino(), specforge_domino, {}),
    "Domino": (domino(logits_start=1, pure_prefix=0), domino_file, {}),
    "Domino, older": (domino(), told(domino_file, kind="causal_v5"), {}),
    "DFlash2": (selector(), dflash2, {}),
    "DFlash2, sliding": (selector(windowed(causal=True)), dflash2, {}),
    "LFM2": (block(), lfm2, {}),
    "LFM2, no Markov input": (block(**NO_MARKOV_INPUT), lfm2, {}),
    "AngelSpec DFlash": (headless(logits_start=1), angelspec, OWN_EMBEDDING),
    "AngelSpec DSpark": (block(logits_start=1), angelspec, {}),
    "speculators dflash": (headless(logits_start=1), speculators_dflash, {}),
    "speculators dflash, older": (headless(logits_start=1), speculators_dflash, random_tables()),
    "speculators dflash, llama": (headless(LLAMA, logits_start=1), speculators_dflash, {}),
    "speculators dflash, sliding": (headless(windowed(causal=True, window_from_anchor=True), logits_start=1),
                                    speculators_dflash, {}),
    "speculators dflash, both ways": (headless(windowed(window_from_anchor=True), logits_start=1),
                                      told(speculators_dflash, sliding_window_non_causal=True), {}),
    "speculators dspark": (block(), speculators_dspark, {}),
    "speculators dspark, s=1": (block(logits_start=1, head_type="rnn"), speculators_dspark, {}),
    "speculators dspark, reduced": (block(**REDUCED), speculators_dspark, OWN_HEAD | vocabulary_map()),
    "speculators dflash2": (selector(windowed(window_from_anchor=True)), speculators_dflash2, {}),
    "speculators eagle3": (eagle3(LLAMA, num_drafts=3, norm_before_residual=True), speculators_eagle3, random_tables()),
    "speculators eagle3, 3.1": (eagle3(fc_norm=True, feed_normed=True, tap_layers=(-1, 2)), speculators_eagle3, {}),
    "speculators eagle3, normed taps": (eagle3(norm_before_fc=True), speculators_eagle3, {}),
    "EAGLE-3": (eagle3(LLAMA, **REDUCED), midlayer, OWN_HEAD | vocabulary_map()),
    "EAGLE-3, narrower": (eagle3(dataclasses.replace(NARROW, qk_norm=False), target_hidden_size=HIDDEN),
                          told(midlayer, target_hidden_size=HIDDEN), random_tables(24)),
    "SpecForge Eagle3": (eagle3(LLAMA, tap_layers=(0, 4, 8), fc_norm=True), specforge_eagle3,
                         random_tables() | vocabulary_map(np.arange(VOCAB))),
    "vLLM Eagle3": (eagle3(tap_layers=(0, 4, 8)), vllm_eagle3, {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


def load(path: Path, target: Target, raw, tensors, **options) -> Drafter:
    return load_drafter(write(path, raw, tensors), target, **options)


def assert_trees_equal(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(tmp_path, target, name):
    """Config and parameters are the canonical ones; a table is the file's where it has one, else the target's."""
    config, writer, tables = LAYOUTS[name]
    raw, tensors = files_of(config, writer)
    loaded = load(tmp_path, target, raw, tensors | tables)
    assert loaded.config == config
    assert_trees_equal(loaded.params, random_params(config))
    ids = SPOKEN if config.reduced else np.arange(VOCAB)
    embedding = tables.get("embed_tokens.weight", target.params["embedding"])
    head = tables.get("lm_head.weight", target.params["lm_head"]["kernel"].T)
    assert_trees_equal(jax.tree.leaves(loaded.borrowed), [embedding, head, ids])


def test_a_target_that_scales_its_embedding_lends_it_scaled(tmp_path):
    """z-lab's drafters embed through their target; others' tables are plain."""
    scaled = make_target(embedding_scale=6.0)
    config = headless(logits_start=1)
    assert load(tmp_path, scaled, *files_of(config, dflash)).config.decoder.embedding_scale == 6.0
    assert load(tmp_path, scaled, *files_of(config, speculators_dflash)).config.decoder.embedding_scale == 1.0


def test_released_gemma4_drafter(golden):
    """Full attention with the global heads; the stray rope keys beside the nested entries say nothing."""
    target = load_target(golden / "gemma4_keqv_target", dtype="float32")
    loaded = load_drafter(golden / "gemma4_keqv", target)
    decoder, c = loaded.config.decoder, target.config
    assert decoder == draft_decoder(c, 2)
    full = decoder.attention[0]
    assert (full.num_kv_heads, full.head_dim, full.window, full.keys_as_values, full.scale) == (1, 32, 0, True, 1.0)
    assert (full.rope.kind, full.rope.theta, full.rope.partial_rotary_factor) == ("proportional", 1e6, 0.25)
    assert (decoder.softcap, decoder.embedding_scale) == (30.0, 8.0)


def test_released_eagle3_drafter(golden, golden_target):
    config = load_drafter(golden / "eagle3", load_target(golden_target, dtype="float32")).config
    assert (config.tap_layers, config.num_drafts, config.decoder.qk_norm) == ((0, 1, 2, 3, 4), 5, True)
    assert config.decoder.attention[0].causal


# --------------------------------------------------------------------------------------------- rotary pairs and windows


def test_interleaved_pairs_score_as_rotated_natively(tmp_path, target):
    """q·k of a loaded layer against the file's own weights, rotated in pairs of neighbours (section 7)."""
    raw, tensors = files_of(block(), lfm2)
    loaded = load(tmp_path, target, raw, tensors)
    decoder, rng = loaded.config.decoder, np.random.default_rng(0)
    x_NxH, position_N = rng.standard_normal((5, HIDDEN)).astype(np.float32), np.array([0, 3, 17, 60, 411])

    def native(which: str, heads: int) -> np.ndarray:
        y = (
            (x_NxH @ tensors[f"layers.0.self_attn.{which}_proj.weight"].T)
            .reshape(5, heads, HEAD_DIM)
            .astype(np.float64)
        )
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * tensors[f"layers.0.self_attn.{which}_norm.weight"]
        angle = position_N[:, None, None] * 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        even, odd, out = y[..., 0::2], y[..., 1::2], np.empty_like(y)
        out[..., 0::2] = even * np.cos(angle) - odd * np.sin(angle)
        out[..., 1::2] = odd * np.cos(angle) + even * np.sin(angle)
        return out

    seen = {}

    def attend(q, k, v):
        seen.update(q=q, k=k)
        return q

    layer = DecoderLayer(decoder, decoder.attention[0])
    params = jax.tree.map(lambda a: a[0], loaded.params["backbone"]["layers"][0])
    rope = rope_table(decoder.attention[0].rope, HEAD_DIM, jnp.asarray(position_N), jnp.float32)
    layer.apply({"params": params}, x_NxH, rope, attend, method="attention")
    scores = np.einsum("nhd,mhd->hnm", seen["q"], np.repeat(seen["k"], 2, axis=1))
    wanted = np.einsum("nhd,mhd->hnm", native("q", 4), np.repeat(native("k", 2), 2, axis=1))
    np.testing.assert_allclose(scores, wanted, atol=2e-4 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("writer", "changes", "config", "causal", "from_anchor"),
    [
        (dflash, {}, headless(windowed(), logits_start=1), True, False),
        (dflash, {"is_causal": False}, headless(windowed(), logits_start=1), False, False),
        (dflash2, {"sliding_window_non_causal": True}, selector(windowed()), False, False),
        (speculators_dflash, {}, headless(windowed(), logits_start=1), True, True),
        (speculators_dflash2, {}, selector(windowed()), False, True),
        (speculators_dflash2, {"sliding_window_non_causal": False}, selector(windowed()), True, True),
    ],
)
def test_windows(tmp_path, target, writer, changes, config, causal, from_anchor):
    """Who sees whom where the layers slide, by producer (section 0.5); full layers see the whole block."""
    full, sliding = load(tmp_path, target, *files_of(config, told(writer, **changes))).config.decoder.attention
    assert (sliding.window, sliding.causal, sliding.window_from_anchor) == (6, causal, from_anchor)
    assert (full.window, full.causal, full.window_from_anchor) == (0, False, False)


def test_layer_types_are_the_last_word_on_windows(tmp_path, target):
    """A target's `use_sliding_window` and `sliding_window`, copied, do not make a window, nor unmake one."""
    raw, tensors = files_of(headless(logits_start=1), dflash)
    full = load(tmp_path, target, raw | {"sliding_window": 6, "use_sliding_window": True}, tensors)
    assert [kind.window for kind in full.config.decoder.attention] == [0]
    raw |= {"sliding_window": 6, "use_sliding_window": False, "layer_types": ["sliding_attention"] * 2}
    assert [kind.window for kind in load(tmp_path, target, raw, tensors).config.decoder.attention] == [6]


# ------------------------------------------------------------------------------------------------------------ the slots

COUNT = "speculative_tokens"


@pytest.mark.parametrize(
    ("flag", "count", "start"),
    [
        (None, None, 1),  # older than the flag
        (True, None, 0), (False, None, 1), (None, 4, 0), (None, 3, 1), (True, 4, 0), (False, 3, 1),
        (None, 9, 1),  # no number of drafts of a block of 4
        (True, 3, "sample_from_anchor says 4, speculative_tokens says 3"),
        (False, 4, "sample_from_anchor says 3, speculative_tokens says 4"),
        (None, 2, "speculative_tokens says 2"),
    ],
)  # fmt: skip
def test_slots_of_a_speculators_dspark(tmp_path, target, flag, count, start):
    raw, tensors = files_of(block(logits_start=1), speculators_dspark)
    raw["sample_from_anchor"] = flag
    raw["speculators_config"]["proposal_methods"][1][COUNT] = count
    if isinstance(start, str):
        refuses(write(tmp_path, raw, tensors), target, "anchor's slot", start)
    else:
        assert load(tmp_path, target, raw, tensors).config.logits_start == start


@pytest.mark.parametrize(
    ("nested", "outer", "start"),
    [
        ({"shift_label": True}, {}, 0), ({"shift_label": False}, {}, 1), ({"shift_label": None}, {}, 1),
        ({"shift_label": None}, {"sample_from_anchor": True}, 0),
        ({"shift_label": True}, {"sample_from_anchor": False}, "shift_label says 4, sample_from_anchor says 3"),
    ],
)  # fmt: skip
def test_slots_of_a_domino(tmp_path, target, nested, outer, start):
    raw, tensors = files_of(domino(), told(domino_file, **nested))
    if isinstance(start, str):
        refuses(write(tmp_path, raw | outer, tensors), target, "anchor's slot", start)
    else:
        assert load(tmp_path, target, raw | outer, tensors).config.logits_start == start


# ------------------------------------------------------------------------------------------------------------- refusals


def refuses(path: Path, target: Target, *words: str, **options) -> None:
    with pytest.raises(UserError) as error:
        load_drafter(path, target, **options)
    message = str(error.value)
    assert "\n" not in message and len(message) < 300
    for word in words:
        assert word in message, message


def extra(*names: str):
    return {name: np.zeros((2, 2), np.float32) for name in names}


SINK = "layers.0.self_attn.attention_sink_bias"
RAW_TARGET = told(deepspec, architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4", dspark_block_size=4)
NOT_COVERED = {
    "DeepSeek-V4": (block(), RAW_TARGET, {}),
    "DeepSeek-V4's": (block(), deepspec, extra("mtp.0.main_proj.weight")),
    "P-EAGLE": (eagle3(LLAMA), midlayer, {"mask_hidden": np.zeros((1, 1, 96), np.float32)}),
    "P-EAGLE ": (eagle3(), told(speculators_eagle3, speculators_model_type="peagle"), {}),
    "xpress": (headless(), told(speculators_dflash, speculators_model_type="xpress"), {}),
    "'mtp'": (headless(), told(speculators_dflash, speculators_model_type="mtp"), {}),
    "Ornith": (block(), told(deepspec, enable_qwen35_gated_q_proj=True), {}),
    "Nemotron": (block(), told(deepspec, attention_sink_bias=True), {}),
    "sinks": (block(), deepspec, {SINK: np.zeros(4, np.float32)}),
    "Bonsai": (block(), deepspec, extra("log_snr_embed.fc1.weight")),
    "Laguna": (headless(logits_start=1), dflash, extra("layers.0.self_attn.qkv_proj.weight")),
    "DFly": (headless(), told(deepspec, model_type="dfly"), {}),
    "quantised": (block(), told(deepspec, quantization_config={"quant_method": "fp8"}), {}),
    "quantised ": (block(), deepspec, extra("layers.0.mlp.up_proj.weight_scale")),
    "hybrid": (headless(logits_start=1), told(dflash, markov_rank=4), {}),
    "hybrid,": (headless(logits_start=1), told(dflash, nested={"markov_rank": 4}), {}),
    "output_multiplier": (selector(), told(dflash2, output_multiplier=2.0), {}),
    "norm_output": (eagle3(LLAMA), told(midlayer, norm_output=False), {}),
    "architecture 'Qwen3ForCausalLM'": (block(), told(deepspec, architectures=["Qwen3ForCausalLM"]), {}),
    "selector_rank": (headless(logits_start=1), told(dflash, architectures=["DFlash2DraftModel"]), {}),
}


@pytest.mark.parametrize("word", NOT_COVERED)
def test_what_is_not_covered_is_named(tmp_path, target, word):
    config, writer, tensors = NOT_COVERED[word]
    raw, own = files_of(config, writer)
    refuses(write(tmp_path, raw, own | tensors), target, word.rstrip(" ,"))


def test_gated_queries(tmp_path, target):
    raw, tensors = files_of(block())
    name = "layers.0.self_attn.q_proj.weight"
    refuses(write(tmp_path, raw, tensors | {name: np.tile(tensors[name], (2, 1))}), target, "q_proj", "gated")


def test_eagle3_of_two_layers(tmp_path, target):
    raw, tensors = files_of(eagle3(), speculators_eagle3)
    raw["transformer_layer_config"] |= {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    refuses(write(tmp_path, raw, tensors), target, "2 layers")


def test_a_gguf_drafter(tmp_path, target):
    (tmp_path / "drafter.gguf").write_bytes(b"GGUF")
    refuses(tmp_path / "drafter.gguf", target, "GGUF")


def test_two_names_for_one_tensor(tmp_path, target):
    raw, tensors = files_of(eagle3(LLAMA), midlayer)
    twin = tensors["midlayer.hidden_norm.weight"]
    refuses(write(tmp_path, raw, tensors | {"layers.0.hidden_norm.weight": twin}), target, "twice", "hidden_norm")


@pytest.mark.parametrize(
    ("config", "writer", "words"),
    [
        (headless(logits_start=1, tap_layers=(0, 9)), dflash, ("[0, 9]", "-1 .. 8")),
        (headless(logits_start=1, tap_layers=(3, 3)), dflash, ("[3, 3]", "different")),
        (headless(logits_start=1, tap_layers=(0, 9)), speculators_dflash, ("[0, 9]", "-1 .. 8")),
        (headless(logits_start=1, tap_layers=(-2, 3)), speculators_dflash, ("[-2, 3]", "-1 .. 8")),
        (block(tap_layers=(3, 8)), deepspec, ("[3, 8]", "-1 .. 7")),
        (eagle3(tap_layers=(-1, 3)), deepspec_eagle3, ("[-1, 3]", "0 .. 7")),
        (eagle3(tap_layers=(3, 1)), deepspec_eagle3, ("[3, 1]", "increase")),
    ],
)
def test_taps_that_a_format_does_not_allow(tmp_path, target, config, writer, words):
    refuses(write(tmp_path, *files_of(config, writer)), target, "tap layers", *words)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("speculators dspark", {"transformer_layer_config": None}, ("lacks 'transformer_layer_config'",)),
        ("speculators dspark", {"transformer_layer_config": [1]}, ("transformer_layer_config", "object")),
        ("speculators dspark", {"mask_token_id": None}, ("lacks 'mask_token_id'",)),
        ("speculators dspark", {"mask_token_id": 2}, ("mask token 2", "end")),
        ("speculators dspark", {"aux_hidden_state_layer_ids": None}, ("lacks 'aux_hidden_state_layer_ids'",)),
        ("speculators dspark", {"markov_head_type": "banana"}, ("head 'banana'", "vanilla")),
        ("z-lab DFlash", {"dflash_config": {"target_layer_ids": [0, 3, 7]}}, ("lacks 'mask_token_id'",)),
        ("z-lab DFlash", {"dflash_config": "none"}, ("dflash_config", "object")),
        ("z-lab DFlash", {"block_size": ...}, ("lacks 'block_size'",)),
        ("z-lab DFlash", {"block_size": 1}, ("block of 1",)),
        ("z-lab DFlash", {"num_target_layers": 12}, ("number of target layers is 12", "has 9")),
        ("z-lab DFlash", {"layer_types": ["sliding_attention"] * 2}, ("sliding_window is None",)),
        ("z-lab DFlash", {"rope_parameters": {"rope_type": "spiral"}}, ("'spiral'",)),
        ("LFM2", {"markov_rank": None}, ("lacks 'markov_rank'",)),
        ("DeepSpec Eagle3", {"ttt_length": None}, ("lacks 'ttt_length'",)),
        ("DeepSpec Eagle3", {"target_layer_ids": None}, ("lacks 'target_layer_ids'",)),
        ("EAGLE-3, narrower", {"target_hidden_size": None}, ("hidden size is 24", "has 32")),
        ("Domino", {"rms_norm_eps": ...}, ("lacks 'rms_norm_eps'",)),
    ],
)  # fmt: skip
def test_a_config_that_lacks_or_misstates_something(tmp_path, target, name, change, words):
    config, writer, tables = LAYOUTS[name]
    raw, tensors = files_of(config, writer)
    raw = {key: value for key, value in (raw | change).items() if value is not ...}
    refuses(write(tmp_path, raw, tensors | tables), target, *words)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("SpecForge DSpark", "logit_head.markov_head.markov_w1.weight"),
        ("SpecForge Domino", "prefix_gru.weight_hh_l0"),
        ("DFlash2", "candidate_selector.predecessor_codebook"),
        ("DFlash2", "layers.1.mlp_conv.base_kernel"),
        ("AngelSpec DSpark", "context_norm.weight"),
        ("speculators dflash", "layers.1.self_attn.k_norm.weight"),
        ("speculators eagle3", "layers.0.hidden_norm.weight"),
        ("speculators eagle3, 3.1", "fc_norm.1.weight"),
        ("EAGLE-3", "midlayer.self_attn.v_proj.weight"),
    ],
)
@pytest.mark.parametrize("spoilt", ["missing", "of another shape"])
def test_a_tensor_of_every_layout(tmp_path, target, name, tensor, spoilt):
    """A missing tensor is called by the name it has here, where there is no file's name for it."""
    config, writer, tables = LAYOUTS[name]
    raw, tensors = files_of(config, writer)
    array = tensors.pop(tensor)
    if spoilt != "missing":
        tensors[tensor] = np.concatenate([array, array])
    own = tensor.removeprefix("logit_head.").replace("midlayer.", "layers.0.").replace("context_norm", "hidden_norm")
    path = write(tmp_path, raw, tensors | tables)
    wanted = f"lacks the tensor '{own}'" if spoilt == "missing" else f"tensor '{own}' has shape [{2 * len(array)}"
    refuses(path, target, wanted)


def test_a_qwen3_eagle3_without_its_norms(tmp_path, target):
    """Llama-shaped layers have none; a Qwen3 whose norms are gone is damaged."""
    raw, tensors = files_of(eagle3(), speculators_eagle3)
    bare = {name: array for name, array in tensors.items() if "self_attn.q_norm" not in name and "k_norm" not in name}
    refuses(write(tmp_path, raw, bare), target, "lacks the tensor 'layers.0.self_attn.q_norm.weight'")


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_unknown_tensor(tmp_path, target, name):
    config, writer, tables = LAYOUTS[name]
    raw, tensors = files_of(config, writer)
    path = write(tmp_path, raw, tensors | tables | extra("layers.0.surprise.weight"))
    refuses(path, target, "does not account for", "'layers.0.surprise.weight'")


@pytest.mark.parametrize("config", [headless(QWEN, logits_start=1), selector(), block()])
def test_block_sizes(tmp_path, target, config):
    writer = {True: dflash2, False: dflash}[config.head_type == "selector"] if config.logits_start else deepspec
    path = write(tmp_path, *files_of(config, writer))
    assert load_drafter(path, target, block_size=4).config.block_size == 4
    refuses(path, target, "block size is 4, not 7", block_size=7)


def test_a_file_that_leaves_the_block_size_to_its_user(tmp_path, target):
    raw, tensors = files_of(block(logits_start=1), angelspec)
    del raw["block_size"]
    refuses(write(tmp_path, raw, tensors), target, "lacks 'block_size'")
    assert load_drafter(tmp_path, target, block_size=4).config.block_size == 4
