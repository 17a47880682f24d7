"""dspark_jax: train and serve DSpark speculative-decoding drafters in JAX. Faster text, unchanged."""

import importlib
from typing import Any

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
__all__ = [
    *("Completion", "Drafter", "Engine", "SamplingParams", "StreamEvent", "Target", "TargetOutput", "UserError"),
    *("load_drafter", "load_target"),
]


def __getattr__(name: str) -> Any:
    """Imports on first use: the command-line doors check their flags before they load JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dspark_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dspark_jax.{_HOMES[name]}"), name)
