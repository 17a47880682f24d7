"""Attention of many requests' flat rows over their cached prefixes: verification, decoding, prefill, drafting."""

import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from pallas_kernels.mesh import dividing
from pallas_kernels.ragged_attention import reference, tpu
from pallas_kernels.ragged_attention.reference import Prefix, Rows, ragged_rows, step_attention
from pallas_kernels.ragged_attention.tpu import unsupported

BACKENDS = ("auto", "tpu", "gpu", "xla")


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
    backend: str = "auto",
) -> jax.Array:
    """Each row attends to its request's prefix and to its own block (`causal`: up to itself). Returns `[N, H, D]`.

    `window` W > 0: a row sees the rows less than W positions before it, itself included. `from_anchor`: every row of a
    block sees the W cached rows before the block, and the block as if there were no window. `softcap` c > 0: scores
    become c tanh(score / c). Softmax in at least float32. Padding rows give finite values that nobody reads.

    `backend` "auto": the kernel where the program is compiled for a TPU and `unsupported` names no reason against it,
    else XLA. On a mesh that is set (`jax.set_mesh`) the kernel runs on every device's own heads. "gpu": the kernel for
    one Hopper GPU where it takes these arrays, else XLA; see `backends.choose`.
    """
    options = {"causal": causal, "scale": scale, "window": window, "from_anchor": from_anchor, "softcap": softcap}
    in_xla = functools.partial(reference.ragged_attention, **options)
    arrays = (q_NxHxD, k_NxKVxD, v_NxKVxD, rows, prefix, layer)
    if backend == "gpu":
        from pallas_kernels.ragged_attention import gpu  # what it imports may change with any JAX: nobody else needs it

        if gpu.unsupported(q_NxHxD, prefix):
            return in_xla(*arrays)
        return gpu.ragged_attention(*arrays, **options)
    if backend == "xla" or (backend == "auto" and unsupported(q_NxHxD, rows, prefix)):
        return in_xla(*arrays)
    kernel = _by_heads(functools.partial(tpu.ragged_attention, **options), k_NxKVxD.shape[1])
    return kernel(*arrays) if backend == "tpu" else jax.lax.platform_dependent(*arrays, tpu=kernel, default=in_xla)


def _by_heads(attend: Any, num_kv: int) -> Any:
    """`attend` on every device's own heads: compilers cannot split a kernel by themselves.

    As the pools lie: `model` splits the key-value heads where it divides them. What is left of the mesh splits the
    query heads of each, or repeats the work.
    """
    if jax.sharding.get_abstract_mesh().size == 1 or not jax.sharding.get_abstract_mesh().auto_axes:
        return attend

    def split(q_NxHxD: jax.Array, k: jax.Array, v: jax.Array, rows: Rows, prefix: Prefix, layer: Any) -> jax.Array:
        kv_axes = dividing(num_kv, ("model",))
        group_axes = dividing(q_NxHxD.shape[1] // num_kv, ("data",) if kv_axes else ("model", "data"))
        q_spec, kv_spec, pool = P(None, kv_axes, group_axes), P(None, kv_axes), P(None, None, kv_axes)

        def local(q_NxKVxGxD: jax.Array, *arrays: Any) -> jax.Array:
            q = q_NxKVxGxD.reshape(len(q_NxKVxGxD), -1, q_NxKVxGxD.shape[-1])
            return attend(q, *arrays).reshape(q_NxKVxGxD.shape)

        specs = (q_spec, kv_spec, kv_spec, P(), Prefix(pool, pool, P(), P()), P())
        # What a kernel returns says nothing of the axes over which it is the same everywhere.
        sharded = jax.shard_map(local, in_specs=specs, out_specs=q_spec, check_vma=False)
        grouped = q_NxHxD.reshape(len(q_NxHxD), num_kv, -1, q_NxHxD.shape[-1])
        return sharded(grouped, k, v, rows, prefix, layer).reshape(q_NxHxD.shape)

    return split


__all__ = ["Prefix", "Rows", "ragged_attention", "ragged_rows", "step_attention", "unsupported"]
