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
    return socket.create_server((config.host, config.port), family=family, backlog=2048)
