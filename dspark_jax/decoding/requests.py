"""Requests and completions: what goes into the engine and what comes out, on the host."""

import dataclasses
from collections.abc import Mapping, Sequence

from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.errors import UserError
from dspark_jax.interop.tokenizer import StreamDecoder, Tokenizer

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]


@dataclasses.dataclass
class Completion:
    """One answer. The three round lists have an entry per round: drafts made, verified, and accepted (no bonus)."""

    token_ids: list[int]
    text: str
    finish_reason: str | None  # "stop" or "length"
    drafted: list[int]
    verified: list[int]
    accepted: list[int]

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
class Request:
    """A request in flight."""

    index: int
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int  # what the context leaves of params.max_tokens
    stop_ids: tuple[int, ...]
    decoder: StreamDecoder | None
    completion: Completion
    pages: list[int] = dataclasses.field(default_factory=list)

    def push(self, tokens: list[int], drafted: int, verified: int, accepted: int) -> None:
        """Takes one round's outcome."""
        done = self.completion
        done.token_ids.extend(tokens)
        done.drafted.append(drafted)
        done.verified.append(verified)
        done.accepted.append(accepted)

    def event(self, tokens: list[int]) -> StreamEvent:
        """The event for these tokens; closes the text when the request has ended."""
        done = self.completion
        ended = len(done.token_ids) >= self.max_tokens or bool(tokens and tokens[-1] in self.stop_ids)
        if ended:
            done.finish_reason = "stop" if done.token_ids[-1] in self.stop_ids else "length"
        delta = ""
        if self.decoder is not None:
            delta = self.decoder.push(tokens) + (self.decoder.flush() if ended else "")
            done.text += delta
        return StreamEvent(self.index, delta, tokens, done.finish_reason)


def prompt_token_ids(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """Token ids of a prompt: a string (one user turn), chat messages, or ids as they are.

    A string is wrapped in the chat template where the model has one. Raises UserError on an empty prompt, on text for
    a model without a tokenizer, and on ids outside the vocabulary.
    """
    if isinstance(prompt, str) or (len(prompt) and isinstance(prompt[0], Mapping)):
        if tokenizer is None:
            raise UserError("this model has no tokenizer: give prompts as lists of token ids")
        if isinstance(prompt, str) and not prompt.strip():
            raise UserError("empty prompt: give at least one word")
        if isinstance(prompt, str) and not tokenizer.chat_template:
            ids = tokenizer.encode(prompt, add_special_tokens=True)
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            ids = tokenizer.chat_ids(messages)
    else:
        ids = [int(i) for i in prompt]
    if not ids:
        raise UserError("empty prompt: it has no tokens")
    bad = next((i for i in ids if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise UserError(f"prompt token {bad} is outside the model's vocabulary of {vocab_size}")
    return ids
