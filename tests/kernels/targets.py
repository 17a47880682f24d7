"""What the kernels' tests share: the chips to compile for, and interpreters that find races and stale memory.

The compiler itself is `pallas_kernels.targets`, which `python -m pallas_kernels.report` needs as well.
"""

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.targets import TPUS, compile_tpu, gpu_compiler_installed, has_kernel, libtpu_installed, tpu_mesh
from tests.kernels.gpu_interpreter import interpret_params

needs_libtpu = pytest.mark.skipif(not libtpu_installed(), reason="libtpu is not installed (requirements-test.txt)")
every_tpu = pytest.mark.parametrize("chip", sorted(TPUS))

ROOT = Path(__file__).parents[2]
# Where `make test` puts the GPU compiler: beside the packages, so that no other process finds the plugin.
GPU_COMPILER = Path(sys.prefix) / "gpu-compiler"
needs_gpu_compiler = pytest.mark.skipif(
    not (GPU_COMPILER.exists() or gpu_compiler_installed()),
    reason="the GPU compiler is not installed (`make test` does it on Linux; docs/kernels.md)",
)


@functools.cache
def gpu_programs() -> dict[str, dict[str, Any]]:
    """What `tests.kernels.gpu_programs` prints of each program, by name."""
    path = os.pathsep.join([str(GPU_COMPILER), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-m", "tests.kernels.gpu_programs"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    *lines, end = done.stdout.splitlines() or [""]
    assert end == "all programs are through", done.stderr
    programs = map(json.loads, lines)
    return {program["name"]: program for program in programs}


def tpu_interpreter() -> contextlib.AbstractContextManager[None]:
    """Runs TPU kernels on the CPU, jitted or not: memory starts as NaN, copies happen on wait, bad indices raise."""
    return _interpreter(pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan"))


def gpu_interpreter() -> contextlib.AbstractContextManager[None]:
    """Runs GPU kernels on the CPU: a block's warpgroups are threads, memory starts as NaN, bad indices raise."""
    return _interpreter(interpret_params())


@contextlib.contextmanager
def _interpreter(params: Any) -> Iterator[None]:
    """A race fails the test: jax 0.10 only prints it, later ones raise."""
    printed = io.StringIO()
    try:
        with pltpu.force_tpu_interpret_mode(params), contextlib.redirect_stdout(printed):
            yield
            jax.effects_barrier()
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    assert "RACE DETECTED" not in printed.getvalue(), printed.getvalue()


__all__ = [
    "TPUS", "compile_tpu", "every_tpu", "gpu_interpreter", "gpu_programs", "has_kernel", "needs_gpu_compiler",
    "needs_libtpu", "tpu_interpreter", "tpu_mesh",
]  # fmt: skip
