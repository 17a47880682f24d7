"""Compiling programs for a machine that is not here, and what comes out of it."""

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
from pallas_kernels.targets import kernels_in

_TOO_MUCH = "RESOURCE_EXHAUSTED: "


class Program(NamedTuple):
    """A program of one mesh. `temporary`: bytes a device needs beside arguments and results that stay; None: nothing
    compiles for that machine, or `refusal` says why it did not compile. `kernels`: names of those that it holds.
    """

    work: list[Product]
    temporary: int | None
    traffic: Traffic
    seconds: float  # that compiling took
    refusal: str = ""
    kernels: tuple[str, ...] = ()


def examine(
    machine: Machine, mesh: AnyMesh, jitted: Any, *args: Any, loops: Sequence[float] = (), **static: Any
) -> Program:
    """Counts a jitted function's products and, where there is a compiler for the machine, compiles it.

    `args`: shapes with shardings on `mesh`. `loops`: how often its loops of unknown length run, the outermost first.
    """
    bare = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype) if _is_shape(a) else a, args)
    work = products(jitted.trace(*bare, **static).jaxpr, loops)
    if not machine.compiles:
        return Program(work, None, {}, 0.0)
    start = time.monotonic()
    try:
        with on(mesh), warnings.catch_warnings():
            # What is compiled for a machine that is not here cannot be loaded from the cache again.
            warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
            compiled = jitted.lower(*args, **static).compile()
    except jax.errors.JaxRuntimeError as error:
        _, too_much, why = str(error).partition(_TOO_MUCH)
        if not too_much:
            raise
        return Program(work, None, {}, time.monotonic() - start, f"compiler: {why.splitlines()[0].rstrip('.')}")
    hlo = compiled.as_text()
    sent, temporary = traffic(hlo, mesh.size, loops), compiled.memory_analysis().temp_size_in_bytes
    return Program(work, temporary, sent, time.monotonic() - start, kernels=kernels_in(hlo))


def _is_shape(a: Any) -> bool:
    return isinstance(a, jax.ShapeDtypeStruct)
