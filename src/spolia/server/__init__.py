"""HTTP: OpenAI's endpoints, health, metrics, over engines that run on threads of their own.

    body -> schema (msgspec, strict) -> token ids -> Answer (streams of the engine) -> Rendering -> one reply, or events

The event loop never touches the pools. One wake-up a step hands it what all streams have got; each stream then costs
one encoded struct and one write. A client that goes away aborts its request at once.
"""

from __future__ import annotations

from spolia.server.app import create_app
from spolia.server.config import ServerConfig
from spolia.server.serving import listen, serve

__all__ = ["ServerConfig", "create_app", "listen", "serve"]
