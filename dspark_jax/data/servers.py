"""Answers from OpenAI-compatible servers of the target (vLLM, SGLang and others), many at a time."""

import collections
import dataclasses
import http.client
import json
import os
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from dspark_jax.data.conversations import PromptRow
from dspark_jax.data.generate import answer_params, answers_run
from dspark_jax.data.jsonl import ResumableJsonl
from dspark_jax.data.turns import Line, Turn, open_turns, thinking_variables, turn_ids
from dspark_jax.errors import UserError
from dspark_jax.interop.target_io import Target
from dspark_jax.progress import Progress

TRIES = 5
FIRST_PAUSE = 1.0  # seconds, doubled from try to try
TIMEOUT = 600.0  # seconds for one answer
GIVE_UP = 20  # turns in a row that got no answer
REFUSED = (400, 413, 422)  # the request is at fault: asking again is in vain
# What a reply can be at fault with: the network, HTTP, no JSON, other JSON than expected.
_FAULTS = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError)


@dataclasses.dataclass(frozen=True)
class Server:
    url: str  # up to and including /v1
    model: str


class _Refused(Exception):
    """The server will not answer this turn, now or later."""


class _Unanswered(Exception):
    """No server answered in all tries."""


def find_servers(urls: Sequence[str]) -> list[Server]:
    """The servers that answer, with the model that they serve. UserError when none does, or when models differ."""
    servers = []
    for url in urls:
        url = url.rstrip("/")
        try:
            servers.append(Server(url, _call(f"{url}/models", timeout=30.0)["data"][0]["id"]))
        except (*_FAULTS, _Refused) as error:
            print(f"warning: {url} is left out ({_reason(error)})", file=sys.stderr)
    if not servers:
        raise UserError(f"no server of data.servers answers: {', '.join(urls)} (each is given as http://HOST:PORT/v1)")
    models = sorted({server.model for server in servers})
    if len(models) > 1:
        raise UserError(f"data.servers serve different models: {', '.join(models)}")
    return servers


def ask_servers(
    servers: Sequence[Server],
    target: Target,
    rows: Sequence[PromptRow],
    path: str | Path,
    temperatures: Sequence[float],
    max_tokens: int,
    seed: int,
    thinking: str = "",
    top_p: float = 1.0,
    top_k: int = 0,
    at_a_time: int = 64,
) -> list[Line]:
    """Like `write_answers`, asking servers for the texts, `at_a_time` turns each. Lines have no token ids.

    A turn that a server refuses gets a line that says why. One that gets no answer in `TRIES` tries gets none, so that
    the next start asks it again; after `GIVE_UP` such turns in a row it is a UserError.
    """
    ids, variables = turn_ids(rows), thinking_variables(thinking)
    extra = {"chat_template_kwargs": variables} if variables else {}
    extra |= {"top_p": top_p} if top_p < 1 else {}
    extra |= {"top_k": top_k} if top_k else {}  # not OpenAI's, but vLLM's and SGLang's

    def payload(turn: Turn) -> dict[str, Any]:
        own = answer_params(turn.id, temperatures, max_tokens, seed)
        sampling = {"temperature": own.temperature, "max_tokens": max_tokens, "seed": own.seed}
        return {"messages": turn.chat, **sampling, **extra}

    run = answers_run(target, temperatures, max_tokens, seed, thinking, servers[0].model, top_p, top_k)
    with ResumableJsonl(path, run) as out, Progress("answers", len(ids)) as progress:
        progress.update(len(ids & out.done))
        asked = _Asked(out, progress)
        _ask_all(servers, open_turns(rows, out.rows), payload, at_a_time * len(servers), asked)
        if asked.failures:
            text = f"{asked.failures} turns got no answer ({asked.reason}): the same command asks again"
            print(f"warning: {text}", file=sys.stderr)
        return [row for row in out.rows if row["id"] in ids]


@dataclasses.dataclass
class _Asked:
    """Takes what came back of each turn; all of it in one thread."""

    out: ResumableJsonl
    progress: Progress
    failures: int = 0
    in_a_row: int = 0
    reason: str = ""

    def take(self, turn: Turn, future: Future) -> Turn | None:
        """Keeps the answer; returns the turn to ask next in its conversation."""
        try:
            line = future.result()
        except _Unanswered as error:
            self.failures, self.in_a_row, self.reason = self.failures + 1, self.in_a_row + 1, str(error)
            return None
        self.in_a_row = 0
        self.out.append(line)
        self.progress.advance(1)
        return turn.after(line)


def _ask_all(
    servers: Sequence[Server],
    turns: Sequence[Turn],
    payload: Callable[[Turn], dict[str, Any]],
    workers: int,
    asked: _Asked,
) -> None:
    """Asks turn by turn, `workers` conversations at a time. What is on its way when this is interrupted is kept."""
    todo, pending, stop, count = collections.deque(turns), {}, threading.Event(), 0
    pool = ThreadPoolExecutor(workers)
    try:
        while todo or pending:
            while todo and len(pending) < workers:
                turn = todo.popleft()
                pending[pool.submit(_ask, servers, count, turn, payload(turn), stop)] = turn
                count += 1
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                following = asked.take(pending.pop(future), future)
                if following:
                    todo.appendleft(following)  # a conversation that has begun ends before others begin
            if asked.in_a_row >= GIVE_UP:
                raise UserError(f"the servers have stopped answering ({asked.reason}): the same command continues")
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
        for future, turn in pending.items():
            if not future.cancelled():
                asked.take(turn, future)


def _ask(servers: Sequence[Server], first: int, turn: Turn, payload: Mapping[str, Any], stop: threading.Event) -> Line:
    """One turn's line. Each try goes to the next server, after a pause that doubles. Raises _Unanswered."""
    reason = "stopped"
    for attempt in range(TRIES):
        if stop.wait(FIRST_PAUSE * 2 ** (attempt - 1) if attempt else 0):
            break
        server = servers[(first + attempt) % len(servers)]
        try:
            reply = _call(f"{server.url}/chat/completions", {**payload, "model": server.model})
            return _line(turn, reply["choices"][0], payload["temperature"])
        except _Refused as error:
            return turn.failed(str(error))
        except _FAULTS as error:
            reason = f"{server.url}: {_reason(error)}"
    raise _Unanswered(reason)


def _line(turn: Turn, choice: Mapping[str, Any], temperature: float) -> Line:
    """The line of a reply. Thoughts that the server has parsed out of the text go back where templates look for them.

    Raises _Refused on an answer without text: the same request would give it again.
    """
    message = choice["message"]
    text, thoughts = message.get("content"), message.get("reasoning") or message.get("reasoning_content")
    if not isinstance(text, str) or not text.strip():
        raise _Refused(f"an answer without text (finish_reason {choice.get('finish_reason')!r})")
    text.encode()  # half of a surrogate pair, which JSON can spell, is a ValueError
    answer = {"content": text, **({"reasoning_content": thoughts} if isinstance(thoughts, str) else {})}
    return turn.line(answer, str(choice.get("finish_reason")), temperature=temperature)


def _call(url: str, payload: Mapping[str, Any] | None = None, timeout: float = TIMEOUT) -> dict[str, Any]:
    """The JSON that a server gives; a payload is posted. `OPENAI_API_KEY` is sent where it is set."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if payload is None else json.dumps(payload).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout) as reply:
            return json.loads(reply.read())
    except urllib.error.HTTPError as error:
        text = f"HTTP {error.code}: {' '.join(error.read(300).decode(errors='replace').split())}"
        raise (_Refused if error.code in REFUSED else OSError)(text) from None


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error) or type(error).__name__
