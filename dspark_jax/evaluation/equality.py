"""Proof that two greedy (or coupled) runs say the same, up to near-ties of float32 that are shown (DESIGN rule 4)."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.sampling import SamplingParams, SlotSampling
from dspark_jax.interop.target_io import Target, dense_forward
from pallas_kernels import warp as warps
from pallas_kernels.noise import Role, gumbel, position_key

TIE_FACTOR = 10.0  # a first difference is a near-tie when its gap is within this many times the measured noise


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first place where two runs part. `gap`: between the two tokens' scores; `noise`: between row counts."""

    index: int
    token_a: int | None
    token_b: int | None
    gap: float
    noise: float

    @property
    def near_tie(self) -> bool:
        return self.gap <= TIE_FACTOR * self.noise

    def __str__(self) -> str:
        kind = "near-tie" if self.near_tie else "DIFFERENT"
        where = f"{kind} at token {self.index}: {self.token_a} or {self.token_b}"
        return f"{where}, gap {self.gap:.2e}, noise {self.noise:.2e}"


def first_difference(
    target: Target, prompt_ids: Sequence[int], a: Sequence[int], b: Sequence[int], params: SamplingParams, seed: int = 0
) -> Difference | None:
    """None when both outputs are equal; else where they part and how close the two tokens' scores were.

    The score of a token is logit / T plus its keyed noise. The noise of the arithmetic is measured at that very place:
    the largest change of any logit when the same prefix is run with another number of rows.
    """
    index = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if index == len(a) == len(b):
        return None
    if index >= min(len(a), len(b)):
        return Difference(index, *(s[index] if index < len(s) else None for s in (a, b)), np.inf, 0.0)
    prefix = [*prompt_ids, *a[:index]]
    few, many = (_last_logits(target, prefix, pad) for pad in (32, 256))
    entries = SlotSampling.of(params, seed, (), 1)
    warp = jax.tree.map(lambda x: jnp.asarray(x)[None], entries.warp)
    noise = float(jnp.max(jnp.abs(warps.scaled(few[None], warp) - warps.scaled(many[None], warp))))
    tokens = jnp.asarray([a[index], b[index]])
    scores = warps.scaled(few[None], warp)[0, tokens]
    if params.temperature > 0:
        scores += gumbel(position_key(entries.seed, jnp.int32(len(prefix)), Role.SAMPLE), tokens)
    return Difference(index, a[index], b[index], float(abs(scores[0] - scores[1])), noise)


def _last_logits(target: Target, prefix: Sequence[int], pad: int) -> jax.Array:
    length = -(-(len(prefix) + 1) // pad) * pad
    tokens = np.zeros((1, length), np.int32)
    tokens[0, : len(prefix)] = prefix
    return dense_forward(target.module, target.params, tokens).logits[0, len(prefix) - 1]
