"""What the kernels' tests share: the chips to compile for, and an interpreter that finds races and stale memory.

The compiler itself is `pallas_kernels.targets`, which `python -m pallas_kernels.report` needs as well.
"""

import contextlib
import io
from collections.abc import Iterator

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.targets import TPUS, compile_tpu, has_kernel, libtpu_installed, tpu_mesh

needs_libtpu = pytest.mark.skipif(not libtpu_installed(), reason="libtpu is not installed (requirements-test.txt)")
every_tpu = pytest.mark.parametrize("chip", sorted(TPUS))


@contextlib.contextmanager
def tpu_interpreter() -> Iterator[None]:
    """Runs TPU kernels on the CPU, jitted or not: memory starts as NaN, copies happen on wait, bad indices raise.

    A race fails the test: jax 0.10 only prints it, later ones raise.
    """
    printed = io.StringIO()
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    try:
        with pltpu.force_tpu_interpret_mode(params), contextlib.redirect_stdout(printed):
            yield
            jax.effects_barrier()
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    assert "RACE DETECTED" not in printed.getvalue(), printed.getvalue()


__all__ = ["TPUS", "compile_tpu", "every_tpu", "has_kernel", "needs_libtpu", "tpu_interpreter", "tpu_mesh"]
