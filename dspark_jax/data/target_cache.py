"""The feature cache: a target's features of training sequences in a folder or bucket, to be read row by row.

    cache.json           what the rows are features of, and how they are stored
    part-PPPPP-NNNNN/    the N-th part of writer P:
        taps, taps_scale, last_hidden, log_total     zarr3 arrays over the concatenated rows of its sequences
        index.jsonl      a sequence a line: the training row, where its rows start, and how many there are
        done.json        written last: a part without it is nobody's, and is never read

The arrays are sharded: a file holds many chunks of 64 rows, each with its crc32c, so a sequence is read alone and a
flipped or missing byte is an error. TensorStore writes a file whole or not at all, on disks as in gs:// and s3://.
"""

import collections
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.struct
import numpy as np
import tensorstore as ts

from dspark_jax.errors import UserError
from dspark_jax.interop.target_io import Target

FORMAT = 1
DTYPES = ("bfloat16", "int8", "float32")
CHUNK_ROWS = 64  # what a reader fetches and checks at once
SHARD_BYTES = 64 << 20  # of taps in one file, about
_CONTEXT = ts.Context({"cache_pool": {"total_bytes_limit": 64 << 20}})  # shard indices are fetched once


@flax.struct.dataclass
class CacheRows:
    """Features of consecutive tokens. `log_total_N` None: not stored, to be computed from the hidden states."""

    taps_NxMH: np.ndarray
    last_hidden_NxH: np.ndarray
    log_total_N: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class CacheInfo:
    """What a cache holds. `dtype`: of taps and last hidden states; "int8" means the taps alone, see `encode`."""

    fingerprint: str  # the target's
    template: str | None  # hash of its chat template, that the prompts were written with
    tap_layers: tuple[int, ...]
    hidden_size: int
    dtype: str
    max_length: int  # longer sequences are cut to this many tokens
    format: int = FORMAT
    thinking: str | None = None  # data.thinking of the answers; None: not known

    @classmethod
    def of(cls, target: Target, tap_layers: Sequence[int], dtype: str, max_length: int) -> "CacheInfo":
        """Raises UserError on a dtype that is not stored."""
        if dtype not in DTYPES:
            raise UserError(f"data.cache_dtype={dtype!r}: features are stored as {', '.join(DTYPES)}")
        template = target.tokenizer.template_hash if target.tokenizer else None
        taps = tuple(int(layer) for layer in tap_layers)
        return cls(target.fingerprint, template, taps, target.config.hidden_size, dtype, max_length)

    @property
    def arrays(self) -> dict[str, tuple[int, np.dtype]]:
        """Width and dtype of every array of a part."""
        taps, state = len(self.tap_layers) * self.hidden_size, "bfloat16" if self.dtype == "int8" else self.dtype
        arrays = {"taps": (taps, self.dtype), "last_hidden": (self.hidden_size, state)}
        arrays |= {"taps_scale": (taps // self.group, "float32")} if self.dtype == "int8" else {}
        return {
            name: (width, np.dtype(dtype)) for name, (width, dtype) in (arrays | {"log_total": (1, "float32")}).items()
        }

    @property
    def group(self) -> int:
        """How many neighbouring values of a tap share a scale in int8."""
        return math.gcd(self.hidden_size, 64)

    @property
    def bytes_per_row(self) -> int:
        return sum(width * dtype.itemsize for width, dtype in self.arrays.values())

    @property
    def shard_rows(self) -> int:
        width, dtype = self.arrays["taps"]
        return max(SHARD_BYTES // (width * dtype.itemsize) // CHUNK_ROWS, 1) * CHUNK_ROWS


def encode(info: CacheInfo, rows: CacheRows) -> dict[str, np.ndarray]:
    """The arrays as they are stored.

    int8 has a float32 scale for each row and group of 64 values: a residual stream has a few values as large as all the
    others together, and one scale for a tap would spend its steps on them (SmolLM2-135M: the shipped drafter's gradient
    is then 4.5 % off, with groups 1.3 %). The last hidden state stays in bfloat16: the distribution that is learnt is
    read off it, and in int8 the gradient would be 11 % off.
    """
    arrays = {"last_hidden": rows.last_hidden_NxH, "log_total": rows.log_total_N[:, None], "taps": rows.taps_NxMH}
    if info.dtype == "int8":
        taps_NxGxS = rows.taps_NxMH.astype(np.float32).reshape(len(rows.taps_NxMH), -1, info.group)
        scale_NxGx1 = np.abs(taps_NxGxS).max(axis=-1, keepdims=True) / 127
        taps = np.rint(taps_NxGxS / np.where(scale_NxGx1 == 0, 1, scale_NxGx1))
        arrays |= {"taps": taps.reshape(rows.taps_NxMH.shape), "taps_scale": scale_NxGx1[..., 0]}
    return {name: array.astype(info.arrays[name][1]) for name, array in arrays.items()}


def decode(info: CacheInfo, arrays: Mapping[str, np.ndarray]) -> CacheRows:
    """Inverse of `encode`, to the rounding of the stored dtype."""
    taps = arrays["taps"]
    if info.dtype == "int8":
        taps_NxGxS = taps.reshape(len(taps), -1, info.group) * arrays["taps_scale"][..., None]
        taps = taps_NxGxS.reshape(taps.shape)
    return CacheRows(taps, arrays["last_hidden"], arrays["log_total"][:, 0])


# ------------------------------------------------------------------------------------------------------------- storage


def open_store(place: str) -> ts.KvStore:
    """A folder or bucket. `place`: a path, gs://BUCKET/PATH or s3://BUCKET/PATH. UserError on another kind.

    AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL name another server than Amazon's, as they do for Amazon's own tools.
    """
    try:
        return ts.KvStore.open(_store_spec(place), context=_CONTEXT).result()
    except (ValueError, OSError) as error:
        raise UserError(f"{place}: not a place for a cache ({error}): give a folder, gs:// or s3://") from None


def _store_spec(place: str) -> dict[str, Any]:
    if "://" not in place:
        return {"driver": "file", "path": f"{Path(place).absolute()}/"}
    spec = ts.KvStore.Spec(place.rstrip("/") + "/").to_json()
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if spec["driver"] != "s3" or not endpoint:
        return spec
    # TensorStore asks Amazon for a bucket's region, and needs to be told another server's.
    return spec | {"endpoint": endpoint, "aws_region": os.environ.get("AWS_REGION", "us-east-1")}


def open_array(store: ts.KvStore, part: str, name: str, info: CacheInfo, create: bool = False) -> ts.TensorStore:
    """One array of a part; a new one has no rows yet."""
    width, dtype = info.arrays[name]
    spec = {"driver": "zarr3", "kvstore": (store / f"{part}/{name}/").spec().to_json()}
    # Without these, zeros would not be stored, and a chunk that is lost would be read as zeros.
    spec |= {"fill_missing_data_reads": False, "store_data_equal_to_fill_value": True}
    if create:
        checked = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        inner = {"chunk_shape": [CHUNK_ROWS, width], "codecs": checked, "index_codecs": checked}
        grid = {"name": "regular", "configuration": {"chunk_shape": [info.shard_rows, width]}}
        codecs = [{"name": "sharding_indexed", "configuration": inner}]
        spec["metadata"] = {"shape": [0, width], "data_type": str(dtype), "chunk_grid": grid, "codecs": codecs}
    return ts.open(spec, context=_CONTEXT, create=create, open=not create).result()


def read_json(place: str, key: str, pending: ts.Future) -> dict[str, Any] | None:
    """An object of the cache that is being fetched, None where there is none. UserError if it cannot be read."""
    try:
        found = pending.result()
        data = json.loads(found.value) if found.state == "value" else None
    except (ValueError, OSError) as error:
        raise UserError(f"{place}/{key} cannot be read ({error})") from None
    if data is not None and not isinstance(data, dict):
        raise UserError(f"{place}/{key} is damaged: it holds no JSON object")
    return data


def read_info(store: ts.KvStore, place: str) -> tuple[CacheInfo | None, int]:
    """What cache.json says, and how many sequences there are to be; (None, 0) where there is no cache.json."""
    raw = read_json(place, "cache.json", store.read("cache.json"))
    if raw is None:
        return None, 0
    if raw.get("format") != FORMAT:
        raise UserError(f"{place}/cache.json: format {raw.get('format')!r} is not {FORMAT}, which this version reads")
    try:
        expected = int(raw.pop("sequences"))
        return CacheInfo(**raw | {"tap_layers": tuple(raw["tap_layers"])}), expected
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{place}/cache.json is damaged ({error}): prepare the features anew") from None


def finished_parts(store: ts.KvStore) -> list[str]:
    """Names of the parts that are whole, in order."""
    keys = (key.decode() for key in store.list().result())
    return sorted(key.removesuffix("/done.json") for key in keys if key.endswith("/done.json"))


# ------------------------------------------------------------------------------------------------------------- reading


@dataclasses.dataclass(frozen=True)
class CachedSequence:
    """Where the features of a training row lie."""

    part: str
    number: int  # the row's place among all rows
    first: int
    rows: int  # length, or one less: an engine never runs the last token
    length: int  # tokens; 0 for a row that is too short to be learnt
    row: Mapping[str, Any]  # the training row itself


def read_index(store: ts.KvStore, place: str, parts: Sequence[str]) -> list[CachedSequence]:
    """The sequences of finished parts, in the order of the rows they were written for."""
    pending = [tuple(store.read(f"{part}/{name}") for name in ("done.json", "index.jsonl")) for part in parts]
    found = []
    for part, (stamp, text) in zip(parts, pending, strict=True):
        stamp = read_json(place, f"{part}/done.json", stamp) or {}
        try:
            data = text.result().value
        except (ValueError, OSError) as error:
            raise damaged(place, f"{part}/index.jsonl", error) from None
        if hashlib.sha256(data).hexdigest() != stamp.get("index_sha256"):
            raise damaged(place, f"{part}/index.jsonl", "its checksum differs")
        found += [CachedSequence(part, **json.loads(line)) for line in data.splitlines()]
    return sorted(found, key=lambda sequence: sequence.number)


def damaged(place: str, key: str, reason: object) -> UserError:
    """The error of a part that was whole once."""
    part = key.split("/")[0]
    return UserError(
        f"{place}/{key} is damaged or incomplete ({reason}): remove {part} and run prepare-features again, "
        "which writes what is missing"
    )


class TargetCache:
    """A cache to train from: `rows` in their order, `read(numbers, lengths)` for features.

    Raises UserError where there is none, where some of it is missing or damaged, and where it is not of `target` with
    `tap_layers`.
    """

    def __init__(self, place: str, target: Target, tap_layers: Sequence[int]):
        self.place, self._store = place, open_store(place)
        info, expected = read_info(self._store, place)
        if info is None:
            raise UserError(
                f"{place} is no feature cache: it has no cache.json (nor, in a folder, DeepSpec's manifest.json)"
            )
        check_info(place, info, CacheInfo.of(target, tap_layers, info.dtype, info.max_length))
        self.info, self.sequences = info, read_index(self._store, place, finished_parts(self._store))
        if len(self.sequences) < expected:
            have = f"holds {len(self.sequences)} of {expected} sequences"
            raise UserError(f"{place} {have}: run prepare-features again, which writes what is missing")
        self._part_rows: collections.Counter[str] = collections.Counter()
        for sequence in self.sequences:
            self._part_rows[sequence.part] += sequence.rows
        self._arrays: dict[str, dict[str, ts.TensorStore]] = {}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The training rows whose features are here."""
        return [dict(sequence.row) for sequence in self.sequences]

    @property
    def lacks_last_rows(self) -> bool:
        """Whether some sequence was written by an engine, without its last token's features."""
        return any(sequence.rows < sequence.length for sequence in self.sequences)

    def read(self, numbers: Sequence[int], lengths: Sequence[int]) -> list[CacheRows]:
        """The features of the first tokens of some rows: `lengths` of them, or one less where the last is lacking."""
        pending = []
        for number, length in zip(numbers, lengths, strict=True):
            at = self.sequences[int(number)]
            if length > at.length:
                raise UserError(
                    f"{self.place} has {at.length} tokens of row {at.row['id']}, {length} are asked for: set "
                    f"data.max_length to at most {self.info.max_length}, or prepare the features again, longer"
                )
            rows = slice(at.first, at.first + min(int(length), at.rows))
            arrays = self._open(at.part)
            pending.append((at.part, {name: array[rows].read() for name, array in arrays.items()}))
        return [decode(self.info, self._take(part, parts)) for part, parts in pending]

    def _open(self, part: str) -> dict[str, ts.TensorStore]:
        if part not in self._arrays:
            arrays = {}
            for name, (width, dtype) in self.info.arrays.items():
                try:
                    arrays[name] = open_array(self._store, part, name, self.info)
                except (ValueError, OSError) as error:
                    raise damaged(self.place, f"{part}/{name}", error) from None
                if (arrays[name].shape, arrays[name].dtype.numpy_dtype) != ((self._part_rows[part], width), dtype):
                    raise damaged(self.place, f"{part}/{name}", "its shape is not that of cache.json")
            self._arrays[part] = arrays
        return self._arrays[part]

    def _take(self, part: str, pending: Mapping[str, ts.Future]) -> dict[str, np.ndarray]:
        arrays = {}
        for name, future in pending.items():
            try:
                arrays[name] = future.result()
            except (ValueError, OSError) as error:
                raise damaged(self.place, f"{part}/{name}", error) from None
        return arrays


def check_info(place: str, have: CacheInfo, want: CacheInfo) -> None:
    """Raises UserError, naming what differs, unless a cache is what is wanted."""
    for field in dataclasses.fields(CacheInfo):
        mine, theirs = getattr(want, field.name), getattr(have, field.name)
        if field.name == "thinking" and None in (mine, theirs):
            continue
        if mine != theirs:
            what = {
                "fingerprint": "target",
                "template": "chat template",
                "tap_layers": "tap layers",
                "thinking": "data.thinking",
            }
            raise UserError(
                f"{place} is a cache with another {what.get(field.name, field.name)} ({theirs}, here {mine}): "
                "give the config it was made with, or another data.cache"
            )
