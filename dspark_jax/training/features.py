"""The frozen target's features of training sequences: computed on the fly, kept in memory, or read from a cache."""

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dspark_jax.data.batches import PAD_TO, Batch, Document
from dspark_jax.data.packing import ALIGN, MicroBatch
from dspark_jax.data.reference_cache import ReferenceCache
from dspark_jax.data.target_cache import TargetCache
from dspark_jax.errors import UserError
from dspark_jax.interop.target_io import Target, log_totals
from dspark_jax.models.attention import attend_documents
from dspark_jax.models.layers import Params
from dspark_jax.models.target import Decoder
from dspark_jax.parallel import in_parts, place_tree, row_spec
from dspark_jax.training.sharding import EVERY, own_places, put_together

HEAD_ROWS = 256  # rows whose full-vocabulary logits are there at a time
MAX_STATE_ERROR = 0.2  # relative: bfloat16 through a deep model stays far below it, another model far above


@flax.struct.dataclass
class Features:
    """What a drafter learns from: taps, the hidden state after the final norm, and log sum exp of the logits.

    The last two give every token's log-probability without storing logits of the whole vocabulary.
    """

    taps_BxSxMH: jax.Array
    last_hidden_BxSxH: jax.Array
    log_total_BxS: jax.Array  # at least float32

    def astype(self, dtype: jnp.dtype) -> "Features":
        """Taps and hidden states in another dtype."""
        return self.replace(
            taps_BxSxMH=self.taps_BxSxMH.astype(dtype), last_hidden_BxSxH=self.last_hidden_BxSxH.astype(dtype)
        )


@functools.partial(jax.jit, static_argnums=0)
def target_features(
    module: Decoder, params: Params, token_BxS: jax.Array, position_BxS: jax.Array | None = None
) -> Features:
    """Runs the frozen target over sequences, or over packs: `position_BxS` are then the tokens' places in documents.

    On a mesh each device runs its own packs and gathers the target's weights layer by layer, which sends less than
    rows do where there are thousands. Too few packs are run by all devices together.
    """
    if position_BxS is None:
        position_BxS = jnp.broadcast_to(jnp.arange(token_BxS.shape[1]), token_BxS.shape)
    run, mesh = functools.partial(_features, module), jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return run(params, token_BxS, position_BxS)
    if len(token_BxS) % mesh.size:
        out = run(params, token_BxS, position_BxS)
        return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, P()), out)
    specs = place_tree(params, lambda path, a: row_spec(path, a.shape, module.config.heads, mesh))
    local = lambda params, *packs: run(in_parts(params, specs), *packs)  # noqa: E731
    own = P(EVERY)
    split = jax.shard_map(local, in_specs=(specs, own, own), out_specs=own, check_vma=False)
    return split(params, token_BxS, position_BxS)


def _features(module: Decoder, params: Params, token_BxS: jax.Array, position_BxS: jax.Array) -> Features:
    batch, length = token_BxS.shape
    attend = attend_documents(module.config, position_BxS, math.gcd(length, ALIGN))
    output = module.apply({"params": params}, token_BxS.reshape(-1), position_BxS.reshape(-1), attend)
    hidden = output.hidden_NxH.reshape(batch, length, -1)
    return Features(output.taps_NxMH.reshape(batch, length, -1), hidden, _log_totals(module, params, hidden))


def _log_totals(module: Decoder, params: Params, hidden_BxSxH: jax.Array) -> jax.Array:
    """`log_totals`, some rows of a long pack at a time."""
    batch, length, width = hidden_BxSxH.shape
    rows = hidden_BxSxH.reshape(-1, math.gcd(length, HEAD_ROWS), width)
    head = "embedding" if module.config.tied else "lm_head"
    params = params | {head: nn.meta.unbox(params[head])}  # whole once, not for every few rows
    return log_totals(module, params, rows).reshape(batch, length)


class FeatureSource:
    """`source(batch)` gives the features of a batch of sequences or of packs.

    `keep`: each sequence is run once, alone (so that its numbers depend on nothing else), and kept in bfloat16 in host
    memory: 2·(M+1)·H bytes a token. Worth it when there are several epochs and the features fit.
    """

    def __init__(self, target: Target, keep: bool):
        self.target, self.keep = target, keep
        self._kept: dict[int, Features] = {}

    def __call__(self, batch: Batch | MicroBatch) -> Features:
        mesh = self.target.mesh
        if not self.keep:
            position = batch.pack.position_DxT if isinstance(batch, MicroBatch) else None
            given = on_devices((batch.token_BxS, position), mesh)
            return target_features(self.target.module, self.target.params, *given)
        # Processes run every row together, and each keeps them all: none waits for one that has a row already.
        rows = [self._row(d.row, batch.token_BxS[d.pack, d.start : d.start + d.length]) for d in batch.documents]
        return jax.tree.map(lambda *parts: _laid_out(batch, batch.documents, parts, mesh), *rows)

    def _row(self, number: int, token_S: np.ndarray) -> Features:
        if number not in self._kept:
            padded = _fit(token_S, -(-len(token_S) // PAD_TO) * PAD_TO)
            out = target_features(self.target.module, self.target.params, padded[None]).astype(jnp.bfloat16)
            self._kept[number] = jax.tree.map(lambda a: np.asarray(a[0, : len(token_S)]), out)
        return self._kept[number]


class CachedFeatures:
    """`source(batch)` reads a batch's features from a cache, whose own rows the batches are made of."""

    def __init__(self, target: Target, cache: TargetCache | ReferenceCache):
        self.target, self.cache = target, cache

    def __call__(self, batch: Batch | MicroBatch) -> Features:
        own = own_places(len(batch.token_BxS), self.target.mesh)
        # A process without documents reads one all the same: for its shapes.
        documents = [d for d in batch.documents if d.pack in own] or batch.documents[:1]
        rows = self.cache.read(*zip(*((d.row, d.length) for d in documents), strict=True))
        dtype, put = self.target.dtype, functools.partial(_laid_out, batch, documents, mesh=self.target.mesh)
        taps = put([row.taps_NxMH.astype(dtype) for row in rows])
        hidden = put([row.last_hidden_NxH.astype(dtype) for row in rows])
        if rows[0].log_total_N is None:
            return Features(taps, hidden, _log_totals(self.target.module, self.target.params, hidden))
        return Features(taps, hidden, put([row.log_total_N for row in rows]))


def on_devices(tree: Any, mesh: Mesh | None) -> Any:
    """Arrays of a batch, all of whose sequences or packs every process knows, divided over the devices."""
    if mesh is None:
        return tree
    own = lambda a: put_together(a[own_places(len(a), mesh)], len(a), mesh)  # noqa: E731
    return jax.tree.map(own, tree)


def _laid_out(
    batch: Batch | MicroBatch, documents: Sequence[Document], parts: Sequence[np.ndarray], mesh: Mesh | None
) -> np.ndarray | jax.Array:
    """Arrays of documents, each in its place of the batch; zeros elsewhere. Each process lays out its own packs."""
    count, length = batch.token_BxS.shape
    place = {pack: i for i, pack in enumerate(own_places(count, mesh))}
    out = np.zeros((len(place), length, *parts[0].shape[1:]), parts[0].dtype)
    for document, part in zip(documents, parts, strict=True):
        if document.pack in place:
            out[place[document.pack], document.start : document.start + len(part)] = part  # a cache may lack the last
    return put_together(out, count, mesh)


def open_cache(place: str, target: Target, tap_layers: Sequence[int]) -> TargetCache | ReferenceCache:
    """A cache of ours, or one of the reference's, for a target and its taps. Raises UserError on any other.

    The reference's has no fingerprint: some of its states are compared with the target's own.
    """
    if not place:
        raise UserError("data.features=cache reads data.cache: set it to what prepare-features wrote")
    if "://" in place or not (Path(place) / "manifest.json").is_file():
        return TargetCache(place, target, tap_layers)
    cache = ReferenceCache(place, target, tap_layers)
    _check_states(place, cache, target.with_taps(tuple(tap_layers)))
    return cache


def _check_states(place: str, cache: ReferenceCache, target: Target) -> None:
    row = cache.row(0)
    token_S = np.asarray((row["prompt_ids"] + row["answer_ids"])[:PAD_TO], np.int32)
    ours = target_features(target.module, target.params, _fit(token_S, PAD_TO)[None])
    (theirs,) = cache.read([0], [len(token_S)])
    for name, mine_1xSxW, other_SxW in (
        ("taps", ours.taps_BxSxMH, theirs.taps_NxMH),
        ("last hidden states", ours.last_hidden_BxSxH, theirs.last_hidden_NxH),
    ):
        mine_SxW = np.asarray(mine_1xSxW[0, : len(token_S)], np.float32)
        error = np.linalg.norm(mine_SxW - other_SxW.astype(np.float32)) / np.linalg.norm(mine_SxW)
        if not error < MAX_STATE_ERROR:
            raise UserError(
                f"{place}: the {name} of its first sample are {error:.0%} off this target's, so another model wrote "
                "them: set target.path to that, or data.cache to another"
            )


def _fit(array: np.ndarray, length: int) -> np.ndarray:
    """Cut or zero-padded to a length along the first axis."""
    array = array[:length]
    return np.pad(array, [(0, length - len(array))] + [(0, 0)] * (array.ndim - 1))
