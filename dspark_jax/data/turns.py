"""Conversations that are answered turn by turn, each turn after the model's own answers to the ones before."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dspark_jax.data.conversations import Messages, PromptRow
from dspark_jax.errors import UserError

Line = dict[str, Any]  # of a file of answers


@dataclasses.dataclass(frozen=True)
class Turn:
    """The turn of a conversation that is asked after `answers`."""

    row: PromptRow
    answers: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The conversation's id, with the number of the turn from the second on: "7", "7#2", "7#3"."""
        return turn_id(self.row.id, len(self.answers))

    @property
    def chat(self) -> Messages | None:
        """The messages to answer; None when all turns are answered. Answers that the row itself gives stay."""
        chat, left = [], list(self.answers)
        messages = self.row.messages
        for message, later in zip(messages, [*messages[1:], None], strict=True):
            chat.append(message)
            if message["role"] != "user" or (later is not None and later["role"] == "assistant"):
                continue
            if not left:
                return chat
            chat.append({"role": "assistant", "content": left.pop(0)})
        return None

    def line(self, answer: Mapping[str, str], finish_reason: str, **more: Any) -> Line:
        """The answered turn, as it is kept."""
        messages = [*self.chat, {"role": "assistant", **answer}]
        return self._line(messages=messages, finish_reason=finish_reason, **more)

    def failed(self, reason: str) -> Line:
        """The turn as it is kept when it cannot be answered; the conversation ends there."""
        return self._line(messages=self.chat, finish_reason="error", error=reason)

    def _line(self, **fields: Any) -> Line:
        return {"id": self.id, "conversation": self.row.id, "turn": len(self.answers), **fields}

    def after(self, line: Line) -> "Turn | None":
        """The turn to ask when this one has been kept as `line`; None at the end of the conversation."""
        if line["finish_reason"] == "error":
            return None
        following = Turn(self.row, (*self.answers, line["messages"][-1]["content"]))
        return None if following.chat is None else following


def turn_id(conversation: str, turn: int) -> str:
    return conversation if turn == 0 else f"{conversation}#{turn + 1}"


def turn_ids(rows: Iterable[PromptRow]) -> set[str]:
    """Ids of all turns of all rows. UserError when two turns would share one."""
    ids: set[str] = set()
    for row in rows:
        turn, own = Turn(row), set()
        while turn.chat is not None:
            own.add(turn.id)
            turn = Turn(row, (*turn.answers, ""))
        if own & ids:
            raise UserError(f"two turns have the id {min(own & ids)!r}: rename the row {row.id!r}")
        ids |= own
    return ids


def open_turns(rows: Iterable[PromptRow], written: Sequence[Line]) -> list[Turn]:
    """The first turn of each conversation that no line answers, for those that go on."""
    lines, found = {line["id"]: line for line in written}, []
    for row in rows:
        turn: Turn | None = Turn(row)
        while turn is not None and turn.id in lines:
            turn = turn.after(lines[turn.id])
        if turn is not None:
            found.append(turn)
    return found


def conversations(lines: Iterable[Line]) -> list[list[Line]]:
    """Answered turns, a list per conversation in the order of its turns. Failed ones are left out."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        if line.get("finish_reason") != "error":
            groups.setdefault(line.get("conversation", line["id"]), []).append(line)
    return [sorted(group, key=lambda line: line.get("turn", 0)) for group in groups.values()]


def thinking_variables(thinking: str) -> dict[str, bool]:
    """Template variables of "on", "off" and "" (whatever the template does by itself)."""
    known = {"": {}, "on": {"enable_thinking": True}, "off": {"enable_thinking": False}}
    if thinking not in known:
        raise UserError(f'thinking={thinking!r}: it is "on", "off" or "" (as the template has it)')
    return known[thinking]
