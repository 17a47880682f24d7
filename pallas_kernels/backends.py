"""Which kernels a program may hold, by the device that it is for."""

from collections.abc import Sequence
from typing import Any

import jax

KERNELS = ("auto", "tpu", "xla")


def choose(kernels: str, arrays: Sequence[Any] = ()) -> tuple[str, str]:
    """ "tpu" or "xla" for programs over `arrays` (none: the default device), and why.

    "auto" takes the kernels on one TPU. They are not partitioned by the compiler, so programs over several devices
    take XLA's operations; so do float64 programs, whose precision the kernels do not have.
    """
    placed = [a for a in arrays if isinstance(a, jax.Array)]
    devices = set().union(*(a.devices() for a in placed)) or {jax.devices()[0]}
    if kernels != "auto":
        return kernels, "asked for"
    platform = next(iter(devices)).platform
    if platform != "tpu":
        return "xla", f"there is no kernel for {platform} devices"
    if len(devices) > 1:
        return "xla", f"the weights are spread over {len(devices)} devices"
    if any(a.dtype.itemsize > 4 for a in placed):
        return "xla", "kernels have no float64"
    return "tpu", next(iter(devices)).device_kind
