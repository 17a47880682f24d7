"""The target's own data: prompts that it writes when given the opening of a user turn, and its answers to prompts."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dspark_jax.data.conversations import Messages, PromptRow, user_opening
from dspark_jax.data.jsonl import ResumableJsonl
from dspark_jax.data.keep_out import KeepOut
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.errors import UserError
from dspark_jax.progress import Progress

WAVE = 512  # requests handed to the engine at a time


def seed_of(text: str) -> int:
    """A 63-bit seed that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def write_prompts(
    engine: Engine,
    path: str | Path,
    count: int,
    openings: Sequence[str],
    temperature: float,
    max_tokens: int,
    seed: int,
    keep_out: KeepOut | None = None,
) -> list[PromptRow]:
    """Lets the target write `count` different user turns, starting them with `openings` in turn; resumable.

    Turns that do not end, those that are too short, repetitive or not plain text, and those of `keep_out` are written
    as refused.
    """
    tokenizer = engine.target.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise UserError("only a target with a tokenizer and a chat template can write its own prompts")
    opening = user_opening(tokenizer)
    run = {
        "target": engine.target.fingerprint,
        "openings": list(openings),
        "temperature": temperature,
        "max_tokens": max_tokens,
        "seed": seed,
        "keep_out": keep_out.fingerprint if keep_out else None,
    }
    with ResumableJsonl(path, run) as out, Progress("prompts", count) as progress:
        texts = {row["text"] for row in out.rows if row["text"]}
        progress.update(len(texts))
        while len(texts) < count:
            first = len(out.done)
            ids = [str(i) for i in range(first, first + WAVE)]
            starts = [openings[int(i) % len(openings)] for i in ids]
            prompts = [tokenizer.encode(opening + start) for start in starts]
            params = [
                SamplingParams(temperature=temperature, seed=seed_of(f"{seed}/prompt/{i}"), max_tokens=max_tokens)
                for i in ids
            ]
            for index, done in engine.stream_completions(prompts, params):
                text = (starts[index] + done.text).strip()
                kept = done.finish_reason == "stop" and is_plain_question(text) and text not in texts
                kept = kept and not (keep_out and keep_out.shared([{"role": "user", "content": text}]))
                out.append({"id": ids[index], "text": text if kept else ""})
                if kept:
                    texts.add(text)
                    progress.update(min(len(texts), count))
        rows = [row for row in out.rows if row["text"]]
    rows.sort(key=lambda row: int(row["id"]))
    return [PromptRow(row["id"], [{"role": "user", "content": row["text"]}]) for row in rows[:count]]


def is_plain_question(text: str) -> bool:
    """Whether a self-written turn is worth answering: long enough, mostly ASCII, not repeating itself."""
    words = text.split()
    if len(words) < 4 or sum(ord(c) < 128 for c in text) < 0.95 * len(text):
        return False
    return len(set(words)) > 0.5 * len(words) and not re.search(r"(.)\1{9}", text)


def write_answers(
    engine: Engine,
    rows: Sequence[PromptRow],
    path: str | Path,
    temperatures: Sequence[float],
    max_tokens: int,
    seed: int,
) -> list[dict[str, Any]]:
    """The target's answer to each prompt, in batches, keyed by id; resumable.

    Each prompt is answered once, at a temperature that its id picks from `temperatures`. Rows keep the exact token ids:
    training on re-tokenised text would show the drafter tokens that the target never produced.
    """
    run = {
        "target": engine.target.fingerprint,
        "temperatures": list(temperatures),
        "max_tokens": max_tokens,
        "seed": seed,
        "template": engine.target.tokenizer.template_hash if engine.target.tokenizer else None,
    }
    with ResumableJsonl(path, run) as out, Progress("answers", len(rows)) as progress:
        todo = [row for row in rows if row.id not in out.done]
        progress.update(len(rows) - len(todo))
        for wave in _waves(todo):
            params = [_answer_params(row.id, temperatures, max_tokens, seed) for row in wave]
            for index, done in engine.stream_completions([row.messages for row in wave], params):
                row = wave[index]
                out.append(
                    {
                        "id": row.id,
                        "messages": [*row.messages, {"role": "assistant", "content": done.text}],
                        "prompt_ids": prompt_ids(engine, row.messages),
                        "answer_ids": done.token_ids,
                        "finish_reason": done.finish_reason,
                        "temperature": params[index].temperature,
                    }
                )
                progress.advance(1)
        wanted = {row.id for row in rows}
        return [row for row in out.rows if row["id"] in wanted]


def prompt_ids(engine: Engine, messages: Messages) -> list[int]:
    return engine.target.tokenizer.chat_ids(messages)


def _answer_params(key: str, temperatures: Sequence[float], max_tokens: int, seed: int) -> SamplingParams:
    own = seed_of(f"{seed}/answer/{key}")
    return SamplingParams(temperature=temperatures[own % len(temperatures)], seed=own, max_tokens=max_tokens)


def _waves(rows: Sequence[PromptRow]) -> Iterator[Sequence[PromptRow]]:
    for start in range(0, len(rows), WAVE):
        yield rows[start : start + WAVE]
