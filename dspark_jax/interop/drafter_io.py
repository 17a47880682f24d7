"""Drafters by name, and on disk: read in every layout that `drafter_formats` knows; `export` writes them.

Our own files hold what was trained and borrow the target's embedding and head; a reduced vocabulary adds `d2t`
(target id = draft id + d2t[draft id]). Others carry copies of the tables, which are used as they are.
"""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from dspark_jax.errors import UserError
from dspark_jax.interop.checkpoint_files import SafetensorsDirectory, locate, read_json
from dspark_jax.interop.draft_vocabulary import borrow, read_tables
from dspark_jax.interop.drafter_fit import check_fit
from dspark_jax.interop.drafter_formats import canonical_form
from dspark_jax.interop.drafter_tensors import (
    CanonicalTensors,
    abstract_drafter,
    drafter_module,
    init_drafter,
    params_from_tensors,
)
from dspark_jax.interop.released import released_for
from dspark_jax.interop.target_io import Target
from dspark_jax.models.config import DrafterConfig, Eagle3Config
from dspark_jax.models.drafter import Borrowed, DSpark
from dspark_jax.models.eagle3 import Eagle3
from dspark_jax.models.layers import Params
from dspark_jax.models.lookup import Lookup
from dspark_jax.parallel import place_tree, place_words, placement

BY_NAME = ("lookup", "auto")

__all__ = ["BY_NAME", "Drafter", "abstract_drafter", "borrow", "check_fit", "init_drafter", "load_drafter"]


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A drafter bound to its target: its own parameters, and the tables it borrows. A lookup has neither."""

    config: DrafterConfig | Eagle3Config | Lookup
    params: Params = dataclasses.field(default_factory=dict)
    borrowed: Borrowed | None = None
    target_fingerprint: str = ""  # of the target it was trained for; "" where its file does not say
    name: str = ""  # what it was loaded as
    # "template" (its hash) and "thinking" ("on", "off", "") of its training data; empty where its file does not say.
    trained_on: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def module(self) -> DSpark | Eagle3 | Lookup:
        return self.config if isinstance(self.config, Lookup) else drafter_module(self.config)

    def on_mesh(self, mesh: Mesh | None) -> "Drafter":
        """The same drafter with its weights shared out over its target's mesh."""
        params = place_tree(self.params, placement(self.config.decoder.heads, mesh))
        b = self.borrowed
        head = place_words(b.head_VdxH, mesh, whole=self.config.reduced)
        tables = Borrowed(place_words(b.embedding_VxH, mesh), head, place_words(b.token_ids_Vd, mesh, whole=True))
        return dataclasses.replace(self, params=params, borrowed=tables)


def load_drafter(source: str | Path, target: Target, *, block_size: int | None = None) -> Drafter:
    """Loads a drafter of any layout in `drafter_formats` (directory or hub id) for `target`.

    "lookup" copies from the request's own text, with no weights, for any target; "auto" is the released drafter of a
    known target, else lookup, and prints which. `block_size`: asks for this one, which a lookup then drafts; a
    checkpoint with another is refused. Raises UserError, and loads nothing, when something is missing, strange, not
    supported or made for another target.
    """
    if source == "lookup":
        return _lookup(target, block_size)
    if source == "auto":
        return _automatic(target, block_size)
    path = locate(source)
    if not path.is_dir():
        raise UserError(f"{path} is no directory: a drafter is config.json and safetensors, GGUF drafters are not read")
    raw = read_json(path / "config.json")
    if block_size is not None:
        raw = {"block_size": block_size, **raw}
    files = SafetensorsDirectory(path)
    made = canonical_form(raw, files, target.config)
    config = made.config
    check_fit(config, target, _special_ids(raw), made.reference_taps)
    own_size = config.block_size if isinstance(config, DrafterConfig) else config.num_drafts
    if block_size not in (None, own_size):
        raise UserError(f"this drafter's block size is {own_size}, not {block_size}: it drafts as it was trained")
    tensors = CanonicalTensors(
        files,
        made.renames,
        interleaved_dim=config.decoder.attention[0].head_dim if made.interleaved else 0,
        head_rows=config.draft_vocab_size if made.padded else None,
    )
    params = params_from_tensors(config, tensors, target.dtype)
    # Of foreign heads only whole ones are the target's; ours are, reduced or not.
    borrowed = read_tables(tensors, config, target, own_head="target_fingerprint" not in raw)
    drafter = Drafter(config, params, borrowed, raw.get("target_fingerprint", ""), str(source), _chats(raw))
    return drafter.on_mesh(target.mesh) if target.mesh else drafter


def _lookup(target: Target, block_size: int | None) -> Drafter:
    config = Lookup() if block_size is None else Lookup(num_drafts=block_size)
    check_fit(config, target)
    return Drafter(config, name="lookup")


def _automatic(target: Target, block_size: int | None) -> Drafter:
    """The released drafter of a known target, else lookup. Says on stderr which, and why."""
    released = released_for(target.name)
    try:
        if released is None:
            raise UserError(f"no released drafter of {target.name} is known")
        drafter, why = load_drafter(released, target, block_size=block_size), f"released for {target.name}"
    except UserError as error:
        drafter, why = _lookup(target, block_size), str(error)
    print(f"drafter: {drafter.name} ({why})", file=sys.stderr, flush=True)
    return drafter


def _chats(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a file of ours says of the chats it was trained on."""
    chats = raw.get("trained_on")
    return chats if isinstance(chats, dict) else {}


def _special_ids(raw: Mapping[str, Any]) -> set[int]:
    """End and padding tokens that a drafter's config copies from its target's."""
    configs = (raw, raw.get("transformer_layer_config") or {})
    found = [config.get(key) for config in configs for key in ("eos_token_id", "pad_token_id")]
    return {i for value in found for i in (value if isinstance(value, list) else [value]) if i is not None}
