"""Requests and completions: what goes into the engine and what comes out, on the host."""

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.stops import StopText
from dspark_jax.errors import UserError
from dspark_jax.interop.tokenizer import Tokenizer

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability under the model's own distribution, and the likeliest tokens in its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass
class Completion:
    """One answer. The three round lists have an entry per round: drafts made, verified, and accepted (no bonus)."""

    token_ids: list[int]
    text: str
    finish_reason: str | None  # "stop", "length", "cancelled" or "error"
    drafted: list[int]
    verified: list[int]
    accepted: list[int]
    confidence: list[list[float]] = dataclasses.field(default_factory=list)  # per round: the drafter's logits
    logprobs: list[TokenLogprob] | None = None
    error: str = ""  # why the request was refused
    # Seconds from the start of the run to the first token and to the last; they say nothing about the answer.
    first_token_seconds: float | None = dataclasses.field(default=None, compare=False)
    seconds: float | None = dataclasses.field(default=None, compare=False)

    @property
    def tokens_per_round(self) -> float:
        """Emitted tokens per round, the bonus included: the paper's accepted length."""
        return len(self.token_ids) / max(len(self.accepted), 1)


@dataclasses.dataclass(frozen=True)
class StreamEvent:
    """Newly committed tokens of one request. Unpacks as (request, text_delta, token_ids, finish_reason)."""

    request: int
    text_delta: str
    token_ids: list[int]
    finish_reason: str | None

    def __iter__(self):
        return iter((self.request, self.text_delta, self.token_ids, self.finish_reason))


@dataclasses.dataclass
class Round:
    """What one round gave a request."""

    tokens: list[int]
    drafted: int
    verified: int
    accepted: int
    confidence: list[float]
    logprobs: list[TokenLogprob]


@dataclasses.dataclass
class Request:
    """A request, from the queue to its end. A queued one holds its prompt and nothing else."""

    index: int
    prompt: Prompt
    params: SamplingParams
    completion: Completion = dataclasses.field(default_factory=lambda: Completion([], "", None, [], [], []))
    cancelled: bool = False
    # Set by `admit`:
    prompt_ids: list[int] = dataclasses.field(default_factory=list)
    seed: int = 0
    max_tokens: int = 0  # what the context leaves of params.max_tokens
    stop_ids: tuple[int, ...] = ()
    # While it runs:
    pages: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0  # prompt tokens in the cache so far
    carry: Any = ()  # the drafter's, after those
    features: list[Any] = dataclasses.field(default_factory=list)  # rows that wait for the engine's sink
    handed_over: int = 0  # rows that the sink has
    _text: StopText | None = None
    _emitted: list[int] = dataclasses.field(default_factory=list)  # tokens of every round
    _sent: int = 0  # tokens that events have shown

    def admit(self, ids: list[int], seed: int, max_tokens: int, stop_ids: tuple[int, ...], tokenizer: Tokenizer | None):
        """Makes a queued request ready to run."""
        self.prompt_ids, self.seed, self.max_tokens, self.stop_ids = ids, seed, max_tokens, stop_ids
        if tokenizer:
            self._text = StopText(tokenizer, self.params.stop)
        if self.params.logprobs is not None:
            self.completion.logprobs = []

    @property
    def ended(self) -> bool:
        return self.completion.finish_reason is not None

    @property
    def settled_rows(self) -> int:
        """Rows before the last shown token: what can no longer be taken back."""
        return len(self.prompt_ids) + self._sent - 1

    def take(self, rounds: Sequence[Round], now: float) -> StreamEvent | None:
        """Takes the rounds of a dispatch; None when there is nothing new to show. `now`: seconds since the start."""
        done, shown = self.completion, ""
        for round_ in rounds:
            if self.ended:  # overshoot behind a stop string
                break
            done.drafted.append(round_.drafted)
            done.verified.append(round_.verified)
            done.accepted.append(round_.accepted)
            done.confidence.append(round_.confidence)
            self._emitted.append(0)
            logprobs = round_.logprobs or [None] * len(round_.tokens)
            for token, logprob in zip(round_.tokens, logprobs, strict=True):
                shown += self._take_token(token, logprob)
                if self.ended:
                    break
        done.text += shown
        if done.token_ids and done.first_token_seconds is None:
            done.first_token_seconds = now
        if self.ended:
            done.seconds = now
        return self._event(shown)

    def _take_token(self, token: int, logprob: TokenLogprob | None) -> str:
        """One token; returns the text that it shows and ends the request where plain decoding would."""
        done = self.completion
        done.token_ids.append(token)
        self._emitted[-1] += 1
        if done.logprobs is not None:
            done.logprobs.append(logprob)
        searching = len(done.token_ids) > self.params.min_tokens
        shown = self._text.push(token, searching) if self._text else ""
        last = token in self.stop_ids or len(done.token_ids) >= self.max_tokens
        if self._text and last and not self._text.stopped:
            shown += self._text.flush(searching)
        if self._text and self._text.stopped:
            self._cut(self._text.kept())
            done.finish_reason = "stop"
        elif last:
            done.finish_reason = "stop" if token in self.stop_ids else "length"
        return shown

    def _cut(self, count: int) -> None:
        """Keeps the first `count` tokens, and of logprobs and rounds what belongs to them."""
        done = self.completion
        del done.token_ids[count:]
        if done.logprobs is not None:
            del done.logprobs[count:]
        ends = np.cumsum(self._emitted)
        rounds = int(np.searchsorted(ends, count)) + 1 if count else 0
        for per_round in (done.drafted, done.verified, done.accepted, done.confidence, self._emitted):
            del per_round[rounds:]
        if rounds:
            self._emitted[-1] -= int(ends[rounds - 1]) - count
            done.accepted[-1] = min(done.accepted[-1], self._emitted[-1])

    def _event(self, shown: str) -> StreamEvent | None:
        done = self.completion
        holds_back = bool(self._text and self.params.stop and not self.ended)
        count = self._text.settled if holds_back else len(done.token_ids)
        tokens, self._sent = done.token_ids[self._sent : count], max(self._sent, count)
        if not (shown or tokens or self.ended):
            return None
        return StreamEvent(self.index, shown, tokens, done.finish_reason)

    def end(self, reason: str, now: float, error: str = "") -> StreamEvent:
        """Ends a request from outside: cancelled or refused."""
        done = self.completion
        done.finish_reason, done.error, done.seconds = reason, error, now
        shown = self._text.flush(searching=False) if self._text and reason == "cancelled" else ""
        done.text += shown
        return self._event(shown) or StreamEvent(self.index, "", [], reason)

    def release(self) -> None:
        """Drops what only a running request needs: thousands of answers may be waiting for the last one."""
        self.pages, self.carry, self.features, self._text = [], (), [], None


def new_requests(prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> list[Request]:
    """Queued requests in the order of the prompts. `params`: one for all, or one each."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise UserError(f"{len(prompts)} prompts, but {len(each)} sampling parameters: give one for all, or one each")
    return [Request(i, prompt, p) for i, (prompt, p) in enumerate(zip(prompts, each, strict=True))]


def prompt_token_ids(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """Token ids of a prompt: a string (one user turn), chat messages, or ids as they are.

    A string is wrapped in the chat template where the model has one. Raises UserError on an empty prompt, on text for
    a model without a tokenizer, on ids outside the vocabulary, and on anything else.
    """
    if isinstance(prompt, str) or _is_chat(prompt):
        if tokenizer is None:
            raise UserError("this model has no tokenizer: give prompts as lists of token ids")
        if isinstance(prompt, str) and not prompt.strip():
            raise UserError("empty prompt: give at least one word")
        ids = _text_ids(prompt, tokenizer)
    else:
        ids = _as_ids(prompt)
    if not ids:
        raise UserError("empty prompt: it has no tokens")
    bad = next((i for i in ids if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise UserError(f"prompt token {bad} is outside the model's vocabulary of {vocab_size}")
    return ids


def _is_chat(prompt: Prompt) -> bool:
    return isinstance(prompt, (list, tuple)) and bool(prompt) and all(isinstance(item, Mapping) for item in prompt)


def _text_ids(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    try:
        if isinstance(prompt, str) and not tokenizer.chat_template:
            return tokenizer.encode(prompt, add_special_tokens=True)
        return tokenizer.chat_ids([{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt))
    except TypeError:  # half of a surrogate pair, which JSON can spell
        raise UserError("this prompt has characters that are no Unicode text: mend or drop them") from None


def _as_ids(prompt: Prompt) -> list[int]:
    try:
        if isinstance(prompt, (Mapping, bytes)):
            raise TypeError
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise UserError(
            "this prompt is of no known kind: give a text, a list of chat messages or a list of token ids"
        ) from None
