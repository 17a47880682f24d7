"""The matrix products of a program, counted from its trace: every loop's body as often as it runs.

XLA's own counts have a loop's body once, and need a compiler. Only products count: norms, softmax, sampling and noise
are taken to be fused with them. A product takes the longer of its operations at the peak rate and its bytes, both
operands and the result, at the peak bandwidth: no machine is faster, all are slower.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from dspark_jax.planning.chips import Chip


class Product(NamedTuple):
    """A product of two arrays, over all devices together."""

    operations: float
    bytes: float
    times: float


def products(jaxpr: Any, loops: Sequence[float] = ()) -> list[Product]:
    """The products of a (closed) jaxpr that was traced without a mesh.

    `loops`: how often loops of unknown length run, the outermost first and once each where nothing is said. Of
    branches the one with most operations counts.
    """
    found = []
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, params = eqn.primitive.name, eqn.params
        if name == "dot_general":
            found.append(_product(eqn))
        elif name == "scan":
            found += _repeated(products(params["jaxpr"], loops), params["length"])
        elif name == "while":
            found += _repeated(products(params["body_jaxpr"], loops[1:]), loops[0] if loops else 1)
        elif name == "cond":
            found += max((products(branch, loops) for branch in params["branches"]), key=operations)
        elif name != "pallas_call":  # its body is one block; the same in XLA's operations is the other branch
            inner = (value for value in params.values() if hasattr(value, "eqns") or hasattr(value, "jaxpr"))
            found += [one for value in inner for one in products(value, loops)]
    return found


def operations(found: Iterable[Product]) -> float:
    return sum(one.operations * one.times for one in found)


def seconds(found: Iterable[Product], chip: Chip, count: int) -> float:
    """Time of products that `count` devices share evenly."""
    longer = (one.times * max(one.operations / chip.operations, one.bytes / chip.bandwidth) for one in found)
    return sum(longer) / count


def _product(eqn: Any) -> Product:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    a, out = eqn.invars[0].aval, eqn.outvars[0].aval
    size = math.prod(a.shape[i] for i in contracted)
    arrays = (*(v.aval for v in eqn.invars), out)
    return Product(2.0 * size * out.size, float(sum(v.size * v.dtype.itemsize for v in arrays)), 1.0)


def _repeated(found: list[Product], times: float) -> list[Product]:
    return [one._replace(times=one.times * times) for one in found]
