"""Pallas' interpreter of GPU kernels, which JAX 0.10 has and does not show yet; there it lacks three things."""

import inspect
import threading
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu


def interpret_params() -> Any:
    """A block's warpgroups run as threads whose races are found; memory starts as NaN; bad indices raise."""
    if hasattr(plgpu, "InterpretGPUParams"):
        return plgpu.InterpretGPUParams(detect_races=True)
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    _teach_transposes()
    _teach_layouts()
    _compile_once()
    return InterpretGPUParams(detect_races=True)


class _Transposed(tuple):
    """A range of a buffer whose content is meant transposed."""


def _teach_transposes() -> None:
    """It cannot read what is given transposed, be it a matrix product's operand or an array."""
    from jax._src.pallas.mosaic.interpret import utils
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax._src.pallas.mosaic_gpu.interpret.shared_memory import GPUSharedMemory as Memory
    from jax._src.state.types import TransposeTransform

    if hasattr(utils.to_range, "taught"):
        return
    to_range, get, read = utils.to_range, Memory.get_buffer_content, gpu_callbacks._get

    def taught_range(transforms: Any) -> Any:
        if transforms and isinstance(transforms[-1], TransposeTransform):
            return _Transposed(to_range(transforms[:-1]))
        return to_range(transforms)

    def taught_get(self: Memory, key: Any, rnge: Any, *args: Any, **kwargs: Any) -> Any:
        content, *rest = get(self, key, rnge, *args, **kwargs)
        return (content.T if isinstance(rnge, _Transposed) else content, *rest)

    def taught_read(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(read).bind(*args, **kwargs)
        transforms = gpu_callbacks._remove_noop_transforms(given.arguments["transforms"])
        if not transforms or not isinstance(transforms[-1], TransposeTransform):
            return read(*args, **kwargs)
        given.arguments["transforms"] = transforms[:-1]
        token, content = read(*given.args, **given.kwargs)
        return token, content.T

    taught_range.taught = True
    utils.to_range, Memory.get_buffer_content, gpu_callbacks._get = taught_range, taught_get, taught_read


def _teach_layouts() -> None:
    """It does not know that an array's layout changes nothing of it."""
    from jax._src.pallas.mosaic_gpu.core import layout_cast_p
    from jax.interpreters import mlir

    mlir.register_lowering(layout_cast_p, lambda ctx, x, **_: [x])


def _compile_once() -> None:
    """It compiles a kernel anew for every warpgroup of every block."""
    from jax._src.pallas.mosaic.interpret import thread_map

    lock, programs = threading.Lock(), {}

    def run(jaxpr: Any, consts: Any, *args: Any) -> None:
        def evaluate(consts: Any, *args: Any) -> None:
            jax.core.eval_jaxpr(jaxpr, consts, *args)

        with lock:
            if jaxpr not in programs:
                programs[jaxpr] = jax.jit(evaluate).lower(consts, *args).compile()
        programs[jaxpr](consts, *args)

    thread_map._run_jaxpr = run
