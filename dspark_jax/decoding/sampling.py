"""What a request asks of the sampler, as host values and as per-slot arrays, and plain sampling."""

import dataclasses
import operator
from collections.abc import Mapping, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.errors import UserError
from pallas_kernels import warp as warps
from pallas_kernels.noise import Key, gumbel
from pallas_kernels.warp import Warp

SAMPLERS = ("rejection", "coupled")
MAX_LOGPROBS = 20

_REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_WHOLES = ("top_k", "max_tokens", "min_tokens", "seed", "logprobs")
_LARGEST = 1e6  # of temperatures, penalties and biases: float32 holds what they make of any logit
_RANGE = f"between {1 / _LARGEST:g} and {_LARGEST:g}"
_INT32 = 2**31


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. `seed` None: drawn by the engine. Penalties work as
    in `transformers` (repetition: prompt and output) and in the OpenAI API (presence, frequency: output); `logit_bias`
    maps token ids to what is added to their logits. Stop tokens are the model's own end tokens (unless `ignore_eos`)
    and `stop_token_ids`; the one that ended a request is kept, while a `stop` string is in neither text nor tokens.
    Until `min_tokens` are out no stop token comes, and a stop string that begins there does not count. `logprobs` n:
    the log-probability of every token under the model's own distribution, and of the n likeliest ones beside it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] | Mapping[int, float] = ()
    seed: int | None = None
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] | str = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_tokens(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        for name in (*_REALS, *_WHOLES):
            value, real = getattr(self, name), name in _REALS
            if value is None and name in ("seed", "logprobs"):
                continue
            if not isinstance(value, (int, float) if real else int) or isinstance(value, bool) or value != value:
                raise UserError(f"{name}={value!r}: it must be a {'' if real else 'whole '}number")
        small, large = 1 / _LARGEST, _LARGEST
        checks = {
            "temperature": (self.temperature == 0 or small <= self.temperature <= large, f"0 (greedy) or {_RANGE}"),
            "top_k": (self.top_k >= 0, "at least 0 (0 is off)"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p < 1, "at least 0 and below 1"),
            "repetition_penalty": (small <= self.repetition_penalty <= large, f"{_RANGE} (1 is off)"),
            "presence_penalty": (abs(self.presence_penalty) <= large, f"at most {large:g} in size"),
            "frequency_penalty": (abs(self.frequency_penalty) <= large, f"at most {large:g} in size"),
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "min_tokens": (0 <= self.min_tokens <= self.max_tokens, f"between 0 and max_tokens, {self.max_tokens}"),
            "logprobs": (self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
            "ignore_eos": (isinstance(self.ignore_eos, bool), "True or False"),
        }
        for name, (holds, what) in checks.items():
            if not holds:
                raise UserError(f"{name}={getattr(self, name)!r}: it must be {what}")

    @property
    def sampled(self) -> bool:
        """True when tokens are drawn at random."""
        return self.temperature > 0

    @property
    def limited(self) -> bool:
        """True when some tokens can never be drawn."""
        return self.sampled and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def adjusts(self) -> bool:
        """True when the logits are to be changed before they are warped."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty, self.min_tokens) != (
            1.0, 0.0, 0.0, 0
        ) or bool(self.logit_bias)  # fmt: skip


def _stop_strings(stop: Sequence[str] | str | None) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else stop or ()
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) and text for text in texts):
        raise UserError(f"stop={stop!r}: it must be texts of at least one character")
    return tuple(texts)


def _stop_tokens(stop_token_ids: Sequence[int] | None) -> tuple[int, ...]:
    try:
        ids = tuple(operator.index(token) for token in (() if stop_token_ids is None else stop_token_ids))
    except TypeError:
        ids = (-1,)
    if not all(0 <= token < _INT32 for token in ids):
        raise UserError(f"stop_token_ids={stop_token_ids!r}: they must be token ids")
    return ids


def _biases(logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias. JSON has texts for the ids."""
    pairs = logit_bias.items() if isinstance(logit_bias, Mapping) else logit_bias or ()
    try:
        biases = tuple((int(token), float(value)) for token, value in pairs)
    except (TypeError, ValueError, OverflowError):
        biases = ((0, float("nan")),)
    if not all(abs(value) <= _LARGEST for _, value in biases):
        raise UserError(f"logit_bias={logit_bias!r}: it must map token ids to numbers of at most {_LARGEST:g} in size")
    return biases


@flax.struct.dataclass
class SlotSampling:
    """`SamplingParams` of the slots in use, as arrays `[R]`."""

    warp: Warp
    seed: Key
    stop_RxE: jax.Array  # stop token ids, padded with -1

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        seed: int,
        stop_ids: tuple[int, ...],
        width: int,
        sampled: bool = True,
        limited: bool = True,
    ) -> "SlotSampling":
        """One slot's entries (scalars, stop ids `[width]`). A seed is 64 bits: two words of the key.

        `sampled`, `limited`: False promises that no slot is (see `Warp`).
        """
        warp = Warp(
            np.float32(params.temperature),
            np.int32(min(params.top_k, _INT32 - 1)),
            np.float32(params.top_p),
            np.float32(params.min_p),
            sampled,
            limited,
        )
        words = (np.uint32(seed & 0xFFFFFFFF), np.uint32((seed >> 32) & 0xFFFFFFFF))
        stops = np.full(width, -1, np.int32)
        stops[: len(stop_ids)] = stop_ids
        return cls(warp, words, stops)


def argmax(scores_NxV: jax.Array) -> jax.Array:
    """First index of each row's maximum. Two plain reductions: XLA:CPU vectorises them, and not its own argmax."""
    peak = jnp.max(scores_NxV, axis=-1, keepdims=True)
    index = jnp.arange(scores_NxV.shape[-1], dtype=jnp.int32)
    return jnp.min(jnp.where(scores_NxV == peak, index, scores_NxV.shape[-1] - 1), axis=-1)


def draw(warped_NxV: jax.Array, warp: Warp, key_N: Key, token_ids_V: jax.Array | None = None) -> jax.Array:
    """Index of each row's argmax of warped logits plus keyed Gumbel noise; no noise where the temperature is 0.

    `token_ids_V`: target ids of a reduced vocabulary, by which the noise is keyed.
    """
    ids = jnp.arange(warped_NxV.shape[-1]) if token_ids_V is None else token_ids_V

    def with_noise(scores):
        noise = gumbel(tuple(k[:, None] for k in key_N), ids).astype(scores.dtype)
        return scores + jnp.where(warp.temperature[:, None] > 0, noise, 0)

    if not warp.sampled:
        return argmax(warped_NxV)

    # Greedy batches skip the noise: it costs as much as the logits' own reductions.
    return argmax(jax.lax.cond(jnp.any(warp.temperature > 0), with_noise, lambda scores: scores, warped_NxV))


def log_prob_of(warped_NxV: jax.Array, token_N: jax.Array) -> jax.Array:
    """log softmax at one index a row, `[N]`."""
    picked = jnp.take_along_axis(warped_NxV, token_N[:, None], axis=-1)[:, 0]
    return picked - jax.nn.logsumexp(warped_NxV, axis=-1)


__all__ = ["SAMPLERS", "SamplingParams", "SlotSampling", "argmax", "draw", "log_prob_of", "warps"]
