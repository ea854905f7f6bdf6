"""`/v1/cache/events`: a snapshot and all that follows, as server-sent events.

    event: snapshot   data: {"sequence_number": 7, "stored": [...]}     forget what you knew; the next event is number 7
    event: stored     data: {"sequence_number": 7, "namespace", "branch", "parent", "start", "token_ids"}
    event: removed    data: {"sequence_number": 8, "namespace", "branch", "start", "num_tokens", "cause"}
    event: cleared    data: {"sequence_number": 9, "namespace"}

`kvcache.events` says what a branch is. Ids are `EPOCH:NUMBER`, of the event that comes next: a client that comes back
with the `Last-Event-ID` of the same engine gets what it missed, and a snapshot if that is too long ago; so does one
that reads too slowly.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from spolia.engine import AsyncEngine, Cleared, Event, Removed, Stored
from spolia.errors import NotReady, SpoliaError
from spolia.server.routes import Route
from spolia.server.served import ServedModel, ServedModels
from spolia.server.sse import EventStream

__all__ = ["EventEndpoints"]

# Between two looks at how many events there are, which costs nothing. Faster than a router decides, slower than a step.
_INTERVAL_S = 0.05
# Some proxies end a connection on which nothing was said for half a minute.
_SIGN_OF_LIFE_S = 15.0


class EventEndpoints:
    """Bound to the models of one app."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._epochs: WeakKeyDictionary[AsyncEngine, str] = WeakKeyDictionary()
        self._is_closed = False

    def routes(self) -> list[Route]:
        return [Route("GET", "/v1/cache/events", self.events)]

    def close(self) -> None:
        """End all streams, which would go on for ever, so that the server can."""
        self._is_closed = True

    async def events(self, request: Request) -> Response:
        """What the cache of a model (`?model=`, else the first) stores and gives up."""
        name = request.query_params.get("model")
        served = self._models.owner(name) if name else self._models.all()[0]
        served.engine  # noqa: B018 - raises while it loads
        last = request.headers.get("last-event-id") or request.query_params.get("after") or ""
        reader = _Reader(self, served, last)
        return EventStream(reader.run(), on_disconnect=reader.leave, headers={})

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def epoch(self, engine: AsyncEngine) -> str:
        """Names one life of one engine: another's numbers mean nothing."""
        return self._epochs.setdefault(engine, uuid.uuid4().hex[:12])


class _Reader:
    """One client."""

    def __init__(self, endpoints: EventEndpoints, served: ServedModel, last_id: str) -> None:
        self._endpoints = endpoints
        self._served = served
        self._has_left = False
        self._epoch, _, number = last_id.partition(":")
        self._since = int(number) if number.isdecimal() and len(number) < 20 else None
        self._told_s = time.monotonic()

    def leave(self) -> None:
        self._has_left = True

    async def run(self) -> AsyncIterator[bytes]:
        yield b": what the cache stores and gives up\n\n"
        while not (self._has_left or self._endpoints.is_closed):
            try:
                data = await self._next()
            except NotReady:  # unloaded; it may come back
                data = b""
            except SpoliaError:
                return  # the engine is closing
            if not data and time.monotonic() - self._told_s > _SIGN_OF_LIFE_S:
                data = b": still here\n\n"
            if data:
                self._told_s = time.monotonic()
                yield data
            await asyncio.sleep(_INTERVAL_S)

    async def _next(self) -> bytes:
        engine = self._served.engine
        epoch = self._endpoints.epoch(engine)
        if epoch != self._epoch:
            self._epoch, self._since = epoch, None
        if self._since == engine.next_event_number:
            return b""
        news = await asyncio.wrap_future(engine.news(self._since))
        self._since = news.next_number
        if news.is_snapshot:
            told = {
                "model": self._served.name,
                "sequence_number": news.next_number,
                "block_size": engine.block_size,
                "stored": [_told(event) for event in news.events],
            }
            return _framed("snapshot", f"{epoch}:{news.next_number}", told)
        return b"".join(
            _framed(type(event).__name__.lower(), f"{epoch}:{event.sequence_number + 1}", _told(event))
            for event in news.events
        )


def _framed(kind: str, id_: str, data: dict[str, Any]) -> bytes:
    return f"event: {kind}\nid: {id_}\n".encode() + b"data: %b\n\n" % msgspec.json.encode(data)


def _told(event: Event) -> dict[str, Any]:
    told: dict[str, Any] = {"sequence_number": event.sequence_number, "namespace": event.namespace.hex()}
    match event:
        case Stored():
            told |= {"branch": event.branch, "parent": event.parent, "start": event.start}
            told["token_ids"] = event.token_ids.tolist()
        case Removed():
            told |= {"branch": event.branch, "start": event.start, "num_tokens": event.num_tokens, "cause": event.cause}
        case Cleared():
            pass
    return told
