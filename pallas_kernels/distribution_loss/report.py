"""What the kernels of the training loss save: lines of `python -m pallas_kernels.report`."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.distribution_loss.chunks import chunk_rows
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


def distribution_loss_lines(
    compile_tpu: Callable[..., jax.stages.Compiled], chip: str, name: str, width: int, vocab: int, softcap: float
) -> Iterator[tuple[str, str, tuple[int, ...], tuple[float, ...]]]:
    """Operation, size, and bytes before and after, temporary and moved, of one chunk of rows with its gradients.

    One chunk, since XLA's account has a loop's body once, however often it runs.
    """
    count = chunk_rows(2**20, vocab)
    shapes = arguments(width, vocab, softcap, count)
    programs = [compile_tpu(chip, gradients, *shapes, backend=backend) for backend in ("xla", "tpu")]
    temporary = tuple(program.memory_analysis().temp_size_in_bytes for program in programs)
    moved = tuple(program.cost_analysis()["bytes accessed"] for program in programs)
    yield "distribution_loss", f"{name} M={count} r={RANK}", temporary, moved
