"""Ragged attention in jnp: rows are regrouped by request, the prefix is gathered page by page."""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Rows:
    """N flat rows of R requests. Rows of one request are neighbours and stand at consecutive positions."""

    slot_N: jax.Array  # request of each row; padding rows point at the last request
    offset_N: jax.Array  # index within the request's block, 0 .. block - 1
    position_N: jax.Array  # absolute position
    valid_N: jax.Array  # False for padding
    first_R: jax.Array  # flat index of each request's first row
    count_R: jax.Array  # rows of each request, at most `block`
    block: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Prefix:
    """Cached keys and values of every layer, read only. The table's width bounds the context that is read."""

    k_LxPxKVxSxD: jax.Array
    v_LxPxKVxSxD: jax.Array
    table_RxC: jax.Array  # page ids of each request, in order
    length_R: jax.Array  # cached rows of each request


def ragged_rows(count_R: jax.Array, start_R: jax.Array, num_rows: int, block: int) -> Rows:
    """Lays out `count_R[r]` rows of each request from position `start_R[r]` on, padded to `num_rows`."""
    end_R = jnp.cumsum(count_R)
    n = jnp.arange(num_rows)
    slot_N = jnp.minimum(jnp.searchsorted(end_R, n, side="right"), len(count_R) - 1).astype(jnp.int32)
    first_R = end_R - count_R
    valid_N = n < end_R[-1]
    offset_N = jnp.where(valid_N, n - first_R[slot_N], 0)
    return Rows(slot_N, offset_N, start_R[slot_N] + offset_N, valid_N, first_R, count_R, block)


def ragged_attention(
    q_NxHxD: jax.Array,
    k_NxKVxD: jax.Array,
    v_NxKVxD: jax.Array,
    rows: Rows,
    prefix: Prefix | None,
    layer: jax.Array | int,
    *,
    causal: bool,
    scale: float,
    window: int = 0,
    from_anchor: bool = False,
    softcap: float = 0.0,
) -> jax.Array:
    """As the package's `ragged_attention` says."""
    num_kv, dim = k_NxKVxD.shape[-2:]
    block_index = jnp.clip(rows.first_R[:, None] + jnp.arange(rows.block), 0, len(rows.slot_N) - 1)  # [R, Q]
    q = q_NxHxD.reshape(-1, num_kv, q_NxHxD.shape[1] // num_kv, dim)[block_index]  # [R, Q, KV, G, D]
    k, v = k_NxKVxD[block_index], v_NxKVxD[block_index]
    in_block = jnp.arange(rows.block)
    visible = in_block < rows.count_R[:, None, None]  # [R, 1, Q]
    if causal:
        visible = visible & (in_block <= in_block[:, None])
    if window and not from_anchor:
        visible = visible & (in_block > in_block[:, None] - window)
    visible = jnp.broadcast_to(visible, (len(rows.count_R), rows.block, rows.block))
    if prefix is not None:
        k_context, v_context = gather_pages(prefix, layer)
        k, v = jnp.concatenate([k_context, k], axis=1), jnp.concatenate([v_context, v], axis=1)
        position = jnp.arange(k_context.shape[1])
        cached = position < prefix.length_R[:, None, None]
        if window:
            # The block's rows stand right behind the prefix.
            first = jnp.broadcast_to(-window, (rows.block,)) if from_anchor else in_block - window + 1
            cached = cached & (position >= (prefix.length_R[:, None] + first)[..., None])
        cached = jnp.broadcast_to(cached, (*visible.shape[:2], k_context.shape[1]))
        visible = jnp.concatenate([cached, visible], axis=-1)
    out = masked_attention(q, k, v, visible, scale, softcap)
    return out.reshape(*block_index.shape, *q_NxHxD.shape[1:])[rows.slot_N, rows.offset_N]


def step_attention(
    q_RxHxD: jax.Array,
    k_RxTxKVxD: jax.Array,
    v_RxTxKVxD: jax.Array,
    newest: jax.Array | int,
    prefix: Prefix,
    layer: jax.Array | int,
    *,
    scale: float,
    window: int = 0,
) -> jax.Array:
    """Row `newest` of T behind each request's prefix attends to the prefix and up to itself. Returns `[R, H, D]`."""
    k_context, v_context = gather_pages(prefix, layer)
    length, num_kv, dim = k_context.shape[1], *k_RxTxKVxD.shape[-2:]
    index = jnp.arange(k_RxTxKVxD.shape[1])
    own = prefix.length_R[:, None] + index
    cached = jnp.broadcast_to(jnp.arange(length), (len(own), length))
    own_visible = jnp.broadcast_to(index <= newest, own.shape)
    visible = jnp.concatenate([cached < prefix.length_R[:, None], own_visible], axis=1)
    if window:
        first = prefix.length_R[:, None] + newest - window
        visible = visible & (jnp.concatenate([cached, own], axis=1) > first)
    q = q_RxHxD.reshape(len(own), 1, num_kv, -1, dim)
    k, v = jnp.concatenate([k_context, k_RxTxKVxD], axis=1), jnp.concatenate([v_context, v_RxTxKVxD], axis=1)
    return masked_attention(q, k, v, visible[:, None], scale).reshape(q_RxHxD.shape)


def gather_pages(prefix: Prefix, layer: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """One layer's cached keys and values of every request, `[R, C·S, KV, D]`."""
    num_pages = prefix.k_LxPxKVxSxD.shape[1]

    def gather(pool: jax.Array) -> jax.Array:
        # One gather on (layer, page): slicing the layer out first would copy pages that nobody asked for.
        pages = pool.reshape(-1, *pool.shape[2:])[layer * num_pages + prefix.table_RxC].swapaxes(2, 3)
        return pages.reshape(pages.shape[0], -1, *pages.shape[3:])

    return gather(prefix.k_LxPxKVxSxD), gather(prefix.v_LxPxKVxSxD)


def masked_attention(
    q_RxQxKVxGxD: jax.Array,
    k_RxCxKVxD: jax.Array,
    v_RxCxKVxD: jax.Array,
    visible_RxQxC: jax.Array,
    scale: float,
    softcap: float = 0.0,
) -> jax.Array:
    """Grouped-query attention; a query that sees nothing gives zeros (spec 1.6)."""
    wide = jnp.promote_types(q_RxQxKVxGxD.dtype, jnp.float32)
    scores = jnp.einsum("rqkgd,rckd->rkgqc", q_RxQxKVxGxD, k_RxCxKVxD, preferred_element_type=wide) * scale
    scores = softcap * jnp.tanh(scores / softcap) if softcap else scores
    visible = visible_RxQxC[:, None, None]
    scores = jnp.where(visible, scores, -jnp.inf)
    peak = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), jnp.finfo(wide).min)
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / jnp.where(total > 0, total, 1)).astype(v_RxCxKVxD.dtype)
    return jnp.einsum("rkgqc,rckd->rqkgd", weights, v_RxCxKVxD)
