"""Meshes: who gets which part, what is refused; and the engine on eight virtual devices, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from dspark_jax.errors import UserError
from dspark_jax.interop.drafter_io import load_drafter
from dspark_jax.interop.target_io import load_target
from dspark_jax.parallel import (
    ALL,
    constrain,
    describe_mesh,
    head_axes,
    parse_mesh,
    start_processes,
    top_k,
    weight_spec,
)

ROOT = Path(__file__).parents[1]


def mesh(data: int, model: int) -> AbstractMesh:
    return AbstractMesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("text", ["8", "0x8", "1x", "x4", "-1x2", "1x8x2", "two", "1 x 8", "1x99999999", "1.0x2"])
def test_a_mesh_that_is_none_is_refused_in_one_line(text):
    with pytest.raises(UserError, match="1x8") as refused:
        parse_mesh(text)
    assert repr(text) in str(refused.value) and "\n" not in str(refused.value)


def test_a_mesh_of_more_devices_than_there_are_is_refused():
    count = jax.local_device_count()
    with pytest.raises(UserError, match=f"needs {count + 1} devices, this process has {count}"):
        parse_mesh(f"1x{count + 1}")
    assert parse_mesh("") is None and describe_mesh(None) == ""


@pytest.mark.parametrize(
    "text", ["2", "localhost:1234", "localhost:1234,2,2", "localhost,2,0", "localhost:1,0,0", "all"]
)
def test_processes_that_are_none_are_refused_in_one_line(text):
    with pytest.raises(UserError, match="HOST:PORT,COUNT,INDEX"):
        start_processes(text)
    assert start_processes("") == (0, 1)


@pytest.mark.parametrize(
    ("heads", "sizes", "axes"),
    [
        ((8, 4), (2, 4), (ALL, ("model",))),  # query heads of a key-value head are split further
        ((4, 4), (2, 4), (("model",), ("model",))),
        ((32, 8), (1, 8), (ALL, ("model",))),
        ((8, 2), (4, 2), (ALL, ("model",))),
        ((8, 2), (1, 8), (None, None)),
        ((9, 3), (1, 8), (None, None)),
        ((6, 3), (2, 4), (None, None)),
    ],
)
def test_heads_are_never_cut(heads, sizes, axes):
    assert head_axes(*heads, mesh(*sizes)) == axes


@pytest.mark.parametrize(
    ("path", "shape", "spec"),
    [
        (("embedding",), (64, 48), P(ALL, None)),
        (("embedding",), (68, 48), P(("model",), None)),
        (("embedding",), (331, 48), P(None, None)),
        (("lm_head", "kernel"), (48, 64), P(None, ALL)),
        (("layers", 0, "q_proj", "kernel"), (3, 48, 64), P(None, None, ALL)),
        (("layers", 0, "q_proj", "bias"), (3, 64), P(None, ALL)),
        (("backbone", "layers", 0, "v_proj", "kernel"), (3, 48, 32), P(None, None, ("model",))),
        (("layers", 0, "o_proj", "kernel"), (3, 64, 48), P(None, ALL, None)),
        (("layers", 0, "o_proj", "bias"), (3, 48), P()),
        (("layers", 0, "mlp", "up_proj", "kernel"), (3, 48, 16), P(None, None, ALL)),
        (("layers", 0, "mlp", "down_proj", "kernel"), (3, 20, 48), P(None, ("model",), None)),
        (("layers", 0, "input_layernorm", "scale"), (3, 48), P()),
        (("backbone", "fc", "kernel"), (96, 48), P(ALL, None)),
        (("markov_head", "markov_w2"), (64, 16), P()),
        (("markov_head", "gate_proj", "kernel"), (64, 16), P()),  # an in-block head's, not an MLP's
    ],
)
def test_who_holds_which_part_of_a_parameter(path, shape, spec):
    assert weight_spec(path, shape, [(8, 4)], mesh(2, 4)) == spec


def test_without_a_mesh_nothing_changes():
    x = jnp.asarray(np.random.default_rng(0).permutation(40).reshape(2, 20))
    assert constrain(x, None, ALL) is x
    np.testing.assert_array_equal(top_k(x, 3)[0], jax.lax.top_k(x, 3)[0])


def test_a_mesh_of_one_device_loads_and_runs(golden):
    one = parse_mesh("1x1")
    target = load_target(golden / "target", mesh=one)
    drafter = load_drafter(golden / "dspark_vanilla", target)
    assert target.mesh == one == drafter.params["backbone"]["fc"]["kernel"].sharding.mesh
    tokens = jnp.arange(12)[None]
    np.testing.assert_array_equal(target(tokens).logits, load_target(golden / "target")(tokens).logits)


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_on_eight_virtual_devices(which):
    """Runs the tests of tests/decoding/eight_devices.py."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", which, "tests/decoding/eight_devices.py"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "JAX_NUM_CPU_DEVICES": "8"}
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    print("eight virtual devices:", done.stdout.strip().splitlines()[-1])
