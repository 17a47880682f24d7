"""Machines by name, and what their makers say of them."""

import math
import re
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from dspark_jax.errors import UserError
from dspark_jax.parallel import mesh_sizes
from pallas_kernels.targets import libtpu_installed, topology

GIB = 2**30


class Chip(NamedTuple):
    """Rates of one JAX device: a chip, or one of its cores where JAX shows those. All are peaks."""

    device: str
    memory: float  # bytes
    bandwidth: float  # bytes a second of its memory
    operations: float  # a second, bfloat16, dense
    links: float  # bytes a second that it sends to the others, all its links together
    compiler: str = ""  # libtpu's name of it; "": there is no compiler for it here
    axes: int = 1  # of its topologies


# TPU: cloud.google.com/tpu/docs, the pages of v5e, v6e, v5p and TPU7x ("system architecture"); half of the
# bidirectional inter-chip bandwidth. A v7x chip is two devices, each with half of everything.
# H100 SXM: NVIDIA's data sheet, without sparsity; half of NVLink's 900 GB/s, which go both ways.
CHIPS = {
    "v5e": Chip("TPU v5e", 16 * GIB, 819e9, 197e12, 200e9, "v5e", 2),
    "v6e": Chip("TPU v6e", 32 * GIB, 1640e9, 918e12, 400e9, "v6e", 2),
    "v5p": Chip("TPU v5p", 95 * GIB, 2765e9, 459e12, 600e9, "v5p", 3),
    "v7x": Chip("TPU v7x core", 96 * GIB, 3690e9, 1153.5e12, 300e9, "tpu7x", 3),
    "h100": Chip("NVIDIA H100 SXM", 80e9, 3350e9, 989e12, 450e9),
}
KNOWN = "v5e:2x4, v6e:2x4, v5p:2x2x2, v7x:2x2x1 and h100:8, or other sizes of these"


class Machine(NamedTuple):
    """Some devices of one kind. `devices`: stand-ins that libtpu compiles for; empty: nothing compiles for it here."""

    name: str
    chip: Chip
    count: int
    devices: tuple[Any, ...]

    @property
    def compiles(self) -> bool:
        return bool(self.devices)

    def holding(self, size: int) -> "Machine":
        """This machine, compiling nothing where `size` bytes a device are too many already."""
        return self if size <= self.chip.memory else self._replace(devices=())

    def mesh(self, sizes: str, num_kv_heads: int) -> Mesh | AbstractMesh:
        """The mesh of a config's line "DATAxMODEL"; "": as many devices share the heads as divide them, and the rest
        are `data`. UserError where there are fewer devices.
        """
        model = math.gcd(self.count, num_kv_heads)
        shape = mesh_sizes(sizes) or (self.count // model, model)
        if math.prod(shape) > self.count:
            raise UserError(f"a mesh of {sizes} needs {math.prod(shape)} devices, {self.name} has {self.count}")
        names, kinds = ("data", "model"), (AxisType.Auto,) * 2
        if not self.compiles:
            return AbstractMesh(shape, names, axis_types=kinds)
        return Mesh(np.array(self.devices[: math.prod(shape)]).reshape(shape), names, axis_types=kinds)


def parse_machine(text: str) -> Machine:
    """The machine that "v5e:2x4" or "h100:8" names. Raises UserError, naming the known ones, on anything else."""
    name, _, sizes = text.partition(":")
    chip, whole = CHIPS.get(name), re.fullmatch(r"\d{1,4}(x\d{1,4})*", sizes)
    shape = [int(n) for n in sizes.split("x")] if whole else []
    unknown = UserError(f"unknown topology {text!r}: known are {KNOWN}")
    if chip is None or len(shape) != chip.axes or not all(shape):
        raise unknown
    if not chip.compiler:
        return Machine(text, chip, shape[0], ())
    if not libtpu_installed():
        raise UserError(f"{text} is planned with TPU's compiler: pip install libtpu (a version that goes with jax's)")
    try:
        devices = topology(f"{chip.compiler}:{sizes}")
    except Exception as error:  # libtpu has shapes that it does not make, and says so in many ways
        raise UserError(f"{unknown} ({str(error).splitlines()[0][:120]})") from None
    return Machine(text, chip, len(devices), devices)
