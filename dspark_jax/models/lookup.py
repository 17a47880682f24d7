"""A drafter without weights: the text after the last place that reads like its end, copied (prompt lookup)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Drafts what followed the latest earlier occurrence of the longest n-gram that ends the text, up to `longest`.

    Config and module in one: there is nothing to train. Seven drafts are a block of eight rows, as the released block
    drafters have it. Longer n-grams than three find little that three do not, and how far shorter ones are to be
    trusted is learnt while serving, for each length by itself.
    """

    num_drafts: int = 7
    longest: int = 3

    tap_layers: ClassVar[tuple[int, ...]] = ()  # it reads tokens alone
    confidence: ClassVar[bool] = False

    def continuation(self, history_RxT: jax.Array, length_R: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Drafts `[R, K]` after the first `length_R` tokens of each row, and the length of the n-gram found (0: none).

        A copy that reaches the end of the text goes on with what it has copied, so that a cycle is drafted whole.
        Without a match the drafts mean nothing.
        """
        size = history_RxT.shape[1]
        place_T, last_R = jnp.arange(size, dtype=jnp.int32), length_R - 1
        alike_RxT = place_T < last_R[:, None]  # the text's own end is no match
        match_RxT = jnp.zeros(history_RxT.shape, jnp.int32)
        for n in range(self.longest):
            end_R = jnp.take_along_axis(history_RxT, jnp.maximum(last_R - n, 0)[:, None], axis=1)
            alike_RxT &= (jnp.roll(history_RxT, n, axis=1) == end_R) & (place_T >= n)
            match_RxT += alike_RxT
        # The longest match, and of equally long ones the latest, in one reduction.
        best_R = jnp.max(jnp.where(match_RxT > 0, match_RxT * size + place_T, 0), axis=1)
        match_R, found_R = best_R // size, best_R % size
        period_R = jnp.where(match_R > 0, last_R - found_R, 1)
        index_RxK = last_R[:, None] + 1 - period_R[:, None] + jnp.arange(self.num_drafts) % period_R[:, None]
        return jnp.take_along_axis(history_RxT, index_RxK, axis=1), match_R
