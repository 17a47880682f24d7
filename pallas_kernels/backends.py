"""Which kernels a program may hold, by the device that it is for."""

from collections.abc import Sequence
from typing import Any

import jax

KERNELS = ("auto", "tpu", "gpu", "xla")


def choose(
    kernels: str, arrays: Sequence[Any] = (), written: Sequence[str] = ("tpu",), untried: bool = False
) -> tuple[str, str]:
    """One of `written`, for which there are kernels, or "xla", for programs over `arrays` (none: the default device),
    and why.

    "auto" takes the kernels on TPUs, and with `untried` on one Hopper GPU: on that machine none has been seen to
    give the right tokens yet, and those are for one device. Float64 programs take XLA's operations: the kernels do not
    have that precision.
    """
    placed = [a for a in arrays if isinstance(a, jax.Array)]
    devices = set().union(*(a.devices() for a in placed)) or {jax.devices()[0]}
    if kernels != "auto":
        return kernels, "asked for"
    device = next(iter(devices))
    if device.platform not in written:
        return "xla", f"there is no kernel for {device.platform} devices"
    capability = getattr(device, "compute_capability", "")
    if device.platform == "gpu" and not capability.startswith("9."):
        return "xla", f"GPU kernels need a Hopper (compute capability 9.x); this {device.device_kind} has {capability}"
    if device.platform == "gpu" and len(devices) > 1:
        return "xla", f"the weights are spread over {len(devices)} devices"
    if any(a.dtype.itemsize > 4 for a in placed):
        return "xla", "kernels have no float64"
    if device.platform == "gpu" and not untried:
        return (
            "xla",
            "its kernels have not run on a card yet: try `python -m pallas_kernels.gpu_check`, then kernels='gpu'",
        )
    return device.platform, device.device_kind
