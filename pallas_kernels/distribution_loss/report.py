"""The training loss at a real model's sizes, for `python -m pallas_kernels.report` and what checks the kernels."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.distribution_loss.loss import distribution_loss
from pallas_kernels.distribution_loss.reference import Rows, RowWeights, Targets, Vocabulary

RANK = 256  # of DSpark's in-block head


def arguments(width: int, vocab: int, softcap: float, num_rows: int, dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
    """Shapes of rows, targets, tables and weights, as DSpark trains them; as many targets as rows."""
    array = jax.ShapeDtypeStruct
    whole, single = array((num_rows,), jnp.int32), array((num_rows,), jnp.float32)
    hidden = array((num_rows, width), dtype)
    rows = Rows(hidden, array((num_rows, RANK), dtype), whole, whole)
    vocabulary = Vocabulary(array((vocab, width), dtype), array((vocab, RANK), dtype), softcap)
    return rows, Targets(hidden, single), vocabulary, RowWeights(single, single, None)


def gradients(rows: Rows, targets: Targets, vocabulary: Vocabulary, weights: RowWeights, **options: Any) -> Any:
    """The loss and its gradients."""

    def loss(trained: tuple[jax.Array, ...]) -> tuple[jax.Array, Any]:
        hidden, factor, correction = trained
        some = rows.replace(hidden_MxH=hidden, factor_Mxr=factor)
        return distribution_loss(some, targets, vocabulary.replace(correction_Vdxr=correction), weights, **options)

    trained = rows.hidden_MxH, rows.factor_Mxr, vocabulary.correction_Vdxr
    return jax.value_and_grad(loss, has_aux=True)(trained)
