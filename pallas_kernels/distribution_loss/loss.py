"""The loss chunk by chunk of the rows: logits of one chunk are alive at a time, and its gradients are made on the spot.

The weight of every row is known beforehand, so a chunk's gradients need no other chunk, and the backward pass only
scales them: no logits are made twice.
"""

from typing import Any

import jax

from pallas_kernels.distribution_loss import tiled, tpu
from pallas_kernels.distribution_loss.chunks import Given, Trained, chunk_rows
from pallas_kernels.distribution_loss.reference import RowLosses, Rows, RowWeights, Targets, Vocabulary, weighted_sum


def _on_gpu(chunk: int, trained: Trained, given: Given, differentiate: bool) -> tuple[Any, jax.Array | None]:
    from pallas_kernels.distribution_loss import gpu  # what it imports may change with any JAX: nobody else needs it

    over_chunks = tiled.over_chunks if gpu.unsupported(trained, given[2]) else gpu.over_chunks
    return over_chunks(chunk, trained, given, differentiate)


BACKENDS = {"xla": tiled.over_chunks, "tpu": tpu.over_chunks, "gpu": _on_gpu}


def distribution_loss(
    rows: Rows,
    targets: Targets,
    vocabulary: Vocabulary,
    weights: RowWeights,
    backend: str = "xla",
    chunk: int | None = None,
) -> tuple[jax.Array, RowLosses]:
    """The weighted sum of every row's losses, and these. Gradients of the sum by hidden states, factors, correction.

    `backend`: "tpu", "gpu" (XLA where its kernel does not take these arrays) or "xla"; see `backends.choose`. `chunk`:
    rows at a time, for "tpu" a multiple of 16; None: as many as the vocabulary's size lets fit. On a mesh the compiler
    would have every device do all rows: call it inside `jax.shard_map(..., check_vma=False)` over the axis that splits
    them, with sources among a device's own targets.
    """
    trained = Trained(rows.hidden_MxH, rows.factor_Mxr, vocabulary.correction_Vdxr)
    chunk = chunk or chunk_rows(len(rows.label_M), len(vocabulary.head_VdxH))
    return _weighted(chunk, backend, trained, (rows, targets, vocabulary, weights))


def _weighted(chunk: int, backend: str, trained: Trained, given: Given) -> tuple[jax.Array, RowLosses]:
    of_rows, _ = BACKENDS[backend](chunk, trained, given, False)
    return weighted_sum(of_rows.losses, given[-1]), of_rows.losses


def _forward(chunk: int, backend: str, trained: Trained, given: Given) -> tuple[tuple[jax.Array, RowLosses], Trained]:
    of_rows, of_correction = BACKENDS[backend](chunk, trained, given, True)
    gradients = Trained(of_rows.hidden_MxH, of_rows.factor_Mxr, of_correction)
    gradients = jax.tree.map(lambda g, a: g.astype(a.dtype), gradients, trained)
    return (weighted_sum(of_rows.losses, given[-1]), of_rows.losses), gradients


def _backward(chunk: int, backend: str, gradients: Trained, cotangent: tuple[jax.Array, Any]) -> tuple[Trained, None]:
    # The rows' losses serve metrics and the confidence's labels: they have no gradient.
    return jax.tree.map(lambda g: g * cotangent[0].astype(g.dtype), gradients), None


_weighted = jax.custom_vjp(_weighted, nondiff_argnums=(0, 1))
_weighted.defvjp(_forward, _backward)
