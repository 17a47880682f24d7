"""Loading a frozen target from a .gguf file, a Hugging Face directory or a hub id."""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dspark_jax.errors import UserError
from dspark_jax.interop.checkpoint_files import SafetensorsDirectory, locate, read_json
from dspark_jax.interop.families import (
    decoder_config,
    layer_names,
    layers_from_tensors,
    refuse_unexpected,
    take_tensor,
    text_config,
)
from dspark_jax.interop.gguf import read_gguf
from dspark_jax.interop.tokenizer import Tokenizer
from dspark_jax.models.attention import attend_rows
from dspark_jax.models.config import DecoderConfig
from dspark_jax.models.few_rows import for_few_rows, gains_by_row
from dspark_jax.models.layers import Params
from dspark_jax.models.target import Decoder
from dspark_jax.parallel import Place, everywhere, mesh_of, place_tree, placement
from pallas_kernels.ragged_attention import ragged_rows


@flax.struct.dataclass
class TargetOutput:
    """Logits `[B, T, V]`, taps `[B, T, M·H]` and the hidden state after the final norm `[B, T, H]`."""

    logits: jax.Array
    taps: jax.Array
    last_hidden: jax.Array


@dataclasses.dataclass(frozen=True)
class Target:
    """A frozen model: `target(tokens [B, T])` runs it without a cache; `Engine` runs it with one.

    Rows may be padded on the right: attention is causal, so real positions never see the padding.
    """

    config: DecoderConfig
    params: Params
    tokenizer: Tokenizer | None
    name: str
    tap_layers: tuple[int, ...] = ()

    @property
    def module(self) -> Decoder:
        return Decoder(self.config, self.tap_layers)

    @property
    def mesh(self) -> Mesh | None:
        """The devices that share the weights; None: one device holds them."""
        return mesh_of(self.params["embedding"])

    @property
    def dtype(self) -> jnp.dtype:
        return self.params["embedding"].dtype

    def with_taps(self, tap_layers: tuple[int, ...]) -> "Target":
        """The same weights, tapped elsewhere. Raises UserError on ids outside -1 .. L - 1."""
        _check_taps(tap_layers, self.config.num_layers)
        return dataclasses.replace(self, tap_layers=tuple(tap_layers))

    def on_mesh(self, mesh: Mesh | None) -> "Target":
        """The same model with its weights shared out over a mesh."""
        return dataclasses.replace(self, params=place_tree(self.params, placement(self.config.heads, mesh)))

    def __call__(self, tokens: jax.Array) -> TargetOutput:
        return dense_forward(self.module, self.params, jnp.asarray(tokens))

    @functools.cached_property
    def by_row(self) -> Params | None:
        """A copy of the weights for rounds of few rows on a CPU; None where they gain nothing by it."""
        return for_few_rows(self.params) if gains_by_row(self.params) else None

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hex digits of the sizes and of some weights in bfloat16: the same for every dtype it is loaded in."""
        c = self.config
        sizes = (c.family, c.vocab_size, c.hidden_size, c.intermediate_size, c.num_layers, c.num_heads)
        digest = hashlib.sha256(repr(sizes).encode())
        for array in everywhere((self.params["norm"]["scale"], self.params["embedding"][:64]), self.mesh):
            digest.update(np.asarray(array.astype(jnp.bfloat16)).tobytes())
        return digest.hexdigest()[:16]


@functools.partial(jax.jit, static_argnums=0)
def dense_forward(module: Decoder, params: Params, tokens_BxT: jax.Array) -> TargetOutput:
    """The target over whole sequences, no cache: for training features and for tests."""
    batch, length = tokens_BxT.shape
    output = hidden_states(module, params, tokens_BxT)
    logits = module.apply({"params": params}, output.hidden_NxH, method=Decoder.logits)
    shape = (batch, length, -1)
    return TargetOutput(logits.reshape(shape), output.taps_NxMH.reshape(shape), output.hidden_NxH.reshape(shape))


def hidden_states(module: Decoder, params: Params, tokens_BxT: jax.Array):
    """`DecoderOutput` of B·T flat rows, each sequence causal over itself."""
    batch, length = tokens_BxT.shape
    zeros = jnp.zeros(batch, jnp.int32)
    rows = ragged_rows(zeros + length, zeros, batch * length, length)
    attend = attend_rows(module.config, rows)
    return module.apply({"params": params}, tokens_BxT.reshape(-1), rows.position_N, attend)


@functools.partial(jax.jit, static_argnums=0)
def log_totals(module: Decoder, params: Params, hidden_BxSxH: jax.Array) -> jax.Array:
    """`[B, S]` log sum exp of the logits of hidden states after the final norm, in at least float32."""

    def one(hidden_SxH: jax.Array) -> jax.Array:
        logits = module.apply({"params": params}, hidden_SxH, method=Decoder.logits)
        return jax.nn.logsumexp(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), axis=-1)

    # One sequence at a time: the full-vocabulary logits of a batch would be the largest array of a training step.
    return jax.lax.map(one, hidden_BxSxH)


def load_target(
    source: str | Path,
    *,
    dtype: jnp.dtype | str | None = None,
    mesh: Mesh | None = None,
    copies: bool = False,
    tap_layers: tuple[int, ...] = (),
) -> Target:
    """Loads a model. `source`: a hub id, a directory with config.json, or a .gguf file.

    `dtype` None: float32 on CPU, bfloat16 elsewhere. `mesh`: devices that share the weights (`parallel.make_mesh`);
    each gets its part alone, so the model need not fit one of them; `copies`: every row of the mesh's `data` axis has
    the whole model, for training. Raises UserError on what cannot be read or used.
    """
    path = locate(source)
    dtype = float_dtype(dtype or (jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16))
    if path.is_dir():
        raw = read_json(path / "config.json")
        tokenizer, tensors, eos = Tokenizer.from_directory(path), SafetensorsDirectory(path), _eos_ids(path, raw)
    elif path.suffix == ".gguf":
        model = read_gguf(path)
        raw, tokenizer, tensors, eos = model.config, model.tokenizer, model.tensors, model.eos_token_ids
    else:
        raise UserError(f"{path} is neither a directory nor a .gguf file")
    config = decoder_config(raw, tuple(eos))
    _check_taps(tap_layers, config.num_layers)
    params = decoder_params(config, tensors, dtype, placement(config.heads, mesh, copies))
    return Target(config, params, tokenizer, str(source), tuple(tap_layers))


def decoder_params(
    config: DecoderConfig, tensors: Mapping[str, Any], dtype: jnp.dtype, place: Place = placement((), None)
) -> Params:
    """The decoder's parameters, layers stacked, from tensors under Hugging Face names.

    A multimodal file keeps the text decoder under "model.language_model."; its other parts are left alone.
    """
    nested = any(name.startswith("model.language_model.") for name in tensors)
    prefix = "model.language_model." if nested else "model."
    like = abstract_params(Decoder(config))
    known = layer_names(config, prefix) | {f"{prefix}embed_tokens.weight", f"{prefix}norm.weight"}
    refuse_unexpected(tensors, known, prefix)
    params = {
        "embedding": take_tensor(tensors, f"{prefix}embed_tokens.weight", like["embedding"].shape, dtype),
        "norm": {"scale": take_tensor(tensors, f"{prefix}norm.weight", (config.hidden_size,), dtype)},
    }
    if not config.tied:
        shape = like["lm_head"]["kernel"].shape
        params["lm_head"] = {
            "kernel": np.ascontiguousarray(take_tensor(tensors, "lm_head.weight", shape[::-1], dtype).T)
        }
    layers = layers_from_tensors(tensors, prefix, like["layers"], config, dtype, place=place)
    return {**place_tree(params, place), "layers": layers}


def float_dtype(dtype: jnp.dtype | str) -> jnp.dtype:
    """A floating dtype by name. UserError on anything else."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise UserError(f"dtype {str(dtype)!r} is not one to compute in: use float32, bfloat16, float16 or float64")
    return found


def abstract_params(module: Decoder) -> Params:
    """Shapes of the decoder's parameters, nothing allocated."""
    row = jax.ShapeDtypeStruct((1,), jnp.int32)
    attend = lambda layer, q, k, v: q  # noqa: E731
    return jax.eval_shape(lambda t: module.init(jax.random.key(0), t, t, attend), row)["params"]


def _eos_ids(directory: Path, config: Mapping[str, Any]) -> list[int]:
    """Stop tokens as generation_config.json gives them, else config.json; an int or a list, deduplicated."""
    path = directory / "generation_config.json"
    eos = read_json(path).get("eos_token_id") if path.is_file() else None
    eos = text_config(config).get("eos_token_id") if eos is None else eos
    return list(dict.fromkeys([eos] if isinstance(eos, int) else eos or []))


def _check_taps(tap_layers: tuple[int, ...], num_layers: int) -> None:
    if any(isinstance(i, bool) or not isinstance(i, int) for i in tap_layers) or len(set(tap_layers)) < len(tap_layers):
        raise UserError(f"tap layers {list(tap_layers)} must be different whole numbers")
    bad = [i for i in tap_layers if not -1 <= i < num_layers]
    if bad:
        raise UserError(
            f"tap layer {bad[0]} does not exist: the target has layers 0 to {num_layers - 1}, -1 is its embedding"
        )
