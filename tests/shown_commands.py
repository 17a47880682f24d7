"""The commands that documents, docstrings and notebooks show, and whether the command-line doors would take them."""

import ast
import functools
import importlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from absl import flags

from configs.base import get_base
from dspark_jax.__main__ import COMMANDS
from dspark_jax.door import parse_config
from dspark_jax.parallel import mesh_sizes
from dspark_jax.planning.chips import parse_machine

ROOT = Path(__file__).parents[1]
ANY_CONFIG = "configs/smollm2_135m.py"  # where a document leaves the config open: configs/X.py, FILE, …
SCRIPTS = ("train.py", "serve.py")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`]+)`")
_OPEN_CONFIG = re.compile(r"--config=(configs/X\.py|FILE|…)(?=\s|$)")
_KEY = re.compile(r"(?:config\.)?((?:target|drafter|data|train|serve|sampling)\.(?!py\b)\w+|mesh)(?:=.*)?")
_OURS = re.compile(r"(?:--\w+=)?((?:configs|docs|drafters|dspark_jax|notebooks|tests)/[\w./-]+)")


class Wrong(AssertionError):
    """What a document shows and the project does not have."""


# ------------------------------------------------------------------------------------------------------ finding them


def blocks(markdown: str, *languages: str) -> list[str]:
    """The fenced blocks of some languages; "" is that of a bare fence."""
    return [body for language, body in _FENCE.findall(markdown) if language in languages]


def inline(markdown: str) -> list[str]:
    """The words in backticks outside of fenced blocks."""
    return [" ".join(code.split()) for code in _INLINE.findall(_FENCE.sub("", markdown))]


def shell_commands(text: str) -> Iterator[list[str]]:
    """The words of each Python or make command in lines of a shell; a block may hold what was printed too.

    Variables are put in where the text itself sets them.
    """
    variables: dict[str, str] = {}
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        line = re.sub(r"\$\{?(\w+)\}?", lambda found: variables.get(found[1], found[0]), line)  # noqa: B023
        if assigned := re.fullmatch(r"(?:export )?(\w+)=\"?([^\"]*)\"?", line):
            variables[assigned[1]] = assigned[2]
        found = re.search(r"(?:^|[\s/\"'])(python3?|make) ", line)
        if not found:
            continue
        try:
            yield from _split(_words(line))
        except ValueError:  # a sentence with an apostrophe goes before it
            yield from _split(_words(line[found.start(1) :]))


def _words(line: str) -> list[str]:
    """A line in the words that a shell sees, what is optional among them. ValueError where a quote is open."""
    line = _OPEN_CONFIG.sub(f"--config={ANY_CONFIG}", re.sub(r"\[(--[^\]]*)\]", r"\1", line))
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def _split(words: list[str]) -> Iterator[list[str]]:
    """The commands among a line's words, in quoted lines for another shell too."""
    command: list[str] | None = None
    for word in (*words, ";"):
        if set(word) <= set("();<>|&"):
            if command:
                yield command
            command = None
        elif command is not None:
            command.append(word)
        elif re.fullmatch(r"(?:\S*/)?(?:python3?|make)", word):
            command = [word]
        if " " in word and command is None:
            yield from shell_commands(word.partition("=")[2] if word.startswith("--") else word)


# ----------------------------------------------------------------------------------------------------- checking them


class _ParsedConfig(Exception):
    """A door has parsed its line: nothing more is to run."""


def check_command(words: list[str]) -> None:
    """Raises Wrong, or the door's own UserError, where a command would be refused before it does anything."""
    for word in words:
        path = _OURS.fullmatch(word)
        if path and not (ROOT / path[1]).exists():
            raise Wrong(f"{' '.join(words)}: there is no {path[1]}")
    if Path(words[0]).name == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        if not all(word in targets for word in words[1:] if "=" not in word):
            raise Wrong(f"{' '.join(words)}: the Makefile has {targets}")
    elif words[1:3] == ["-m", "dspark_jax"]:
        _check_side_door(words)
    elif words[1] == "-m" and words[2] == "bench.peers":
        _parse(importlib.import_module("bench.peers"), ["bench.peers", *words[3:]])
    elif words[1] == "-m":
        if importlib.util.find_spec(words[2]) is None:
            raise Wrong(f"there is no module {words[2]}")
    elif words[1] in SCRIPTS:
        _parse(_script(words[1]), words[1:])
    elif words[1] != "-c" and not (ROOT / words[1]).exists():
        raise Wrong(f"{' '.join(words)}: there is no {words[1]}")


def _check_side_door(words: list[str]) -> None:
    name = words[3] if len(words) > 3 else ""
    if name in ("COMMAND", "…", "--help"):
        return
    if name not in COMMANDS:
        raise Wrong(f"{' '.join(words)}: no such command")
    _parse(importlib.import_module(COMMANDS[name][0]), [f"python -m dspark_jax {name}", *words[4:]])


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"shown_{name[:-3]}", ROOT / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _parse(module: ModuleType, argv: list[str]) -> None:
    """Lets a door's `main` read a line, and stops it there."""

    def stop(*given: Any, **options: Any) -> None:
        config, values = parse_config(*given, **options)
        if config is not None:
            mesh_sizes(config.mesh)
        if "topology" in values and values["topology"].value:
            parse_machine(values["topology"].value)
        raise _ParsedConfig

    main = module.main
    with mock.patch.object(module, "parse_config", stop), mock.patch.object(sys, "argv", argv):
        try:
            main(argv) if main.__code__.co_argcount else main()
        except _ParsedConfig:
            return
    raise Wrong(f"{' '.join(argv)}: read no config")


def check_words(code: str, around: str = "") -> None:
    """The same for words in backticks: a command, or a part of one, or a config's key.

    A flag that stands in the blocks `around` them, where commands are checked whole, may be another program's.
    """
    first, _, rest = code.partition(" ")
    if first in ("python", "make") and rest:
        for words in shell_commands(code):
            check_command(words)
    elif first in COMMANDS and re.match(r"--|answers\b", rest):
        config = "" if "--config=" in rest or "--simulate" in rest else f" --config={ANY_CONFIG}"
        for words in shell_commands(f"python -m dspark_jax {code}{config}"):
            check_command(words)
    elif first.startswith("--config."):
        check_command(["python", "train.py", f"--config={ANY_CONFIG}", *code.replace("DATAxMODEL", "1x1").split()])
    elif flag := re.fullmatch(r"--([\w-]+)(?:=.*)?", code):
        if flag[1] not in known_flags() and code not in around:
            raise Wrong(f"{code}: no command has such a flag")
    elif key := _KEY.fullmatch(code):
        section, _, name = key[1].partition(".")
        if name and name not in get_base()[section]:
            raise Wrong(f"{code}: configs/base.py has no {key[1]}")


@functools.cache
def known_flags() -> set[str]:
    """The flags of all doors."""
    names = {"config", "help"}
    modules = [importlib.import_module(module) for module, _ in COMMANDS.values()]
    for module in (*modules, _script("serve.py"), importlib.import_module("bench.peers")):
        values = flags.FlagValues()
        for define in ("define", "_define", "define_json"):
            if hasattr(module, define) and not (define == "define_json" and "json" in values):
                getattr(module, define)(values)
        names |= set(values)
    return names


def check_python(code: str) -> None:
    """Raises where a Python block is no Python, or names what the package's face does not have."""
    import dspark_jax

    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dspark_jax":
            if node.attr not in dspark_jax.__all__:
                raise Wrong(f"dspark_jax.{node.attr} is not in its public face")
