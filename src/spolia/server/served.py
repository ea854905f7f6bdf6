"""The models this server answers for, from the moment they begin to load."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from spolia.engine import AsyncEngine, CacheStats, EngineStats, SessionStore, TokenStream
from spolia.errors import NotReady, UnknownModel
from spolia.server.conversations import ConversationLog
from spolia.server.curve import LiveCurve
from spolia.server.explaining import ExplainLog
from spolia.server.metrics import Metrics, ModelMetrics

__all__ = ["ServedModel", "ServedModels"]

_NUM_RECENT = 64


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model: its engine, or the promise of one.

    Attributes:
        loading: done when the model can answer, or holds why it never will.
        streams: submitted and not ended. Weak, so that one which nobody reads any more does not count for ever.
        request_timeout_s: after which an answer is ended.
        curve: what other sizes would have hit.
        explained, conversations: of the last requests.
        recent: what the page shows of the requests that ended last.
        since_s: Unix time at which loading began.
    """

    name: str
    loading: Future[AsyncEngine]
    metrics: ModelMetrics
    request_timeout_s: float
    curve: LiveCurve
    since_s: float = field(default_factory=time.time)
    streams: WeakSet[TokenStream] = field(default_factory=WeakSet)
    explained: ExplainLog = field(default_factory=ExplainLog)
    conversations: ConversationLog = field(default_factory=ConversationLog)
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_NUM_RECENT))
    _embedding: asyncio.Lock = field(default_factory=asyncio.Lock)
    _embedders: list[object] = field(default_factory=list)

    @property
    def trouble(self) -> str | None:
        """Why the model cannot answer now; None if it can."""
        if not self.loading.done():
            return f"model {self.name} is loading, for {time.time() - self.since_s:.1f} s so far"
        error = self.loading.exception() or self.loading.result().failure
        return None if error is None else f"model {self.name} failed: {error}"

    @property
    def num_waiting(self) -> int:
        """Streams that are not in the batch. The engine's own count is as old as its last step and misses a burst."""
        return len(self.streams) - self.engine.stats.num_running

    @property
    def num_embedding(self) -> int:
        """Requests for embeddings that have not ended."""
        return len(self._embedders)

    @asynccontextmanager
    async def embedding(self) -> AsyncIterator[None]:
        """One request for embeddings at a time: each takes a step for every one of the engine's, and two would two."""
        token = object()
        self._embedders.append(token)
        try:
            async with self._embedding:
                yield
        finally:
            self._embedders.remove(token)

    @property
    def engine(self) -> AsyncEngine:
        """
        Raises:
            NotReady: still loading, or failed to; the message says which.
        """
        if not self.loading.done() or self.loading.exception() is not None:
            raise NotReady(self.trouble)
        return self.loading.result()

    @property
    def sessions(self) -> SessionStore:
        """Conversations that are kept here.

        Raises:
            NotReady: as `engine`.
        """
        return self.engine.sessions


class ServedModels:
    """By name, in the order given."""

    def __init__(self, engines: Mapping[str, Future[AsyncEngine]], *, request_timeout_s: float) -> None:
        self.metrics = Metrics(self._snapshots, self._caches)
        self._by_name = {
            name: ServedModel(name, engine, self.metrics.of_model(name), request_timeout_s, LiveCurve(engine))
            for name, engine in engines.items()
        }

    def get(self, name: str | None) -> ServedModel:
        """
        Args:
            name: as the client spells it; None is right where there is only one.

        Raises:
            UnknownModel: not served here.
        """
        if name is None and len(self._by_name) == 1:
            return next(iter(self._by_name.values()))
        if name not in self._by_name:
            raise UnknownModel(f"the model {name!r} does not exist here; served: {', '.join(self._by_name)}")
        return self._by_name[name]

    def all(self) -> list[ServedModel]:
        return list(self._by_name.values())

    def loaded(self) -> dict[str, AsyncEngine]:
        """Engines of the models that have been loaded, also of those that have failed since."""
        return {
            served.name: served.loading.result()
            for served in self._by_name.values()
            if served.loading.done() and served.loading.exception() is None
        }

    def _snapshots(self) -> dict[str, EngineStats]:
        return {name: engine.stats for name, engine in self.loaded().items()}

    def _caches(self) -> dict[str, CacheStats]:
        return {name: engine.cache_stats for name, engine in self.loaded().items()}
