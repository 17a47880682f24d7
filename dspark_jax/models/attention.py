"""What rows attend to, for every kind of attention layer: the bridge from the models to the kernels."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dspark_jax.models.config import DecoderConfig
from dspark_jax.models.layers import Layer, LayerAttend
from dspark_jax.parallel import MODEL, divided
from pallas_kernels.anchor_attention import anchor_attention
from pallas_kernels.ragged_attention import Prefix, Rows, ragged_attention


def attend_rows(
    config: DecoderConfig, rows: Rows, prefixes: tuple[Prefix, ...] | None = None, backend: str = "auto"
) -> LayerAttend:
    """Flat rows over their requests' cached prefixes, one `Prefix` for each kind of attention, and over themselves."""

    def attend(layer: Layer, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        kind = config.attention[layer.kind]
        prefix = prefixes[layer.kind] if prefixes else None
        return ragged_attention(
            q, k, v, rows, prefix, layer.index,
            causal=kind.causal, scale=kind.softmax_scale, window=kind.window, from_anchor=kind.window_from_anchor,
            backend=backend,
        )  # fmt: skip

    return attend


def attend_blocks(
    config: DecoderConfig,
    context_kv: tuple[tuple[jax.Array, jax.Array], ...],
    anchor_BxN: jax.Array,
    start_BxN: jax.Array,
    keep_BxN: jax.Array,
    size: int,
    backend: str = "xla",
) -> LayerAttend:
    """Packed draft blocks of `size` slots over the rows of their documents, from `start` to their anchors (training).

    `context_kv`: for each kind of attention, keys and values `[L, B·S, KV, D]` of the context. `backend`: of
    `anchor_attention`.
    """
    batch, blocks = anchor_BxN.shape

    def attend(layer: Layer, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        kind = config.attention[layer.kind]
        k_context, v_context = (a[layer.index].reshape(batch, -1, *a.shape[2:]) for a in context_kv[layer.kind])
        q_block, k_block, v_block = (a.reshape(batch, blocks, size, *a.shape[1:]) for a in (q, k, v))
        out = anchor_attention(
            q_block, k_context, v_context, k_block, v_block, anchor_BxN, keep_BxN, kind.softmax_scale,
            start_BxN=start_BxN, causal=kind.causal, window=kind.window, from_anchor=kind.window_from_anchor,
            backend=backend,
        )  # fmt: skip
        return out.reshape(q.shape)

    return attend


def attend_documents(config: DecoderConfig, position_BxS: jax.Array, align: int) -> LayerAttend:
    """Every row of B packs over the rows of its own document up to itself: the target's forward.

    Documents begin at multiples of `align`: rows are then blocks of so many, each behind its document's earlier rows.
    """
    batch, length = position_BxS.shape
    anchor = jnp.broadcast_to(jnp.arange(0, length, align), (batch, length // align))
    blocks = anchor, jnp.ones(anchor.shape, bool), anchor - position_BxS[:, ::align]

    def attend(layer: Layer, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        kind = config.attention[layer.kind]

        def own(blocks: tuple[jax.Array, ...], q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            anchor, keep, start = blocks
            context = (a.reshape(batch, length, *a.shape[1:]) for a in (k, v))
            q_block, k_block, v_block = (a.reshape(*anchor.shape, align, *a.shape[1:]) for a in (q, k, v))
            out = anchor_attention(
                q_block, *context, k_block, v_block, anchor, keep, kind.softmax_scale, start_BxN=start, causal=True,
                window=kind.window, backend="auto",
            )  # fmt: skip
            return out.reshape(q.shape)

        return _by_heads(own, kind.num_kv_heads)(blocks, q, k, v)

    return attend


def _by_heads(attend: Callable[..., jax.Array], num_kv_heads: int) -> Callable[..., jax.Array]:
    """`attend(blocks, q, k, v)` with heads divided over `model`: the compiler would move tiles, millions of them."""
    axes = divided(num_kv_heads, jax.sharding.get_abstract_mesh(), MODEL)
    if axes is None:
        return attend
    heads = P(None, axes)
    return jax.shard_map(attend, in_specs=(P(), heads, heads, heads), out_specs=heads, check_vma=False)
