"""One output file of several processes: process 0 writes it, the others write parts beside it, taken in at the end.

They need to see the same folder, and nothing else of each other. A row that was written lies in the file or in a part
at any time, so a run that was killed, wherever it stood, goes on with as many processes as one likes.
"""

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark_jax.data.jsonl import ResumableJsonl
from dspark_jax.errors import UserError
from dspark_jax.progress import Progress

LOOK_EVERY = 1.0  # seconds
PATIENCE = 300.0  # seconds until another process must at least have begun its part


def part_path(out: str | Path, index: int) -> Path:
    """Where process `index` writes its rows."""
    return Path(f"{out}.part{index}") if index else Path(out)


def parts_of(out: str | Path) -> list[Path]:
    """The parts that lie beside `out`."""
    out = Path(out)
    near = out.parent.iterdir() if out.parent.is_dir() else ()
    return sorted(path for path in near if re.fullmatch(re.escape(out.name) + r"\.part\d+", path.name))


def written_rows(path: Path) -> list[dict[str, Any]]:
    """The complete rows of a file that another process may be writing, or removing; none if it is nobody's output."""
    try:
        data = path.read_bytes() if _stamp(path).exists() else b""
        lines = data[: data.rfind(b"\n") + 1].splitlines()
        return [json.loads(line) for line in lines if line.strip()]
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise UserError(f"{path}: a line is not valid JSON ({error})") from None


def take_parts(file: ResumableJsonl, ids: Sequence[str], count: int, progress: Progress) -> None:
    """Process 0: waits until the parts hold whatever `file` lacks of `ids`, and appends what they hold."""
    start = time.monotonic()
    while True:
        parts = parts_of(file.path)
        rows = {row["id"]: row for path in parts for row in written_rows(path) if row["id"] not in file.done}
        missing = [key for key in ids if key not in file.done and key not in rows]
        progress.update(len(ids) - len(missing))
        if not missing:
            break
        absent = [i for i in range(1, count) if part_path(file.path, i) not in parts]
        if absent and time.monotonic() - start > PATIENCE:
            raise UserError(
                f"process {absent[0]} has written nothing beside {file.path}: all processes must see the same folder"
            )
        time.sleep(LOOK_EVERY)
    for row in rows.values():
        file.append(row)
    for path in set(parts) - {part_path(file.path, i) for i in range(count)}:  # of processes that are no more
        _remove(path)


def give_part(part: Path, out: str | Path, ids: Sequence[str]) -> None:
    """Another process: waits until `out` holds all answers, then removes its part. All processes end together."""
    while not set(ids) <= {row["id"] for row in written_rows(Path(out))}:
        time.sleep(LOOK_EVERY)
    _remove(part)


def _stamp(path: Path) -> Path:
    return path.with_name(path.name + ".run.json")


def _remove(part: Path) -> None:
    part.unlink()
    _stamp(part).unlink(missing_ok=True)
