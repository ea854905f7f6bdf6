"""Running the app: listening before the models are there, and draining before the end."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI

from spolia.engine import AsyncEngine
from spolia.server.app import create_app
from spolia.server.body import BodyDeadlines
from spolia.server.config import ServerConfig
from spolia.server.events import EventEndpoints, EventPublisher
from spolia.server.logs import log_fields
from spolia.server.served import ServedModels

__all__ = ["serve"]

logger = logging.getLogger("spolia.server")

# Two threads share the interpreter: the engine's, which the cores wait for, and the event loop. At Python's default of
# 5 ms, whichever holds the lock could keep the other waiting for a whole step.
_SWITCH_INTERVAL_S = 0.0005

# After the first signal, for clients that have sent a part of their request.
_REST_OF_BODY_S = 1.0

# For aborted answers to tell their clients so.
_LAST_WORDS_S = 1.0


def serve(engines: Mapping[str, Future[AsyncEngine]], config: ServerConfig, listener: socket.socket) -> None:
    """Serve on `listener` until SIGINT or SIGTERM; then finish what runs. A second signal aborts it, a third drops it.

    Blocks; call it on the main thread. The engines that were loaded are closed at the end.

    Raises:
        SpoliaError: a model could not be loaded, nothing is served any more; or KV events cannot be published.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    server = _Server(create_app(engines, config), engines, config)
    publisher = server.publish_events(config)
    try:
        asyncio.run(server.run_until_drained(listener))
    finally:
        if publisher is not None:
            publisher.close()
    for future in engines.values():
        if future.done() and (error := future.exception()) is not None:
            raise error


class _Server(uvicorn.Server):
    """uvicorn, with signals that mean: drain, abort, drop; and none of them is an error."""

    def __init__(self, app: FastAPI, engines: Mapping[str, Future[AsyncEngine]], config: ServerConfig) -> None:
        # Request lines are ours (see `answer`); uvicorn's own log is for what goes wrong.
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                ssl_certfile=config.tls_cert,
                ssl_keyfile=config.tls_key,
            )
        )
        self._models: ServedModels = app.state.models
        self._body_deadlines: BodyDeadlines = app.state.body_deadlines
        self._events: EventEndpoints = app.state.cache_events
        self._engines = engines
        self._num_signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Task[None] | None = None

    def publish_events(self, config: ServerConfig) -> EventPublisher | None:
        """None if nobody wants them."""
        if config.kv_events is None:
            return None
        return EventPublisher(self._models.loaded, config.kv_events, config.kv_events_replay)

    async def run_until_drained(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        await self.serve(sockets=[listener])
        await self._close_engines()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for name, future in self._engines.items():
            future.add_done_callback(partial(self._on_loaded, name))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._body_deadlines.hurry(_REST_OF_BODY_S)
        self._events.close()
        await super().shutdown(sockets)

    def _on_loaded(self, name: str, future: Future[AsyncEngine]) -> None:
        """Called on the loading thread, but not before the server answers and handles signals."""
        if future.exception() is not None:
            self.should_exit = True
            return
        config = future.result().config
        kv_mb = round((config.kv_memory or 0) / 1e6)
        fields = {"max_context": config.max_context, "kv_mb": kv_mb, "threads": config.num_threads}
        log_fields(logger, "ready", {"model": name, **fields})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """In place of uvicorn's, which would end the process by the signal after draining."""
        self._num_signals += 1
        if self._num_signals == 1:
            self.should_exit = True
        elif self._num_signals == 2 and self._loop is not None:
            # Not from here: the signal may have interrupted whoever holds the engine's lock.
            self._loop.call_soon_threadsafe(self._abort)
        else:
            self.force_exit = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._drop)

    def _abort(self) -> None:
        self._closing = asyncio.ensure_future(self._abort_and_drop())

    async def _abort_and_drop(self) -> None:
        await self._close_engines()
        await asyncio.sleep(_LAST_WORDS_S)
        self._drop()

    def _drop(self) -> None:
        """Cut the connections that are left: a client that does not send the rest of its request, or does not read."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _close_engines(self) -> None:
        for engine in self._models.loaded().values():
            await engine.aclose()
