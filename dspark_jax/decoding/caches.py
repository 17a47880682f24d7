"""The page pool: keys and values of target and drafter, in pages that slots share out among them.

Forward passes only read it (`view`); `write` commits the accepted rows afterwards. Page tables are known here alone.
"""

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.models.config import DecoderConfig
from dspark_jax.models.layers import KeysValues
from pallas_kernels.ragged_attention import Prefix, Rows


@flax.struct.dataclass
class PagePool:
    """Keys and values of all layers of one kind of attention: L layers, P pages of S rows."""

    k_LxPxSxKVxD: jax.Array
    v_LxPxSxKVxD: jax.Array

    @property
    def page_size(self) -> int:
        return self.k_LxPxSxKVxD.shape[2]

    def view(self, table_RxC: jax.Array, length_R: jax.Array) -> Prefix:
        """The cached rows of each slot, read only."""
        return Prefix(self.k_LxPxSxKVxD, self.v_LxPxSxKVxD, table_RxC, length_R)

    def write(
        self, k_LxNxKVxD: jax.Array, v_LxNxKVxD: jax.Array, table_RxC: jax.Array, rows: Rows, keep_N: jax.Array
    ) -> "PagePool":
        """Stores the rows to keep at their absolute positions; the others are dropped."""
        pages, size = self.k_LxPxSxKVxD.shape[1:3]
        column = rows.position_N // size
        keep_N = keep_N & rows.valid_N & (column < table_RxC.shape[1])
        page_N = jnp.where(keep_N, table_RxC[rows.slot_N, column], pages)
        at = (slice(None), page_N, rows.position_N % size)
        return PagePool(
            self.k_LxPxSxKVxD.at[at].set(k_LxNxKVxD, mode="drop"), self.v_LxPxSxKVxD.at[at].set(v_LxNxKVxD, mode="drop")
        )


Pools = tuple[PagePool, ...]  # one for each kind of attention; a page id means the same rows in all of them


def empty_pools(config: DecoderConfig, pages: int, page_size: int, dtype: jnp.dtype) -> Pools:
    """Zeroed pools for a decoder's layers."""

    def pool(kind: int) -> PagePool:
        attention, layers = config.attention[kind], config.layer_kinds.count(kind)
        shape = (layers, pages, page_size, attention.num_kv_heads, attention.head_dim)
        return PagePool(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    return tuple(pool(kind) for kind in range(len(config.attention)))


def view_pools(pools: Pools, table_RxC: jax.Array, length_R: jax.Array) -> tuple[Prefix, ...]:
    """The cached rows of each slot, read only, for each kind of attention."""
    return tuple(pool.view(table_RxC, length_R) for pool in pools)


def write_pools(pools: Pools, kv: tuple[KeysValues, ...], table_RxC: jax.Array, rows: Rows, keep_N: jax.Array) -> Pools:
    """Stores the rows to keep in every pool."""
    return tuple(pool.write(k, v, table_RxC, rows, keep_N) for pool, (k, v) in zip(pools, kv, strict=True))


class PageAllocator:
    """Which pages are free (host side). A request takes all pages it can ever need, so it never starves midway."""

    def __init__(self, pages: int):
        self.total = pages
        self._free = list(range(pages - 1, -1, -1))

    def take(self, count: int) -> list[int] | None:
        """`count` page ids, or None when too few are free."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give(self, pages: list[int]) -> None:
        self._free.extend(reversed(pages))
