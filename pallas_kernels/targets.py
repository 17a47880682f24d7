"""Compiles programs for TPUs and GPUs that are not here: their compilers run on any x86 host.

TPUs: `pip install libtpu`. GPUs: see docs/kernels.md, and set `JAX_PLATFORMS=cpu`, else JAX looks for a driver.
Compiled is not run: a program that compiles fits the chip's memories and its compiler's rules, no more.
"""

import functools
import importlib.util
import math
import os
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

TPUS = {"v5e": "v5e:2x4", "v6e": "v6e:2x4", "v5p": "v5p:2x2x2"}  # eight chips each
KERNELS = ("tpu_custom_call", "mosaic_gpu_v2")  # how a Mosaic kernel shows in a compiled program
OPERATIONS = ("anchor_attention", "distribution_loss", "fused_verify", "markov_sampler", "ragged_attention")

# What compilers ask of a GPU: compute capability, processors, bytes of memory and of second-level cache.
GPUS = {"H100": ((9, 0), 132, 84_929_347_584, 52_428_800), "B200": ((10, 0), 148, 192_000_000_000, 132_644_864)}
_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: {processors}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: {cache}
  clock_rate_ghz: 1.98
  device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{name}"
"""


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
    return _compile(tpu_mesh(chip), function, shapes, static)


def gpu_compiler_installed() -> bool:
    packages = ("jax_cuda12_plugin", "jax_plugins.xla_cuda12", "nvidia.cuda_nvcc")
    try:
        return all(importlib.util.find_spec(package) is not None for package in packages)
    except ModuleNotFoundError:  # of the package that should hold it
        return False


@functools.cache
def gpu_mesh(name: str) -> Mesh:
    """One GPU that compiles and cannot run."""
    (major, minor), processors, memory, cache = GPUS[name]
    config = _GPU.format(
        name=f"NVIDIA {name}", major=major, minor=minor, processors=processors, memory=memory, cache=cache
    )
    devices = topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x1").devices
    return jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=devices)


def compile_gpu(name: str, function: Callable[..., Any], *shapes: Any, **static: Any) -> jax.stages.Compiled:
    """`function(*shapes, **static)`, jitted and compiled for one GPU, down to its machine code."""
    return _compile(gpu_mesh(name), function, shapes, static)


def _compile(mesh: Mesh, function: Callable[..., Any], shapes: Any, static: Any) -> jax.stages.Compiled:
    replicated = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=replicated), shapes)
    return jax.jit(functools.partial(function, **static)).lower(*placed).compile()


def has_kernel(compiled: jax.stages.Compiled) -> bool:
    """Whether a Mosaic kernel is in the program."""
    text = compiled.as_text()
    return any(kernel in text for kernel in KERNELS)


def kernels_in(hlo: str) -> tuple[str, ...]:
    """Whose TPU kernels a compiled program's text holds: names out of OPERATIONS."""
    return tuple(op for op in OPERATIONS if re.search(rf"%{op}[\w.]* = .*{KERNELS[0]}", hlo))
