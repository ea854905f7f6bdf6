"""The listening socket, made before anything that takes time."""

from __future__ import annotations

import socket

from spolia.server.config import ServerConfig

__all__ = ["listen"]


def listen(config: ServerConfig) -> socket.socket:
    """A socket that listens, so that a port in use is known before a model is loaded.

    Raises:
        OSError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.create_server((config.host, config.port), family=family, backlog=2048)
    # Connections inherit it. asyncio sets it only on sockets whose protocol number is given, which an accepted one's is
    # not; and without it the second write of an answer waits for the client to acknowledge the first: 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
