"""Drafters written to disk: in our own format, and as the checkpoint that another program loads.

Our own files hold what was trained, under DeepSpec's names, and borrow the target's vocabulary tables. What the others
expect is in `export_configs` (config.json) and here (tensors); `export_needs` says who runs what.
"""

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from dspark_jax.errors import UserError
from dspark_jax.interop import export_configs as layouts
from dspark_jax.interop.draft_vocabulary import borrow
from dspark_jax.interop.drafter_io import Drafter
from dspark_jax.interop.drafter_tensors import drafter_tensors
from dspark_jax.interop.export_needs import kind_of, refuse_unserved
from dspark_jax.interop.target_io import Target
from dspark_jax.models.config import DrafterConfig, Eagle3Config
from dspark_jax.models.drafter import Borrowed

EXPORT_RECORD = "dspark_jax_export.json"  # says that a directory is an export of ours, and of what

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
Tensors = dict[str, np.ndarray]

_CONFIGS: dict[str, Callable[[DrafterConfig | Eagle3Config, layouts.Recipient], layouts.Json]] = {
    "ours": layouts.own_json,
    "deepspec": layouts.deepspec_json,
    "vllm": layouts.vllm_json,
    "sglang": layouts.sglang_json,
    "speculators": layouts.speculators_json,
    "specforge": layouts.specforge_json,
    "dflash": layouts.dflash_json,
}
_ZERO_HEAD_RANK = 16  # any will do


def save_drafter(path: str | Path, drafter: Drafter, target: Target) -> None:
    """Writes a drafter in our own format, bfloat16. Files of another name in the directory stay."""
    config, tensors = checkpoint("ours", drafter, target)
    if drafter.trained_on:
        config = {**config, "trained_on": dict(drafter.trained_on)}
    path = Path(path).absolute()
    with _written(path, config, tensors) as fresh:
        path.mkdir(exist_ok=True)
        for file in ("model.safetensors", "config.json"):
            os.replace(fresh / file, path / file)


def export_drafter(
    path: str | Path,
    drafter: Drafter,
    target: Target,
    consumer: str,
    *,
    dtype: str = "bfloat16",
    target_name: str | None = None,
    overwrite: bool = False,
) -> None:
    """Writes the directory that `consumer` (one of `CONSUMERS`) loads, as a whole or not at all.

    `target_name`: where others find the target, when not under `target.name`. An earlier export is replaced, another
    model's directory only with `overwrite`, anything else never. Raises UserError when the consumer does not run such a
    drafter, and when the directory cannot be written.
    """
    path = Path(path).absolute()
    check_replaceable(path, overwrite)
    config, tensors = checkpoint(consumer, drafter, target, dtype, target_name)
    record = {"consumer": consumer, "target": target_name or target.name, "target_fingerprint": target.fingerprint}
    with _written(path, config, tensors) as fresh:
        _write_json(fresh / EXPORT_RECORD, record)
        if path.exists():
            os.replace(path, fresh.with_name("old"))
        os.replace(fresh, path)


def check_replaceable(path: str | Path, overwrite: bool = False) -> None:
    """Raises UserError when an export must not go to `path`."""
    path = Path(path)
    if path.is_dir():
        names = {file.name for file in path.iterdir()}
        replaceable = not names or EXPORT_RECORD in names or (overwrite and "config.json" in names)
        advice = "" if overwrite else ", or --overwrite to replace a model"
    else:
        replaceable, advice = not path.exists(), ""
    if not replaceable:
        raise UserError(f"{path} is in use and no export of ours: choose another --out{advice}")


def checkpoint(
    consumer: str, drafter: Drafter, target: Target, dtype: str = "bfloat16", target_name: str | None = None
) -> tuple[layouts.Json, Tensors]:
    """config.json and tensors of a drafter as `consumer` reads them. UserError when it does not run such a drafter."""
    name = target_name or target.name
    if consumer != "ours" and (name.startswith("wheel:") or name.endswith(".gguf")):
        raise UserError(f"{consumer} does not find the target by the name {name!r}: give --target_name=HUB_ID")
    own = _own_tables(drafter, target, dtype)
    refuse_unserved(consumer, drafter.config, target, bool(own))
    if consumer in ("vllm", "sglang") and kind_of(drafter.config) == "DSpark" and not drafter.config.markov_rank:
        drafter = with_zero_head(drafter)
    made = _CONFIGS[consumer](drafter.config, layouts.Recipient(target, name, dtype))
    tensors = drafter_tensors(drafter.config, drafter.params) | _tables(consumer, drafter, own)
    if consumer in ("sglang", "specforge") and kind_of(drafter.config) == "Eagle3":
        tensors = {_midlayer(name): array for name, array in tensors.items()}
    return made, {name: _stored(array, dtype) for name, array in tensors.items()} | _maps(consumer, drafter)


def with_zero_head(drafter: Drafter) -> Drafter:
    """The same drafter with a Markov head that adds nothing: engines run no block whose anchor predicts without one."""
    c = drafter.config
    shapes = {"markov_w1": c.decoder.vocab_size, "markov_w2": c.draft_vocab_size}
    head = {name: jnp.zeros((rows, _ZERO_HEAD_RANK)) for name, rows in shapes.items()}
    config = dataclasses.replace(c, markov_rank=_ZERO_HEAD_RANK, head_type="vanilla")
    return dataclasses.replace(drafter, config=config, params={**drafter.params, "markov_head": head})


# ------------------------------------------------------------------------------------------------- vocabulary tables


def _own_tables(drafter: Drafter, target: Target, dtype: str) -> dict[str, jax.Array]:
    """The embedding and the head rows, where they are not the target's to the precision of `dtype`."""
    ids = np.asarray(drafter.borrowed.token_ids_Vd) if drafter.config.reduced else None
    lent, own = _table_pair(borrow(target, ids)), _table_pair(drafter.borrowed)
    return {name: own[name] for name in own if not _equal(own[name], lent[name], dtype)}


def _table_pair(borrowed: Borrowed) -> dict[str, jax.Array]:
    return {EMBEDDING: borrowed.embedding_VxH, HEAD: borrowed.head_VdxH}


def _equal(a: jax.Array, b: jax.Array, dtype: str) -> bool:
    return a is b or (a.shape == b.shape and bool(jnp.array_equal(a.astype(dtype), b.astype(dtype))))


def _tables(consumer: str, drafter: Drafter, own: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
    """The tables that belong into the file: those the consumer does not take from the target."""
    config, both = drafter.config, _table_pair(drafter.borrowed)
    if consumer == "deepspec":
        return both
    if isinstance(config, Eagle3Config) and consumer != "ours":
        return both if consumer in ("speculators", "specforge") else {HEAD: both[HEAD], **own}
    return own | ({HEAD: both[HEAD]} if config.reduced and consumer != "ours" else {})


def _maps(consumer: str, drafter: Drafter) -> Tensors:
    """`d2t` (offsets) and `t2d` (which target ids are spoken), where the consumer wants them (0.4)."""
    config, ids = drafter.config, np.asarray(drafter.borrowed.token_ids_Vd, np.int64)
    identity_too = consumer in ("sglang", "specforge") and isinstance(config, Eagle3Config)
    if not config.reduced and not identity_too:
        return {}
    spoken_V = np.zeros(config.decoder.vocab_size, np.bool_)
    spoken_V[ids] = True
    maps = {"d2t": ids - np.arange(len(ids)), "t2d": spoken_V}
    return {"d2t": maps["d2t"]} if consumer in ("ours", "vllm") else maps


def _midlayer(name: str) -> str:
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def _stored(array: Any, dtype: str) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(array).astype(jnp.dtype(dtype)))


# -------------------------------------------------------------------------------------------------------------- files


@contextmanager
def _written(path: Path, config: layouts.Json, tensors: Mapping[str, np.ndarray]):
    """A directory on the disk of `path` with config.json and weights; what is left of it is gone after the block."""
    work = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        fresh = work / "new"
        fresh.mkdir()
        safetensors.numpy.save_file(dict(tensors), fresh / "model.safetensors", metadata={"format": "pt"})
        _write_json(fresh / "config.json", config)
        yield fresh
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
