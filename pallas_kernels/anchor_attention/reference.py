"""Anchor attention in jnp."""

import jax
import jax.numpy as jnp


def anchor_attention(
    q_BxNxKxHxD: jax.Array,
    k_context_BxSxKVxD: jax.Array,
    v_context_BxSxKVxD: jax.Array,
    k_block_BxNxKxKVxD: jax.Array,
    v_block_BxNxKxKVxD: jax.Array,
    anchor_BxN: jax.Array,
    keep_BxN: jax.Array,
    start_BxN: jax.Array,
    scale: float,
    *,
    causal: bool,
    window: int,
    from_anchor: bool,
) -> jax.Array:
    """What `pallas_kernels.anchor_attention` says, with all scores of blocks on context in memory."""
    batch, blocks, slots, heads, dim = q_BxNxKxHxD.shape
    num_kv = k_context_BxSxKVxD.shape[2]
    wide = jnp.promote_types(q_BxNxKxHxD.dtype, jnp.float32)
    q = q_BxNxKxHxD.reshape(batch, blocks, slots, num_kv, heads // num_kv, dim)
    context = jnp.einsum("bnkhgd,bshd->bhgnks", q, k_context_BxSxKVxD, preferred_element_type=wide) * scale
    block = jnp.einsum("bnkhgd,bnjhd->bhgnkj", q, k_block_BxNxKxKVxD, preferred_element_type=wide) * scale
    position, key_slot = jnp.arange(context.shape[-1]), jnp.arange(block.shape[-1])
    slot = key_slot[-slots:]
    visible = (position >= start_BxN[..., None, None]) & (position < anchor_BxN[..., None, None])  # [B, N, 1, S]
    if window:
        first = jnp.broadcast_to(-window, (slots,)) if from_anchor else slot - window + 1
        visible = visible & (position >= (anchor_BxN[..., None] + first)[..., None])
    context = jnp.where(visible[:, None, None], context, -jnp.inf)
    if causal:
        block = jnp.where(key_slot <= slot[:, None], block, -jnp.inf)
    if window and not from_anchor:
        block = jnp.where(key_slot > slot[:, None] - window, block, -jnp.inf)
    # A slot always sees itself, so the softmax of a dummy block is finite; its output is zeroed below.
    weights = jax.nn.softmax(jnp.concatenate([context, block], axis=-1), axis=-1).astype(q.dtype)
    on_context, on_block = jnp.split(weights, [context.shape[-1]], axis=-1)
    out = jnp.einsum("bhgnks,bshd->bnkhgd", on_context, v_context_BxSxKVxD)
    out = out + jnp.einsum("bhgnkj,bnjhd->bnkhgd", on_block, v_block_BxNxKxKVxD)
    return jnp.where(keep_BxN[..., None, None, None], out.reshape(q_BxNxKxHxD.shape), 0)
