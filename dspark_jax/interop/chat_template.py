"""The jinja environment of chat templates, and the place of what they mark as generated."""

import json
import re
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Around what a template marks as generated; Unicode keeps these code points from ever being text.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"


class _GenerationTag(jinja2.ext.Extension):
    """Accepts `{% generation %}`, with which templates mark the assistant's words, and renders its body."""

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _MarkedGenerationTag(_GenerationTag):
    """The same, with marks around the body."""

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        mark = lambda text: jinja2.nodes.Output([jinja2.nodes.TemplateData(text)])  # noqa: E731
        return [mark(_OPEN), *super().parse(parser), mark(_CLOSE)]


def template_environment(marked: bool = False) -> ImmutableSandboxedEnvironment:
    """The environment that published chat templates expect; sandboxed, because they come from strangers.

    `marked`: texts have marks around the bodies of `{% generation %}`, which `take_marks` takes out.
    """
    generation = _MarkedGenerationTag if marked else _GenerationTag
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, generation]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        # jinja2's own filter escapes HTML characters, which models were never shown.
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def take_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """A text without its marks, and the (start, end) characters that they stood around. Lone marks stay in the text."""
    text, starts, spans = "", [], []
    for piece in re.split(f"({_OPEN}|{_CLOSE})", marked):
        if piece == _OPEN:
            starts.append(len(text))
        elif piece == _CLOSE and starts:
            spans.append((starts.pop(), len(text)))
        else:
            text += piece
    return text + _OPEN * len(starts), spans
