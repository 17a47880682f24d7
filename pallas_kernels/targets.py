"""Compiles programs for TPUs that are not here: libtpu's compiler runs on any x86 host (`pip install libtpu`).

Compiled is not run: a program that compiles fits the chip's memories and its compiler's rules, no more.
"""

import functools
import importlib.util
import math
import os
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

TPUS = {"v5e": "v5e:2x4", "v6e": "v6e:2x4", "v5p": "v5p:2x2x2"}  # eight chips each
KERNEL = "tpu_custom_call"  # how a Mosaic TPU kernel shows in a compiled program


def libtpu_installed() -> bool:
    return importlib.util.find_spec("libtpu") is not None


@functools.cache
def topology(name: str) -> tuple[Any, ...]:
    """The devices of a topology by libtpu's name, as "v5e:2x4": they compile and cannot run."""
    # Else libtpu asks the cloud's metadata server what host this is, and a lock file lets in one process at a time.
    unasked = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_HOSTNAMES": "localhost"}
    for variable, value in (unasked | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}).items():
        os.environ.setdefault(variable, value)
    return tuple(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)


def tpu_mesh(chip: str, shape: tuple[int, ...] = (1, 1), names: tuple[str, ...] = ("data", "model")) -> Mesh:
    """A mesh of chips that compile and cannot run."""
    devices = topology(TPUS[chip])[: math.prod(shape)]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)


def compile_tpu(chip: str, function: Callable[..., Any], *shapes: Any, **static: Any) -> jax.stages.Compiled:
    """`function(*shapes, **static)`, jitted and compiled for one chip.

    `shapes`: trees of `ShapeDtypeStruct` or of arrays. Raises what the compiler raises, for example when a kernel's
    blocks do not fit the chip's vector memory.
    """
    replicated = NamedSharding(tpu_mesh(chip), PartitionSpec())
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=replicated), shapes)
    return jax.jit(functools.partial(function, **static)).lower(*placed).compile()


def has_kernel(compiled: jax.stages.Compiled) -> bool:
    """Whether a Mosaic TPU kernel is in the program."""
    return KERNEL in compiled.as_text()
