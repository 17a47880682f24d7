"""What is learnt of a chat: the assistant's words, found by the chat template's own spans or by its turn headers.

Answers that were generated here need none of this: their rows keep the tokens themselves.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dspark_jax.data.conversations import Messages
from dspark_jax.errors import UserError
from dspark_jax.interop.tokenizer import Tokenizer

Spans = list[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class TurnMarks:
    """What a template writes around an answer. `given`: what it writes behind the header when it asks for one."""

    header: str
    given: str
    end: str


def chat_tokens(
    tokenizer: Tokenizer, messages: Messages, cut: Collection[int] = (), **variables: Any
) -> tuple[list[int], Spans]:
    """A rendered chat's token ids and the (start, end) tokens that are learnt: every answer, its end of turn included.

    The spans are those of `{% generation %}` where the template has them. Else an answer runs from behind its header
    to the end of its turn (spec 9.3), less what the template already writes when it asks for an answer; answers that
    the template shows without that get it put before them, since the model never answers without it. A character span
    becomes tokens as in the reference: by the number of tokens that the text before it has on its own.
    `cut`: which answers (0: the first) ran into a limit; the template's end of turn is not theirs and is not learnt.
    `variables`: for the template, as `enable_thinking=False`.
    Raises UserError on a template that fails, or that marks answers in neither way.
    """
    text = tokenizer.render(messages, add_generation_prompt=False, **variables)
    spans = tokenizer.generation_spans(messages, **variables)
    marks = None if spans and not cut else turn_marks(tokenizer, variables)
    if not spans:
        text = tokenizer.render(_opened(messages, text, marks), add_generation_prompt=False, **variables)
        spans = _header_spans(text, marks)
    for i in cut:
        if i < len(spans):
            start, end = spans[i]
            spans[i] = (start, start + len(text[start:end].removesuffix(marks.end)))
    count = lambda end: len(tokenizer.encode(text[:end]))  # noqa: E731
    return tokenizer.encode(text), [(count(start), count(end)) for start, end in spans]


def turn_marks(tokenizer: Tokenizer, variables: Mapping[str, Any]) -> TurnMarks:
    """Finds what a template writes around answers, by rendering a chat whose texts are known.

    The turn looked at is not the last: there, templates may add a block of thoughts of their own.
    """
    texts = ["\u241fa", "\u241fb", "\u241fc", "\u241fd"]
    roles = ["user", "assistant"] * 2
    chat: Messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    whole, asked, opened = (
        tokenizer.render(part, add_generation_prompt=opens, **variables)
        for part, opens in ((chat, False), (chat[:1], False), (chat[:1], True))
    )
    if not all(text in whole for text in texts) or texts[0] not in asked:
        raise _unmarked(tokenizer)
    user_end = asked.split(texts[0])[1]
    between, end = whole.split(texts[0])[1].split(texts[1])[0], whole.split(texts[3])[1]
    header = between.removeprefix(user_end)
    if not between.startswith(user_end) or not header.strip() or not end.strip():
        raise _unmarked(tokenizer)
    given = opened[len(asked + header) :] if opened.startswith(asked + header) else ""
    return TurnMarks(header, given, end)


def join_turns(conversations: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Rows to train on, from rows of one answer each, a list per conversation in the order of its turns.

    A turn whose tokens stand, as they were generated, at the start of the next one's prompt is learnt there. Else (the
    template drops thoughts from the history; a text has other tokens than it was generated with) it stays a row of its
    own. So every answer is learnt once, with its own tokens, in the context that it was given in.
    """
    rows = []
    for turns in conversations:
        spans: Spans = []
        for turn, later in zip(turns, [*turns[1:], None], strict=True):
            ids = turn["prompt_ids"] + turn["answer_ids"]
            spans = [*spans, (len(turn["prompt_ids"]), len(ids))]
            if later is not None and later["prompt_ids"][: len(ids)] == ids:
                continue
            rows.append(turn if len(spans) == 1 else {**turn, **masked_row(ids, spans)})
            spans = []
    return [dict(row) for row in rows]


def masked_row(ids: list[int], spans: Spans) -> dict[str, Any]:
    """`prompt_ids` up to the first learnt token, `answer_ids` from there on, and the `loss_mask` over both."""
    mask = [0] * len(ids)
    for start, end in spans:
        mask[start:end] = [1] * (end - start)
    first = spans[0][0]
    return {"prompt_ids": ids[:first], "answer_ids": ids[first:], "loss_mask": mask}


def _opened(messages: Messages, text: str, marks: TurnMarks) -> Messages:
    """The messages, with what the template gives an answer put before those that `text` shows without it."""
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    shown = text.split(marks.header)[1:]
    if len(shown) != len(answers):  # a user writes headers too
        return messages
    bare = {i for i, answer in zip(answers, shown, strict=True) if not answer.startswith(marks.given)}
    return [{**m, "content": marks.given + m["content"]} if i in bare else m for i, m in enumerate(messages)]


def _header_spans(text: str, marks: TurnMarks) -> Spans:
    """Character spans of the answers, each from behind its header to the end of its turn, or of the text."""
    spans, at = [], text.find(marks.header)
    while at >= 0:
        start = at + len(marks.header)
        found = text.find(marks.end, start)
        end = found + len(marks.end) if found >= 0 else len(text)
        if marks.given and text.startswith(marks.given, start):
            start += len(marks.given)
        spans.append((start, end))
        at = text.find(marks.header, end)
    return spans


def _unmarked(tokenizer: Tokenizer) -> UserError:
    return UserError(
        f"{tokenizer.source}: the chat template has neither generation spans nor headers around its answers, so they "
        "cannot be found in a text: let the target answer with `prepare answers`, which keeps the tokens"
    )
