"""The page pool: keys and values of target and drafter, in pages that slots share out among them.

Forward passes only read it (`view`); `write` commits the accepted rows afterwards. Page tables are known here alone.
"""

import hashlib
import itertools
from collections.abc import Hashable, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.models.config import DecoderConfig
from dspark_jax.models.layers import KeysValues
from dspark_jax.parallel import MODEL, split
from pallas_kernels.ragged_attention import Prefix, Rows

# How a pool is split on a mesh, where its heads divide.
HEADS = (None, None, MODEL, None, None)


@flax.struct.dataclass
class PagePool:
    """Keys and values of all layers of one kind of attention: L layers, P pages of S rows.

    Heads come before rows: a head's rows of a page are then whole tiles of a TPU's memory, however few heads there are,
    and a kernel multiplies them as they lie.
    """

    k_LxPxKVxSxD: jax.Array
    v_LxPxKVxSxD: jax.Array

    @property
    def page_size(self) -> int:
        return self.k_LxPxKVxSxD.shape[3]

    def view(self, table_RxC: jax.Array, length_R: jax.Array) -> Prefix:
        """The cached rows of each slot, read only."""
        return Prefix(self.k_LxPxKVxSxD, self.v_LxPxKVxSxD, table_RxC, length_R)

    def write(
        self, k_LxNxKVxD: jax.Array, v_LxNxKVxD: jax.Array, table_RxC: jax.Array, rows: Rows, keep_N: jax.Array
    ) -> "PagePool":
        """Stores the rows to keep at their absolute positions; the others are dropped."""
        pages, size = self.k_LxPxKVxSxD.shape[1], self.k_LxPxKVxSxD.shape[3]
        column = rows.position_N // size
        keep_N = keep_N & rows.valid_N & (column < table_RxC.shape[1])
        page_N = jnp.where(keep_N, table_RxC[rows.slot_N, column], pages)
        place = (page_N, rows.position_N % size)
        return PagePool(_put(self.k_LxPxKVxSxD, k_LxNxKVxD, *place), _put(self.v_LxPxKVxSxD, v_LxNxKVxD, *place))


def _put(pool: jax.Array, new_LxNxKVxD: jax.Array, page_N: jax.Array, row_N: jax.Array) -> jax.Array:
    """`pool` with N rows written; pages past its end are dropped. On a mesh every device writes its own heads."""

    def put(pool: jax.Array, new: jax.Array, page_N: jax.Array, row_N: jax.Array) -> jax.Array:
        layer, head = jnp.arange(pool.shape[0])[:, None, None], jnp.arange(pool.shape[2])
        # An index for every axis: XLA for TPU copies the whole pool for some scatters of slices.
        return pool.at[layer, page_N[:, None], head, row_N[:, None]].set(new, mode="drop")

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return put(pool, new_LxNxKVxD, page_N, row_N)
    # Left to itself, XLA would gather the rows of all heads: it cannot split a scatter along an axis that is indexed.
    heads = split(mesh, pool.shape, HEADS)
    specs = (heads, split(mesh, new_LxNxKVxD.shape, (None, None, MODEL, None)), PartitionSpec(), PartitionSpec())
    return jax.shard_map(put, in_specs=specs, out_specs=heads)(pool, new_LxNxKVxD, page_N, row_N)


Pools = tuple[PagePool, ...]  # one for each kind of attention; a page id means the same rows in all of them


def empty_pools(config: DecoderConfig, pages: int, page_size: int, dtype: jnp.dtype, mesh: Mesh | None = None) -> Pools:
    """Zeroed pools for a decoder's layers; on a mesh, every device keeps the heads that it computes."""

    def pool(kind: int) -> PagePool:
        attention, layers = config.attention[kind], config.layer_kinds.count(kind)
        shape = (layers, pages, attention.num_kv_heads, page_size, attention.head_dim)
        where = NamedSharding(mesh, split(mesh, shape, HEADS)) if mesh else None
        return PagePool(jnp.zeros(shape, dtype, device=where), jnp.zeros(shape, dtype, device=where))

    return tuple(pool(kind) for kind in range(len(config.attention)))


def view_pools(pools: Pools, table_RxC: jax.Array, length_R: jax.Array) -> tuple[Prefix, ...]:
    """The cached rows of each slot, read only, for each kind of attention."""
    return tuple(pool.view(table_RxC, length_R) for pool in pools)


def write_pools(pools: Pools, kv: tuple[KeysValues, ...], table_RxC: jax.Array, rows: Rows, keep_N: jax.Array) -> Pools:
    """Stores the rows to keep in every pool."""
    return tuple(pool.write(k, v, table_RxC, rows, keep_N) for pool, (k, v) in zip(pools, kv, strict=True))


class PageAllocator:
    """Which pages are free (host side). A request takes all pages it can ever need, so it never starves midway.

    Full pages of a prompt may be shared: `publish` files them under the tokens up to their end, `match` finds them for
    a later prompt. A shared page is never written again; nobody's pages stay filed until their room is needed.
    """

    def __init__(self, pages: int):
        self.total = pages
        self._free = list(range(pages - 1, -1, -1))
        self._users: dict[int, int] = {}  # page -> requests that hold it
        self._filed: dict[Hashable, int] = {}  # key of a prefix -> its last page
        self._key_of: dict[int, Hashable] = {}
        self._idle: dict[int, None] = {}  # filed pages that nobody holds, the first to be reused first

    @property
    def available(self) -> int:
        """Pages that a request could get now."""
        return len(self._free) + len(self._idle)

    def take(self, count: int, shared: Sequence[int] = ()) -> list[int] | None:
        """`shared` pages and as many fresh ones as make `count`; None when too few are free."""
        idle = sum(page in self._idle for page in shared)
        if count - len(shared) > self.available - idle:
            return None
        for page in shared:
            self._idle.pop(page, None)
            self._users[page] = self._users.get(page, 0) + 1
        fresh = [self._fresh() for _ in range(count - len(shared))]
        self._users.update(dict.fromkeys(fresh, 1))
        return [*shared, *fresh]

    def _fresh(self) -> int:
        if self._free:
            return self._free.pop()
        page = next(iter(self._idle))
        del self._idle[page], self._filed[self._key_of.pop(page)]
        return page

    def give(self, pages: Sequence[int]) -> None:
        """Takes a request's pages back; filed ones keep their rows."""
        # Last page first: a prefix that loses its beginning cannot be found any more.
        for page in reversed(pages):
            self._users[page] -= 1
            if not self._users[page]:
                del self._users[page]
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def match(self, keys: Sequence[Hashable]) -> list[int]:
        """The filed pages of the longest known prefix. `keys`: one for each page of a prompt, in order."""
        return [self._filed[key] for key in itertools.takewhile(self._filed.__contains__, keys)]

    def forget(self) -> None:
        """Unfiles all prefixes: their rows are about to be overwritten. Only while nobody holds a page."""
        self._free += self._key_of
        self._filed, self._key_of, self._idle = {}, {}, {}

    def publish(self, keys: Sequence[Hashable], pages: Sequence[int]) -> None:
        """Files full prompt pages that a request holds, unless the same prefix is filed already."""
        for key, page in zip(keys, pages, strict=True):
            if key not in self._filed and page not in self._key_of:
                self._filed[key], self._key_of[page] = page, key


def prefix_keys(ids: Sequence[int], page_size: int, lookahead: int) -> list[bytes]:
    """A key for each full page of a prompt, which stands for all tokens up to its end.

    `lookahead`: tokens after a page that its rows depend on as well (Eagle3 reads a row's successor).
    """
    keys, key = [], b""
    for end in range(page_size, len(ids) - lookahead + 1, page_size):
        page = np.asarray(ids[end - page_size : end + lookahead], np.int64).tobytes()
        key = hashlib.sha256(key + page).digest()
        keys.append(key)
    return keys
