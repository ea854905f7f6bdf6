"""Running the app: listening before the models are there, and draining before the end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.server import HANDLED_SIGNALS

from spolia.engine import AsyncEngine
from spolia.server.app import create_app
from spolia.server.body import BodyDeadlines
from spolia.server.config import ServerConfig
from spolia.server.events import EventEndpoints, EventPublisher
from spolia.server.logs import log_fields
from spolia.server.mcp import McpServers
from spolia.server.pins import Pins
from spolia.server.served import ModelSource, ServedModel, ServedModels
from spolia.server.tracing import Tracing
from spolia.server.warming import read_prompts, warm_up

__all__ = ["serve"]

logger = logging.getLogger("spolia.server")

# Two threads share the interpreter: the engine's, which the cores wait for, and the event loop. At Python's default of
# 5 ms, whichever holds the lock could keep the other waiting for a whole step.
_SWITCH_INTERVAL_S = 0.0005

# After the first signal, for clients that have sent a part of their request.
_REST_OF_BODY_S = 1.0

# For aborted answers to tell their clients so.
_LAST_WORDS_S = 1.0


def serve(
    models: Mapping[str, ModelSource],
    config: ServerConfig,
    listener: socket.socket,
    *,
    library: Callable[[], Mapping[str, ModelSource]] = dict,
) -> bool:
    """Serve on `listener` until SIGINT or SIGTERM; then finish what runs. A second signal aborts it, a third drops it.

    Blocks; call it on the main thread. Engines are closed at the end, and the process is to end then: from there on it
    ignores both signals.

    Args:
        models: loaded at the start, as far as there is room; the others by their first request.
        library: further models that requests may want.

    Returns:
        Whether all is at rest; False: a thread is still loading a model.

    Raises:
        SpoliaError: a model could not be loaded at the start; or KV events cannot be published. Nothing is served.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    server = _Server(create_app(models, config, library=library), config)
    publisher = server.publish_events(config)
    try:
        asyncio.run(server.run_until_drained(listener))
    finally:
        if publisher is not None:
            publisher.close()
        server.end_traces()
    if server.failure is not None:
        raise server.failure
    return all(served.loading is None or served.loading.done() for served in server.models.all())


class _Server(uvicorn.Server):
    """uvicorn, with signals that mean: drain, abort, drop; and none of them is an error."""

    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
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
        self.models: ServedModels = app.state.models
        self.failure: BaseException | None = None
        self._body_deadlines: BodyDeadlines = app.state.body_deadlines
        self._events: EventEndpoints = app.state.cache_events
        self._tracing: Tracing | None = app.state.tracing
        self._pins: Pins = app.state.pins
        self._mcp: McpServers | None = app.state.mcp
        self._preloading: asyncio.Task[None] | None = None
        self._warm = [] if config.warm is None else read_prompts(config.warm)
        self._warming: set[asyncio.Future[None]] = set()
        self._num_signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._aborting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    def publish_events(self, config: ServerConfig) -> EventPublisher | None:
        """None if nobody wants them."""
        if config.kv_events is None:
            return None
        return EventPublisher(self.models.loaded, config.kv_events, config.kv_events_replay)

    def end_traces(self) -> None:
        """Send the last of them."""
        if self._tracing is not None:
            self._tracing.close()

    async def run_until_drained(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        await self.serve(sockets=[listener])
        await self._close_engines()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.models.shelf.on_loaded = self._on_loaded
        for served in self.models.all():
            if served.loading is not None:
                served.loading.add_done_callback(partial(self._on_loaded, served))
        self._preloading = asyncio.ensure_future(self.models.shelf.preload(self.models.all()))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._body_deadlines.hurry(_REST_OF_BODY_S)
        self._events.close()
        await super().shutdown(sockets)
        await self._close_engines()  # while signals are still ours: what is written then is not to be cut off

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """In place of uvicorn's, which would have the old handlers back while the process is not quite at its end."""
        for number in HANDLED_SIGNALS:
            signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number in HANDLED_SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    def _on_loaded(self, served: ServedModel, future: Future[AsyncEngine]) -> None:
        """Called on the loading thread, but not before the server answers and handles signals."""
        if (error := future.exception()) is not None:
            if self._preloading is None or not self._preloading.done():
                self.failure = error
                self.should_exit = True
            else:
                log_fields(logger, "not loaded", {"model": served.name, "reason": str(error)})
            return
        config = future.result().config
        kv_mb = round((config.kv_memory or 0) / 1e6)
        fields = {"max_context": config.max_context, "kv_mb": kv_mb, "threads": config.num_threads}
        log_fields(logger, "ready", {"model": served.name, **fields})
        if self._warm and self._loop is not None:
            self._loop.call_soon_threadsafe(self._warm_up, served)

    def _warm_up(self, served: ServedModel) -> None:
        task = asyncio.ensure_future(warm_up(served, self._warm, self._pins))
        self._warming.add(task)
        task.add_done_callback(self._warming.discard)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain, abort, drop."""
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
        self._aborting = asyncio.ensure_future(self._abort_and_drop())

    async def _abort_and_drop(self) -> None:
        await self._close_engines()
        await asyncio.sleep(_LAST_WORDS_S)
        self._drop()

    def _drop(self) -> None:
        """Cut the connections that are left: a client that does not send the rest of its request, or does not read."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _close_engines(self) -> None:
        """Once, whoever wants it first; the others wait for it."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._end_all())
        await asyncio.shield(self._closing)

    async def _end_all(self) -> None:
        if self._preloading is not None:
            self._preloading.cancel()
        if self._mcp is not None:
            await self._mcp.close()
        for engine in self.models.loaded().values():
            await engine.aclose()
