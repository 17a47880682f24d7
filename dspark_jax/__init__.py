"""dspark_jax: train and serve DSpark speculative-decoding drafters in JAX. Faster text, unchanged."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark_jax.decoding.engine import Engine
    from dspark_jax.decoding.requests import Completion, StreamEvent
    from dspark_jax.decoding.sampling import SamplingParams
    from dspark_jax.errors import UserError
    from dspark_jax.interop.drafter_io import Drafter, load_drafter
    from dspark_jax.interop.target_io import Target, TargetOutput, load_target

_HOMES = {
    "Engine": "decoding.engine",
    "Completion": "decoding.requests",
    "StreamEvent": "decoding.requests",
    "SamplingParams": "decoding.sampling",
    "UserError": "errors",
    "Drafter": "interop.drafter_io",
    "load_drafter": "interop.drafter_io",
    "Target": "interop.target_io",
    "TargetOutput": "interop.target_io",
    "load_target": "interop.target_io",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Imports on first use: the command-line doors check their flags before they load JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dspark_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dspark_jax.{_HOMES[name]}"), name)
