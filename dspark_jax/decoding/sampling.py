"""What a request asks of the sampler, as host values and as per-slot arrays, and plain sampling."""

import dataclasses
import math

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.errors import UserError
from pallas_kernels import warp as warps
from pallas_kernels.noise import Key, gumbel
from pallas_kernels.warp import Warp

SAMPLERS = ("rejection", "coupled")


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. `seed` None: drawn by the engine. Stop tokens are
    the model's own end tokens (unless `ignore_eos`) and `stop_token_ids`; the one that ended a request is kept.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name, kind in {"temperature": (int, float), "top_p": (int, float), "min_p": (int, float), "top_k": int,
                           "max_tokens": int, "seed": (int, type(None))}.items():  # fmt: skip
            if not isinstance(getattr(self, name), kind) or isinstance(getattr(self, name), bool):
                raise UserError(f"{name}={getattr(self, name)!r}: it must be a number")
        checks = {
            "temperature": (math.isfinite(self.temperature) and self.temperature >= 0, "a number of at least 0"),
            "top_k": (self.top_k >= 0, "at least 0 (0 is off)"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p < 1, "at least 0 and below 1"),
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
        }
        for name, (holds, what) in checks.items():
            if not holds:
                raise UserError(f"{name}={getattr(self, name)!r}: it must be {what}")


@flax.struct.dataclass
class SlotSampling:
    """`SamplingParams` of the slots in use, as arrays `[R]`."""

    warp: Warp
    seed: Key
    stop_RxE: jax.Array  # stop token ids, padded with -1

    @classmethod
    def of(cls, params: SamplingParams, seed: int, stop_ids: tuple[int, ...], width: int) -> "SlotSampling":
        """One slot's entries (scalars, stop ids `[width]`). A seed is 64 bits: two words of the key."""
        warp = Warp(
            np.float32(params.temperature), np.int32(params.top_k), np.float32(params.top_p), np.float32(params.min_p)
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


def draw(
    warped_NxV: jax.Array, temperature_N: jax.Array, key_N: Key, token_ids_V: jax.Array | None = None
) -> jax.Array:
    """Index of each row's argmax of warped logits plus keyed Gumbel noise; no noise where the temperature is 0.

    `token_ids_V`: target ids of a reduced vocabulary, by which the noise is keyed.
    """
    ids = jnp.arange(warped_NxV.shape[-1]) if token_ids_V is None else token_ids_V

    def with_noise(scores):
        noise = gumbel(tuple(k[:, None] for k in key_N), ids).astype(scores.dtype)
        return scores + jnp.where(temperature_N[:, None] > 0, noise, 0)

    # Greedy batches skip the noise: it costs as much as the logits' own reductions.
    return argmax(jax.lax.cond(jnp.any(temperature_N > 0), with_noise, lambda scores: scores, warped_NxV))


def log_prob_of(warped_NxV: jax.Array, token_N: jax.Array) -> jax.Array:
    """log softmax at one index a row, `[N]`."""
    picked = jnp.take_along_axis(warped_NxV, token_N[:, None], axis=-1)[:, 0]
    return picked - jax.nn.logsumexp(warped_NxV, axis=-1)


__all__ = ["SAMPLERS", "SamplingParams", "SlotSampling", "argmax", "draw", "log_prob_of", "warps"]
