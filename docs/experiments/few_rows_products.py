"""Products of a few rows with 30 matrices, on the left and apart (models/few_rows.py) or scanned out of a stack.

PYTHONPATH=. python docs/experiments/few_rows_products.py
"""

import functools
import statistics

import jax
import jax.numpy as jnp
from rich.progress import track

from dspark_jax.evaluation.timing import seconds
from dspark_jax.models.few_rows import _matrix_first

LAYERS, OUT, IN = 30, 3072, 576
TURNS = 9


def from_stack(stack_LxIxO: jax.Array, x_NxI: jax.Array) -> jax.Array:
    """Each product's result has a little part in the next one's rows, so that none can be left out."""
    return jax.lax.scan(lambda x, w: (x + 1e-6 * (x @ w)[:, :IN], None), x_NxI, stack_LxIxO)[0]


def by_row(weights: list[jax.Array], x_NxI: jax.Array) -> jax.Array:
    for weight_OxI in weights:
        x_NxI = x_NxI + 1e-6 * _matrix_first(x_NxI, weight_OxI)[:, :IN]
    return x_NxI


def main() -> None:
    stack = jax.random.normal(jax.random.key(0), (LAYERS, IN, OUT))
    ways = {from_stack: stack, by_row: [jnp.array(w.T) for w in stack]}
    cases = {(rows, way): jnp.ones((rows, IN)) for rows in (8, 16, 32, 64, 128, 256) for way in ways}
    jitted, times = {way: jax.jit(way) for way in ways}, {case: [] for case in cases}
    for _ in track(range(TURNS + 1), "turns"):
        for (rows, way), x in cases.items():
            times[rows, way].append(1e3 * seconds(functools.partial(jitted[way], ways[way], x)))
    for rows in dict.fromkeys(rows for rows, _ in cases):
        stacked, apart = (statistics.median(times[rows, way][1:]) for way in ways)
        print(f"{rows:4} rows   stack {stacked:6.1f} ms   by row {apart:6.1f} ms   ratio {apart / stacked:.2f}")


if __name__ == "__main__":
    main()
