"""Compiling programs for a machine that is not here, and what comes out of it."""

import re
import time
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from dspark_jax.parallel import on
from dspark_jax.planning.chips import Machine
from dspark_jax.planning.collectives import Traffic, traffic
from dspark_jax.planning.counting import Product, products
from dspark_jax.planning.models import AnyMesh

_TOO_MUCH = re.compile(r"Used ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?)")


class Program(NamedTuple):
    """A program of one mesh. `temporary`: bytes a device needs beside arguments and results that stay; None: nothing
    compiles for that machine, or `refusal` says why it did not compile.
    """

    work: list[Product]
    temporary: int | None
    traffic: Traffic
    operations_once: float  # on one device by XLA's count, which has the bodies of loops once
    seconds: float  # that compiling took
    refusal: str = ""


def examine(
    machine: Machine, mesh: AnyMesh, jitted: Any, *args: Any, loops: Sequence[float] = (), **static: Any
) -> Program:
    """Counts a jitted function's products and, where there is a compiler for the machine, compiles it.

    `args`: shapes with shardings on `mesh`. `loops`: how often its loops of unknown length run, the outermost first.
    """
    bare = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype) if _is_shape(a) else a, args)
    work = products(jitted.trace(*bare, **static).jaxpr, loops)
    if not machine.compiles:
        return Program(work, None, {}, 0.0, 0.0)
    start = time.monotonic()
    try:
        with on(mesh), warnings.catch_warnings():
            # What is compiled for a machine that is not here cannot be loaded from the cache again.
            warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
            compiled = jitted.lower(*args, **static).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Program(work, None, {}, 0.0, time.monotonic() - start, _too_much(str(error)))
    memory = compiled.memory_analysis()
    costs = compiled.cost_analysis() or {}
    return Program(
        work, memory.temp_size_in_bytes, traffic(compiled.as_text(), mesh.size, loops),
        costs.get("flops", 0.0), time.monotonic() - start,
    )  # fmt: skip


def _is_shape(a: Any) -> bool:
    return isinstance(a, jax.ShapeDtypeStruct)


def _too_much(message: str) -> str:
    found = _TOO_MUCH.search(message)
    used = f"it would use {found[1]} of {found[2]} bytes" if found else message.splitlines()[0][:160]
    return f"the compiler refuses it: {used}"
