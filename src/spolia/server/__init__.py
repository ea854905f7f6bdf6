"""HTTP: OpenAI's endpoints, health, metrics, over engines that run on threads of their own.

    body -> schema (msgspec, strict) -> token ids -> Answer (streams of the engine) -> Rendering -> one reply, or events

The event loop never touches the pools. One wake-up a step hands it what all streams have got; each stream then costs
one encoded struct and one write. A client that goes away aborts its request at once.

`create_app` and `serve` are imported when they are first used: the web framework takes longer to import than a small
model to load, and both can happen at the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spolia.server.config import ServerConfig
from spolia.server.durations import parse_duration
from spolia.server.listener import listen
from spolia.server.logs import log_fields, set_up_logging

if TYPE_CHECKING:
    from spolia.server.access.keys import read_keys
    from spolia.server.app import create_app
    from spolia.server.mcp.config import read_mcp_file
    from spolia.server.served import ModelSource
    from spolia.server.serving import serve

__all__ = [
    "ModelSource",
    "ServerConfig",
    "create_app",
    "listen",
    "log_fields",
    "parse_duration",
    "read_keys",
    "read_mcp_file",
    "serve",
    "set_up_logging",
]

_HOMES = {
    "ModelSource": "served",
    "create_app": "app",
    "read_keys": "access.keys",
    "read_mcp_file": "mcp.config",
    "serve": "serving",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'spolia.server' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(f"spolia.server.{_HOMES[name]}"), name)
