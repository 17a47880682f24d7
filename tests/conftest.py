"""Shared fixtures. JAX stays in float32; a test that wants float64 asks for the fixture `x64`."""

import os

# Where libtpu is installed, every start would look for a TPU. Set the variable to run the tests on an accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Nearly all of the suite's time is compilation of tiny programs; LLVM need not polish them.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

# Test files share many programs, and so do the processes that run them.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(os.path.dirname(__file__), ".programs"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

GOLDEN = Path(__file__).parent / "data" / "golden"


@pytest.fixture(autouse=True, scope="module")
def few_programs_alive() -> Iterator[None]:
    """Frees a file's compiled programs when it is done: each holds memory maps, which Linux counts and limits."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit JAX for the length of one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def golden() -> Path:
    """Arrays of the reference PyTorch implementation: a tiny Qwen3 target, a DSpark drafter and what they compute."""
    return GOLDEN


@pytest.fixture(scope="session")
def golden_target(golden: Path) -> Path:
    """Directory of the trained target: 6 layers, width 96, 320 byte-level tokens."""
    return golden / "target"


CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama directory with random weights, a byte-level tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("chat_model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>", "<|mask|>", "<|pad|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    end = tokenizer.token_to_id("<|end|>")
    sizes = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = {"model_type": "llama", "tie_word_embeddings": True, "eos_token_id": end, "max_position_embeddings": 512}
    (path / "config.json").write_text(json.dumps(sizes | heads | config))
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (264, 32), "model.norm.weight": (32,)}
    for i in range(3):
        layer = f"model.layers.{i}."
        shapes |= {layer + f"{name}.weight": (32,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {
            layer + f"self_attn.{n}_proj.weight": (rows, 32) for n, rows in zip("qkvo", (32, 16, 16, 32), strict=True)
        }
        shapes |= {layer + f"mlp.{n}_proj.weight": s for n, s in (("gate", (48, 32)), ("up", (48, 32)))}
        shapes[layer + "mlp.down_proj.weight"] = (32, 48)
    draw = lambda shape: rng.standard_normal(shape) * 0.3 if len(shape) > 1 else np.ones(shape)  # noqa: E731
    save_file({name: draw(shape).astype(np.float32) for name, shape in shapes.items()}, path / "model.safetensors")
    return path
