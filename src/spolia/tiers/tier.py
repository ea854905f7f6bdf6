"""A backend in service: see `Tier`."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spolia.errors import StorageUnavailable

from .backend import Buffer, EvictingBackend, Health, StorageBackend
from .extent import Checksum, ExtentError, ExtentHeader, Sealer, extent_bytes, open_extent
from .host import HostBackend
from .keys import BLOCK_SIZE, DIGEST_BYTES, link, root_digest

__all__ = ["Tier", "TierState", "TierStats"]

logger = logging.getLogger("spolia.tiers")

_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 60.0

_EXISTS_BATCH = 64
"""Most prompts are unknown from some point on: asking for all of them at once would be in vain."""

_FULL = "it is full, and drops nothing to take more: give it more room, or have it drop what is old"

_MAX_KNOWN = 1 << 16
"""Keys that a tier remembers to have: what it knows need not be offered to it again."""


class TierState(StrEnum):
    """Whether a tier is asked."""

    UP = "up"
    DOWN = "down"
    """It failed; it is tried again after a while."""
    STALLED = "stalled"
    """A call has not returned for long. Nothing else is asked of it until that returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """A tier at this moment; counters only grow.

    Attributes:
        reason: why it is not up, or takes nothing; "" if all is well.
        num_hits, num_misses: blocks that were asked for.
        num_refused: blocks that came back other than they were stored, and were dropped.
        num_no_room: blocks that it did not take because it is full and drops nothing.
        num_failures: calls that failed.
        read_bytes_per_s: as measured, verification included; None before the first read.
    """

    name: str
    state: TierState
    reason: str
    health: Health
    num_hits: int
    num_misses: int
    num_refused: int
    num_no_room: int
    num_failures: int
    num_read_bytes: int
    num_written_bytes: int
    read_bytes_per_s: float | None


class _InFlight(NamedTuple):
    begun_s: float
    thread: int


class Tier:
    """Seals what goes down, trusts nothing that comes up, and keeps a backend that fails or hangs from being asked.

    Never raises for what a backend does: a tier that cannot answer misses, and says so in its `stats`. After a failure
    it is left alone for a second, after the next for two, and so on up to a minute. Any thread may call.

    Args:
        name: for people and metrics.
        stall_s: a call that takes longer than this shuts the tier until it returns.
        clock: seconds; only differences matter.
    """

    def __init__(
        self,
        name: str,
        backend: StorageBackend,
        *,
        sealer: Sealer | None = None,
        stall_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.backend = backend
        self._sealer: Sealer = sealer or Checksum()
        self._stall_s = stall_s
        self._clock = clock
        self._lock = threading.Lock()  # guards all below
        self._calls: dict[int, _InFlight] = {}
        self._num_calls = 0
        self._retry_s: float | None = None  # when to try again; None: up
        self._backoff_s = _FIRST_RETRY_S
        self._reason = ""
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._num_forgettings = 0
        self._is_full = False
        self._has_stalled = False  # and that has been told
        self._num_hits = self._num_misses = self._num_refused = self._num_no_room = self._num_failures = 0
        self._num_read_bytes = self._num_written_bytes = 0
        self._read_bytes_per_s: float | None = None
        self._health = Health(None, None, None)
        self._in_time(self._look)  # a backend that is away from the start is seen at once

    @property
    def state(self) -> TierState:
        with self._lock:
            return self._state()

    @property
    def read_bytes_per_s(self) -> float | None:
        return self._read_bytes_per_s

    @property
    def is_usable(self) -> bool:
        """Whether there is any point in asking: it is up, or it is time to try again."""
        with self._lock:
            state = self._state()
            is_news = state is TierState.STALLED and not self._has_stalled
            self._has_stalled |= is_news
            is_usable = state is TierState.UP or (
                state is TierState.DOWN and self._retry_s is not None and self._clock() >= self._retry_s
            )
        if is_news:
            logger.warning("tier=%s hangs, requests go on without it until its call returns", self.name)
        return is_usable

    @property
    def hanging_threads(self) -> frozenset[int]:
        """Threads, by their idents, whose calls have not returned for too long."""
        with self._lock:
            now_s = self._clock()
            return frozenset(call.thread for call in self._calls.values() if now_s - call.begun_s > self._stall_s)

    def probe(self) -> None:
        """Write, read and delete something, to see whether all of that works.

        Raises:
            StorageUnavailable: it does not, or not in time; says why.
        """
        trouble: list[StorageUnavailable] = []

        def look() -> None:
            try:
                self._probe()
            except StorageUnavailable as error:
                trouble.append(error)

        if not self._in_time(look):
            raise StorageUnavailable(f"tier {self.name} does not work: it has not answered for {self._stall_s:g} s")
        if trouble:
            raise trouble[0]

    def _probe(self) -> None:
        token_ids = bytes(4 * BLOCK_SIZE)
        parent = root_digest(namespace := os.urandom(DIGEST_BYTES))
        header = ExtentHeader(namespace, parent, link(parent, token_ids), 0, 0, token_ids, "probe", 64)
        encoded = header.encode()
        extent = bytearray(encoded.ljust(extent_bytes(len(encoded), 64), b"?"))
        wanted = bytes(extent[len(encoded) : len(encoded) + 64])
        is_put = self.put([header.key], [memoryview(extent)]) == 1
        (payload,) = self.get_into([header.key], [memoryview(bytearray(len(extent)))])
        self.delete([header.key])
        with self._lock:
            self._read_bytes_per_s = None  # so few bytes tell nothing of how fast many are read
        if not is_put or payload is None or payload.tobytes() != wanted:
            stats = self.stats
            raise StorageUnavailable(
                f"tier {self.name} does not work: {stats.reason or 'it does not keep what it takes'}"
            )

    def knows(self, key: bytes) -> bool:
        """Whether it had this key when it was last asked. Costs nothing."""
        with self._lock:
            return key in self._known

    def forget(self, keys: Sequence[bytes]) -> None:
        """Take these for not there from now on; they are about to be deleted."""
        with self._lock:
            self._num_forgettings += 1
            for key in keys:
                self._known.pop(key, None)

    def count(self, keys: Sequence[bytes]) -> int:
        """How many of these it has, from the first one on without a gap."""
        with self._call() as is_usable:
            if not is_usable:
                return 0
            count = 0
            for start in range(0, len(keys), _EXISTS_BATCH):
                for is_here in self.backend.exists(keys[start : start + _EXISTS_BATCH]):
                    if not is_here:
                        with self._lock:
                            for key in keys[count:]:
                                self._known.pop(key, None)
                        return count
                    count += 1
            return count
        return 0

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[NDArray[np.uint8] | None]:
        """The payload of each key, a view of its buffer; None for a miss, also for what was not to be trusted.

        Args:
            buffers: each as large as its extent.
        """
        payloads: list[NDArray[np.uint8] | None] = [None] * len(keys)
        with self._call() as is_usable:
            if not is_usable:
                return payloads
            started_s, num_forgettings = self._clock(), self._num_forgettings
            sizes = self.backend.get_into(keys, buffers)
            refused = []
            for i, (key, buffer, size) in enumerate(zip(keys, buffers, sizes, strict=True)):
                if size is None:
                    continue
                try:
                    payloads[i] = open_extent(buffer[:size], self._sealer, key)[1]
                except ExtentError as error:
                    logger.warning("tier=%s dropped block %s: %s", self.name, key.hex(), error)
                    refused.append(key)
            self._note_read(keys, payloads, refused, self._clock() - started_s, num_forgettings)
            if refused:
                self.backend.delete(refused)
                self.forget(refused)  # who has offered it meanwhile takes it for there
        return payloads

    def hand_down(self, take: Callable[[bytes, Buffer], object] | None) -> None:
        """From now on, show `take` each extent that has to make room, readable and checked; None: show nobody."""
        if not isinstance(self.backend, EvictingBackend):
            return
        if take is None:
            self.backend.on_evict = None
            return

        def show(key: bytes, extent: Buffer) -> None:
            opened = memoryview(bytearray(extent))  # it may be read by somebody just now
            with suppress(ExtentError):  # it is of no use to anybody
                open_extent(opened, self._sealer, key)
                take(key, opened)

        self.backend.on_evict = show

    def put(self, keys: Sequence[bytes], extents: Sequence[Buffer]) -> int:
        """Seal and store extents, in place; how many it took."""
        with self._call() as is_usable:
            if not is_usable:
                return 0
            for extent in extents:
                self._sealer.seal(extent)
            num_forgettings = self._num_forgettings
            taken = self.backend.put(keys, extents)
            with self._lock:
                for key, extent, is_taken in zip(keys, extents, taken, strict=True):
                    if is_taken:
                        self._num_written_bytes += len(extent)
                        if num_forgettings == self._num_forgettings:  # else it may have been deleted meanwhile
                            self._learn(key)
                self._num_no_room += len(taken) - sum(taken)
                was_full, self._is_full = self._is_full, bool(taken) and not any(taken)
                is_news = self._is_full and not was_full
            if is_news:
                logger.warning("tier=%s took none of %d blocks: %s", self.name, len(taken), _FULL)
            return sum(taken)
        return 0

    def delete(self, keys: Sequence[bytes]) -> bool:
        """Drop these; whether it could be told to."""
        self.forget(keys)
        is_told = False
        with self._call() as is_usable:
            if is_usable:
                self.backend.delete(keys)
                is_told = True
        self.forget(keys)  # who has read it meanwhile takes it for there
        return is_told

    def touch(self, keys: Sequence[bytes]) -> None:
        """They were used; the first is to be kept longest."""
        with self._call() as is_usable:
            if is_usable:
                here = self.backend.touch(keys)
                with self._lock:
                    for key, is_here in zip(keys, here, strict=True):
                        if not is_here:
                            self._known.pop(key, None)

    @property
    def stats(self) -> TierStats:
        """Costs no I/O: how full it is dates from its last call."""
        with self._lock:
            state = self._state()
            reason = self._reason
            if state is TierState.STALLED:
                waited_s = self._clock() - min(self._calls.values()).begun_s
                reason = f"a call has not returned for {waited_s:.0f} s"
            elif self._is_full and not reason:
                reason = _FULL
            return TierStats(
                name=self.name,
                state=state,
                reason=reason,
                health=self._health,
                num_hits=self._num_hits,
                num_misses=self._num_misses,
                num_refused=self._num_refused,
                num_no_room=self._num_no_room,
                num_failures=self._num_failures,
                num_read_bytes=self._num_read_bytes,
                num_written_bytes=self._num_written_bytes,
                read_bytes_per_s=self._read_bytes_per_s,
            )

    def close(self) -> None:
        """Let go of the backend, which may forget what it has: nothing is taken for there any more."""
        with self._lock:
            self._known.clear()
        self._in_time(self._close)
        if isinstance(self.backend, HostBackend):  # others have what they had, and are not asked when they are closed
            with self._lock:
                self._health = self.backend.health()

    # -- Parts ---------------------------------------------------------------------------------------------------------

    def _in_time(self, act: Callable[[], object]) -> bool:
        """Do something that somebody waits for; False if it hangs: a backend need have no limit of its own."""
        thread = threading.Thread(target=act, name=f"spolia-{self.name}-look", daemon=True)
        thread.start()
        thread.join(self._stall_s)
        return not thread.is_alive()

    def _look(self) -> None:
        with self._call():
            pass

    def _close(self) -> None:
        try:
            self.backend.close()
        except Exception as error:
            logger.warning("tier=%s was not closed: %s: %s", self.name, type(error).__name__, error)

    @contextmanager
    def _call(self) -> Iterator[bool]:
        """Around each use of the backend; yields whether it may be used. What it raises ends here."""
        if not self.is_usable:
            yield False
            return
        with self._lock:
            self._num_calls += 1
            number = self._num_calls
            self._calls[number] = _InFlight(self._clock(), threading.get_ident())
        try:
            yield True
            health = self.backend.health()
        except Exception as error:
            self._note_failure(error)
        else:
            self._note_success(health)
        finally:
            with self._lock:
                del self._calls[number]

    def _state(self) -> TierState:
        if self._calls and self._clock() - min(self._calls.values()).begun_s > self._stall_s:
            return TierState.STALLED
        return TierState.UP if self._retry_s is None else TierState.DOWN

    def _note_failure(self, error: Exception) -> None:
        reason = str(error) if isinstance(error, StorageUnavailable) else f"{type(error).__name__}: {error}"
        with self._lock:
            was_up = self._retry_s is None
            self._num_failures += 1
            self._known.clear()  # whoever comes back may have lost it
            self._reason = reason
            self._retry_s = self._clock() + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, _LAST_RETRY_S)
        if was_up:
            logger.warning("tier=%s is down, requests go on without it: %s", self.name, reason)

    def _note_success(self, health: Health) -> None:
        with self._lock:
            was_down = self._retry_s is not None or self._has_stalled
            self._has_stalled = False
            self._retry_s = None
            self._backoff_s = _FIRST_RETRY_S
            self._reason = ""
            self._health = health
        if was_down:
            logger.warning("tier=%s is up again", self.name)

    def _note_read(
        self,
        keys: Sequence[bytes],
        payloads: Sequence[NDArray[np.uint8] | None],
        refused: Sequence[bytes],
        duration_s: float,
        num_forgettings: int,
    ) -> None:
        num_bytes = sum(payload.nbytes for payload in payloads if payload is not None)
        with self._lock:
            for key, payload in zip(keys, payloads, strict=True):
                if payload is None:
                    self._num_misses += 1
                    self._known.pop(key, None)
                else:
                    self._num_hits += 1
                    if num_forgettings == self._num_forgettings:  # else it may have been deleted meanwhile
                        self._learn(key)
            self._num_refused += len(refused)
            self._num_read_bytes += num_bytes
            if num_bytes and duration_s > 0:
                rate = num_bytes / duration_s
                before = self._read_bytes_per_s
                self._read_bytes_per_s = rate if before is None else 0.7 * before + 0.3 * rate

    def _learn(self, key: bytes) -> None:
        self._known[key] = None
        self._known.move_to_end(key)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
