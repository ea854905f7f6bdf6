"""The engine's side of the tiers: what goes down, and what comes up before a prompt is computed.

    submit ──▶ Tiering.begin ──── nothing below, or none wanted ───────────────▶ scheduler
                   │ fetch                                                          ▲
                   ▼                                                                │
               held back ──▶ runs arrive ──▶ copied into blocks, committed ──▶ done, failed or late

A restored prefix is committed like a computed one, so the scheduler finds it in the tree as it finds any other, and a
restore that fails half-way leaves what arrived, contiguous. Where reading alone would take too long, the rest is read
from its far end while the sequence computes from the near one (`_Meeting`). Nothing here waits: steps go on between
runs. All of it is called on the engine's thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from spolia.engine.request import Sequence
from spolia.engine.transfers import Transfers
from spolia.errors import Bug, InvalidRequest
from spolia.kernels import BLOCK_SIZE
from spolia.kvcache import KVCache, Lease, Tag
from spolia.tiers import (
    SEAL_BYTES,
    BlockRun,
    Encoding,
    ExtentHeader,
    FetchPolicy,
    KeyChain,
    Mover,
    Planner,
    Restore,
    Tier,
    TierStats,
    TierUse,
    block_key,
    key_of,
    layout_of,
)

__all__ = ["Offloader", "Tiering"]

_MAX_COUNTED = 1 << 16
"""Blocks whose uses are counted for selective tiers: the last ones used."""

_STALLED_S = 30.0
"""Nobody waits longer than this for a tier that brings nothing."""

_LOOK_S = 0.25
"""How often to see whether a tier that is waited for has stalled."""

_MIN_MEETING = 4
"""Blocks that are worth bringing up from the far end."""

_BYTES_A_STEP = 32 << 20
"""Copied between two steps at most, in each direction, while there is something to compute."""


class Offloader:
    """Copies blocks out of the pools, into buffers that the mover writes from.

        committed ──▶ write_through        so that a process that is killed leaves it behind
        used often ─▶ selective
        evicted ────▶ the first write_back, and whatever above it still lacks the block

    What finds no room in the buffers waits in its tier's line, in its pool: its tag tells whether it is still there. A
    tier that hangs holds up nobody else's.

    Args:
        pools: uint8 `[num_blocks, block_bytes]` a group.
        uses: the tiers, the fastest first.
        encodings: how blocks are written; a tag, which is an extent's header, names its own.
    """

    def __init__(
        self, pools: Seq[NDArray[np.uint8]], mover: Mover, uses: Seq[TierUse], encodings: Seq[Encoding]
    ) -> None:
        self._pools = pools
        self._encodings = {encoding.layout: encoding for encoding in encodings}
        self._mover = mover
        self._write_through: list[Tier] = []
        self._write_back: list[Tier] = []
        self._selective: list[TierUse] = []
        self.use(uses)
        self._num_uses: OrderedDict[bytes, int] = OrderedDict()  # by key, for selective tiers
        self._lines: dict[Tier, dict[tuple[int, int], Tag]] = {}  # by (group, block id); none is empty
        self.num_lost_blocks = 0  # evicted before there was room to copy them

    def use(self, uses: Seq[TierUse]) -> None:
        """From now on, write to these."""
        self._write_through = [use.tier for use in uses if use.write == "write_through"]
        self._write_back = [use.tier for use in uses if use.write == "write_back"][:1]
        self._selective = [use for use in uses if use.write == "selective"]
        for index, use in enumerate(uses):
            below = next((other.tier for other in uses[index + 1 :] if other.write == "write_back"), None)
            use.tier.hand_down(None if below is None else partial(self._mover.demote, below))

    def note_committed(self, group: int, block_ids: NDArray[np.int32], tags: Seq[Tag]) -> None:
        """These blocks are whole and committed."""
        for tier in self._write_through:
            self._line_up(tier, group, block_ids, tags)

    def note_used(self, group: int, block_ids: NDArray[np.int32], tags: Seq[Tag]) -> None:
        """One more request is done with these blocks."""
        self.note_committed(group, block_ids, tags)  # those that a tier could not take before
        if not self._selective:
            return
        for block_id, tag in zip(block_ids.tolist(), tags, strict=True):
            num_uses = self._num_uses.get(key := key_of(tag), 0) + 1
            self._num_uses[key] = num_uses
            self._num_uses.move_to_end(key)
            for use in self._selective:
                if num_uses >= use.min_uses:
                    self._line_up(use.tier, group, np.array([block_id], np.int32), [tag])
        while len(self._num_uses) > _MAX_COUNTED:
            self._num_uses.popitem(last=False)

    def on_evict(self, group: int, block_ids: NDArray[np.int32], tags: Seq[Tag | None]) -> None:
        """The last chance to copy these."""
        for block_id, tag in zip(block_ids.tolist(), tags, strict=True):
            if tag is None:
                continue
            key = key_of(tag)
            tiers = [*self._write_through, *self._write_back]
            tiers += [use.tier for use in self._selective if self._num_uses.get(key, 0) >= use.min_uses]
            tiers += [tier for tier in list(self._lines) if self._take(tier, (group, block_id)) == tag]
            taken = [self._copy(tier, group, block_id, tag) for tier in dict.fromkeys(tiers)]
            if not all(taken):
                self.num_lost_blocks += 1

    def pump(self, cache: KVCache, max_bytes: int | None) -> None:
        """Copy from the lines, in turn, what there is room for, up to `max_bytes`."""
        num_bytes = 0
        while ready := [tier for tier in self._lines if self._has_room(tier)]:
            for tier in ready:
                if max_bytes is not None and num_bytes >= max_bytes:
                    return
                group, block_id = place = next(iter(self._lines[tier]))
                tag = self._take(tier, place)
                if tag is not None and cache.tags(group, np.array([block_id], np.int32)) == [tag]:
                    self._copy(tier, group, block_id, tag)
                    num_bytes += self._pools[group].shape[1]

    @property
    def can_pump(self) -> bool:
        """Whether `pump` has something to do."""
        return any(map(self._has_room, self._lines))

    def send(self, tier: Tier, group: int, block_ids: NDArray[np.int32], tags: Seq[Tag]) -> None:
        """Have these blocks written to a tier, whatever its use."""
        self._line_up(tier, group, block_ids, tags)

    def forget(self, is_unwanted: Callable[[Tag], bool]) -> None:
        """Write nothing of that kind that is still in line."""
        for tier, line in list(self._lines.items()):
            for place in [place for place, tag in line.items() if is_unwanted(tag)]:
                self._take(tier, place)

    def num_waiting_for(self, tier: Tier) -> int:
        """Blocks in line, or on their way, to one tier."""
        return len(self._lines.get(tier, ())) + self._mover.num_pending_for(tier)

    @property
    def num_waiting(self) -> int:
        """Blocks in line, each as often as there are tiers that it waits for."""
        return sum(map(len, self._lines.values()))

    def _line_up(self, tier: Tier, group: int, block_ids: NDArray[np.int32], tags: Seq[Tag]) -> None:
        for block_id, tag in zip(block_ids.tolist(), tags, strict=True):
            if not self._mover.has(tier, key_of(tag)):
                self._lines.setdefault(tier, {})[group, block_id] = tag

    def _take(self, tier: Tier, place: tuple[int, int]) -> Tag | None:
        """Out of a tier's line; None: it is not there."""
        line = self._lines.get(tier, {})
        tag = line.pop(place, None)
        if not line:
            self._lines.pop(tier, None)
        return tag

    def _has_room(self, tier: Tier) -> bool:
        """Whether the first in a tier's line need not wait; a tier that is down gets nothing, and keeps nobody."""
        group, _ = next(iter(self._lines[tier]))
        return not tier.is_usable or self._mover.has_room(tier, group)

    def _copy(self, tier: Tier, group: int, block_id: int, tag: Tag) -> bool:
        """To a tier, if it lacks the block; False if there was no room. A tier that is down gets nothing."""
        if self._mover.has(tier, key_of(tag)):
            return True
        if not tier.is_usable:
            return False
        return self._mover.store(tier, tag, group, self._pools[group][block_id], self._encodings[layout_of(tag)])


@dataclass(slots=True)
class _Held:
    """A sequence that waits for its prefix.

    Attributes:
        restore: None: it waits for another's, which brings the same blocks.
        begun_s, progress_s: when it began to wait, and when something last arrived.
        is_begun: readers have got round to it.
        is_free: it is in the scheduler's hands, and takes what arrives before its turn comes.
    """

    sequence: Sequence
    first_block: int
    stop_block: int
    restore: Restore | None
    begun_s: float
    progress_s: float
    is_free: bool = False
    is_begun: bool = False


@dataclass(slots=True)
class _Meeting:
    """A sequence that computes its prompt while the prompt's end is brought up.

        tokens   |  computed  ->   |  to do  |  <-  in the lease's blocks  |
                                             low_block                     stop_block

    Attributes:
        lease: whose blocks are filled from the end; if the sequence has another, it was preempted.
        ranges: (start, stop, tier) of what is there, the last first.
    """

    sequence: Sequence
    restore: Restore
    lease: Lease
    low_block: int
    stop_block: int
    ranges: list[tuple[int, int, str]]


class Tiering:
    """Offload and restore for one engine.

    Args:
        pools: the cache's, uint8 `[num_blocks, block_bytes]` a group.
        uses: the tiers, the fastest first.
        encodings: how blocks are written: those of requests that want exact KV, and those of the others.
        clock: seconds; only differences matter.
        fetch: who waits for a restore.
        timeout_s: how long at most, if `fetch` is "timeout".

    Attributes:
        transfers: what moves though no request waits for it.
    """

    def __init__(
        self,
        cache: KVCache,
        pools: Seq[NDArray[np.uint8]],
        mover: Mover,
        offloader: Offloader,
        uses: Seq[TierUse],
        *,
        encodings: tuple[Encoding, Encoding],
        clock: Callable[[], float],
        fetch: FetchPolicy = "planned",
        timeout_s: float = 1.0,
    ) -> None:
        self.cache = cache
        self.pools = pools
        self.mover = mover
        self.offloader = offloader
        self.exact, self.usual = encodings
        self._clock = clock
        self._fetch: FetchPolicy = fetch
        self._timeout_s = timeout_s
        self._uses = list(uses)
        self._held: dict[str, _Held] = {}  # by request, in order of arrival
        self._declined: dict[str, int] = {}  # by request that may meet its end half-way: the block where that ends
        self._meetings: dict[str, _Meeting] = {}  # by request
        self._met: Counter[str] = Counter()
        self.transfers = Transfers(self)
        self._planner = Planner(clock)

    @property
    def num_held(self) -> int:
        """Sequences that wait for a restore."""
        return sum(not held.is_free for held in self._held.values())

    @property
    def uses(self) -> tuple[TierUse, ...]:
        """The tiers, the fastest first."""
        return tuple(self._uses)

    @property
    def planner(self) -> Planner:
        """What restoring and computing have cost so far."""
        return self._planner

    def note_step(self, num_tokens: int, duration_s: float) -> None:
        """A step took that long."""
        self._planner.note_step(num_tokens, duration_s)

    @property
    def num_lost_blocks(self) -> int:
        """Blocks evicted before they could be copied."""
        return self.offloader.num_lost_blocks

    def stats(self) -> tuple[TierStats, ...]:
        return tuple(tier.stats for tier in self.mover.tiers)

    def set_waker(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on any thread, when there is something for `poll` to do."""
        self.mover.notify = wake

    # -- Tiers come and go ---------------------------------------------------------------------------------------------

    def attach(self, use: TierUse, index: int | None = None) -> None:
        """Use one more tier, as the `index`-th fastest; None: as the slowest. What is committed from now on goes there.

        Raises:
            InvalidRequest: there is one of that name.
        """
        if any(other.tier.name == use.tier.name for other in self._uses):
            raise InvalidRequest(f"there is a tier {use.tier.name!r} already; detach it first", param="tier")
        index = len(self._uses) if index is None else index
        self.mover.attach(use.tier, index)
        self._uses.insert(index, use)
        self.offloader.use(self._uses)

    def retire(self, name: str) -> tuple[TierUse, int]:
        """Begin to take a tier out of use: nothing is read from it, and only what waits for it now is written to it.

        Returns:
            The tier, and its place, for `reinstate`.

        Raises:
            InvalidRequest: there is none of that name.
        """
        for index, use in enumerate(self._uses):
            if use.tier.name == name:
                del self._uses[index]
                self.mover.hide(use.tier)
                self.offloader.use(self._uses)
                return use, index
        there = ", ".join(use.tier.name for use in self._uses) or "none"
        raise InvalidRequest(f"there is no tier {name!r}; there are: {there}", param="tier")

    def reinstate(self, use: TierUse, index: int) -> None:
        """Undo `retire`."""
        self._uses.insert(index, use)
        self.mover.show(use.tier, index)
        self.offloader.use(self._uses)

    def detach(self, use: TierUse) -> None:
        """Let go of a tier that was retired."""
        self.mover.detach(use.tier)

    def num_unwritten(self, use: TierUse) -> int:
        """Blocks that are to be written to a tier, retired or not, and are not yet."""
        return self.offloader.num_waiting_for(use.tier)

    # -- Down ----------------------------------------------------------------------------------------------------------

    def commit(self, sequence: Sequence) -> None:
        """Commit what was computed, and name the blocks that it completes."""
        lease = sequence.held_lease
        if not self._uses:
            self.cache.commit(lease, sequence.uncommitted_ids)
            return
        start, stop = lease.num_computed_tokens, sequence.num_computed_tokens
        self.commit_blocks(lease, self._chain(sequence), self._encoding(sequence), sequence.token_ids, start, stop)

    def finish(self, sequence: Sequence) -> None:
        """It is about to let go of its lease. Whatever of it is not below yet gets in line; all of it was just used."""
        if not self._uses:
            return
        chain = self._chain(sequence)
        chain.extend(sequence.token_ids[: sequence.held_lease.num_computed_tokens])
        for group in range(len(self.pools)):
            table = sequence.held_lease.block_table(group)[: len(chain.digests)]
            ids = table[table >= 0]
            tagged = [
                (block_id, tag)
                for block_id, tag in zip(ids.tolist(), self.cache.tags(group, ids), strict=True)
                if tag is not None
            ]
            self.offloader.note_used(
                group, np.array([block_id for block_id, _ in tagged], np.int32), [tag for _, tag in tagged]
            )
        keys = self._keys(chain.digests)
        for tier in self.mover.tiers:
            if keys and tier.is_usable:
                self.mover.touch(tier, keys)

    # -- Up ------------------------------------------------------------------------------------------------------------

    def begin(self, sequence: Sequence) -> bool:
        """Look for what of the prompt is below. True: the sequence is held back until `poll` returns it."""
        ids = sequence.reusable_ids
        first = self.cache.probe(sequence.request.namespace, ids) // BLOCK_SIZE
        stop = (len(ids) - 1) // BLOCK_SIZE  # the last token is computed in any case
        if first >= stop or not self._has_usable_tier:
            return False
        chain = self._chain(sequence)
        chain.extend(ids)
        restore = None
        if not self._is_on_its_way(chain.digests[first]):
            restore = self.mover.fetch(
                chain.digests[first:stop],
                first,
                self._encoding(sequence),
                is_worth=self._is_worth if self._fetch == "planned" else None,
            )
        now_s = self._clock()
        is_free = self._fetch == "best_effort"
        if not is_free or restore is not None:
            self._held[sequence.request.request_id] = _Held(sequence, first, stop, restore, now_s, now_s, is_free)
        return not is_free

    def start(self, sequence: Sequence) -> None:
        """Its turn has come: what is still on its way is no longer wanted, but for what may meet it half-way."""
        request_id = sequence.request.request_id
        if request_id in self._held:
            self._let_go(self._held[request_id])
        stop_block = self._declined.pop(request_id, None)
        first_block = -(-sequence.num_computed_tokens // BLOCK_SIZE)
        if stop_block is None or stop_block - first_block < _MIN_MEETING or sequence.is_scoring:
            return
        digests = self._chain(sequence).digests[first_block:stop_block]
        restore = self.mover.fetch(digests, first_block, self._encoding(sequence), is_backward=True)
        self._meetings[request_id] = _Meeting(sequence, restore, sequence.held_lease, -1, stop_block, [])

    def take_met(self) -> Counter[str]:
        """Tokens by tier that met running sequences since this was last called."""
        met, self._met = self._met, Counter()
        return met

    def num_rounded_tokens(self, sequence: Sequence, num_tokens: int) -> dict[str, int]:
        """How many of its first tokens have KV that was kept in fewer bits, by the kind of these; {} if none has."""
        codec = self._encoding(sequence).codec
        if codec is None or sequence.lease is None:
            return {}
        num_rounded = self.cache.num_rounded_tokens(sequence.lease, num_tokens)
        return {codec.name: num_rounded} if num_rounded else {}

    def poll(self, *, is_busy: bool) -> list[Sequence]:
        """Take in what arrived, send down what waits; the sequences that need to wait no longer.

        Args:
            is_busy: others have something to compute, so do not take long.
        """
        max_bytes = _BYTES_A_STEP if is_busy else None
        self.offloader.pump(self.cache, max_bytes)
        self.transfers.poll(is_busy=is_busy or bool(self._held))
        for meeting in list(self._meetings.values()):
            if self._meet(meeting):
                self._end_meeting(meeting.sequence)
        if not self._held:
            return []
        now_s = self._clock()
        done = [
            held
            for held in self._held.values()
            if held.restore is not None and self._advance(held, held.restore, now_s, max_bytes)
        ]
        ready = [self._let_go(held) for held in done if not held.is_free]
        for held in done:
            if held.is_free:
                self._let_go(held)
        for held in [held for held in self._held.values() if held.restore is None]:
            if not self._is_on_its_way(self._chain(held.sequence).digests[held.first_block]):
                # Whoever brought it is done: most often all is there now.
                del self._held[held.sequence.request.request_id]
                if not self.begin(held.sequence):
                    ready.append(held.sequence)
        return ready

    def drop(self, sequence: Sequence) -> bool:
        """Forget a sequence; False if it was not held back."""
        held = self._held.get(sequence.request.request_id)
        if held is not None:
            self._let_go(held)
        self._declined.pop(sequence.request.request_id, None)
        self._end_meeting(sequence)
        return held is not None and not held.is_free

    @property
    def idle_s(self) -> float | None:
        """For how long `poll` will have nothing to do unless the waker is called: 0: not at all; None: for ever."""
        if self.offloader.can_pump or (self.transfers.has_something and not self._held):
            return 0.0
        waits = [held for held in self._held.values() if held.restore is not None]
        if any(held.restore is not None and (held.restore.has_arrived or held.restore.is_done) for held in waits):
            return 0.0
        if any(held.restore is not None and held.restore.is_begun and not held.is_begun for held in waits):
            return 0.0  # from now on it may wait less long
        if not waits:
            return 0.0 if self._held else None
        now_s = self._clock()
        return max(0.0, min(_LOOK_S, *(self._deadline_s(held) - now_s for held in waits)))

    def close(self, timeout_s: float) -> None:
        """Write what waits, for so long at most, and end the I/O."""
        self.transfers.cancel()
        deadline_s = self._clock() + timeout_s
        while self.offloader.num_waiting and self._clock() < deadline_s:
            self.offloader.pump(self.cache, None)
            self.mover.flush(0.05)
        self.mover.flush(max(0.0, deadline_s - self._clock()))
        self.mover.close()

    # -- Block by block, for files that somebody keeps -----------------------------------------------------------------

    @property
    def layout(self) -> str:
        """How the bytes of a block are arranged and computed, in words."""
        return self.exact.layout

    def payload_bytes(self, group: int) -> int:
        """Of one block."""
        return int(self.pools[group].shape[1])

    def extent(self, chain: KeyChain, index: int, group: int, token_ids: NDArray[np.int32], block_id: int) -> bytearray:
        """A block as an extent that is still to be sealed."""
        header = self.header(chain, self.exact, index, group, token_ids).encode()
        return bytearray(header + self.pools[group][block_id].tobytes() + bytes(SEAL_BYTES))

    def write_block(self, group: int, block_id: int, payload: NDArray[np.uint8]) -> None:
        """Fill a block that a lease has, before it is committed."""
        self.pools[group][block_id] = payload

    # -- Parts ---------------------------------------------------------------------------------------------------------

    def _chain(self, sequence: Sequence) -> KeyChain:
        if sequence.chain is None:
            sequence.chain = KeyChain(sequence.request.namespace)
        return sequence.chain

    @property
    def _has_usable_tier(self) -> bool:
        return any(tier.is_usable for tier in self.mover.tiers)

    def _keys(self, digests: Seq[bytes]) -> list[bytes]:
        return [block_key(digest, group) for digest in digests for group in range(len(self.pools))]

    def _encoding(self, sequence: Sequence) -> Encoding:
        return self.exact if sequence.request.is_exact else self.usual

    def _is_worth(self, tier: Tier, num_blocks: int, num_bytes: int) -> bool:
        """Whether to read so many blocks. Any thread."""
        return self._planner.is_worth(tier.name, num_blocks * BLOCK_SIZE, num_bytes, tier.read_bytes_per_s)

    def _deadline_s(self, held: _Held) -> float:
        """When to stop waiting for the next run, or for the first to be begun."""
        if self._fetch == "timeout":
            return held.begun_s + self._timeout_s
        if self._fetch == "planned":
            num_blocks = held.stop_block - held.first_block
            is_guess = not held.sequence.restored and any(tier.read_bytes_per_s is None for tier in self.mover.tiers)
            if held.is_begun and is_guess:
                return held.progress_s + self._planner.first_wait_s(num_blocks * BLOCK_SIZE)
            if held.is_begun:
                num_blocks = min(self.mover.run_blocks, num_blocks)
            return held.progress_s + self._planner.wait_s(num_blocks * BLOCK_SIZE)
        return held.progress_s + _STALLED_S

    def _is_on_its_way(self, digest: bytes) -> bool:
        """Whether a restore is bringing this block, or has brought it and it is about to be taken in."""
        return any(held.restore is not None and digest in held.restore.wanted for held in self._held.values())

    def _let_go(self, held: _Held) -> Sequence:
        restore = held.restore
        if restore is not None:
            self.mover.cancel(restore)
            if self._fetch == "planned" and restore.num_found:
                self._plan_meeting(held, restore.first_block + restore.num_found)
        del self._held[held.sequence.request.request_id]
        return held.sequence

    def _plan_meeting(self, held: _Held, stop_block: int) -> None:
        """Blocks up to that one are there, and were not waited for: read them from the end, if that is of use."""
        num_known = self.cache.probe(held.sequence.request.namespace, held.sequence.reusable_ids)
        num_blocks = stop_block - num_known // BLOCK_SIZE
        tier = None if held.restore is None else held.restore.declined
        rate = None if tier is None else tier.read_bytes_per_s
        if num_blocks >= _MIN_MEETING and self._planner.is_worth_meeting(
            num_blocks * BLOCK_SIZE, num_blocks * sum(self._encoding(held.sequence).payload_bytes), rate
        ):
            self._declined[held.sequence.request.request_id] = stop_block

    def _meet(self, meeting: _Meeting) -> bool:
        """Put what has arrived into its place; whether there is no more to come, or both ends have met."""
        sequence, lease = meeting.sequence, meeting.lease
        if sequence.lease is not lease:
            return True  # preempted: its blocks are gone
        is_done = meeting.restore.is_done
        while (run := meeting.restore.take_run()) is not None:
            is_taken = self._place(meeting, run)
            self.mover.give_back(run)
            if not is_taken:
                return True
        if sequence.meets_at is None or lease.num_computed_tokens < sequence.meets_at:
            return is_done and sequence.meets_at is None
        start = lease.num_computed_tokens
        ranges = [(max(first, start), stop, tier) for first, stop, tier in reversed(meeting.ranges) if stop > start]
        if ranges:
            stop = ranges[-1][1]
            self.commit_blocks(lease, self._chain(sequence), self._encoding(sequence), sequence.known_ids, start, stop)
            sequence.note_met(ranges)
            sequence.num_rounded_tokens = self.num_rounded_tokens(sequence, stop)
            sequence.table_changed = True
            for first, last, tier in ranges:
                self._met[tier] += last - first
        return True

    def _place(self, meeting: _Meeting, run: BlockRun) -> bool:
        """Copy a run into the lease's blocks; False if there is no room for it."""
        sequence, lease = meeting.sequence, meeting.lease
        stop_block = run.first_block + run.num_blocks
        if meeting.low_block >= 0 and stop_block != meeting.low_block:
            return False
        stop = stop_block * BLOCK_SIZE
        if lease.num_reserved_tokens < stop:
            copies = self.cache.grow(lease, stop)
            if copies is None:
                return False
            if copies:
                raise Bug(f"request {sequence.request.request_id} shares a block that it has written to")
            sequence.num_slots = lease.num_reserved_tokens
            sequence.table_changed = True
        for group, pool in enumerate(self.pools):
            table = lease.block_table(group)
            for block_id, payload in zip(
                table[run.first_block : stop_block].tolist(), run.payloads[group], strict=True
            ):
                pool[block_id] = payload
            if run.is_rounded:
                self.cache.mark_rounded(group, table[run.first_block : stop_block])
        meeting.low_block = run.first_block
        meeting.ranges.append((run.first_block * BLOCK_SIZE, stop, run.tier))
        sequence.meets_at = run.first_block * BLOCK_SIZE
        return True

    def _end_meeting(self, sequence: Sequence) -> None:
        meeting = self._meetings.pop(sequence.request.request_id, None)
        if meeting is not None:
            self.mover.cancel(meeting.restore)
            sequence.meets_at = None

    def _advance(self, held: _Held, restore: Restore, now_s: float, max_bytes: int | None) -> bool:
        """Take in runs; whether the sequence need not wait for more."""
        is_done = restore.is_done  # before looking: what arrived by then is seen below
        if restore.is_begun and not held.is_begun:
            held.is_begun, held.progress_s = True, now_s
        num_bytes = 0
        while max_bytes is None or num_bytes < max_bytes:
            run = restore.take_run()
            if run is None:
                return is_done or now_s >= self._deadline_s(held) or not self._has_usable_tier
            num_bytes += run.num_bytes
            sequence = held.sequence
            is_taken = self.take_in(
                sequence.request.namespace,
                sequence.known_ids,
                self._chain(sequence),
                self._encoding(sequence),
                run,
                sequence.restored,
            )
            self.mover.give_back(run)
            held.progress_s = now_s
            if not is_taken:
                return True
        return False

    def take_in(
        self,
        namespace: bytes,
        ids: NDArray[np.int32],
        chain: KeyChain,
        encoding: Encoding,
        run: BlockRun,
        restored: list[tuple[int, int, str]] | None = None,
    ) -> bool:
        """Copy a run into blocks of the pools and commit it; False if it no longer fits on, or there is no room.

        Args:
            ids: of the prefix, and at least one more.
            restored: gets (start, stop, tier) of what was taken in.
        """
        stop_block = run.first_block + run.num_blocks
        stop = stop_block * BLOCK_SIZE
        with self.cache.open_restore(namespace, ids[: stop + 1]) as lease:
            start = lease.num_computed_tokens
            first_block = start // BLOCK_SIZE
            if start >= stop:
                return True
            if first_block < run.first_block or self.cache.grow(lease, stop) is None:
                return False
            for group, pool in enumerate(self.pools):
                table = lease.block_table(group)
                payloads = islice(run.payloads[group], first_block - run.first_block, None)
                for block_id, payload in zip(table[first_block:stop_block].tolist(), payloads, strict=True):
                    pool[block_id] = payload
                if run.is_rounded:
                    self.cache.mark_rounded(group, table[first_block:stop_block])
            self.commit_blocks(lease, chain, encoding, ids, start, stop)
        if restored is not None:
            restored.append((start, stop, run.tier))
        tier = next((use.tier for use in self._uses if use.is_exclusive and use.tier.name == run.tier), None)
        if tier is not None and not run.is_rounded:  # the pools have it now, and give it back when it is evicted
            digests = chain.digests[run.first_block : stop_block]
            self.mover.discard(tier, self._keys(digests))
        return True

    def commit_blocks(
        self,
        lease: Lease,
        chain: KeyChain,
        encoding: Encoding,
        token_ids: NDArray[np.int32],
        start: int,
        stop: int,
    ) -> None:
        """Commit what is in the lease's blocks, and name the blocks that it completes."""
        first, last = start // BLOCK_SIZE, stop // BLOCK_SIZE
        if first == last:
            self.cache.commit(lease, token_ids[start:stop])
            return
        written = [lease.block_table(group)[first:last].copy() for group in range(len(self.pools))]
        self.cache.commit(lease, token_ids[start:stop])
        chain.extend(token_ids[:stop])
        for group, before in enumerate(written):
            # Blocks may have been exchanged for equal ones; those that slid out of a window are the ones written.
            now = lease.block_table(group)[first:last]
            block_ids = np.where(now >= 0, now, before)
            tags = [self.header(chain, encoding, index, group, token_ids).encode() for index in range(first, last)]
            self.cache.tag(group, block_ids, tags)
            self.offloader.note_committed(group, block_ids, tags)

    def header(
        self, chain: KeyChain, encoding: Encoding, index: int, group: int, token_ids: NDArray[np.int32]
    ) -> ExtentHeader:
        """What a block of a sequence is called below."""
        start = index * BLOCK_SIZE
        return ExtentHeader(
            namespace=chain.namespace,
            parent=chain.parent(index),
            digest=chain.digests[index],
            group=group,
            start=start,
            token_ids=token_ids[start : start + BLOCK_SIZE].astype("<i4").tobytes(),
            layout=encoding.layout,
            payload_bytes=encoding.payload_bytes[group],
        )
