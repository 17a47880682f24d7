"""A tiny target, drafters for it, and how every producer writes one: config.json and tensors of a canonical drafter."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from dspark_jax.interop.drafter_io import abstract_drafter
from dspark_jax.interop.drafter_tensors import drafter_tensors
from dspark_jax.interop.target_io import Target
from dspark_jax.models.config import Attention, DecoderConfig, DrafterConfig, Eagle3Config, Rope

Raw = dict[str, Any]
Tensors = dict[str, np.ndarray]
Writer = Callable[..., tuple[Raw, Tensors]]

VOCAB, HIDDEN, LAYERS, MASK, HEAD_DIM = 40, 32, 9, 39, 8
SPOKEN = np.array([0, 1, 3, 4, 5, 9, 12, 13, 20, 21, 30, 37])  # a reduced vocabulary

# ------------------------------------------------------------------------------------------------- canonical drafters

ROPE = Rope(10000.0, original_max_position_embeddings=512)
FULL = Attention(num_kv_heads=2, head_dim=HEAD_DIM, rope=ROPE, causal=False)
QWEN = DecoderConfig(
    family="qwen3",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_heads=4,
    attention=(FULL,),
    layer_kinds=(0, 0),
    max_length=512,
    qk_norm=True,
    tied=False,
)
GEMMA = dataclasses.replace(
    QWEN,
    family="gemma4",
    attention=(
        Attention(
            num_kv_heads=1,
            head_dim=16,
            rope=Rope(1e6, "proportional", original_max_position_embeddings=512, partial_rotary_factor=0.25),
            causal=False,
            keys_as_values=True,
            scale=1.0,
        ),
    ),
    activation="gelu_tanh",
    value_norm=True,
    sandwich=True,
    layer_scalar=True,
    embedding_scale=HIDDEN**0.5,
    softcap=30.0,
)


def attention_of(decoder: DecoderConfig, **changes) -> DecoderConfig:
    """The decoder with other settings in its one kind of attention."""
    return dataclasses.replace(decoder, attention=(dataclasses.replace(decoder.attention[0], **changes),))


def windowed(**changes) -> DecoderConfig:
    """Two layers, the first one sliding."""
    sliding = dataclasses.replace(FULL, window=6, **changes)
    return dataclasses.replace(QWEN, attention=(FULL, sliding), layer_kinds=(1, 0))


def block(decoder: DecoderConfig = QWEN, **changes) -> DrafterConfig:
    """A DSpark with a vanilla head."""
    fields = {
        "block_size": 4, "mask_token_id": MASK, "tap_layers": (0, 3, 7), "num_target_layers": LAYERS,
        "draft_vocab_size": VOCAB, "markov_rank": 4,
    }  # fmt: skip
    return DrafterConfig(decoder=decoder, **(fields | changes))


def headless(decoder: DecoderConfig = QWEN, **changes) -> DrafterConfig:
    """A DFlash: no in-block head, no confidence head."""
    return block(decoder, **({"markov_rank": 0, "confidence": False, "confidence_with_markov": False} | changes))


def domino(**changes) -> DrafterConfig:
    return headless(**({"markov_rank": 4, "head_type": "domino", "gru_width": 8, "pure_prefix": 1} | changes))


def selector(decoder: DecoderConfig = QWEN, **changes) -> DrafterConfig:
    sizes = {"markov_rank": 4, "head_type": "selector", "selector_top_k": 8, "conv_taps": 2, "conv_group": 16}
    return headless(decoder, **({"logits_start": 1} | sizes | changes))


def eagle3(decoder: DecoderConfig = QWEN, **changes) -> Eagle3Config:
    decoder = dataclasses.replace(attention_of(decoder, causal=True), layer_kinds=(0,))
    fields = {"num_drafts": 7, "tap_layers": (1, 3, 5), "num_target_layers": LAYERS, "draft_vocab_size": VOCAB}
    return Eagle3Config(decoder=decoder, **(fields | changes))


LLAMA = dataclasses.replace(QWEN, qk_norm=False)

# ------------------------------------------------------------------------------------------------------------- writers


def layer_keys(d: DecoderConfig, **changes) -> Raw:
    """The Hugging Face config of a drafter's layers."""
    kinds = [d.attention[kind] for kind in d.layer_kinds]
    window = max(kind.window for kind in kinds)
    raw = {
        "model_type": "qwen3" if d.qk_norm else "llama", "hidden_act": "silu", "vocab_size": d.vocab_size,
        "hidden_size": d.hidden_size, "intermediate_size": d.intermediate_size, "num_hidden_layers": d.num_layers,
        "num_attention_heads": d.num_heads, "num_key_value_heads": d.attention[0].num_kv_heads,
        "head_dim": d.attention[0].head_dim, "rms_norm_eps": d.rms_eps, "max_position_embeddings": d.max_length,
        "layer_types": ["sliding_attention" if kind.window else "full_attention" for kind in kinds],
        "sliding_window": window or None, "use_sliding_window": bool(window),
        "rope_parameters": {"rope_theta": d.attention[0].rope.theta, "rope_type": "default"},
    }  # fmt: skip
    return raw | (_gemma_keys(d) if d.family == "gemma4" else {}) | changes


def _gemma_keys(d: DecoderConfig) -> Raw:
    """A Gemma4 text config, with the stray rope keys that released drafters carry."""
    full = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    sliding = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh", "attention_k_eq_v": True,
        "head_dim": 8, "num_key_value_heads": 2, "global_head_dim": 16, "num_global_key_value_heads": 1,
        "final_logit_softcapping": 30.0, "sliding_window": 16, "tie_word_embeddings": False,
        "rope_parameters": {
            "full_attention": full, "sliding_attention": sliding, "rope_theta": None, "rope_type": "default",
        },
    }  # fmt: skip


def deepspec(c: DrafterConfig, tensors: Tensors, **changes) -> tuple[Raw, Tensors]:
    raw = layer_keys(c.decoder) | {
        "architectures": ["Gemma4DSparkModel" if c.decoder.family == "gemma4" else "Qwen3DSparkModel"],
        "block_size": c.block_size, "mask_token_id": c.mask_token_id, "target_layer_ids": list(c.tap_layers),
        "num_target_layers": c.num_target_layers, "num_anchors": c.num_anchors, "markov_rank": c.markov_rank,
        "enable_confidence_head": c.confidence, "tie_word_embeddings": False,
    }  # fmt: skip
    raw |= {"markov_head_type": c.head_type} if c.markov_rank else {}
    raw |= {"confidence_head_with_markov": c.confidence_with_markov} if c.confidence else {}
    return raw | changes, tensors


def deepspec_eagle3(c: Eagle3Config, tensors: Tensors) -> tuple[Raw, Tensors]:
    name = "Gemma4Eagle3Model" if c.decoder.family == "gemma4" else "Qwen3Eagle3Model"
    raw = {
        "architectures": [name], "target_layer_ids": list(c.tap_layers), "num_target_layers": c.num_target_layers,
        "ttt_length": c.num_drafts, "step_loss_decay": 0.8, "draft_num_hidden_layers": 1,
    }  # fmt: skip
    return layer_keys(c.decoder) | raw, tensors


def dflash(c: DrafterConfig, tensors: Tensors, nested: Raw | None = None, **changes) -> tuple[Raw, Tensors]:
    """z-lab's layout, and with `nested` keys those made from it."""
    raw = {
        "architectures": ["DFlashDraftModel"], "block_size": c.block_size, "num_target_layers": c.num_target_layers,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "dflash_config": {"target_layer_ids": list(c.tap_layers), "mask_token_id": c.mask_token_id} | (nested or {}),
    }  # fmt: skip
    return layer_keys(c.decoder) | raw | changes, tensors


def all_nested(c: DrafterConfig, tensors: Tensors) -> tuple[Raw, Tensors]:
    """z-lab's layout from Qwen3.5 on: the block size nested, a target's leftovers among the rope's keys."""
    raw, tensors = dflash(c, tensors, {"block_size": c.block_size})
    raw["block_size"] = 99
    raw["rope_parameters"] |= {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 2], "mrope_interleaved": True}
    return raw, tensors


def flat_rope(c: DrafterConfig, tensors: Tensors) -> tuple[Raw, Tensors]:
    """z-lab's layout of 2025: rope the old way, no taps named."""
    raw, tensors = dflash(c, tensors, rope_theta=10000.0, rope_scaling=None)
    del raw["rope_parameters"], raw["dflash_config"]["target_layer_ids"], raw["layer_types"]
    return raw, tensors


def specforge_dspark(c: DrafterConfig, tensors: Tensors) -> tuple[Raw, Tensors]:
    """The older spelling of the tensors, yarn in the head's own rope, and no word on the confidence head."""
    rope = c.decoder.attention[0].rope
    nested = {"projector_type": "dspark", "markov_rank": c.markov_rank, "markov_head_type": c.head_type}
    yarn = {"rope_theta": rope.theta, "rope_type": "yarn", "factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings}  # fmt: skip
    legacy = {f"logit_head.{n}" if n.startswith(("markov_head", "confidence")) else n: a for n, a in tensors.items()}
    return dflash(c, legacy, nested, architectures=["DSparkDraftModel"], rope_parameters=yarn)


def domino_file(c: DrafterConfig, tensors: Tensors, kind: str = "domino", **nested) -> tuple[Raw, Tensors]:
    keys = {
        "projector_type": kind, "emb_dim": c.markov_rank, "gru_hidden_dim": c.gru_width,
        "pure_draft_prefix_len": c.pure_prefix, "shift_label": c.logits_start == 0,
    }  # fmt: skip
    legacy = kind == "causal_v5"
    renamed = {f"logit_head.{n}" if legacy and n.startswith(("prefix_gru", "embed_proj")) else n: a
               for n, a in tensors.items()}  # fmt: skip
    return dflash(c, renamed, keys | nested, emb_dim=999)


def specforge_domino(c: DrafterConfig, tensors: Tensors) -> tuple[Raw, Tensors]:
    raw, tensors = domino_file(c, tensors)
    return raw | {"architectures": ["DominoDraftModel"]}, tensors


def dflash2(c: DrafterConfig, tensors: Tensors, **changes) -> tuple[Raw, Tensors]:
    return dflash(c, tensors, selector_keys(c), architectures=["DFlash2DraftModel"], **changes)


def selector_keys(c: DrafterConfig) -> Raw:
    return {"selector_rank": c.markov_rank, "selector_top_k": c.selector_top_k, "conv_kernel_size": c.conv_taps,
            "conv_group_size": c.conv_group}  # fmt: skip


def lfm2(c: DrafterConfig, tensors: Tensors) -> tuple[Raw, Tensors]:
    """No word on what the confidence head reads; rotary pairs are neighbours."""
    keys = {"markov_rank": c.markov_rank, "markov_head_type": c.head_type, "enable_confidence_head": True}
    raw, tensors = dflash(
        c, {name: interleave(name, array) for name, array in tensors.items()}, {"num_target_layers": 9}
    )
    del raw["num_target_layers"], raw["auto_map"]
    return raw | keys | {"architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False}, tensors


def interleave(name: str, array: np.ndarray) -> np.ndarray:
    """From split halves to neighbouring pairs: the inverse of what a loader does."""
    if not name.endswith(("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")):
        return array
    halves = array.reshape(-1, 2, HEAD_DIM // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def angelspec(c: DrafterConfig, tensors: Tensors) -> tuple[Raw, Tensors]:
    names = {"fc.weight": "context_proj.weight", "hidden_norm.weight": "context_norm.weight",
             "norm.weight": "final_norm.weight"}  # fmt: skip
    raw = layer_keys(c.decoder) | {
        "architectures": ["DSparkDraftModel" if c.markov_rank else "DFlashDraftModel"],
        "model_type": "dspark" if c.markov_rank else "dflash", "block_size": c.block_size,
        "mask_token_id": c.mask_token_id, "target_layer_ids": list(c.tap_layers),
        "num_target_layers": len(c.tap_layers), "target_num_hidden_layers": c.num_target_layers,
    }  # fmt: skip
    return raw, {names.get(name, name): array for name, array in tensors.items()}


def speculators(c: DrafterConfig | Eagle3Config, tensors: Tensors, kind: str, count: int, **changes):
    """The envelope; `count`: its `speculative_tokens`."""
    method = {"proposal_type": "greedy", "speculative_tokens": count, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    other = method | {"proposal_type": "sampled", "speculative_tokens": 1}
    raw = {
        "speculators_model_type": kind, "speculators_version": "0.9.0", "architectures": ["DSparkDraftModel"],
        "auto_map": {"": "config.Speculator"}, "draft_vocab_size": c.draft_vocab_size, "target_hidden_size": None,
        "transformer_layer_config": layer_keys(c.decoder), "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": [other, method],
        },
    }  # fmt: skip
    return raw | changes, tensors


def speculators_block(c: DrafterConfig, tensors: Tensors, kind: str, **changes) -> tuple[Raw, Tensors]:
    keys = {
        "block_size": c.block_size, "mask_token_id": c.mask_token_id,
        "aux_hidden_state_layer_ids": [i + 1 for i in c.tap_layers],
    }  # fmt: skip
    return speculators(c, tensors, kind, c.num_drafts, **(keys | changes))


def speculators_dspark(c: DrafterConfig, tensors: Tensors, **changes) -> tuple[Raw, Tensors]:
    keys = {
        "markov_rank": c.markov_rank, "markov_head_type": c.head_type, "enable_confidence_head": c.confidence,
        "confidence_head_with_markov": c.confidence_with_markov, "sample_from_anchor": c.logits_start == 0,
    }  # fmt: skip
    return speculators_block(c, tensors, "dspark", **(keys | changes))


def speculators_dflash(c: DrafterConfig, tensors: Tensors, **changes) -> tuple[Raw, Tensors]:
    return speculators_block(c, tensors, "dflash", sample_from_anchor=False, **changes)


def speculators_dflash2(c: DrafterConfig, tensors: Tensors, **changes) -> tuple[Raw, Tensors]:
    return speculators_block(c, tensors, "dflash2", **selector_keys(c), **changes)


def speculators_eagle3(c: Eagle3Config, tensors: Tensors, **changes) -> tuple[Raw, Tensors]:
    """All layers take the sliding layers' rope."""
    keys = {
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in c.tap_layers], "norm_output": c.feed_normed,
        "norm_before_residual": c.norm_before_residual, "fc_norm": c.fc_norm, "norm_before_fc": c.norm_before_fc,
    }  # fmt: skip
    raw, tensors = speculators(c, tensors, "eagle3", c.num_drafts, **(keys | changes))
    rope = raw["transformer_layer_config"]["rope_parameters"]
    raw["transformer_layer_config"]["rope_parameters"] = {
        "full_attention": rope | {"rope_theta": 5.0}, "sliding_attention": rope,
    }  # fmt: skip
    return raw, tensors


def midlayer(c: Eagle3Config, tensors: Tensors, **changes) -> tuple[Raw, Tensors]:
    """EAGLE-3's own layout: the layer under another name, no word on taps."""
    raw = layer_keys(c.decoder) | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": c.draft_vocab_size}
    return raw | changes, {name.replace("layers.0.", "midlayer."): array for name, array in tensors.items()}


def specforge_eagle3(c: Eagle3Config, tensors: Tensors) -> tuple[Raw, Tensors]:
    """Its `norm_output` is what every Eagle3 does: norm, then head."""
    ids = {"eagle_aux_hidden_state_layer_ids": list(c.tap_layers), "use_aux_hidden_state": True}
    return midlayer(c, tensors, eagle_config=ids, norm_output=True)


def vllm_eagle3(c: Eagle3Config, tensors: Tensors) -> tuple[Raw, Tensors]:
    raw, _ = midlayer(c, tensors, eagle_aux_hidden_state_layer_ids=[i + 1 for i in c.tap_layers])
    return raw | {"architectures": ["Eagle3Qwen3ForCausalLM"]}, tensors


# ----------------------------------------------------------------------------------------------- files and their target


def make_target(embedding_scale: float = 1.0) -> Target:
    """Sizes, an embedding and a head; the layers are never run."""
    kind = Attention(num_kv_heads=2, head_dim=HEAD_DIM, rope=ROPE)
    config = dataclasses.replace(
        QWEN, attention=(kind,), layer_kinds=(0,) * LAYERS, embedding_scale=embedding_scale, eos_token_ids=(2,)
    )
    rng = np.random.default_rng(9)
    embedding, head = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((VOCAB, HIDDEN), (HIDDEN, VOCAB))
    )
    return Target(config, {"embedding": embedding, "lm_head": {"kernel": head}}, None, "tiny target")


@functools.cache
def random_params(config: DrafterConfig | Eagle3Config) -> Any:
    rng = np.random.default_rng(3)
    draw = lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, abstract_drafter(config))


def random_tables(width: int = HIDDEN, spoken: int = VOCAB) -> Tensors:
    rng = np.random.default_rng(4)
    shapes = {"embed_tokens.weight": (VOCAB, width), "lm_head.weight": (spoken, width)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def vocabulary_map(ids: np.ndarray = SPOKEN) -> Tensors:
    return {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(VOCAB), ids)}


def write(path: Path, raw: Raw, tensors: Tensors) -> Path:
    """A checkpoint directory."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    save_file({name: np.ascontiguousarray(a) for name, a in tensors.items()}, path / "model.safetensors")
    return path


def files_of(config: DrafterConfig | Eagle3Config, writer: Writer = deepspec, **options) -> tuple[Raw, Tensors]:
    """config.json and tensors of a random drafter."""
    return writer(config, drafter_tensors(config, random_params(config)), **options)
