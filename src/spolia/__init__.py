"""Spolia: LLM inference whose first-class citizen is the KV cache.

`LLM` and `SamplingParams` are imported on first use, so that `import spolia` and `spolia --help` cost nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spolia.engine import LLM, AsyncEngine, EngineConfig
    from spolia.generation import SamplingParams

__all__ = ["LLM", "AsyncEngine", "EngineConfig", "SamplingParams", "__version__"]

__version__ = "0.1.0"

_HOMES = {
    "LLM": "spolia.engine",
    "AsyncEngine": "spolia.engine",
    "EngineConfig": "spolia.engine",
    "SamplingParams": "spolia.generation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'spolia' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
