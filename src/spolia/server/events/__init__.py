"""What the caches store and give up, told as it happens: to browsers and programs over HTTP, to routers over ZMQ.

/v1/cache/events        server-sent events: a snapshot, then every change, token by token
--kv-events ENDPOINT    ZMQ: whole blocks by name, in the form of vLLM's KV events, with a socket to replay from
"""

from __future__ import annotations

from spolia.server.events.publisher import EventPublisher
from spolia.server.events.stream import EventEndpoints

__all__ = ["EventEndpoints", "EventPublisher"]
