"""KV events over ZMQ, in the form of vLLM's, so that routers which follow its servers can follow these.

    PUB      topic `kv@MODEL` | sequence number, 8 bytes, big-endian | msgpack of [time, [event, ...], 0]
    ROUTER   ask: first number wanted, 8 bytes (before it the topic, where there are several models)
             answers: number | batch, for each batch from there on; then number -1 with nothing

    event    ["BlockStored", [name, ...], parent name or nil, [token id, ...], block_size, nil, "CPU", nil, namespace]
             ["BlockRemoved", [name, ...], "CPU"]
             ["AllBlocksCleared"]

Whoever asks for numbers that are not kept any more gets one batch that begins with `AllBlocksCleared` and holds all
there is, under the number of the batch up to which that is true. So asking from 0 always ends in the exact state.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from spolia.engine import AsyncEngine, BlocksRemoved, BlocksStored, CacheMirror
from spolia.errors import InvalidRequest, SpoliaError

__all__ = ["EventPublisher"]

_INTERVAL_MS = 20
_NUM_KEPT = 4_096
_END = (-1).to_bytes(8, "big", signed=True)
_MEDIUM = "CPU"


class EventPublisher:
    """Owns the two sockets and a thread that uses them.

    Args:
        engines: those that are loaded, by name; called on the thread.
        endpoint: to publish at, such as tcp://127.0.0.1:5557.
        replay: to answer at; None: nobody can ask.
        num_kept: batches that can be asked for again.

    Raises:
        InvalidRequest: pyzmq is not installed.
        SpoliaError: an endpoint cannot be had.
    """

    def __init__(
        self,
        engines: Callable[[], Mapping[str, AsyncEngine]],
        endpoint: str,
        replay: str | None = None,
        *,
        num_kept: int = _NUM_KEPT,
    ) -> None:
        try:
            import zmq
        except ImportError:
            raise InvalidRequest("kv_events needs pyzmq: pip install 'spolia[zmq]'", param="kv_events") from None
        self._engines = engines
        self._num_kept = num_kept
        self._topics: dict[str, _Topic] = {}
        self._context = zmq.Context()
        self._sockets: list[Any] = []
        self._publisher, self.endpoint = self._bound(zmq.PUB, endpoint)
        self._router: Any = None
        self.replay: str | None = None
        if replay is not None:
            self._router, self.replay = self._bound(zmq.ROUTER, replay)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spolia-kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()
        self._close_sockets()

    def _close_sockets(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()

    def _bound(self, kind: Any, endpoint: str) -> tuple[Any, str]:
        import zmq

        socket = self._context.socket(kind)
        self._sockets.append(socket)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise SpoliaError(
                f"KV events cannot be published at {endpoint}: {error}; say --kv-events tcp://HOST:PORT"
            ) from None
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _run(self) -> None:
        while not self._is_closed.is_set():
            for name, engine in self._engines().items():
                topic = self._topics.get(name)
                if topic is None:
                    topic = self._topics[name] = _Topic(name, self._num_kept)
                try:
                    sent = topic.follow(engine)
                except SpoliaError:  # it is closing
                    continue
                if sent is not None:
                    self._publisher.send_multipart([topic.name, *sent])
            if self._router is None:
                self._is_closed.wait(_INTERVAL_MS / 1e3)
            elif self._router.poll(_INTERVAL_MS):
                self._answer(self._router.recv_multipart())

    def _answer(self, frames: list[bytes]) -> None:
        """The envelope is the asker's address, and what a REQ socket puts after it; the last frame is the number."""
        number = frames[-1]
        empty = 2 if len(frames) > 2 and not frames[1] else 1
        envelope, named = frames[:empty], frames[empty:-1]
        topics = [topic for topic in self._topics.values() if not named or topic.name == named[0]]
        if len(number) == 8 and len(topics) == 1:
            for batch in topics[0].since(int.from_bytes(number, "big", signed=True)):
                self._router.send_multipart([*envelope, *batch])
        self._router.send_multipart([*envelope, _END, b""])


class _Topic:
    """One model's batches."""

    def __init__(self, model: str, num_kept: int) -> None:
        self.name = f"kv@{model}".encode()
        self._engine: weakref.ref[AsyncEngine] | None = None  # the last one; it may go
        self._since: int | None = None
        self._mirror = CacheMirror(1)
        self._block_size = 1
        self._next_number = 0
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=num_kept)

    def follow(self, engine: AsyncEngine) -> tuple[bytes, bytes] | None:
        """The next batch; None if nothing has changed.

        Raises:
            SpoliaError: the engine is closed or has failed.
        """
        if self._engine is None or engine is not self._engine():  # the first, or the model was loaded anew
            self._engine, self._since, self._block_size = weakref.ref(engine), None, engine.block_size
            self._mirror = CacheMirror(engine.block_size)
        if self._since == engine.next_event_number:
            return None
        news = engine.news(self._since).result()
        self._since = news.next_number
        if news.is_snapshot:
            self._mirror.reset(news.events)
            return self._batch(self._everything())
        changes = [change for event in news.events for change in self._mirror.apply(event)]
        return self._batch(map(self._told, changes)) if changes else None

    def since(self, number: int) -> list[tuple[bytes, bytes]]:
        oldest = self._next_number - len(self._kept)
        if 0 <= oldest <= number or not self._kept:
            return list(self._kept)[max(0, number - oldest) :]
        return [(self._kept[-1][0], _encoded(self._everything()))]

    def _everything(self) -> list[Any]:
        return [["AllBlocksCleared"], *map(self._told, self._mirror.blocks())]

    def _batch(self, events: Iterable[Any]) -> tuple[bytes, bytes]:
        batch = self._next_number.to_bytes(8, "big", signed=True), _encoded(list(events))
        self._kept.append(batch)
        self._next_number += 1
        return batch

    def _told(self, change: BlocksStored | BlocksRemoved) -> list[Any]:
        if isinstance(change, BlocksRemoved):
            return ["BlockRemoved", change.names, _MEDIUM]
        namespace = change.namespace.hex()
        stored = change.names, change.parent, change.token_ids, self._block_size
        return ["BlockStored", *stored, None, _MEDIUM, None, namespace]


def _encoded(events: list[Any]) -> bytes:
    return msgspec.msgpack.encode([time.time(), events, 0])
