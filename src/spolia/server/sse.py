"""Server-sent events, and noticing that the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["DONE", "EventStream", "next_of", "watch_for_disconnect", "with_signs_of_life"]

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

_SIGN_OF_LIFE_S = 10.0


async def _wait_for_disconnect(receive: Receive, on_disconnect: Callable[[], None]) -> None:
    """Returns once the client has gone; `receive` may still hold parts of a body that nobody reads."""
    while (await receive())["type"] != "http.disconnect":
        pass
    on_disconnect()


@contextmanager
def watch_for_disconnect(receive: Receive, on_disconnect: Callable[[], None]) -> Iterator[None]:
    """Call `on_disconnect` once if the client goes away inside the block. The request's body must have been read."""
    watcher = asyncio.ensure_future(_wait_for_disconnect(receive, on_disconnect))
    try:
        yield
    finally:
        watcher.cancel()


async def with_signs_of_life(
    events: AsyncIterator[bytes], sign: bytes, interval_s: float = _SIGN_OF_LIFE_S
) -> AsyncIterator[bytes]:
    """`events`, and `sign` whenever nothing has come for so long: clients take a long silence for a dead server."""
    while True:
        waiting = asyncio.ensure_future(next_of(events))
        try:
            while not (await asyncio.wait([waiting], timeout=interval_s))[0]:
                yield sign
            data = waiting.result()
        finally:
            waiting.cancel()
        if data is None:
            return
        yield data


async def next_of(items: AsyncIterator[T]) -> T | None:
    """The next item, as a coroutine that a task can be made of; None: there is none."""
    return await anext(items, None)


class EventStream(Response):
    """Sends prepared bytes as they come; each item of `events` is one or more whole events, and one write.

    The plain ASGI way, without a task group or a middleware: the cost of an item is one `send`. A client that goes
    away calls `on_disconnect`, which must make `events` end.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], *, on_disconnect: Callable[[], None], headers: dict[str, str]
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", **headers})
        del self.headers["content-length"]
        self._events = events
        self._on_disconnect = on_disconnect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with watch_for_disconnect(receive, self._on_disconnect):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
