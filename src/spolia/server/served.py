"""The models this server answers for: in memory, on their way there, or waiting for a request that wants them."""

from __future__ import annotations

import asyncio
import difflib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

from starlette.types import ASGIApp, Receive, Scope, Send

from spolia.engine import AsyncEngine, EngineConfig, SessionStore, TokenStream
from spolia.errors import ModelError, NotReady, UnknownModel
from spolia.models import list_recipes, read_recipe
from spolia.server.conversations import ConversationLog
from spolia.server.curve import LiveCurve
from spolia.server.errors import Conflict
from spolia.server.explaining import ExplainLog
from spolia.server.metrics import Metrics, ModelMetrics, Reading
from spolia.server.shelf import Shelf
from spolia.server.slots import Slots

if TYPE_CHECKING:
    from spolia.models import ChatTemplate, Model, Recipe

__all__ = ["HoldsModels", "ModelSource", "ServedModel", "ServedModels"]

_NUM_RECENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model comes from when somebody asks for it.

    Attributes:
        load: called on a thread of its own, with the most bytes that its KV may take; None: as the engine sees fit.
        size_bytes: what it takes in memory at least, from the size of its files. It may fetch them first.
        is_pinned: it stays once it is loaded.
        config: what it is loaded with.
        loading: where somebody has begun to load it.
    """

    load: Callable[[int | None], AsyncEngine]
    size_bytes: Callable[[], int]
    is_pinned: bool = False
    config: EngineConfig = field(default_factory=EngineConfig)
    loading: Future[AsyncEngine] | None = None


@dataclass(slots=True, eq=False)
class ServedModel:
    """One model. What clients made of it (sessions, explanations) is kept while it is not in memory.

    Attributes:
        source: None for an engine that somebody else has made, which comes and goes as they like.
        loading: done when the model can answer, or holds why it cannot; None while nobody asks for it.
        streams: submitted and not ended. Weak, so that one which nobody reads any more does not count for ever.
        searches: that have not ended; likewise.
        request_timeout_s: after which an answer is ended.
        curve: what other sizes would have hit.
        explained, conversations: of the last requests.
        recent: what the page shows of the requests that ended last.
        since_s: Unix time at which loading began.
        num_holds: HTTP requests that are being answered with it.
        num_queued: of them, those that wait for it to be loaded.
        waits_for: why it is not being loaded yet.
        used_s: when it was last asked for, by the shelf's clock.
        keep_alive_s: for how long it stays without a request; None: until its memory is wanted.
        expires_s: Unix time of that; None while it is in use, or for ever.
        slots: llama.cpp's.
        leaving: an engine that is ending: what it counted is told as long as it is not added to what was before.
        aside: sessions of an engine that was unloaded, for the next one.
        kv_bytes: what its KV had when it was unloaded: it is to have that again. None: it has not been unloaded.
        recipe: by which this is made of the model that has the engine; None: it is that model.
        dressed: chat templates of those made of it, by name.
    """

    name: str
    source: ModelSource | None
    loading: Future[AsyncEngine] | None
    metrics: ModelMetrics
    request_timeout_s: float
    keep_alive_s: float | None = None
    since_s: float = field(default_factory=time.time)
    streams: WeakSet[TokenStream] = field(default_factory=WeakSet)
    searches: WeakSet[object] = field(default_factory=WeakSet)
    explained: ExplainLog = field(default_factory=ExplainLog)
    conversations: ConversationLog = field(default_factory=ConversationLog)
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_NUM_RECENT))
    num_holds: int = 0
    num_queued: int = 0
    waits_for: str | None = None
    used_s: float = 0.0
    expires_s: float | None = None
    expiry: asyncio.TimerHandle | None = None
    leaving: AsyncEngine | None = None
    aside: SessionStore | None = None
    kv_bytes: int | None = None
    slots: Slots = field(default_factory=Slots)
    recipe: Recipe | None = None
    dressed: dict[str, tuple[Recipe, ChatTemplate | None]] = field(default_factory=dict)
    curve: LiveCurve = field(init=False)
    _embedding: asyncio.Lock = field(default_factory=asyncio.Lock)
    _embedders: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.curve = LiveCurve(lambda: self.engine if self.state == "ready" else None)

    @property
    def state(self) -> Literal["unloaded", "loading", "ready", "failed"]:
        if self.loading is None:
            return "unloaded"
        if not self.loading.done():
            return "loading"
        if self.loading.exception() is not None or self.loading.result().failure is not None:
            return "failed"
        return "ready"

    @property
    def trouble(self) -> str | None:
        """Why the model cannot answer now; None if it can."""
        if self.loading is None:
            return f"model {self.name} is not in memory; the next request for it loads it"
        if not self.loading.done():
            waits_for = "" if self.waits_for is None else f"; it waits for {self.waits_for}"
            return f"model {self.name} is loading, for {time.time() - self.since_s:.1f} s so far{waits_for}"
        error = self.loading.exception() or self.loading.result().failure
        return None if error is None else f"model {self.name} failed: {error}"

    @property
    def is_pinned(self) -> bool:
        """Whether it stays in memory whatever happens."""
        return self.source is None or self.source.is_pinned

    @property
    def is_idle(self) -> bool:
        """Whether nobody is being answered by it, or about to be; a stream that is to be resumed counts."""
        return not self.num_holds and not self.streams and not self.searches

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
            NotReady: not loaded, loading, or failed to; the message says which.
        """
        if self.loading is None or not self.loading.done() or self.loading.exception() is not None:
            raise NotReady(self.trouble)
        return self.loading.result()

    @property
    def model(self) -> Model:
        """What it knows of its words: the engine's model, or as the recipe has it.

        Raises:
            NotReady: as `engine`.
        """
        model, recipe = self.engine.model, self.recipe
        if recipe is None:
            return model
        kept, template = self.dressed.get(self.name, (None, None))
        if kept != recipe:  # compiled once, and not by each request
            template = recipe.dress(model).chat_template
            self.dressed[self.name] = recipe, template
        return replace(model, chat_template=template)

    def made(self, name: str, recipe: Recipe) -> ServedModel:
        """This model by another name and recipe: the same engine, cache and sessions. For one request."""
        view = replace(self, name=name, recipe=recipe)
        view.curve = self.curve
        return view

    @property
    def sessions(self) -> SessionStore:
        """Conversations that are kept here.

        Raises:
            NotReady: as `engine`.
        """
        return self.engine.sessions


class ServedModels:
    """By name, in the order given.

    Args:
        engines: engines, promises of them, or where to get them.
        library: further models, which somebody may ask for; called when a name is not known, or all are listed.
    """

    def __init__(
        self,
        engines: Mapping[str, Future[AsyncEngine] | ModelSource],
        *,
        request_timeout_s: float,
        shelf: Shelf | None = None,
        library: Callable[[], Mapping[str, ModelSource]] = dict,
    ) -> None:
        self.metrics = Metrics(self._readings)
        self.shelf = shelf or Shelf()
        self._request_timeout_s = request_timeout_s
        self._library = library
        self._by_name: dict[str, ServedModel] = {}
        for name, engine in engines.items():
            self._add(name, engine)

    def get(self, name: str | None) -> ServedModel:
        """A model as it is, in memory or not. To be answered by it, use `ready`.

        Args:
            name: as the client spells it; None is right where there is only one.

        Raises:
            UnknownModel: not served here.
        """
        served, recipe = self._find(name)
        return served if name is None or recipe is None else served.made(name, recipe)

    def owner(self, name: str | None) -> ServedModel:
        """The model that has the engine of what is asked for, as `get`; not a view of it.

        Raises:
            UnknownModel: not served here.
        """
        return self._find(name)[0]

    def _find(self, name: str | None) -> tuple[ServedModel, Recipe | None]:
        """The model that has the engine, and the recipe where `name` is one made of it."""
        try:
            recipe = None if name is None else read_recipe(name)
        except ModelError as error:
            raise UnknownModel(str(error), param="model") from None
        if recipe is None or (recipe.base != name and name in self._by_name):
            return self._with_engine(name), None
        try:
            return self._with_engine(recipe.base), recipe
        except UnknownModel:
            raise UnknownModel(f"{name} is made of {recipe.base!r}, which is not served here") from None

    def _with_engine(self, name: str | None) -> ServedModel:
        if name is None and len(self._by_name) == 1:
            return next(iter(self._by_name.values()))
        if name is not None and name not in self._by_name:
            self._look_into_library()
        if name is None and self._by_name:
            raise UnknownModel(f"several models are served; say which with `model`: {', '.join(self._by_name)}")
        if name not in self._by_name:
            near = difflib.get_close_matches(str(name).lower(), self._by_name, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UnknownModel(f"the model {name!r} does not exist here; {hint}served: {', '.join(self._by_name)}")
        return self._by_name[name]

    async def ready(self, name: str | None, *, keep_alive_s: float | None = None) -> ServedModel:
        """A model that is in memory, and stays there until the HTTP request that asks has been answered.

        Args:
            keep_alive_s: for how long after that it is to stay, infinity included; None: as the server was told.

        Raises:
            UnknownModel: not served here.
            NotReady: it cannot be loaded, or not within the shelf's time; says why.
        """
        served, recipe = self._find(name)
        held = _held.get()
        if held is not None and served not in held:
            held.append(served)
            self.shelf.hold(served)
        await self.shelf.ensure(served, self.all(), keep_alive_s=keep_alive_s)
        return served if name is None or recipe is None else served.made(name, recipe)

    async def forget(self, name: str) -> None:
        """Take a model out of memory, and serve it no more.

        Raises:
            Conflict: it is in use, or may not leave.
        """
        served = self._by_name.get(name)
        if served is None:
            return
        if served.is_pinned:
            raise Conflict(f"{name} is pinned in this server's memory; start it without --pin {name}, or end it")
        await self.shelf.unload(served)
        if served.state in ("ready", "loading"):
            raise Conflict(f"{name} is {'loading' if served.state == 'loading' else 'in use'}; try again later")
        self._by_name.pop(name, None)

    def release(self, served: ServedModel) -> None:
        """An HTTP request that was answered with it has ended."""
        self.shelf.release(served)

    def all(self) -> list[ServedModel]:
        return list(self._by_name.values())

    def everything(self) -> list[ServedModel]:
        """`all`, what the library has that nobody has asked for yet, and what was made of these."""
        self._look_into_library()
        made = [
            self._by_name[recipe.base].made(name, recipe)
            for name, recipe in list_recipes().items()
            if recipe.base in self._by_name and (recipe.base == name or name not in self._by_name)
        ]
        own = {served.name for served in made}
        return [*(served for served in self.all() if served.name not in own), *made]

    def loaded(self) -> dict[str, AsyncEngine]:
        """Engines of the models that have been loaded, also of those that have failed since."""
        return {
            served.name: served.loading.result()
            for served in self._by_name.values()
            if served.loading is not None and served.loading.done() and served.loading.exception() is None
        }

    def _add(self, name: str, engine: Future[AsyncEngine] | ModelSource) -> None:
        source = engine if isinstance(engine, ModelSource) else None
        loading = engine.loading if isinstance(engine, ModelSource) else engine
        self._by_name[name] = ServedModel(
            name, source, loading, self.metrics.of_model(name), self._request_timeout_s, self.shelf.keep_alive_s
        )

    def _look_into_library(self) -> None:
        for name, source in self._library().items():
            if name not in self._by_name:
                self._add(name, source)

    def _readings(self) -> dict[str, Reading]:
        leaving = {served.name: served.leaving for served in self._by_name.values() if served.leaving is not None}
        return {
            name: Reading(engine.stats, engine.cache_stats) for name, engine in {**leaving, **self.loaded()}.items()
        }


_held: ContextVar[list[ServedModel] | None] = ContextVar("spolia_held", default=None)


class HoldsModels:
    """ASGI middleware: what `ServedModels.ready` gave to a request stays until its response has been sent."""

    def __init__(self, app: ASGIApp, models: ServedModels) -> None:
        self._app = app
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held: list[ServedModel] = []
        _held.set(held)
        try:
            await self._app(scope, receive, send)
        finally:
            for served in held:
                self._models.release(served)
