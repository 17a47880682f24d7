"""Models of a config as shapes: nothing is read but sizes, and nothing is allocated."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from dspark_jax.decoding.caches import HEADS
from dspark_jax.errors import UserError
from dspark_jax.interop.checkpoint_files import locate, read_json
from dspark_jax.interop.drafter_io import Drafter, abstract_drafter
from dspark_jax.interop.families import decoder_config
from dspark_jax.interop.gguf import read_gguf
from dspark_jax.interop.target_io import Target, abstract_params, float_dtype
from dspark_jax.models.config import Attention, DecoderConfig, Rope
from dspark_jax.models.drafter import Borrowed
from dspark_jax.models.lookup import Lookup
from dspark_jax.models.target import Decoder
from dspark_jax.parallel import ALL, place_tree, split, weight_spec
from dspark_jax.training.drafters import new_drafter_config

AnyMesh = Mesh | AbstractMesh


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> DecoderConfig:
    attention = (Attention(num_kv_heads=8, head_dim=128, rope=Rope(1e6)),)
    return DecoderConfig(
        "qwen3", 151_936, hidden, intermediate, heads, attention, (0,) * layers, max_length=40_960, qk_norm=True,
        tied=tied,
    )  # fmt: skip


def _gemma4_12b() -> DecoderConfig:
    rope = Rope(1e6, kind="proportional", partial_rotary_factor=0.25)
    full = Attention(num_kv_heads=1, head_dim=512, rope=rope, keys_as_values=True, scale=1.0)
    sliding = Attention(num_kv_heads=8, head_dim=256, rope=Rope(1e4), window=1024, scale=1.0)
    return DecoderConfig(
        "gemma4", 262_144, 3840, 15_360, 16, (full, sliding), (1, 1, 1, 1, 1, 0) * 8, max_length=131_072,
        activation="gelu_tanh", qk_norm=True, value_norm=True, sandwich=True, layer_scalar=True,
        embedding_scale=3840**0.5, softcap=30.0,
    )  # fmt: skip


# Sizes of the targets that configs/ name, so that planning them needs no hub.
KNOWN = {
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12_288, 36, 32, tied=False),
    "Qwen/Qwen3-14B": _qwen3(5120, 17_408, 40, 40, tied=False),
    "google/gemma-4-12B-it": _gemma4_12b(),
}


def abstract_models(config: ConfigDict) -> tuple[Target, Drafter]:
    """The target, and the drafter that the config's `drafter` section makes, with shapes for parameters.

    Dtypes are those of an accelerator: bfloat16 where `target.dtype` says nothing. Raises UserError as loading does.
    """
    decoder = _decoder(config.target.path)
    dtype = float_dtype(config.target.dtype or jnp.bfloat16)
    target = Target(decoder, _of_dtype(abstract_params(Decoder(decoder)), dtype), None, config.target.path)
    if config.drafter.mask_token_id < 0:  # its name needs a tokenizer; which token it is changes no size
        config = config.copy_and_resolve_references()
        config.drafter.mask_token_id = decoder.vocab_size - 1
    made = new_drafter_config(config, target)
    width = target.config.hidden_size
    tables = Borrowed(
        target.params["embedding"], jax.ShapeDtypeStruct((made.draft_vocab_size, width), dtype),
        jax.ShapeDtypeStruct((made.draft_vocab_size,), jnp.int32),
    )  # fmt: skip
    return target, Drafter(made, abstract_drafter(made), tables)


def served_drafter(config: ConfigDict, target: Target, drafter: Drafter) -> Drafter | None:
    """What the config's `serve` section drafts with: nothing, a lookup, or the config's own drafter."""
    if not config.serve.drafter:
        return None
    if config.serve.drafter == "lookup":
        return Drafter(Lookup(), name="lookup")
    return Drafter(drafter.config, _of_dtype(drafter.params, target.dtype), drafter.borrowed)


def _decoder(source: str) -> DecoderConfig:
    if source in KNOWN and not Path(source).exists():
        return KNOWN[source]
    if "/" in source and not source.startswith(("wheel:", ".", "/", "~")) and not Path(source).exists():
        return decoder_config(read_json(_hub_config(source)))
    path = locate(source)
    return decoder_config(read_json(path / "config.json") if path.is_dir() else read_gguf(path).config)


def _hub_config(name: str) -> Path:
    """The config.json of a hub id, without its weights."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.hf_hub_download(name, "config.json"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0][:160]
        raise UserError(f"{name!r} is no local path, and the hub did not give its config.json ({reason})") from None


def _of_dtype(params: Any, dtype: jnp.dtype) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype), params)


# --------------------------------------------------------------------------------------------- where the arrays lie


def placed(array: Any, mesh: AnyMesh, spec: PartitionSpec = PartitionSpec()) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))


def replicated(tree: Any, mesh: AnyMesh) -> Any:
    return jax.tree.map(lambda a: placed(a, mesh), tree)


def place_params(params: Any, config: DecoderConfig, mesh: AnyMesh) -> Any:
    """A target's or a drafter's parameters, or an optimizer's state of them, as `parallel` shares weights out."""
    return place_tree(params, lambda path, a: placed(a, mesh, weight_spec(tuple(path), a.shape, config.heads, mesh)))


def place_tables(tables: Borrowed, mesh: AnyMesh, reduced: bool) -> Borrowed:
    """As `Drafter.on_mesh`."""
    words = lambda a: placed(a, mesh, split(mesh, a.shape, (ALL, None)))  # noqa: E731
    head = placed(tables.head_VdxH, mesh) if reduced else words(tables.head_VdxH)
    return Borrowed(words(tables.embedding_VxH), head, placed(tables.token_ids_Vd, mesh))


def place_pools(pools: Any, mesh: AnyMesh) -> Any:
    return jax.tree.map(lambda a: placed(a, mesh, split(mesh, a.shape, HEADS)), pools)


def bytes_of(*trees: Any) -> int:
    """Bytes of placed arrays on one device."""
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(trees))
