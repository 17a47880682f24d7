"""From a queued request to one that runs: checked, tokenised, its prompt cut into chunks for the cache."""

import random
from collections.abc import Callable, Sequence

import numpy as np

from dspark_jax.decoding.requests import Request, prompt_token_ids
from dspark_jax.errors import UserError
from dspark_jax.interop.target_io import Target

STOP_WIDTH = 8  # stop tokens a request may have


def admit(request: Request, target: Target, context: int, own_noise: bool) -> None:
    """Tokenises a request and makes it ready to run. Raises UserError, naming it, when it cannot run here.

    `context`: most tokens that it can have, prompt and answer. `own_noise`: one seed for all requests must not be one
    noise for all.
    """
    config, tokenizer, params, index = target.config, target.tokenizer, request.params, request.index
    try:
        ids = prompt_token_ids(request.prompt, tokenizer, config.vocab_size)
    except UserError as error:
        raise UserError(f"prompt {index}: {error}") from None
    room = context - len(ids)
    stops = () if params.ignore_eos else config.eos_token_ids
    stops = tuple(dict.fromkeys((*stops, *params.stop_token_ids)))
    biased = [token for token, _ in params.logit_bias if not 0 <= token < config.vocab_size]
    checks = {
        f"has {len(ids)} tokens, the context holds {context}: shorten it": room < 1,
        f"asks for max_tokens={params.max_tokens}, the context holds {context}": params.max_tokens > context,
        f"has {len(stops)} stop tokens, at most {STOP_WIDTH} are supported": len(stops) > STOP_WIDTH,
        f"biases token {biased[:1]}, outside the vocabulary of {config.vocab_size}": bool(biased),
        "has stop strings, but this model has no tokenizer: use stop_token_ids": params.stop and not tokenizer,
    }
    failed = next((what for what, fails in checks.items() if fails), None)
    if failed:
        raise UserError(f"prompt {index} {failed}")
    seed = random.getrandbits(64) if params.seed is None else params.seed
    if own_noise:
        seed = random.Random(f"{seed} {index}").getrandbits(64)
    request.admit(ids, seed, min(params.max_tokens, room), stops, tokenizer)


def next_chunks(
    requests: Sequence[Request], slots: int, chunk: int, bucket: Callable[[int], int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each request's next prompt tokens to cache: where they start `[slots]`, how many, the tokens `[slots, Q + 1]`.

    Chunks end at multiples of `chunk`, wherever they start, and before the prompt's last token. They have one token
    more than is cached: some drafters read a row's successor.
    """
    start, count, parts = np.zeros(slots, np.int32), np.zeros(slots, np.int32), []
    for i, request in enumerate(requests):
        end = min((request.cached // chunk + 1) * chunk, len(request.prompt_ids) - 1)
        start[i], count[i] = request.cached, end - request.cached
        parts.append(request.prompt_ids[request.cached : end + 1])
    tokens = np.zeros((slots, bucket(max(8, int(count.max()))) + 1), np.int32)
    for i, part in enumerate(parts):
        tokens[i, : len(part)] = part
    return start, count, tokens
