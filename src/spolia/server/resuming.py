"""Streams that outlive their connection: `"resumable": true` in a request, `GET /v1/streams/{id}` after a drop.

Generation goes on while nobody reads. Each event has a number, told as SSE's `id:`; lines of JSON are counted from 0.
A client that comes back says the last one it saw (`Last-Event-ID`, or `?after=`), and gets the rest as it comes. A
stream is kept for five minutes after its last reader has gone, or after its end; one that nobody comes back to, or ever
came to, is aborted then. `ResumableStreams.end` ends it before. Where too many are kept, the tenant with the most
of them makes room for others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable

from starlette.requests import Request
from starlette.responses import Response

from spolia.errors import InvalidRequest, Overloaded
from spolia.server.access import current_caller
from spolia.server.errors import UnknownThing
from spolia.server.routes import Route
from spolia.server.sse import EventStream

__all__ = ["LineStream", "ResumableStreams", "stream"]

_KEPT_S = 300.0
_MAX_STREAMS = 1024


class LineStream(EventStream):
    """A JSON object a line."""

    media_type = "application/x-ndjson"


class _Stream:
    """One stream's events so far.

    Args:
        kind: how it is sent.
        abort: ends the request behind it.
        forget: drops the stream from its owner.
    """

    def __init__(
        self,
        kind: type[EventStream],
        tenant: str | None,
        abort: Callable[[], None],
        forget: Callable[[], None],
        kept_s: float,
    ) -> None:
        self.kind = kind
        self.tenant = tenant
        self.events: list[bytes] = []
        self.is_over = False
        self._abort = abort
        self._forget = forget
        self._kept_s = kept_s
        self._readers: set[_Reader] = set()
        self._has_ended = False
        self._expiry: asyncio.TimerHandle | None = None
        self._pump: asyncio.Task[None] | None = None

    @property
    def is_read(self) -> bool:
        return bool(self._readers)

    def start(self, events: AsyncIterator[bytes]) -> None:
        self._pump = asyncio.ensure_future(self._fill(events))
        self._wait_for_reader()  # the client may have gone before its response began

    async def _fill(self, events: AsyncIterator[bytes]) -> None:
        try:
            async for several in events:
                for event in self._apart(several):
                    number = b"" if self.kind is LineStream else b"id: %d\n" % len(self.events)
                    self.events.append(number + event)
                self._wake()
        finally:
            self.is_over = True
            self._abort = _nothing  # and with it goes the answer, whose model may leave
            self._wake()

    def _apart(self, several: bytes) -> list[bytes]:
        """One write's events, each with its end."""
        end = b"\n" if self.kind is LineStream else b"\n\n"
        return [event + end for event in several.split(end) if event]

    def _wake(self) -> None:
        for reader in self._readers:
            reader.wake.set()

    def enter(self, reader: _Reader) -> None:
        self._readers.add(reader)
        if self._has_ended:  # after it was found
            reader.leave()
        if self._expiry is not None:
            self._expiry.cancel()

    def leave(self, reader: _Reader) -> None:
        self._readers.discard(reader)
        if not self._readers:
            self._wait_for_reader()

    def end(self) -> None:
        """Nobody is to read it any more: its readers are sent away, and the request behind it is aborted."""
        self._has_ended = True
        if self._expiry is not None:
            self._expiry.cancel()
        for reader in self._readers:
            reader.leave()
        self._abort()

    def _wait_for_reader(self) -> None:
        if self._has_ended:
            return
        self._expiry = asyncio.get_running_loop().call_later(self._kept_s, self._expire)

    def _expire(self) -> None:
        self._abort()
        self._forget()


def _nothing() -> None:
    return


class _Reader:
    """One connection that reads a stream from event number `start` on."""

    def __init__(self, stream: _Stream, start: int) -> None:
        self.wake = asyncio.Event()
        self._stream = stream
        self._start = start
        self._has_left = False

    def leave(self) -> None:
        """The client has gone; `events` ends."""
        self._has_left = True
        self.wake.set()

    async def events(self) -> AsyncIterator[bytes]:
        self._stream.enter(self)
        try:
            while not self._has_left:
                self.wake.clear()
                ready = self._stream.events[self._start :]
                if ready:
                    self._start += len(ready)
                    yield b"".join(ready)
                elif self._stream.is_over:
                    return
                else:
                    await self.wake.wait()
        finally:
            self._stream.leave(self)

    def response(self, headers: dict[str, str]) -> Response:
        return self._stream.kind(self.events(), on_disconnect=self.leave, headers=headers)


class ResumableStreams:
    """All of an app. Event loop only.

    Args:
        kept_s: how long a stream waits for a reader.
    """

    def __init__(self, kept_s: float = _KEPT_S, max_streams: int = _MAX_STREAMS) -> None:
        self._kept_s = kept_s
        self._max_streams = max_streams
        self._by_id: dict[str, _Stream] = {}

    def routes(self) -> list[Route]:
        return [Route("GET", "/v1/streams/{stream_id}", self.resume)]

    def open(
        self,
        stream_id: str,
        events: AsyncIterator[bytes],
        *,
        kind: type[EventStream] = EventStream,
        abort: Callable[[], None],
        headers: dict[str, str],
    ) -> Response:
        """The response that reads a new stream from its beginning.

        Raises:
            Overloaded: too many are kept; nothing was begun.
        """
        tenant = current_caller().tenant
        if len(self._by_id) >= self._max_streams and not self._make_room(tenant):
            abort()
            raise Overloaded(
                f"{self._max_streams} resumable streams are kept, as many as may; your tenant has the most of them, "
                "or those of whoever has are all being read; leave `resumable` out, or ask again later"
            )
        stream = _Stream(kind, tenant, abort, lambda: self._forget(stream_id), self._kept_s)
        self._by_id[stream_id] = stream
        stream.start(events)
        return _Reader(stream, 0).response(headers)

    def __contains__(self, stream_id: str) -> bool:
        return stream_id in self._by_id

    def end(self, stream_id: str) -> bool:
        """Forget a stream of the caller's tenant, whoever reads it; False: there is none."""
        stream = self._find(stream_id)
        if stream is None:
            return False
        self._forget(stream_id)
        stream.end()
        return True

    async def resume(self, request: Request, stream_id: str) -> Response:
        """The rest of a stream.

        Raises:
            UnknownThing: nobody knows it, any more or at all; or it is another tenant's.
            InvalidRequest: the number of the last event is none.
        """
        last = request.query_params.get("after", request.headers.get("last-event-id", "-1"))
        return self.read_on(stream_id, last)

    def read_on(self, stream_id: str, last: str) -> Response:
        """As `resume`, after the event of number `last`."""
        stream = self._find(stream_id)
        if stream is None:
            raise UnknownThing(
                f"no stream {stream_id!r} is kept here; it is for {self._kept_s:g} s after its last reader"
            )
        digits = last.isascii() and last.isdecimal() and len(last) <= 18
        if last != "-1" and not (digits and int(last) < len(stream.events)):
            raise InvalidRequest(
                f"after is {last!r}; it must be the id of the last event that came, of {len(stream.events)} from 0 on, "
                "or -1 for all",
                param="after",
            )
        return _Reader(stream, int(last) + 1).response({"x-request-id": stream_id})

    def _make_room(self, tenant: str | None) -> bool:
        """End the oldest that nobody reads, one that is over first, of the tenant that has most, if that is more."""
        held = Counter(stream.tenant for stream in self._by_id.values())
        most = max(held, key=held.__getitem__, default=tenant)
        if held[most] <= held[tenant]:
            return False
        unread = {id_: stream for id_, stream in self._by_id.items() if stream.tenant == most and not stream.is_read}
        if not unread:
            return False
        stream_id = min(unread, key=lambda id_: not unread[id_].is_over)
        self._forget(stream_id)
        unread[stream_id].end()
        return True

    def _find(self, stream_id: str) -> _Stream | None:
        stream = self._by_id.get(stream_id)
        return None if stream is None or stream.tenant != current_caller().tenant else stream

    def _forget(self, stream_id: str) -> None:
        self._by_id.pop(stream_id, None)  # a reader that found it may come in just after its time is up, and leave


def stream(
    request: Request,
    stream_id: str,
    events: AsyncIterator[bytes],
    *,
    abort: Callable[[], None],
    headers: dict[str, str],
    is_resumable: bool | None,
    kind: type[EventStream] = EventStream,
) -> Response:
    """The response that sends `events`: one that ends with its connection, or one that can be resumed.

    Args:
        abort: ends the request behind it.

    Raises:
        Overloaded: too many resumable streams are kept; nothing was begun.
    """
    if not is_resumable:
        return kind(events, on_disconnect=abort, headers=headers)
    streams: ResumableStreams = request.app.state.resumable_streams
    return streams.open(stream_id, events, kind=kind, abort=abort, headers=headers)
