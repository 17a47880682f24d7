"""Writing a feature cache: every writer has parts of its own. What is finished is kept, the rest is written anew."""

import contextlib
import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
import tensorstore as ts

from dspark_jax.data.batches import PAD_TO, learnt_length
from dspark_jax.data.target_cache import (
    CacheInfo,
    CacheRows,
    check_info,
    encode,
    finished_parts,
    open_array,
    open_store,
    read_index,
    read_info,
    read_json,
)
from dspark_jax.decoding.requests import Request
from dspark_jax.decoding.sink import RowFeatures, Sink
from dspark_jax.errors import UserError, is_full
from dspark_jax.interop.target_io import Target, log_totals

LOOK_EVERY = 5.0  # seconds
PART_BYTES = 4 << 30  # what a writer that is killed has to write again, at most


def size_line(place: str, info: CacheInfo, rows: int) -> str:
    """What `rows` more rows will take, in words. Raises UserError where a local disk has less free."""
    need = rows * info.bytes_per_row
    line = f"{rows} tokens x {info.bytes_per_row} bytes = {_size(need)} in {place}"
    if "://" in place:
        return line
    folder = Path(place).absolute()
    folder = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if need > free:
        raise UserError(
            f"features do not fit: {line}, which has {_size(free)} free: free or choose another disk, store int8 "
            "(data.cache_dtype), or train without a cache (data.features=online)"
        )
    return f"{line} ({_size(free)} free)"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def tokens_digest(row: Mapping[str, Any]) -> bytes:
    """Tells a training row from others of its id: its features are those of its tokens."""
    tokens = [row.get("prompt_ids"), row.get("answer_ids")]
    return hashlib.sha256(json.dumps(tokens).encode()).digest()[:8]


class CacheWriter:
    """Adds sequences to the cache at `place`, a new one or one of the same `info` (UserError on any other).

    `sequences`: how many rows the cache is to hold in the end. `process` of `processes`: parts are named after it, and
    those that an earlier run left unfinished are removed by the process whose turn they are. Leaving the context
    finishes the last part, unless an error ended it; Ctrl-C is none. `done`: rows of finished parts, id to digest.
    """

    def __init__(
        self,
        place: str,
        info: CacheInfo,
        sequences: int,
        process: int = 0,
        processes: int = 1,
        part_bytes: int = PART_BYTES,
    ):
        self.place, self.info, self._part_bytes = place, info, part_bytes
        self.process, self.processes = process, processes
        self._sequences, self._store = sequences, open_store(place)
        self._part: _Part | None = None
        self.finished = 0
        with self._named_errors():
            self._expected()
            parts = finished_parts(self._store)
            self.finished = len(parts)
            self._remove_unfinished(parts)
        mine = [int(part.split("-")[2]) for part in parts if int(part.split("-")[1]) == process]
        self._next = max(mine, default=-1) + 1
        found = read_index(self._store, place, parts)
        self.done = {sequence.row["id"]: tokens_digest(sequence.row) for sequence in found}

    def _expected(self) -> int:
        """How many sequences cache.json announces, -1 in a new place. Raises UserError on somebody else's."""
        keys = self._store.list().result()  # before cache.json is read: another process may be writing that
        before, expected = read_info(self._store, self.place)
        if before is not None:
            check_info(self.place, before, self.info)
        elif keys:
            raise UserError(f"{self.place} is not empty, and no feature cache: set data.cache to a new folder")
        return expected if before else -1

    def expect(self, sequences: int) -> None:
        """Announces that the cache is to hold so many rows in the end, more or fewer than was announced before."""
        self._sequences = sequences
        with self._named_errors():
            if self.process == 0 and self._expected() not in (-1, sequences):
                self._announce()

    def _announce(self) -> None:
        text = json.dumps(dataclasses.asdict(self.info) | {"sequences": self._sequences}, indent=1) + "\n"
        self._store.write("cache.json", text.encode()).result()

    def _begin(self) -> "_Part":
        """A new part. The first one makes the place a cache, so a run that is refused leaves nothing behind."""
        if self._expected() < self._sequences:
            self._announce()
        self._next += 1
        return _Part(self._store, f"part-{self.process:05d}-{self._next - 1:05d}", self.info)

    def _remove_unfinished(self, finished: list[str]) -> None:
        begun = {key.decode().split("/")[0] for key in self._store.list().result()} - {"cache.json", *finished}
        for part in begun:
            if part.startswith("part-") and int(part.split("-")[1]) % self.processes == self.process:
                self._store.delete_range(ts.KvStore.KeyRange(f"{part}/", f"{part}0")).result()

    def add(self, number: int, row: Mapping[str, Any], length: int, rows: CacheRows | None) -> None:
        """Adds the features of the first `length` tokens of row `number` (None where there are none to learn from)."""
        with self._named_errors():
            if self._part is None:
                self._part = self._begin()
            self._part.add(number, row, length, rows)
            if self._part.rows * self.info.bytes_per_row >= self._part_bytes:
                self._finish()

    def finish(self) -> None:
        """Makes what was added readable; `done` has all of it then."""
        with self._named_errors():
            self._finish()

    def wait_for_all(self, sequences: int) -> None:
        """Returns when the finished parts of all processes hold that many sequences."""
        counts: dict[str, int] = {}
        while True:
            for part in set(finished_parts(self._store)) - counts.keys():
                key = f"{part}/done.json"
                counts[part] = (read_json(self.place, key, self._store.read(key)) or {}).get("sequences", 0)
            if sum(counts.values()) >= sequences:
                return
            time.sleep(LOOK_EVERY)

    def _finish(self) -> None:
        if self._part is not None:
            self._part.finish()
            self.done |= {row["id"]: tokens_digest(row) for row in self._part.training_rows}
            self._part, self.finished = None, self.finished + 1

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as error:
            reason = "the disk is full" if is_full(error) else str(error)
            name = self._part.name if self._part else "cache.json"
            raise UserError(
                f"{self.place}/{name} cannot be written: {reason}; parts finished so far: {self.finished}. They stay, "
                "and the same command goes on from there"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None or kind is KeyboardInterrupt:
            self.finish()


class _Part:
    """One part: rows wait in memory until they fill a shard, which is then written in the background."""

    def __init__(self, store: ts.KvStore, name: str, info: CacheInfo):
        self.name, self.rows, self.training_rows = name, 0, []
        self._store, self._info = store, info
        self._arrays = {array: open_array(store, name, array, info, create=True) for array in info.arrays}
        self._index: list[str] = []
        self._waiting: list[dict[str, np.ndarray]] = []
        self._written = 0
        self._futures: list[Any] = []

    def add(self, number: int, row: Mapping[str, Any], length: int, rows: CacheRows | None) -> None:
        count = 0 if rows is None else len(rows.taps_NxMH)
        entry = {"number": number, "first": self.rows, "rows": count, "length": length, "row": row}
        self._index.append(json.dumps(entry, ensure_ascii=False) + "\n")
        self.training_rows.append(row)
        self.rows += count
        if count:
            self._waiting.append(encode(self._info, rows))
        if self.rows - self._written >= self._info.shard_rows:
            self._write((self.rows - self._written) // self._info.shard_rows * self._info.shard_rows)

    def _write(self, count: int) -> None:
        """Begins to write `count` of the rows that wait, when those begun before are written."""
        self._wait()
        for name, array in self._arrays.items():
            end = self._written + count
            grown = array.resize(exclusive_max=[end, array.shape[1]], resize_metadata_only=True).result()
            data = np.concatenate([one[name] for one in self._waiting])
            self._futures.append(grown[self._written : end].write(data[:count]))
            self._arrays[name] = grown
        rest = {name: np.concatenate([one[name] for one in self._waiting])[count:] for name in self._arrays}
        self._waiting, self._written = [rest], self._written + count

    def _wait(self) -> None:
        for future in self._futures:
            future.result()
        self._futures = []

    def finish(self) -> None:
        """Writes what waits, the index and, last of all, the mark that makes the part readable."""
        if self.rows > self._written:
            self._write(self.rows - self._written)
        self._wait()
        index = "".join(self._index).encode()
        stamp = {"rows": self.rows, "sequences": len(self._index), "index_sha256": hashlib.sha256(index).hexdigest()}
        self._store.write(f"{self.name}/index.jsonl", index).result()
        self._store.write(f"{self.name}/done.json", json.dumps(stamp).encode()).result()


# ------------------------------------------------------------------------------------------------- from the engine


Finish = Callable[[int, int, Mapping[str, Any] | None], None]


def sink_writer(writer: CacheWriter, target: Target) -> tuple[Sink, Finish]:
    """A sink for the engine that writes answers, and `finish(request, number, row)`, to call when a request has ended.

    `row` is the training row (prompt_ids, answer_ids) of that request, `number` its place among all rows; where it is
    None, nothing of the request is kept. The last token of an answer is never run, so its features are lacking; block
    drafters do not read them, Eagle3 does.
    """
    waiting: dict[int, list[RowFeatures]] = {}

    def take(request: Request, rows: RowFeatures) -> None:
        waiting.setdefault(request.index, []).append(rows)

    def finish(request: int, number: int, row: Mapping[str, Any] | None) -> None:
        parts = waiting.pop(request, [])
        if row is None:
            return
        length = learnt_length(row, writer.info.max_length)
        if not length or not parts:
            writer.add(number, row, 0, None)
            return
        rows = jax.tree.map(lambda *arrays: np.concatenate(arrays)[:length], *parts)
        count = len(rows.hidden_NxH)
        padded_SxH = np.pad(rows.hidden_NxH, [(0, -count % PAD_TO), (0, 0)])
        log_total_N = np.asarray(log_totals(target.module, target.params, padded_SxH[None]))[0, :count]
        writer.add(number, row, length, CacheRows(rows.taps_NxMH, rows.hidden_NxH, log_total_N))

    return Sink(writer.info.tap_layers, take), finish
