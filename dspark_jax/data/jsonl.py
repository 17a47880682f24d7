"""JSONL that can be interrupted: rows are keyed by id, appended one by one, never lost or written twice."""

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dspark_jax.errors import UserError, full_disk_named


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number, object); blank lines are skipped. UserError names the line that is malformed."""
    for number, line in read_lines(path):
        try:
            yield number, parse_object(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}") from None


def read_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Yields (line number, line) of a file, without the blank ones. UserError when there is no such file."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no such file: {path}")
    with path.open("rb") as file:
        yield from ((number, line) for number, line in enumerate(file, start=1) if line.strip())


def parse_object(line: bytes) -> dict[str, Any]:
    """The JSON object in a line. ValueError says why there is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, found {type(row).__name__}")
    return row


def check_run(path: Path, run: Mapping[str, Any]) -> None:
    """Raises UserError unless the file at `path` is new or of this run; a new one is filed under it."""
    stamp = path.with_name(path.name + ".run.json")
    run = json.loads(json.dumps(dict(run)))
    if not stamp.exists():
        if path.exists() and path.stat().st_size:
            raise UserError(f"{path} exists and has no {stamp.name}: choose another --out, or remove it")
        path.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
        return
    try:
        before = json.loads(stamp.read_text(encoding="utf-8"))
    except ValueError:
        raise UserError(f"{stamp} is damaged: remove it and {path.name} to start over") from None
    differs = [key for key in sorted(set(before) | set(run)) if before.get(key) != run.get(key)]
    if differs:
        raise UserError(f"{path} is the output of another run (its {', '.join(differs)} differ): choose another file")


class ResumableJsonl:
    """An output file of one run. `run` identifies it (models, parameters); it is kept in `PATH.run.json` beside it.

    Opening a file of the same run continues it: `done` holds the ids that are in it; a torn last line is cut off.
    Opening a file of another run, or one without its run file, raises UserError: nothing is overwritten.
    """

    def __init__(self, path: str | Path, run: Mapping[str, Any]):
        self.path = Path(path)
        check_run(self.path, run)
        if self.path.exists():
            self._cut_torn_line()
        self.rows = [row for _, row in read_jsonl(self.path)] if self.path.exists() else []
        self.done = {row["id"] for row in self.rows}
        self._file = self.path.open("a", encoding="utf-8")

    def _cut_torn_line(self) -> None:
        with self.path.open("rb+") as file:
            data = file.read()
            file.truncate(data.rfind(b"\n") + 1)

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes one row, durable against the end of this process. UserError when the disk is full."""
        with self._full_disk_named():
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
            self._file.flush()
        self.done.add(row["id"])
        self.rows.append(dict(row))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._full_disk_named():  # closing writes what a full disk has refused before
            self._file.close()

    def _full_disk_named(self) -> AbstractContextManager[None]:
        return full_disk_named(self.path, "the rows before stay, and the same command goes on from there")
