"""Shared fixtures. JAX stays in float32; a test that wants float64 asks for the fixture `x64`."""

import os

# Where libtpu is installed, every start would look for a TPU. Set the variable to run the tests on an accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

GOLDEN = Path(__file__).parent / "data" / "golden"


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit JAX for the length of one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def golden() -> Path:
    """Arrays of the reference PyTorch implementation: a tiny Qwen3 target, a DSpark drafter and what they compute."""
    return GOLDEN


@pytest.fixture(scope="session")
def golden_target(golden: Path) -> Path:
    """Directory of the trained target: 6 layers, width 96, 320 byte-level tokens."""
    return golden / "target"
