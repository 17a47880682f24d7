"""The tools that prove the other kernels must themselves tell right from wrong."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tests.kernels.targets import compile_tpu, every_tpu, has_kernel, needs_libtpu, tpu_interpreter, tpu_mesh

ROWS = jax.ShapeDtypeStruct((8, 128), jnp.float32)


def double(x: jax.Array) -> jax.Array:
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    return pl.pallas_call(kernel, out_shape=ROWS)(x)


def read_early(x: jax.Array, wait: bool) -> jax.Array:
    """Copies x into the chip's memory and, without `wait`, reads before the copy has ended."""

    def kernel(x_ref, out_ref, buffer, sent):
        copy = pltpu.make_async_copy(x_ref, buffer, sent)
        copy.start()
        if wait:
            copy.wait()
        out_ref[...] = buffer[...]
        if not wait:
            copy.wait()

    scratch = [pltpu.VMEM(ROWS.shape, ROWS.dtype), pltpu.SemaphoreType.DMA]
    in_hbm = [pl.BlockSpec(memory_space=pl.ANY)]
    return pl.pallas_call(kernel, out_shape=ROWS, in_specs=in_hbm, scratch_shapes=scratch)(x)


def out_of_vector_memory(x: jax.Array) -> jax.Array:
    def kernel(x_ref, out_ref, buffer):
        buffer[:8, :128] = x_ref[...]
        out_ref[...] = buffer[:8, :128]

    return pl.pallas_call(kernel, out_shape=ROWS, scratch_shapes=[pltpu.VMEM((1 << 15, 1 << 13), jnp.float32)])(x)


def test_the_interpreter_runs_a_kernel():
    with tpu_interpreter():
        assert jnp.all(jax.jit(double)(jnp.ones(ROWS.shape)) == 2)
        assert jnp.all(read_early(jnp.ones(ROWS.shape), wait=True) == 1)


def test_the_interpreter_finds_a_race():
    with pytest.raises(Exception, match="(?i)race"):
        with tpu_interpreter():
            read_early(jnp.ones(ROWS.shape), wait=False)


@needs_libtpu
@every_tpu
def test_the_compiler_knows_the_chip(chip):
    assert has_kernel(compile_tpu(chip, double, ROWS))
    assert not has_kernel(compile_tpu(chip, lambda x: x * 2, ROWS))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED|vmem"):
        compile_tpu(chip, out_of_vector_memory, ROWS)


@needs_libtpu
def test_chips_form_a_mesh():
    assert dict(tpu_mesh("v5e", (2, 4)).shape) == {"data": 2, "model": 4}


@needs_libtpu
def test_a_platforms_branch_is_chosen_by_the_target():
    def either(x):
        return jax.lax.platform_dependent(x, tpu=double, default=lambda x: x * 2)

    assert has_kernel(compile_tpu("v5e", either, ROWS))
    assert jnp.all(jax.jit(either)(jnp.ones(ROWS.shape)) == 2)
