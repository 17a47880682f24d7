"""Chat rows: the shapes in which prompts are stored, and the opening of a user turn."""

import dataclasses
from pathlib import Path
from typing import Any

from dspark_jax.data.jsonl import read_jsonl
from dspark_jax.errors import UserError
from dspark_jax.interop.tokenizer import Tokenizer

Messages = list[dict[str, str]]
# Parameters that a row may set for itself, besides those of the config.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "logit_bias", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos",
            "logprobs")  # fmt: skip
_ROLES = {"human": "user", "user": "user", "system": "system"}
_ROLES |= dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant")


@dataclasses.dataclass(frozen=True)
class PromptRow:
    """A prompt of a file: its id (the row's own, else its line number) and the messages to answer."""

    id: str
    messages: Messages
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def read_prompts(path: str | Path) -> list[PromptRow]:
    """Reads a JSONL of prompts. A row has `prompt` (text), `turns` (user texts; the first is asked), `messages`, or
    `conversations` (role/content or from/value); optionally `id` and any of the sampling parameters.

    Raises UserError, naming the line, on a row of another shape or a repeated id, and on a file without rows.
    """
    rows, seen = [], {}
    for number, row in read_jsonl(path):
        where = f"{path}, line {number}"
        key = str(row.get("id", number))
        if key in seen:
            raise UserError(f"{where}: the id {key!r} stands in line {seen[key]} too")
        seen[key] = number
        options = {name: row[name] for name in SAMPLING if name in row}
        rows.append(PromptRow(key, row_messages(row, where), options))
    if not rows:
        raise UserError(f"{path} has no prompts: it should hold one JSON object a line")
    return rows


def row_messages(row: dict[str, Any], where: str) -> Messages:
    """The messages of a row up to its last user turn. UserError on another shape; `where` names the row."""
    try:
        if "prompt" in row:
            named = named_turns([("user", row["prompt"])])
        elif "turns" in row:
            named = named_turns([("user", row["turns"][0])]) if isinstance(row["turns"], list) and row["turns"] else []
        else:
            named = named_turns(chat_turns(row))
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    while named and named[-1]["role"] != "user":
        named.pop()
    if not named:
        raise UserError(f"{where}: no user message to answer")
    return named


def chat_turns(row: dict[str, Any]) -> list[tuple[Any, Any]]:
    """(role, text) of a row's `messages` or `conversations`, as they stand there. ValueError on another shape."""
    turns = row.get("messages", row.get("conversations"))
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("expected one of prompt, turns, messages, conversations")
    return [(turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))) for turn in turns]


def named_turns(turns: list[tuple[Any, Any]]) -> Messages:
    """The same as messages, with our names of the roles. ValueError on an unknown role or a turn without text."""
    for role, text in turns:
        if not isinstance(role, str) or role not in _ROLES:
            raise ValueError(f"unknown role {role!r}")
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"an empty or non-text {_ROLES[role]} message")
    return [{"role": _ROLES[role], "content": text} for role, text in turns]


def user_opening(tokenizer: Tokenizer) -> str:
    """What the chat template writes before the first user text (system prompt included)."""
    mark = "\u241f"
    return tokenizer.render([{"role": "user", "content": mark}], add_generation_prompt=False).split(mark)[0]
