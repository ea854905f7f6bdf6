"""The engine's own thread: the one place where the step loop runs, for `LLM` and `AsyncEngine` alike.

    callers' threads                     engine thread                        callers' threads
    submit, abort, call  -> one queue -> core.submit / abort / step  -> deliver([(sink, delta or error), ...])

Every request that was submitted is answered: by a delta that carries its output, or by an error. If a step raises, all
requests get an error, the engine is unhealthy, and later submissions are refused with the same error.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from spolia.engine.core import EngineCore
from spolia.engine.outputs import Delta
from spolia.engine.request import Request
from spolia.errors import Bug, InvalidRequest, NotReady, SpoliaError, StorageUnavailable
from spolia.tiers import HandedDown, Tier, TierUse, hand_down, held_alone, still_there

__all__ = ["EngineThread", "RetiredTier"]

S = TypeVar("S")
T = TypeVar("T")

_LOOK_S = 0.01

_HANDED_DOWN = 64
"""Blocks that a tier takes over at a time: what else is to be written there goes on between."""


class RetiredTier(NamedTuple):
    """A tier that was in use, its place among the others, and what became of what it alone had."""

    use: TierUse
    place: int
    handed_down: HandedDown


class _Command(NamedTuple):
    run: Callable[[], Any]
    future: Future[Any] | None  # gets what `run` returns or raises


_WAKE = _Command(lambda: None, None)


class EngineThread(Generic[S]):
    """Runs an `EngineCore`. Any thread may call; only `close`, `wait_drained` and what comes and goes with tiers wait.

    Args:
        core: from here on touched by the engine's thread only.
        deliver: called on the engine's thread after each step with what it produced, each with the sink that came with
            its request. It must not block or raise.
    """

    def __init__(self, core: EngineCore, deliver: Callable[[Sequence[tuple[S, Delta | SpoliaError]]], None]) -> None:
        self._core = core
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._changed = threading.Condition()  # guards the fields below
        self._sinks: dict[str, S] = {}
        self._refusal: SpoliaError | None = None
        self._is_closed = False
        core.set_waker(lambda: self._inbox.put(_WAKE))
        self._thread = threading.Thread(target=self._run, name="spolia-engine", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> SpoliaError | None:
        """Why requests cannot be answered any more; None while they can, and after an orderly close."""
        return self._refusal if isinstance(self._refusal, Bug) else None

    def submit(self, requests: Sequence[tuple[Request, S]]) -> None:
        """Queue requests, all before the same step.

        Raises:
            InvalidRequest: a request of that id is in flight. None of `requests` was taken.
            NotReady: draining or closed.
            Bug: a step failed earlier.
        """
        with self._changed:
            if self._refusal is not None:
                raise self._refusal
            for request, _ in requests:
                if request.request_id in self._sinks:
                    raise InvalidRequest(
                        f"a request with id {request.request_id!r} is in flight; ids must be unique", param="request_id"
                    )
            self._sinks.update((request.request_id, sink) for request, sink in requests)
            self._inbox.put(_Command(lambda: self._submit([request for request, _ in requests]), None))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests wherever they are; their outputs say "abort". Those that have ended are ignored."""
        self._inbox.put(_Command(lambda: self._abort(request_ids), None))

    def call(self, function: Callable[[EngineCore], T]) -> Future[T]:
        """Run `function` between two steps.

        Raises:
            NotReady, Bug: as `submit`.
        """
        future: Future[T] = Future()
        with self._changed:
            if self._refusal is not None:
                raise self._refusal
            self._inbox.put(_Command(lambda: function(self._core), future))
        return future

    def attach_tier(self, use: TierUse, index: int | None = None) -> None:
        """Use one more tier from the next step on, as the `index`-th fastest; None: as the slowest. Waits.

        Raises:
            StorageUnavailable: it does not work. Nothing has changed.
            InvalidRequest: there is one of that name.
        """
        use.tier.probe()
        self.call(lambda core: core.tiering.tiers.attach(use, index)).result()

    def detach_tier(self, name: str, timeout_s: float = 10.0) -> HandedDown:
        """Write what waits for a tier, then do without it; what an exclusive one alone has goes to the tier below.

        Waits, as long as something gets done within that time; steps go on.

        Returns:
            What became of the blocks that an exclusive tier alone had.

        Raises:
            StorageUnavailable: not all could be written. The tier is in use as before.
            InvalidRequest: there is none of that name.
        """
        retired = self.retire_tier(name, timeout_s)
        self.call(lambda core: core.tiering.tiers.detach(retired.use)).result()
        return retired.handed_down

    def retire_tier(self, name: str, timeout_s: float = 10.0) -> RetiredTier:
        """As `detach_tier`, but it keeps what it has, for `TiersInUse.reinstate`, until `TiersInUse.detach`."""
        use, index = self.call(lambda core: core.tiering.tiers.retire(name)).result()
        try:
            deadline_s = time.monotonic() + timeout_s
            while self.call(lambda core: core.tiering.tiers.num_unwritten(use.tier)).result():
                if time.monotonic() >= deadline_s:
                    raise StorageUnavailable(f"tier {name} has not written all within {timeout_s} s; it stays in use")
                time.sleep(_LOOK_S)
            handed_down = self._hand_down(use.tier, index, timeout_s) if use.is_exclusive else HandedDown()
        except BaseException:
            self.call(lambda core: core.tiering.tiers.reinstate(use, index)).result()
            raise
        return RetiredTier(use, index, handed_down)

    def _hand_down(self, tier: Tier, index: int, timeout_s: float) -> HandedDown:
        """Have the fastest tier below that works take what a retired one alone has, in the line of what it is to write.

        Raises:
            StorageUnavailable: none works, or it does not take all of it.
        """
        entries = held_alone(tier)
        tiers = self.call(lambda core: core.tiering.tiers.below(index)).result()
        num_bytes = sum(entry.num_bytes for entry in entries or ())
        if entries is None:
            health = tier.stats.health
            return HandedDown(num_dropped_blocks=health.num_entries, num_dropped_bytes=health.num_bytes)
        if not entries or not tiers:
            return HandedDown(num_dropped_blocks=len(entries), num_dropped_bytes=num_bytes)
        below = next((other for other in tiers if other.is_usable), tiers[0])

        def in_line(act: Callable[[Tier], T]) -> T:
            done = self.call(lambda core: core.tiering.tiers.mover.call(below, act)).result()
            try:
                return done.result(timeout_s)
            except TimeoutError:
                raise StorageUnavailable(
                    f"tier {below.name} has not taken what tier {tier.name} alone has: nothing came of it for "
                    f"{timeout_s:g} s; tier {tier.name} stays in use. To drop it, detach tier {below.name} first"
                ) from None

        there: set[bytes] = set()
        batches = [entries[start : start + _HANDED_DOWN] for start in range(0, len(entries), _HANDED_DOWN)]
        for batch in batches:
            in_line(partial(hand_down, tier, batch))
        for batch in batches:  # only now: what there was no room for has been given up
            there |= in_line(partial(still_there, keys=[entry.key for entry in batch]))
        lower = tiers[tiers.index(below) + 1 :]
        kept = self.call(lambda core: [
            entry
            for entry in entries
            if entry.key in there or any(core.tiering.tiers.mover.has(other, entry.key) for other in lower)
        ]).result()  # fmt: skip
        num_kept_bytes = sum(entry.num_bytes for entry in kept)
        return HandedDown(below.name, len(kept), num_kept_bytes, len(entries) - len(kept), num_bytes - num_kept_bytes)

    def drain(self) -> None:
        """Refuse new requests; those there are go on to their end."""
        with self._changed:
            self._refusal = self._refusal or NotReady(
                "the engine is shutting down and takes no new requests; try again when it has been started anew"
            )

    def _refuse_for_good(self) -> None:
        with self._changed:
            if not isinstance(self._refusal, Bug):
                self._refusal = NotReady("the engine is closed and takes no more requests; make another one")

    def wait_drained(self, timeout_s: float | None = None) -> bool:
        """Wait until no request is in flight; False if that took longer than `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._sinks, timeout_s)

    def close(self) -> None:
        """Abort what is in flight, end the thread and wait for it. May be called again."""
        self._refuse_for_good()
        self._inbox.put(_Command(self._stop, None))
        if threading.current_thread() is not self._thread:  # it may be the one that collects the engine's last owner
            self._thread.join()

    # The engine's thread.

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._take_commands()
                self._publish(self._core.step())
        except BaseException as error:
            self._fail(error)
        self._core.close()

    def _take_commands(self) -> None:
        """Run the commands that wait; with nothing to compute, wait for one, or for as long as the core says."""
        while not self._is_closed:
            idle_s = self._core.idle_s
            try:
                run, future = self._inbox.get(block=idle_s != 0, timeout=idle_s or None)
            except queue.Empty:
                return
            if future is None:
                run()
                continue
            if not future.set_running_or_notify_cancel():  # whoever asked has gone, with a time limit for instance
                continue
            try:
                future.set_result(run())
            except Exception as error:
                future.set_exception(error)

    def _submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._core.submit(request)

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._core.abort(request_id)

    def _stop(self) -> None:
        self._core.abort_all()
        self._is_closed = True

    def _publish(self, deltas: Sequence[tuple[str, Delta | SpoliaError]]) -> None:
        if not deltas:
            return
        with self._changed:
            events = [(self._sinks[request_id], delta) for request_id, delta in deltas]
            for request_id, delta in deltas:
                if isinstance(delta, SpoliaError) or delta.output is not None:
                    del self._sinks[request_id]
            if not self._sinks:
                self._changed.notify_all()
        self._deliver(events)

    def _fail(self, error: BaseException) -> None:
        failure = Bug(f"the engine stopped: {type(error).__name__}: {error}")
        failure.__cause__ = error
        with self._changed:  # no submission can come in between: what is in `_sinks` now is all there will be
            self._refusal = failure
            events = [(sink, failure) for sink in self._sinks.values()]
            self._sinks.clear()
            self._changed.notify_all()
        while not self._inbox.empty():
            future = self._inbox.get().future
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(failure)
        self._deliver(events)
