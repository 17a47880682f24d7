"""Reads the reference trainer's target cache, version 2 (spec 9.5): shards of samples, bfloat16, no checksums."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dspark_jax.data.target_cache import CacheRows
from dspark_jax.errors import UserError
from dspark_jax.interop.checkpoint_files import read_json
from dspark_jax.interop.target_io import Target

VERSION = 2
_DTYPES = {"hidden_dtype": "bfloat16", "token_dtype": "int32", "mask_dtype": "uint8"}
# A line of samples.idx. Offsets are those of input ids, attention mask, loss mask, taps and last hidden states.
_RECORD = np.dtype([("sample", "<u8"), ("shard", "<u4"), ("length", "<u4"), ("offset", "<u8", 5)])


class ReferenceCache:
    """A cache to train from, with the interface of `TargetCache`: its samples are the rows.

    Raises UserError on another version or layout, on a missing or truncated file, and where it is not of `target` with
    `tap_layers`, as far as its manifest can tell: it has no fingerprint of the target.
    """

    lacks_last_rows = False

    def __init__(self, place: str, target: Target, tap_layers: Sequence[int]):
        self._folder = Path(place)
        manifest = read_json(self._folder / "manifest.json")
        self._hidden, self._taps = target.config.hidden_size, len(tap_layers)
        self._check_manifest(manifest, list(tap_layers))
        names = {shard["shard_id"]: shard["file_name"] for shard in manifest["shards"]}
        self._index = self._read_index(manifest["num_samples"], len(names))
        self._shards = [self._map(number, self._folder / names[number]) for number in range(len(names))]

    def _check_manifest(self, manifest: dict[str, Any], tap_layers: list[int]) -> None:
        path = self._folder / "manifest.json"
        if manifest.get("version") != VERSION:
            raise UserError(
                f"{path}: version {manifest.get('version')!r}, only {VERSION} is read: prepare a cache anew"
            )
        wanted = {**_DTYPES, "index_record_size": _RECORD.itemsize, "target_layer_ids": tap_layers}
        for key, value in (wanted | {"hidden_size": self._hidden}).items():
            if manifest.get(key) != value:
                raise UserError(
                    f"{path}: {key} is {manifest.get(key)}, this config and its target need {value}: give those it "
                    "was made with, or another data.cache"
                )
        shards = manifest.get("shards")
        numbers = [shard.get("shard_id") for shard in shards] if isinstance(shards, list) else None
        if numbers != list(range(len(numbers or ()))) or not isinstance(manifest.get("num_samples"), int):
            raise UserError(f"{path} does not list its shards and count its samples: copy it again")

    def _read_index(self, count: int, shards: int) -> np.ndarray:
        """The records of all samples, checked for blocks that lie one behind the other."""
        path = self._folder / "samples.idx"
        size = path.stat().st_size if path.is_file() else 0
        if size != count * _RECORD.itemsize:
            raise UserError(f"{path} has {size} bytes, {count} samples need {count * _RECORD.itemsize}: copy it again")
        if not count:
            raise UserError(f"{path} is empty: there is nothing to train on")
        index = np.fromfile(path, _RECORD)
        steps = np.diff(index["offset"].astype(np.int64), axis=1)
        length = index["length"].astype(np.int64)
        expected = np.stack([4 * length, length, length, 2 * self._taps * self._hidden * length], axis=1)
        bad = (steps != expected).any(axis=1) | (index["shard"] >= shards)
        if bad.any():
            raise UserError(f"{path}: the record of sample {bad.argmax()} does not fit the manifest: copy both again")
        return index

    def _map(self, number: int, path: Path) -> np.ndarray:
        mine = self._index[self._index["shard"] == number]
        ends = mine["offset"][:, 4] + 2 * self._hidden * mine["length"].astype(np.uint64)
        need, size = int(ends.max(initial=0)), path.stat().st_size if path.is_file() else 0
        if size < need:
            raise UserError(
                f"{path} has {size} bytes, its samples need {need}: it is truncated or missing, copy it again"
            )
        return np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)

    def _block(self, number: int, block: int, dtype: np.dtype, width: int, length: int) -> np.ndarray:
        """The first rows of one of a sample's blocks, copied: in the file they may be unaligned."""
        record = self._index[number]
        start = int(record["offset"][block])
        data = self._shards[record["shard"]][start : start + length * width * np.dtype(dtype).itemsize]
        return np.frombuffer(data.tobytes(), dtype).reshape(length, width)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The samples as training rows."""
        return [self.row(number) for number in range(len(self._index))]

    def row(self, number: int) -> dict[str, Any]:
        """One sample. Its prompt ends where the loss mask begins; the mask itself says what is learnt."""
        length = int(self._index["length"][number])
        ids = self._block(number, 0, "<i4", 1, length)[:, 0].tolist()
        mask = self._block(number, 2, "u1", 1, length)[:, 0]
        start = int(mask.argmax()) if mask.any() else length
        return {"id": str(number), "prompt_ids": ids[:start], "answer_ids": ids[start:], "loss_mask": mask}

    def read(self, numbers: Sequence[int], lengths: Sequence[int]) -> list[CacheRows]:
        """The features of the first tokens of some samples."""
        dtype, width = ml_dtypes.bfloat16, self._hidden
        return [
            CacheRows(
                self._block(number, 3, dtype, self._taps * width, length),
                self._block(number, 4, dtype, width, length),
                None,
            )
            for number, length in zip(map(int, numbers), map(int, lengths), strict=True)
        ]
