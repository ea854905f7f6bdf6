"""Which models are in memory: loaded when somebody asks, one at a time, and unloaded when others need the room.

    unloaded --a request--> loading --> ready --its time is over, or its memory is wanted--> unloaded
                               |
                               +--> failed: its requests are told why, and the next one tries again

Of the models that have to go, the one that was asked for longest ago goes first. A pinned one does not go, nor one that
somebody is being answered by: whoever needs its room waits, and says for what. An unloaded model's KV is in its tiers
(`--kv-disk`, `--kv-remote`), all of it: closing an engine writes what is not there yet.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

from spolia.engine import KV_SHARE, AsyncEngine, available_bytes
from spolia.errors import NotReady, SpoliaError
from spolia.server.logs import log_fields
from spolia.server.metrics import Reading

if TYPE_CHECKING:
    from spolia.server.served import ServedModel

__all__ = ["Shelf", "kv_share"]

logger = logging.getLogger("spolia.server")

_LOOK_AGAIN_S = 0.05
_MIN_KV_BYTES = 16 << 20


def kv_share(free_bytes: int) -> int:
    """Bytes of KV for a model that, with its weights, leaves so many of the shelf's."""
    return max(_MIN_KV_BYTES, int(KV_SHARE * free_bytes))


class Shelf:
    """Event loop only.

    Args:
        memory_bytes: for all models, weights and KV; None: what the system has available.
        keep_alive_s: for how long a model stays without a request; None: until its memory is wanted.
        wait_s: how long a request waits for its model.
        available: bytes that the process may still take.
    """

    def __init__(
        self,
        *,
        memory_bytes: int | None = None,
        keep_alive_s: float | None = None,
        wait_s: float = 600.0,
        available: Callable[[], int] = available_bytes,
    ) -> None:
        self.memory_bytes = memory_bytes
        self.keep_alive_s = keep_alive_s
        self._wait_s = wait_s
        self._available = available
        self._placing = asyncio.Lock()  # one model comes or goes at a time: each measures what is left
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_loaded: Callable[[ServedModel, Future[AsyncEngine]], None] = lambda *_: None
        self.on_leave: Callable[[ServedModel, AsyncEngine], Awaitable[None]] = _nothing
        self.on_back: Callable[[ServedModel], Awaitable[None]] = _nothing

    @property
    def is_at_rest(self) -> bool:
        """Whether no model is coming or going."""
        return not self._tasks

    def hold(self, served: ServedModel) -> None:
        """It is asked for: it stays until `release`."""
        served.num_holds += 1
        served.used_s = time.monotonic()
        self._stop_expiry(served)

    def release(self, served: ServedModel) -> None:
        served.num_holds -= 1
        served.used_s = time.monotonic()
        if served.is_pinned or served.num_holds or served.keep_alive_s is None or math.isinf(served.keep_alive_s):
            return
        served.expires_s = time.time() + served.keep_alive_s
        self._expire_after(served, served.keep_alive_s)

    async def ensure(self, served: ServedModel, models: Sequence[ServedModel], *, keep_alive_s: float | None) -> None:
        """Have it in memory.

        Args:
            models: all there are, which may have to make room.

        Raises:
            NotReady: it cannot be loaded, or not in time; says why.
        """
        served.keep_alive_s = self.keep_alive_s if keep_alive_s is None else keep_alive_s
        if served.state == "ready" or served.source is None:
            _ = served.engine  # a promise of somebody else's is not waited for
            return
        loading = served.loading if served.state != "failed" else None
        if loading is None:
            loading = self._begin(served, models)
        if not loading.done():
            served.num_queued += 1
            try:
                await _done(loading, self._wait_s)
            except TimeoutError:
                raise NotReady(f"{served.trouble}; more than {self._wait_s:g} s are not waited for") from None
            finally:
                served.num_queued -= 1
        if (error := loading.exception()) is not None:
            raise NotReady(f"model {served.name} cannot be loaded: {error}")
        _ = served.engine

    async def preload(self, models: Sequence[ServedModel]) -> None:
        """Load what has a source, in this order, as long as nobody has to give way."""
        for served in models:
            if served.source is None:
                continue
            if served.loading is None:
                try:
                    needed = await asyncio.to_thread(served.source.size_bytes)
                except Exception as error:  # its files cannot be had: found out now, like those of the first
                    served.loading = Future()
                    served.loading.set_exception(error)
                    self.on_loaded(served, served.loading)
                    continue
                if needed + _MIN_KV_BYTES > self._free_bytes(models):
                    log_fields(logger, "left for its first request", {"model": served.name, "mb": needed // 10**6})
                    continue
                loading = self._begin(served, models)
            else:
                loading = served.loading
            await _done(loading, None)

    async def unload(self, served: ServedModel) -> None:
        """Take it out of memory, if it is there and nobody uses it. What its engine has computed goes to its tiers."""
        async with self._placing:
            await self._unload(served)

    async def wait(self) -> None:
        """Until no model is coming or going."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def free_bytes(self, models: Sequence[ServedModel]) -> int | None:
        """What is left of its memory; None: it was not told how much that is."""
        return None if self.memory_bytes is None else self.memory_bytes - sum(self.memory_of(models))

    def memory_of(self, models: Sequence[ServedModel]) -> tuple[int, int]:
        """Bytes of weights and of KV in memory."""
        engines = [served.engine for served in models if served.state == "ready"]
        return sum(engine.weights_bytes for engine in engines), sum(engine.kv_bytes for engine in engines)

    def _begin(self, served: ServedModel, models: Sequence[ServedModel]) -> Future[AsyncEngine]:
        before, loading = served.loading, Future[AsyncEngine]()
        failed = None if before is None or before.exception() is not None else before.result()
        served.loading, served.leaving = loading, failed
        served.since_s = time.time()
        loading.add_done_callback(lambda done: self.on_loaded(served, done))
        self._keep(asyncio.ensure_future(self._load(served, loading, models, failed)))
        return loading

    async def _load(
        self,
        served: ServedModel,
        loading: Future[AsyncEngine],
        models: Sequence[ServedModel],
        failed: AsyncEngine | None,
    ) -> None:
        source = served.source
        assert source is not None
        async with self._placing:
            for other in models:  # one that was begun before there was a server takes its share first
                if other.source is not None and other.source.loading is not None and other.loading is not loading:
                    await _done(other.source.loading, None)
            if failed is not None:
                await _put_aside(served, failed, self.on_leave)
                del failed
                await asyncio.to_thread(gc.collect)
            try:
                kv_bytes = await self._make_room(served, source.size_bytes, models)
            except Exception as error:
                loading.set_exception(error)
                served.loading = None
                return
            finally:
                served.waits_for = None

            def load() -> None:
                try:
                    engine = source.load(kv_bytes)
                    if served.aside is not None:
                        engine.sessions.adopt(served.aside)
                        served.aside = None
                    loading.set_result(engine)
                except BaseException as error:
                    loading.set_exception(error)

            # A thread that does not keep the process alive: whoever ends the server does not wait for a model.
            threading.Thread(target=load, name="spolia-load", daemon=True).start()
            await _done(loading, None)
            if loading.exception() is not None:
                served.loading = None  # the next request tries again
            else:
                await self.on_back(served)

    async def _make_room(
        self, served: ServedModel, size_bytes: Callable[[], int], models: Sequence[ServedModel]
    ) -> int | None:
        """Unload others until there is room; the bytes that its KV may take.

        A model that was here before is to have the KV that it had: for that, others go that nobody uses. Where they are
        in use it takes what is left, and the log says who has the rest.
        """
        needed = await asyncio.to_thread(size_bytes)
        fixed = 0 if served.source is None else served.source.config.kv_memory or 0  # that is in `needed`
        had = max(_MIN_KV_BYTES, (served.kv_bytes or 0) - fixed)
        while (free := self._free_bytes(models)) < needed + had:
            others = [other for other in models if other is not served and other.state == "ready"]
            may_go = [other for other in others if not other.is_pinned]
            idle = [other for other in may_go if other.is_idle]
            if free >= needed + _MIN_KV_BYTES and not idle:
                has_mb = {other.name: round(sum(self.memory_of([other])) / 1e6) for other in others}
                held = ", ".join(f"{name} has {mb} MB" for name, mb in has_mb.items()) or "others on this machine"
                left = {"model": served.name, "kv_mb": round((free - needed) / 1e6), "before_mb": round(had / 1e6)}
                log_fields(logger, "less KV than before", {**left, "as": held, "remedy": "raise --memory"})
                break
            if not may_go:
                there = ", ".join(f"{other.name} ({sum(self.memory_of([other]))} bytes)" for other in others) or "none"
                raise NotReady(
                    f"model {served.name} needs {needed + _MIN_KV_BYTES} bytes, and {max(free, 0)} are free; none of "
                    f"those in memory may be unloaded: {there}. Raise --memory, lower --kv-memory, or pin fewer"
                )
            if idle:
                await self._unload(min(idle, key=lambda other: other.used_s))
                continue
            served.waits_for = f"{' or '.join(other.name for other in may_go)}, in whose room it will be, to be idle"
            await asyncio.sleep(_LOOK_AGAIN_S)
        if served.kv_bytes is not None:
            share = 0 if self.memory_bytes is None else kv_share(free - needed)
            return max(_MIN_KV_BYTES, min(max(had, share), free - needed))
        return None if self.memory_bytes is None else kv_share(free - needed)

    def _free_bytes(self, models: Sequence[ServedModel]) -> int:
        available = self._available()
        return (
            available if self.memory_bytes is None else min(self.memory_bytes - sum(self.memory_of(models)), available)
        )

    async def _unload(self, served: ServedModel) -> None:
        if served.state != "ready" or not served.is_idle or served.is_pinned:
            return
        engine = served.leaving = served.engine
        served.loading = None
        self._stop_expiry(served)
        await _put_aside(served, engine, self.on_leave)
        del engine
        await asyncio.to_thread(gc.collect)  # parts of an engine know each other; the memory is wanted now
        log_fields(logger, "unloaded", {"model": served.name})

    def _expire_after(self, served: ServedModel, seconds: float) -> None:
        def expire() -> None:
            if served.is_idle:
                self._keep(asyncio.ensure_future(self.unload(served)))
            else:  # a stream that may be resumed
                self._expire_after(served, max(seconds, 1.0))

        if served.expiry is not None:
            served.expiry.cancel()
        served.expiry = asyncio.get_running_loop().call_later(seconds, expire)

    def _stop_expiry(self, served: ServedModel) -> None:
        served.expires_s = None
        if served.expiry is not None:
            served.expiry.cancel()
            served.expiry = None

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _put_aside(
    served: ServedModel, engine: AsyncEngine, on_leave: Callable[[ServedModel, AsyncEngine], Awaitable[None]]
) -> None:
    """End an engine; its sessions, and as much memory as it had, are for the next one."""
    with suppress(SpoliaError):  # one that has failed can tell nothing
        await on_leave(served, engine)
    served.kv_bytes = max(engine.kv_bytes, served.kv_bytes or 0)
    await engine.aclose()
    served.aside = engine.sessions
    served.leaving = None
    served.metrics.end(Reading(engine.stats, engine.cache_stats))


async def _nothing(*_: object) -> None:
    return


async def _done(future: Future[AsyncEngine], timeout_s: float | None) -> None:
    """Wait for a future that another thread sets; what it holds is not looked at."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def wake(_: Future[AsyncEngine]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(wake)
    async with asyncio.timeout(timeout_s):
        await done.wait()
