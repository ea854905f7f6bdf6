"""The threads between the engine and the tiers: it hands over and collects, and never waits for them.

    engine thread                       one writer a tier                     readers
    store(tier, header, block) ──copy──▶ encode, seal, put
    touch(tier, keys) ─────────────────▶ touch
    restore = fetch(digests, ...) ─────────────────────────────────────────▶ find, read, verify, decode
    restore.take_run() ◀───────────────────────────────────────────────────── notify
    give_back(run)

Memory is bounded at both ends: `store` says no when too much waits to be written, and readers wait for buffers that
the engine has not given back yet.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np

from spolia.errors import StorageUnavailable

from .buffers import BufferPool
from .encoding import Bytes, Encoding
from .extent import SEAL_BYTES, extent_bytes, key_of
from .keys import block_key
from .reach import FirstNeeded, Reach, reach
from .tier import Tier

__all__ = ["BlockRun", "Mover", "Restore"]

T = TypeVar("T")

logger = logging.getLogger("spolia.tiers")

_RUN_BYTES = 4 << 20
"""A run of blocks that is read and handed over together."""

_FIRST_SHARE = 4
"""The first run from a tier is so much shorter."""

_MAX_LOOKS = 2
"""For what is of use only as a whole."""

_BATCH = 16
"""Extents that are written together at most."""


class BlockRun(NamedTuple):
    """Blocks [first_block, stop_block), verified.

    Attributes:
        ranges: (start, stop, tier) in blocks: where they are from.
        payloads: `payloads[group]` is the KV of the last blocks, up to `stop_block`, as it is to lie in its pool. Of
            all blocks, or, if it is sparse, in window groups of those that the token after them looks at.
        is_rounded: it is nearly what was computed: it was kept in fewer bits.
    """

    first_block: int
    stop_block: int
    ranges: tuple[tuple[int, int, str], ...]
    payloads: tuple[tuple[Bytes, ...], ...]
    buffers: tuple[Bytes, ...]
    is_rounded: bool

    @property
    def num_blocks(self) -> int:
        return self.stop_block - self.first_block

    @property
    def first_blocks(self) -> tuple[int, ...]:
        """By group, the first block that there is."""
        return tuple(self.stop_block - len(of_group) for of_group in self.payloads)

    @property
    def is_sparse(self) -> bool:
        """Whether it is of use only as a whole: it has not every block of every group."""
        return any(len(of_group) < self.num_blocks for of_group in self.payloads)

    @property
    def num_bytes(self) -> int:
        return sum(payload.nbytes for of_group in self.payloads for payload in of_group)


class Restore:
    """Blocks on their way up: [first_block, first_block + num_blocks), in order, as far as they can be had.

    The engine's thread takes runs from it; a reader fills it. `is_done` once nothing more will arrive. Where tiers lack
    what a window has passed, it is one run that comes when all of it has been read, or not at all.

    Attributes:
        first_needed: what the token after some blocks looks at; None: all of every group.
        is_backward: from the last that can be had to the first.
        is_worth: asked on a reader's thread whether so many blocks, of so many bytes, are worth reading from a tier;
            None: they are.
        num_found: blocks that the tiers say they have, from where it begins on; None: not yet asked.
        declined: the tier that reading on from is not worth while; None: nothing was declined.
        num_parts: how often something was read.
    """

    def __init__(
        self,
        digests: Sequence[bytes],
        first_block: int,
        encoding: Encoding,
        *,
        is_backward: bool = False,
        is_worth: Callable[[Tier, int, int], bool] | None = None,
        first_needed: FirstNeeded | None = None,
    ) -> None:
        self.digests = digests
        self.encoding = encoding
        self.is_backward = is_backward
        self.is_worth = is_worth
        self.first_needed = first_needed
        self.declined: Tier | None = None
        self.wanted = frozenset(digests)
        self.first_block = first_block
        self.num_found: int | None = None
        self.num_parts = 0
        self.is_begun = False
        self.is_cancelled = False
        self.is_done = False
        self._arrived: deque[BlockRun] = deque()

    def __repr__(self) -> str:
        return f"Restore(first_block={self.first_block}, num_blocks={self.num_blocks}, is_done={self.is_done})"

    @property
    def num_blocks(self) -> int:
        return len(self.digests)

    @property
    def has_arrived(self) -> bool:
        """Whether `take_run` has something."""
        return bool(self._arrived)

    def take_run(self) -> BlockRun | None:
        """The next run, whose buffers go back by `Mover.give_back`; None if none is there yet."""
        try:
            return self._arrived.popleft()
        except IndexError:
            return None


class _Store(NamedTuple):
    """An extent to be sealed and written; while `encoding` is given, one whose payload is a block yet to be encoded."""

    key: bytes
    buffer: Bytes
    num_bytes: int
    group: int = 0
    encoding: Encoding | None = None

    @property
    def keys(self) -> Sequence[bytes]:
        return (self.key,)

    def extent(self) -> memoryview | None:
        """Ready to be sealed; None if the block cannot be encoded."""
        if self.encoding is None or self.encoding.codec is None:
            return self.buffer.data[: self.num_bytes]
        begin, size = self.encoding.num_header_bytes, self.encoding.block_bytes[self.group]
        payload = self.encoding.codec.encode(self.group, self.buffer[begin : begin + size])
        if payload is None:
            return None
        self.buffer[begin : begin + len(payload)] = payload
        return self.buffer.data[: extent_bytes(begin, len(payload))]


class _Touch(NamedTuple):
    keys: Sequence[bytes]


class _Delete(NamedTuple):
    keys: Sequence[bytes]
    done: Future[bool]


class _Call(NamedTuple):
    act: Callable[[Tier], Any]
    done: Future[Any]


class _Lane:
    """What waits to be written to one tier, and the thread that writes it."""

    def __init__(self, tier: Tier, staging_bytes: int, run: Callable[[_Lane], None]) -> None:
        self.tier = tier
        self.buffers = BufferPool(staging_bytes)
        self.queue: queue.SimpleQueue[_Store | _Touch | _Delete | _Call | None] = queue.SimpleQueue()
        self.is_leaving = False
        self._lock = threading.Lock()  # guards what follows
        self._last: dict[bytes, _Store | _Delete] = {}  # by key: what becomes of it last of all that is in line
        self.thread = threading.Thread(target=run, args=(self,), name=f"spolia-{tier.name}-writer", daemon=True)
        self.thread.start()

    def put(self, job: _Store | _Delete) -> None:
        """Have it done after all that is in line."""
        with self._lock:
            for key in job.keys:
                self._last[key] = job
            self.queue.put(job)

    def note_done(self, job: _Store | _Delete) -> None:
        with self._lock:
            for key in job.keys:
                if self._last.get(key) is job:
                    del self._last[key]

    def has(self, key: bytes) -> bool:
        """Whether the tier has this block once all that is in line is done."""
        with self._lock:
            last = self._last.get(key)
        return self.tier.knows(key) if last is None else isinstance(last, _Store)

    @property
    def num_pending(self) -> int:
        """Blocks that wait to be written or dropped."""
        return len(self._last)


class Mover:
    """Moves extents between the engine's thread, which calls everything here, and `tiers`, the fastest first.

    Args:
        encodings: all that blocks will be written or read in, of the same pools.
        staging_bytes: memory for what waits to be written to all tiers, and as much again for what was read.

        num_readers: as many as do not hang in a tier: one that does is replaced, and leaves when it is back.

    Attributes:
        notify: called on threads of the mover's when something arrived or room was made.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        encodings: Sequence[Encoding],
        staging_bytes: int = 64 << 20,
        num_readers: int = 2,
    ) -> None:
        self.tiers = tuple(tiers)
        self.notify: Callable[[], None] = lambda: None
        self._block_bytes = encodings[0].block_bytes
        # Buffers take a block as it is, or any extent.
        self._buffer_bytes = [
            max(extent_bytes(encoding.num_header_bytes, size) for encoding in encodings) for size in self._block_bytes
        ]
        self._run_blocks = max(1, _RUN_BYTES // max(1, sum(self._buffer_bytes)))
        self._reads = BufferPool(staging_bytes)
        # A tier that hangs keeps its own share and no more.
        self._share_bytes = staging_bytes // max(1, len(self.tiers))
        self._lanes = {tier: _Lane(tier, self._share_bytes, self._write) for tier in self.tiers}
        self._restores: queue.SimpleQueue[Restore | None] = queue.SimpleQueue()
        self._num_readers = num_readers
        self._crew = threading.Lock()  # guards what follows
        self._readers: list[threading.Thread] = []
        # Those that were detached, too, as long as somebody hangs in them.
        self._ever: weakref.WeakSet[Tier] = weakref.WeakSet(tiers)

    # -- Tiers come and go ---------------------------------------------------------------------------------------------

    def attach(self, tier: Tier, index: int) -> None:
        """Use one more tier, as the `index`-th fastest."""
        self._lanes = {**self._lanes, tier: _Lane(tier, self._share_bytes, self._write)}
        with self._crew:
            self._ever.add(tier)
        self.tiers = (*self.tiers[:index], tier, *self.tiers[index:])

    def hide(self, tier: Tier) -> None:
        """Begin no reads from a tier; what waits to be written to it is written."""
        self.tiers = tuple(other for other in self.tiers if other is not tier)

    def show(self, tier: Tier, index: int) -> None:
        """Undo `hide`."""
        self.tiers = (*self.tiers[:index], tier, *self.tiers[index:])

    @property
    def written(self) -> tuple[Tier, ...]:
        """All that something may still be written to, those first that are hidden."""
        return (*(tier for tier in self._lanes if tier not in self.tiers), *self.tiers)

    def detach(self, tier: Tier) -> None:
        """Forget a tier that was hidden, and close it when its writer is done."""
        lane = self._lanes[tier]
        self._lanes = {each: other for each, other in self._lanes.items() if each is not tier}
        lane.is_leaving = True
        lane.queue.put(None)

    # -- Down ----------------------------------------------------------------------------------------------------------

    def has(self, tier: Tier, key: bytes) -> bool:
        """Whether a tier has this block, or is about to."""
        return self._lanes[tier].has(key)

    def has_room(self, tier: Tier, group: int) -> bool:
        """Whether `store` would take a block of this group."""
        return self._lanes[tier].buffers.has_room(self._buffer_bytes[group])

    def store(self, tier: Tier, header: bytes, group: int, block: Bytes, encoding: Encoding) -> bool:
        """Copy a block and have it encoded and written; False, with nothing done, if too much waits already."""
        lane = self._lanes[tier]
        buffer = lane.buffers.take(self._buffer_bytes[group])
        if buffer is None:
            return False
        end = len(header) + len(block)
        buffer[: len(header)] = np.frombuffer(header, np.uint8)
        buffer[len(header) : end] = block
        lane.put(_Store(key_of(header), buffer, end + SEAL_BYTES, group, encoding))
        return True

    def touch(self, tier: Tier, keys: Sequence[bytes]) -> None:
        """Have a tier note that these were used, the first to be kept longest."""
        self._lanes[tier].queue.put(_Touch(keys))

    def discard(self, tier: Tier, keys: Sequence[bytes]) -> Future[bool]:
        """Have a tier drop these, and what is in line to be stored under them. What is stored from now on stays.

        Returns:
            Whether the tier could be told, once it has been.
        """
        job = _Delete(keys, Future())
        lane = self._lanes.get(tier)
        if lane is None:
            job.done.set_result(False)
        else:
            lane.put(job)
        return job.done

    def call(self, tier: Tier, act: Callable[[Tier], T]) -> Future[T]:
        """Have something done with a tier on its writer's thread, after all that is in line and before what follows.

        Returns:
            What `act` returns or raises; StorageUnavailable: the tier has been detached.
        """
        done: Future[T] = Future()
        lane = self._lanes.get(tier)
        if lane is None:
            done.set_exception(StorageUnavailable(f"tier {tier.name} has been detached meanwhile"))
        else:
            lane.queue.put(_Call(act, done))
        return done

    def demote(self, tier: Tier, key: bytes, extent: memoryview) -> bool:
        """Copy an extent that leaves the tier above. Any thread; False if too much waits already."""
        lane = self._lanes.get(tier)
        if lane is None or not tier.is_usable or lane.has(key):
            return True
        buffer = lane.buffers.take(len(extent))
        if buffer is None:
            return False
        buffer.data[:] = extent
        lane.put(_Store(key, buffer, len(extent)))
        return True

    @property
    def num_pending(self) -> int:
        """Blocks that wait to be written or dropped."""
        return sum(lane.num_pending for lane in self._lanes.values())

    def num_pending_for(self, tier: Tier) -> int:
        """Of these, those for one tier."""
        lane = self._lanes.get(tier)
        return 0 if lane is None else lane.num_pending

    @property
    def run_blocks(self) -> int:
        """Blocks of a run, at most."""
        return self._run_blocks

    # -- Up ------------------------------------------------------------------------------------------------------------

    def fetch(
        self,
        digests: Sequence[bytes],
        first_block: int,
        encoding: Encoding,
        *,
        is_backward: bool = False,
        is_worth: Callable[[Tier, int, int], bool] | None = None,
        first_needed: FirstNeeded | None = None,
    ) -> Restore:
        """Begin to bring up blocks that were written in this encoding, `digests[0]` being that of `first_block`.

        Args:
            is_backward, is_worth, first_needed: as `Restore` has them.
        """
        restore = Restore(
            digests, first_block, encoding, is_backward=is_backward, is_worth=is_worth, first_needed=first_needed
        )
        self._restores.put(restore)
        self.replace_readers()
        return restore

    def replace_readers(self) -> None:
        """If something waits to be read, see that there are readers who do not hang: a tier that does is not to hold up
        what the others have."""
        if self._restores.empty():
            return
        with self._crew:
            for _ in range(self._num_readers - self._num_free()):
                reader = threading.Thread(target=self._read, name="spolia-reader", daemon=True)
                self._readers.append(reader)
                reader.start()

    def give_back(self, run: BlockRun) -> None:
        """The run has been copied, or nobody wants it."""
        for buffer in run.buffers:
            self._reads.give(buffer)

    def cancel(self, restore: Restore) -> None:
        """Bring no more; what arrived is dropped."""
        restore.is_cancelled = True
        while (run := restore.take_run()) is not None:
            self.give_back(run)

    # -- The end -------------------------------------------------------------------------------------------------------

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was handed over is written; False if that took longer. Any thread."""
        deadline_s = time.monotonic() + timeout_s
        while self.num_pending:
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(0.002)
        return True

    def close(self, timeout_s: float = 1.0) -> None:
        """End the threads; one that hangs in a backend is left to end by itself."""
        for lane in self._lanes.values():
            lane.queue.put(None)
        with self._crew:
            readers = list(self._readers)
        for _ in readers:
            self._restores.put(None)
        for thread in [*(lane.thread for lane in self._lanes.values()), *readers]:
            thread.join(timeout_s)
        for tier in self._lanes:  # those that are hidden, too
            tier.close()

    # -- The writers' threads ------------------------------------------------------------------------------------------

    def _write(self, lane: _Lane) -> None:
        while True:
            job = lane.queue.get()
            stores: list[_Store] = []
            while isinstance(job, _Store):
                stores.append(job)
                if len(stores) == _BATCH or lane.queue.empty():
                    break
                job = lane.queue.get()
            for act in (partial(self._put, lane, stores), partial(self._do, lane, job)):
                try:
                    act()
                except Exception:  # what comes after is written all the same
                    logger.exception("tier=%s did not get what it was to get", lane.tier.name)
            if job is None:
                return

    def _do(self, lane: _Lane, job: _Store | _Touch | _Delete | _Call | None) -> None:
        """What is no store."""
        if isinstance(job, _Touch):
            lane.tier.touch(job.keys)
        elif isinstance(job, _Delete):
            _answer(job.done, partial(self._delete, lane, job))
        elif isinstance(job, _Call):
            _answer(job.done, partial(job.act, lane.tier))
        elif job is None and lane.is_leaving:
            lane.tier.close()

    def _put(self, lane: _Lane, stores: list[_Store]) -> None:
        if not stores:
            return
        try:
            ready = [(store.key, extent) for store in stores if (extent := store.extent()) is not None]
            if ready:
                lane.tier.put([key for key, _ in ready], [extent for _, extent in ready])
        finally:
            for store in stores:
                lane.buffers.give(store.buffer)
                lane.note_done(store)
            self.notify()

    def _delete(self, lane: _Lane, job: _Delete) -> bool:
        try:
            return lane.tier.delete(job.keys)
        finally:
            lane.note_done(job)

    # -- The readers' threads ------------------------------------------------------------------------------------------

    def _read(self) -> None:
        while (restore := self._restores.get()) is not None:
            try:
                self._bring(restore)
            except Exception:  # what has not arrived is a miss, and others are read all the same
                logger.exception("a restore of %d blocks was given up", restore.num_blocks)
            finally:
                restore.is_done = True
                self.notify()
            if self._leaves():
                return

    def _leaves(self) -> bool:
        """Whether the reader that asks has been replaced while it hung; it is counted no more then."""
        with self._crew:
            is_too_many = self._num_free() > self._num_readers
            if is_too_many:
                self._readers.remove(threading.current_thread())
        return is_too_many

    def _num_free(self) -> int:
        """Readers that do not hang."""
        hanging = {ident for tier in self._ever for ident in tier.hanging_threads}
        return sum(reader.ident not in hanging for reader in self._readers)

    def _bring(self, restore: Restore) -> None:
        """Find out which tier has what, then read it run by run, until a block is nowhere."""
        restore.is_begun = True
        self.notify()  # who waits for it waits otherwise from now on
        num_groups = len(self._block_bytes)
        keys = [block_key(digest, group) for digest in restore.digests for group in range(num_groups)]
        gap = None
        while True:
            first = gap or 0
            segments = self._locate(keys[::-1] if restore.is_backward else keys[first * num_groups :], num_groups)
            if restore.num_found is None:
                restore.num_found = sum(count for _, count in segments)
                if restore.first_needed is not None and self._bring_sparse(restore, segments, restore.first_needed):
                    return
            missing = self._bring_from(restore, keys, segments, first)
            # A block that a tier had may be in another by now; if it misses twice, it is lost.
            if missing is None or missing == gap:
                return
            gap = missing

    def _bring_sparse(self, restore: Restore, segments: Sequence[tuple[Tier, int]], first_needed: FirstNeeded) -> bool:
        """If more can be had without what windows have passed, read that; False if nothing has come of it."""
        num_groups = len(self._block_bytes)
        known = [tier for tier, count in segments for _ in range(count)]
        num_known = len(known)
        for _ in range(_MAX_LOOKS):  # a block that a tier had may be in another by now
            tiers = self.tiers
            found = reach(tiers, restore.digests, restore.first_block, num_groups, first_needed, known)
            if found.num_blocks <= num_known:
                return False
            restore.num_found = found.num_blocks
            payloads = self._read_sparse(restore, found, tiers)
            if payloads is not None:
                ranges = tuple((start, stop, tier.name) for start, stop, tier in found.ranges)
                is_rounded = restore.encoding.codec is not None
                restore._arrived.append(BlockRun(found.first_block, found.stop_block, ranges, payloads, (), is_rounded))
            if payloads is not None or restore.is_cancelled or restore.declined is not None:
                return True
            known = []
        restore.num_found = num_known
        return False

    def _read_sparse(
        self, restore: Restore, found: Reach, tiers: Sequence[Tier]
    ) -> tuple[tuple[Bytes, ...], ...] | None:
        """All that is needed, a part at a time; None if a block was not there after all, or nobody wants it.

        It lies in memory of its own until the engine takes it: buffers that others wait for might never come back.
        """
        payload_bytes = restore.encoding.payload_bytes
        places = [
            (tier, group, index)
            for group, of_group in enumerate(found.places)
            for index, tier in enumerate(of_group, found.num_blocks - len(of_group))
        ]
        num_bytes = sum(payload_bytes[group] for _, group, _ in places)
        blocks: dict[tuple[int, int], Bytes] = {}
        for tier in tiers:
            left = [(group, index) for at, group, index in places if at is tier]
            while left:
                if restore.is_worth is not None and not restore.is_worth(tier, found.num_blocks, num_bytes):
                    restore.declined = tier
                    return None
                part, left = left[: self._run_blocks], left[self._run_blocks :]
                groups = [group for group, _ in part]
                keys = [block_key(restore.digests[index], group) for group, index in part]
                buffers = [np.empty(self._buffer_bytes[group], np.uint8) for group in groups]
                read = self._read_blocks(restore.encoding, tier, keys, groups, buffers)
                if len(read) < len(part) or restore.is_cancelled:
                    return None
                blocks.update(zip(part, read, strict=True))
                num_bytes -= sum(payload_bytes[group] for group in groups)
                restore.num_parts += 1
                self.notify()
        return tuple(
            tuple(blocks[group, index] for index in range(found.num_blocks - len(of_group), found.num_blocks))
            for group, of_group in enumerate(found.places)
        )

    def _bring_from(
        self, restore: Restore, keys: Sequence[bytes], segments: Sequence[tuple[Tier, int]], first: int
    ) -> int | None:
        """Read what was found; the index of the block that was not there after all, None if nothing is left to do."""
        num_groups = len(self._block_bytes)
        for tier, index, size in self._runs(restore, segments, first):
            run = self._read_run(restore, tier, keys[index * num_groups : (index + size) * num_groups], index)
            if restore.is_backward and run is not None and run.num_blocks < size:
                self.give_back(run)  # what lies behind the gap hangs in the air
                return None
            if run is not None:
                restore._arrived.append(run)
            if restore.is_cancelled:  # the engine may have looked before it arrived
                while (late := restore.take_run()) is not None:
                    self.give_back(late)
                return None
            if run is not None:
                self.notify()
            num_read = 0 if run is None else run.num_blocks
            if num_read < size:
                return None if restore.is_backward else index + num_read
        return None

    def _runs(
        self, restore: Restore, segments: Sequence[tuple[Tier, int]], first: int
    ) -> Iterator[tuple[Tier, int, int]]:
        """(tier, index of its first block, size) of what to read next, decided when it is asked for."""
        if restore.is_backward:
            stop = restore.num_blocks
            for tier, count in segments:
                low = stop - count
                while stop > low:
                    size = min(self._run_blocks, stop - low)
                    stop -= size
                    yield tier, stop, size
            return
        index = first
        for tier, count in segments:
            stop = index + count
            while index < stop:
                num_bytes = (stop - index) * sum(restore.encoding.payload_bytes)
                is_worth = restore.is_worth  # each run has told more of how fast it is
                if is_worth is not None and not is_worth(tier, stop - index, num_bytes):
                    restore.declined = tier
                    return
                # Of a tier that was never read nobody knows how long a run will take.
                is_known = tier.read_bytes_per_s is not None
                size = min(self._run_blocks if is_known else -(-self._run_blocks // _FIRST_SHARE), stop - index)
                yield tier, index, size
                index += size

    def _locate(self, keys: Sequence[bytes], num_groups: int) -> list[tuple[Tier, int]]:
        """Which tier to read how many blocks from, in order, until a block that none has."""
        segments: list[tuple[Tier, int]] = []
        index = 0
        while index < len(keys):
            for tier in self.tiers:
                count = tier.count(keys[index:]) // num_groups
                if count:
                    segments.append((tier, count))
                    index += count * num_groups
                    break
            else:
                break
        return segments

    def _read_run(self, restore: Restore, tier: Tier, keys: Sequence[bytes], index: int) -> BlockRun | None:
        """Read whole blocks; None if not even the first is there, or nobody wants it any more."""
        buffers: list[Bytes] = []
        num_groups = len(self._block_bytes)
        for position in range(len(keys)):
            size = self._buffer_bytes[position % num_groups]
            buffer = None
            while buffer is None:
                if restore.is_cancelled:
                    break
                buffer = self._reads.take(size, timeout_s=0.05)
            if buffer is None:
                break
            buffers.append(buffer)
        whole = 0
        try:
            groups = [position % num_groups for position in range(len(keys))]
            payloads = []
            if len(buffers) == len(keys):
                payloads = self._read_blocks(restore.encoding, tier, keys, groups, buffers)
            whole = len(payloads) // num_groups
        finally:
            for buffer in buffers[whole * num_groups :]:
                self._reads.give(buffer)
        if not whole:
            return None
        by_group = tuple(tuple(islice(payloads, group, whole * num_groups, num_groups)) for group in range(num_groups))
        is_rounded = restore.encoding.codec is not None
        used = tuple(buffers[: whole * num_groups])
        first = restore.first_block + index
        return BlockRun(first, first + whole, ((first, first + whole, tier.name),), by_group, used, is_rounded)

    def _read_blocks(
        self,
        encoding: Encoding,
        tier: Tier,
        keys: Sequence[bytes],
        groups: Sequence[int],
        buffers: Sequence[Bytes],
    ) -> list[Bytes]:
        """The blocks of these keys, each of its group and in its buffer, up to the first that is not there."""
        codec = encoding.codec
        if codec is None:
            payloads = tier.get_into(keys, [buffer.data for buffer in buffers])
        else:
            sizes = encoding.extent_bytes
            extents = [np.empty(sizes[group], np.uint8) for group in groups]
            payloads = tier.get_into(keys, [extent.data for extent in extents])
        blocks: list[Bytes] = []
        for group, payload, buffer in zip(groups, payloads, buffers, strict=True):
            if payload is None or payload.nbytes != encoding.payload_bytes[group]:
                break
            if codec is None:
                blocks.append(payload)
            else:
                block = buffer[: encoding.block_bytes[group]]
                codec.decode(group, payload, block)
                blocks.append(block)
        return blocks


def _answer(done: Future[T], act: Callable[[], T]) -> None:
    """Do it, and tell whoever waits for it: what it raises is theirs."""
    is_awaited = done.set_running_or_notify_cancel()
    try:
        result = act()
    except Exception as error:
        if is_awaited:
            done.set_exception(error)
        raise
    if is_awaited:
        done.set_result(result)
