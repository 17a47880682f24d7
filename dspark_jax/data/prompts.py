"""Prompts to train on: from JSONL or a Hugging Face dataset, bad rows left out, evaluation questions kept out.

Serving refuses a file with a bad row (`conversations.read_prompts`); of a million rows from elsewhere some are bad.
"""

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from dspark_jax.data.conversations import Messages, PromptRow, chat_turns, named_turns
from dspark_jax.data.jsonl import parse_object, read_lines
from dspark_jax.data.keep_out import KeepOut
from dspark_jax.errors import UserError

HUB = "hf:"
_SHOWN = 10  # bad rows that are shown; the report has all


@dataclasses.dataclass
class PromptReport:
    """What became of the rows that were read."""

    source: str
    read: int = 0
    skipped: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # {"line", "reason"} of bad rows
    kept_out: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # {"line", "shares"} with evaluation sets

    def print(self) -> None:
        """Says on stderr what was left out, and of the first bad rows where they are."""
        for row in self.skipped[:_SHOWN]:
            print(f"{self.source}, line {row['line']}: skipped: {row['reason']}", file=sys.stderr)
        counts = f"{self.read} rows read, {len(self.skipped)} bad ones skipped"
        print(f"{self.source}: {counts}, {len(self.kept_out)} kept out (evaluation data)", file=sys.stderr, flush=True)


def training_prompts(source: str, count: int, keep_out: KeepOut | None = None) -> tuple[list[PromptRow], PromptReport]:
    """The first `count` usable rows of `source`: a JSONL file, or "hf:NAME[:SPLIT]" of the Hugging Face hub.

    The messages of a row are its system and user turns, all to be answered in order: answers of others that stand in
    between are dropped. Bad rows and those that share text with evaluation data are reported, by line (of a dataset:
    by row, from 1). Raises UserError when nothing usable is left.
    """
    rows, report, seen = [], PromptReport(source), {}
    for line, row in hub_rows(source) if source.startswith(HUB) else read_lines(source):
        if len(rows) == count:
            break
        report.read += 1
        try:
            prompt = _prompt(line, parse_object(row) if isinstance(row, bytes) else row)
            if prompt.id in seen:
                raise ValueError(f"the id {prompt.id!r} stands in line {seen[prompt.id]} too")
        except ValueError as error:
            report.skipped.append({"line": line, "reason": str(error)})
            continue
        seen[prompt.id] = line
        shared = keep_out.shared(prompt.messages) if keep_out else None
        if shared:
            report.kept_out.append({"line": line, "shares": shared})
        else:
            rows.append(prompt)
    if not rows:
        reason = f": line {report.skipped[0]['line']}: {report.skipped[0]['reason']}" if report.skipped else ""
        raise UserError(f"{source} has no usable prompts{reason}")
    return rows, report


def _prompt(line: int, row: dict[str, Any]) -> PromptRow:
    """A row's prompt. Datasets fill absent fields with None."""
    row = {name: value for name, value in row.items() if value is not None}
    messages = asked_turns(row)
    "".join(message["content"] for message in messages).encode()  # half of a surrogate pair is no text
    return PromptRow(str(row.get("id", line)), messages)


def asked_turns(row: dict[str, Any]) -> Messages:
    """System and user turns of a row with `messages`, `conversations`, `turns` or `prompt`, the fullest it has.

    Raises ValueError on a row of another shape, or without a user turn.
    """
    if "messages" in row or "conversations" in row:
        turns = chat_turns(row)
    else:
        texts = row.get("turns", [row["prompt"]] if "prompt" in row else None)
        if not isinstance(texts, list):
            raise ValueError("expected one of prompt, turns, messages, conversations")
        turns = [("user", text) for text in texts]
    asked = [message for message in named_turns(turns) if message["role"] != "assistant"]
    while asked and asked[-1]["role"] != "user":
        asked.pop()
    if not asked:
        raise ValueError("no user message to answer")
    return asked


def hub_rows(source: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (number, row) of the dataset that "hf:NAME[:SPLIT]" names, streamed; SPLIT is "train" unless given."""
    name, _, split = source.removeprefix(HUB).partition(":")
    yield from enumerate(dataset_rows(source, name, split=split or "train"), start=1)


def dataset_rows(label: str, *names: str, **options: Any) -> Iterator[dict[str, Any]]:
    """Rows of `datasets.load_dataset(*names, **options)`, streamed. UserError, which `label` begins, when it fails."""
    try:
        import datasets  # not one of our requirements: most prompts are files
    except ImportError:
        raise UserError(f"{label}: reading datasets of the hub needs `pip install datasets`") from None
    try:
        yield from datasets.load_dataset(*names, streaming=True, **options)
    except Exception as error:  # its errors are of many kinds: the network's, the hub's, pyarrow's
        raise UserError(f"{label}: {type(error).__name__}: {error}") from None
