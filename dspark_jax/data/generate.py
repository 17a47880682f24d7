"""The target's own data: prompts that it writes when given the opening of a user turn, and its answers to prompts."""

import collections
import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dspark_jax.data.answer_features import AnswerFeatures
from dspark_jax.data.conversations import PromptRow, user_opening
from dspark_jax.data.jsonl import ResumableJsonl
from dspark_jax.data.keep_out import KeepOut
from dspark_jax.data.turns import Line, Turn, open_turns, thinking_variables, turn_ids
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.requests import Completion
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.errors import UserError
from dspark_jax.interop.target_io import Target
from dspark_jax.interop.tokenizer import Tokenizer
from dspark_jax.progress import Progress

REST = "…"  # in an opening: where the target goes on
WAVE = 512  # requests handed to the engine at a time


class WaveAnswer(NamedTuple):
    """What became of one turn of a wave."""

    place: int  # in the wave
    request: int | None  # of the engine's; None: the chat template refused the turn
    prompt_ids: list[int]
    completion: Completion


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

    What follows REST in an opening is put behind what the target wrote. Turns that do not end, those that are too
    short, repetitive or not plain text, and those of `keep_out` are written as refused.
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
            new = (str(i) for i in itertools.count() if str(i) not in out.done)
            ids = list(itertools.islice(new, min(WAVE, 2 * count)))  # about half of them are kept
            starts, ends = zip(*(openings[int(i) % len(openings)].partition(REST)[::2] for i in ids), strict=True)
            prompts = [tokenizer.encode(opening + start) for start in starts]
            params = [
                SamplingParams(temperature=temperature, seed=seed_of(f"{seed}/prompt/{i}"), max_tokens=max_tokens)
                for i in ids
            ]
            for index, done in engine.stream_completions(prompts, params):
                text = (starts[index] + done.text).strip()
                kept = done.finish_reason == "stop" and is_plain_question(text)
                kept = kept and not (keep_out and keep_out.shared([{"role": "user", "content": text}]))
                text += ends[index]
                kept = kept and text not in texts
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


def answers_run(
    target: Target,
    temperatures: Sequence[float],
    max_tokens: int,
    seed: int,
    thinking: str,
    model: str | None = None,
    top_p: float = 1.0,
    top_k: int = 0,
) -> dict[str, Any]:
    """What identifies a file of answers. `model`: as the servers that gave them call it."""
    cuts = {name: value for name, value, whole in (("top_p", top_p, 1), ("top_k", top_k, 0)) if value != whole}
    return {
        **cuts,  # files of whole distributions do not speak of them
        "target": target.fingerprint,
        "temperatures": list(temperatures),
        "max_tokens": max_tokens,
        "seed": seed,
        "template": target.tokenizer.template_hash if target.tokenizer else None,
        "thinking": thinking or None,
        "model": model,
    }


def write_answers(
    engine: Engine,
    rows: Sequence[PromptRow],
    path: str | Path,
    temperatures: Sequence[float],
    max_tokens: int,
    seed: int,
    thinking: str = "",
    top_p: float = 1.0,
    top_k: int = 0,
    features: AnswerFeatures | None = None,
) -> list[Line]:
    """The target's answer to every turn of every row, in batches, keyed by id; resumable.

    Each turn is answered once, after the target's own answers to the ones before it, at a temperature that its id picks
    from `temperatures`. Lines keep the exact token ids: training on re-tokenised text would show the drafter tokens
    that the target never produced. A turn that cannot be answered gets a line that says why, and its conversation ends.
    `features`: whose sink the engine has, told of every line as soon as it is kept.
    """
    if engine.target.tokenizer is None:
        raise UserError("only a target with a tokenizer can answer prompts to train on")
    ids, variables = turn_ids(rows), thinking_variables(thinking)
    run = answers_run(engine.target, temperatures, max_tokens, seed, thinking, top_p=top_p, top_k=top_k)
    with ResumableJsonl(path, run) as out, Progress("answers", len(ids)) as progress:
        todo = collections.deque(open_turns(rows, out.rows))
        progress.update(len(ids & out.done))
        while todo:
            wave = [todo.popleft() for _ in range(min(WAVE, len(todo)))]
            params = [answer_params(turn.id, temperatures, max_tokens, seed, top_p, top_k) for turn in wave]
            for answer in answer_wave(engine, wave, params, variables):
                turn = wave[answer.place]
                line = _line(turn, answer, params[answer.place].temperature)
                out.append(line)
                progress.advance(1)
                following = turn.after(line)
                if features and answer.request is not None:
                    features.take(answer.request, line, _prompt_ids(engine.target.tokenizer, following, variables))
                if following:
                    todo.append(following)
        return [row for row in out.rows if row["id"] in ids]


def _line(turn: Turn, answer: WaveAnswer, temperature: float) -> Line:
    done = answer.completion
    if done.finish_reason == "error":
        return turn.failed(done.error)
    tokens = {"prompt_ids": answer.prompt_ids, "answer_ids": done.token_ids}
    return turn.line({"content": done.text}, done.finish_reason, **tokens, temperature=temperature)


def _prompt_ids(tokenizer: Tokenizer, turn: Turn | None, variables: Mapping[str, Any]) -> list[int] | None:
    """A turn's prompt; None where there is no turn, or the template refuses it."""
    try:
        return tokenizer.chat_ids(turn.chat, **variables) if turn else None
    except UserError:
        return None


def answer_params(
    key: str, temperatures: Sequence[float], max_tokens: int, seed: int, top_p: float = 1.0, top_k: int = 0
) -> SamplingParams:
    """How the turn of id `key` is answered."""
    own = seed_of(f"{seed}/answer/{key}")
    temperature = temperatures[own % len(temperatures)]
    return SamplingParams(temperature=temperature, seed=own, max_tokens=max_tokens, top_p=top_p, top_k=top_k)


def answer_wave(
    engine: Engine, wave: Sequence[Turn], params: Sequence[SamplingParams], variables: Mapping[str, Any]
) -> Iterator[WaveAnswer]:
    """Answers turns together, and yields the answers as they end.

    `variables`: of the chat template. A turn that cannot be answered ends with the reason "error".
    """
    ready = []
    for place, turn in enumerate(wave):
        try:
            ready.append((place, engine.target.tokenizer.chat_ids(turn.chat, **variables)))
        except UserError as error:
            yield WaveAnswer(place, None, [], Completion([], "", "error", [], [], [], error=str(error)))
    requests = engine.stream_completions([ids for _, ids in ready], [params[place] for place, _ in ready])
    for request, done in requests:
        place, ids = ready[request]
        yield WaveAnswer(place, request, ids, done)
