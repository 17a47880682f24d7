"""Products of few rows with large matrices, which is what a round on a CPU consists of.

They cost the reading of the matrix, if nothing else is done with it. XLA:CPU copies the right operand of a product to
pack it, and a scan copies each layer out of its stack: together more than the reading. So on a CPU matrices stand on
the left, `[out, in]`, and layers apart.
"""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

FEW = 128  # rows up to which matrices on the left are faster
CACHED = 2**24  # parameters; a model of no more is not worth a second copy and the longer compilation


def product(x: jax.Array, weight_OxI: jax.Array) -> jax.Array:
    """x W^T, `[..., I]` to `[..., O]`."""
    if x.size > FEW * x.shape[-1]:
        return _rows_first(x, weight_OxI)
    return jax.lax.platform_dependent(x, weight_OxI, cpu=_matrix_first, default=_rows_first)


def _rows_first(x: jax.Array, weight_OxI: jax.Array) -> jax.Array:
    return jnp.einsum("...i,oi->...o", x, weight_OxI)


def _matrix_first(x: jax.Array, weight_OxI: jax.Array) -> jax.Array:
    y_OxN = jax.lax.dot_general(weight_OxI, x.reshape(-1, x.shape[-1]), (((1,), (1,)), ((), ())))
    # Behind the barrier XLA does not see the transposition, for which it would change the operands' order again.
    return jax.lax.optimization_barrier(y_OxN).T.reshape(*x.shape[:-1], -1)


def for_few_rows(params: Any) -> Any:
    """A model's parameters as rounds on a CPU read them: a copy of its layers, apart, and of its matrices, `[out, in]`.

    Such a matrix is called "by_row" instead of "kernel" (see `Linear`).
    """
    if isinstance(params, dict):
        return {name: _by_row(name, value) for name, value in params.items()}
    return params


def _by_row(name: str, value: Any) -> Any:
    if name == "layers":
        return tuple(tuple(for_few_rows(layer) for layer in _apart(stack)) for stack in value)
    if isinstance(value, dict) and "kernel" in value and value["kernel"].ndim == 2:
        others = {key: a for key, a in value.items() if key != "kernel"}
        return others | {"by_row": jnp.array(value["kernel"].T)}
    return for_few_rows(value)


def _apart(stack: Any) -> list[Any]:
    count = len(jax.tree.leaves(stack)[0])
    return [jax.tree.map(lambda a, i=i: jnp.array(a[i]), stack) for i in range(count)]


def gains_by_row(params: Any) -> bool:
    """Whether rounds over these weights are faster by row: on one CPU whose caches do not hold them all.

    Not where a copy of them would take more than half of the memory that is free.
    """
    arrays = jax.tree.leaves(params)
    if any(isinstance(a, jax.core.Tracer) or not isinstance(a, jax.Array) for a in arrays):
        return False  # of a machine that is not here
    devices = set().union(*(a.devices() for a in arrays))
    if len(devices) > 1 or next(iter(devices)).platform != "cpu":
        return False
    return sum(a.size for a in arrays) > CACHED and 2 * sum(a.nbytes for a in arrays) < free_memory()


def free_memory() -> float:
    """Bytes of host memory that can be had without swapping; inf where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
