"""Which keys the queries of a tile see: one answer for the kernels of every chip."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class View(NamedTuple):
    """What the rows of a tile may see (static). Keys are counted from the block's first row; cached ones are below 0.

    Query `m` of a tile is head `m % group` of the block's row `base + m // group`.
    """

    group: int
    tile: int
    tiles: int
    causal: bool
    window: int
    from_anchor: bool

    def oldest(self, base: jax.Array) -> jax.Array:
        """The first key that the tile from row `base` on sees."""
        if not self.window:
            return jnp.full_like(base, jnp.iinfo(jnp.int32).min // 2)
        return jnp.full_like(base, -self.window) if self.from_anchor else base - self.window + 1

    def mask(self, key: jax.Array, m: jax.Array, base: jax.Array, end: jax.Array, cached: bool) -> jax.Array:
        """Which keys `[1, C]` the queries `[M, 1]` see, `[M, C]` or `[1, C]`; `end`: of the keys that are there."""
        visible = key < end
        # Rows are compared times the group, which saves a division: a <= m // group where a * group <= m.
        if self.causal and not cached:
            visible = visible & ((key - base) * self.group <= m)
        if self.window and not self.from_anchor:
            visible = visible & ((key - base + self.window) * self.group > m)
        if self.window and self.from_anchor and cached:
            visible = visible & (key >= -self.window)
        return visible
