"""JSON files that are whole or not there at all."""

import json
import os
from pathlib import Path
from typing import Any

from dspark_jax.errors import UserError


def write_json(path: str | Path, value: dict[str, Any]) -> None:
    """Writes by way of a temporary file, so that no half-written file is ever seen."""
    path = Path(path)
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(fresh, path)


def read_json(path: str | Path, what: str, mend: str) -> dict[str, Any]:
    """The object in a file. UserError says `what` is missing or damaged, and the `mend`."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"no {what} at '{path}' ({error.strerror}): {mend}") from None
    except ValueError as error:
        raise UserError(f"{what} '{path}' is damaged or truncated ({error}): {mend}") from None
    if not isinstance(value, dict):
        raise UserError(f"{what} '{path}' holds no JSON object: {mend}")
    return value
