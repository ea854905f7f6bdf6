"""The engine's side of the tiers: what goes down, and what comes up before a prompt is computed.

    submit ──▶ Tiering.begin ──── nothing below, or none wanted ───────────────▶ scheduler
                   │ fetch                                                          ▲
                   ▼                                                                │
               held back ──▶ runs arrive ──▶ copied into blocks, committed ──▶ done, failed or late

A restored prefix is committed like a computed one, so the scheduler finds it in the tree as it finds any other, and a
restore that fails half-way leaves what arrived, contiguous. Nothing here waits: steps go on between runs. All of it is
called on the engine's thread.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from spolia.engine.request import Sequence
from spolia.errors import InvalidRequest
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

_BYTES_A_STEP = 32 << 20
"""Copied between two steps at most, in each direction, while there is something to compute."""


class Offloader:
    """Copies blocks out of the pools, into buffers that the mover writes from.

        committed ──▶ write_through        so that a process that is killed leaves it behind
        used often ─▶ selective
        evicted ────▶ the first write_back, and whatever above it still lacks the block

    What finds no room in the buffers waits in line, in its pool: its tag tells whether it is still there.

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
        self._line: deque[tuple[int, int, Tag, Tier]] = deque()  # (group, block id, tag, where to)
        self.num_lost_blocks = 0  # evicted before there was room to copy them

    def use(self, uses: Seq[TierUse]) -> None:
        """From now on, write to these."""
        self._write_through = [use.tier for use in uses if use.write == "write_through"]
        self._write_back = [use.tier for use in uses if use.write == "write_back"][:1]
        self._selective = [use for use in uses if use.write == "selective"]

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
            taken = [self._copy(tier, group, block_id, tag) for tier in tiers]
            if not all(taken):
                self.num_lost_blocks += 1

    def pump(self, cache: KVCache, max_bytes: int | None) -> None:
        """Copy from the line what there is room for, up to `max_bytes`."""
        num_bytes = 0
        while self.can_pump and (max_bytes is None or num_bytes < max_bytes):
            group, block_id, tag, tier = self._line.popleft()
            if tier in self._mover.tiers and cache.tags(group, np.array([block_id], np.int32)) == [tag]:
                self._copy(tier, group, block_id, tag)
                num_bytes += self._pools[group].shape[1]

    @property
    def can_pump(self) -> bool:
        """Whether `pump` has something to do."""
        if not self._line:
            return False
        group, _, _, tier = self._line[0]
        return tier not in self._mover.tiers or not tier.is_usable or self._mover.has_room(tier, group)

    @property
    def num_waiting(self) -> int:
        """Blocks in line."""
        return len(self._line)

    def _line_up(self, tier: Tier, group: int, block_ids: NDArray[np.int32], tags: Seq[Tag]) -> None:
        for block_id, tag in zip(block_ids.tolist(), tags, strict=True):
            if not self._mover.has(tier, key_of(tag)):
                self._line.append((group, block_id, tag, tier))

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


class Tiering:
    """Offload and restore for one engine.

    Args:
        pools: the cache's, uint8 `[num_blocks, block_bytes]` a group.
        uses: the tiers, the fastest first.
        encodings: how blocks are written: those of requests that want exact KV, and those of the others.
        clock: seconds; only differences matter.
        fetch: who waits for a restore.
        timeout_s: how long at most, if `fetch` is "timeout".
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
        self._cache = cache
        self._pools = pools
        self._mover = mover
        self._offloader = offloader
        self._exact, self._usual = encodings
        self._clock = clock
        self._fetch: FetchPolicy = fetch
        self._timeout_s = timeout_s
        self._uses = list(uses)
        self._held: dict[str, _Held] = {}  # by request, in order of arrival
        self._planner = Planner(clock)
        if fetch == "planned":
            mover.is_worth = self._is_worth

    @property
    def num_held(self) -> int:
        """Sequences that wait for a restore."""
        return sum(not held.is_free for held in self._held.values())

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
        return self._offloader.num_lost_blocks

    def stats(self) -> tuple[TierStats, ...]:
        return tuple(tier.stats for tier in self._mover.tiers)

    def set_waker(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on any thread, when there is something for `poll` to do."""
        self._mover.notify = wake

    # -- Tiers come and go ---------------------------------------------------------------------------------------------

    def attach(self, use: TierUse, index: int | None = None) -> None:
        """Use one more tier, as the `index`-th fastest; None: as the slowest. What is committed from now on goes there.

        Raises:
            InvalidRequest: there is one of that name.
        """
        if any(other.tier.name == use.tier.name for other in self._uses):
            raise InvalidRequest(f"there is a tier {use.tier.name!r} already; detach it first", param="tier")
        index = len(self._uses) if index is None else index
        self._mover.attach(use.tier, index)
        self._uses.insert(index, use)
        self._offloader.use(self._uses)

    def retire(self, name: str) -> tuple[TierUse, int]:
        """Begin to take a tier out of use: nothing new is written to it or read from it.

        Returns:
            The tier, and its place, for `reinstate`.

        Raises:
            InvalidRequest: there is none of that name.
        """
        for index, use in enumerate(self._uses):
            if use.tier.name == name:
                del self._uses[index]
                self._mover.hide(use.tier)
                self._offloader.use(self._uses)
                return use, index
        there = ", ".join(use.tier.name for use in self._uses) or "none"
        raise InvalidRequest(f"there is no tier {name!r}; there are: {there}", param="tier")

    def reinstate(self, use: TierUse, index: int) -> None:
        """Undo `retire`."""
        self._uses.insert(index, use)
        self._mover.show(use.tier, index)
        self._offloader.use(self._uses)

    def detach(self, use: TierUse) -> None:
        """Let go of a tier that was retired."""
        self._mover.detach(use.tier)

    def flush(self, use: TierUse, timeout_s: float) -> bool:
        """Wait until all for a tier is written; False if that took longer. Not to be called on the engine's thread."""
        return self._mover.flush(timeout_s, use.tier)

    # -- Down ----------------------------------------------------------------------------------------------------------

    def commit(self, sequence: Sequence) -> None:
        """Commit what was computed, and name the blocks that it completes."""
        lease = sequence.held_lease
        if not self._uses:
            self._cache.commit(lease, sequence.uncommitted_ids)
            return
        start, stop = lease.num_computed_tokens, sequence.num_computed_tokens
        self._commit(lease, sequence, sequence.token_ids, start, stop)

    def finish(self, sequence: Sequence) -> None:
        """It is about to let go of its lease. Whatever of it is not below yet gets in line; all of it was just used."""
        if not self._uses:
            return
        chain = self._chain(sequence)
        chain.extend(sequence.token_ids[: sequence.held_lease.num_computed_tokens])
        for group in range(len(self._pools)):
            table = sequence.held_lease.block_table(group)[: len(chain.digests)]
            ids = table[table >= 0]
            tagged = [
                (block_id, tag)
                for block_id, tag in zip(ids.tolist(), self._cache.tags(group, ids), strict=True)
                if tag is not None
            ]
            self._offloader.note_used(
                group, np.array([block_id for block_id, _ in tagged], np.int32), [tag for _, tag in tagged]
            )
        keys = self._keys(chain.digests)
        for tier in self._mover.tiers:
            if keys and tier.is_usable:
                self._mover.touch(tier, keys)

    # -- Up ------------------------------------------------------------------------------------------------------------

    def begin(self, sequence: Sequence) -> bool:
        """Look for what of the prompt is below. True: the sequence is held back until `poll` returns it."""
        ids = sequence.reusable_ids
        first = self._cache.probe(sequence.request.namespace, ids) // BLOCK_SIZE
        stop = (len(ids) - 1) // BLOCK_SIZE  # the last token is computed in any case
        if first >= stop or not self._has_usable_tier:
            return False
        chain = self._chain(sequence)
        chain.extend(ids)
        restore = None
        if not self._is_on_its_way(chain.digests[first]):
            restore = self._mover.fetch(chain.digests[first:stop], first, self._encoding(sequence))
        now_s = self._clock()
        is_free = self._fetch == "best_effort"
        if not is_free or restore is not None:
            self._held[sequence.request.request_id] = _Held(sequence, first, stop, restore, now_s, now_s, is_free)
        return not is_free

    def start(self, sequence: Sequence) -> None:
        """Its turn has come: what is still on its way is no longer wanted."""
        if sequence.request.request_id in self._held:
            self._let_go(self._held[sequence.request.request_id])

    def num_rounded_tokens(self, sequence: Sequence, num_tokens: int) -> dict[str, int]:
        """How many of its first tokens have KV that was kept in fewer bits, by the kind of these; {} if none has."""
        codec = self._encoding(sequence).codec
        if codec is None or sequence.lease is None:
            return {}
        num_rounded = self._cache.num_rounded_tokens(sequence.lease, num_tokens)
        return {codec.name: num_rounded} if num_rounded else {}

    def poll(self, *, is_busy: bool) -> list[Sequence]:
        """Take in what arrived, send down what waits; the sequences that need to wait no longer.

        Args:
            is_busy: others have something to compute, so do not take long.
        """
        max_bytes = _BYTES_A_STEP if is_busy else None
        self._offloader.pump(self._cache, max_bytes)
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
        if held is None:
            return False
        self._let_go(held)
        return not held.is_free

    @property
    def idle_s(self) -> float | None:
        """For how long `poll` will have nothing to do unless the waker is called: 0: not at all; None: for ever."""
        if self._offloader.can_pump:
            return 0.0
        waits = [held for held in self._held.values() if held.restore is not None]
        if any(held.restore is not None and (held.restore.has_arrived or held.restore.is_done) for held in waits):
            return 0.0
        if not waits:
            return 0.0 if self._held else None
        now_s = self._clock()
        return max(0.0, min(_LOOK_S, *(self._deadline_s(held) - now_s for held in waits)))

    def close(self, timeout_s: float) -> None:
        """Write what waits, for so long at most, and end the I/O."""
        deadline_s = self._clock() + timeout_s
        while self._offloader.num_waiting and self._clock() < deadline_s:
            self._offloader.pump(self._cache, None)
            self._mover.flush(0.05)
        self._mover.flush(max(0.0, deadline_s - self._clock()))
        self._mover.close()

    # -- Block by block, for files that somebody keeps -----------------------------------------------------------------

    @property
    def layout(self) -> str:
        """How the bytes of a block are arranged and computed, in words."""
        return self._exact.layout

    def payload_bytes(self, group: int) -> int:
        """Of one block."""
        return int(self._pools[group].shape[1])

    def extent(self, chain: KeyChain, index: int, group: int, token_ids: NDArray[np.int32], block_id: int) -> bytearray:
        """A block as an extent that is still to be sealed."""
        header = self._header(chain, self._exact, index, group, token_ids).encode()
        return bytearray(header + self._pools[group][block_id].tobytes() + bytes(SEAL_BYTES))

    def write_block(self, group: int, block_id: int, payload: NDArray[np.uint8]) -> None:
        """Fill a block that a lease has, before it is committed."""
        self._pools[group][block_id] = payload

    # -- Parts ---------------------------------------------------------------------------------------------------------

    def _chain(self, sequence: Sequence) -> KeyChain:
        if sequence.chain is None:
            sequence.chain = KeyChain(sequence.request.namespace)
        return sequence.chain

    @property
    def _has_usable_tier(self) -> bool:
        return any(tier.is_usable for tier in self._mover.tiers)

    def _keys(self, digests: Seq[bytes]) -> list[bytes]:
        return [block_key(digest, group) for digest in digests for group in range(len(self._pools))]

    def _encoding(self, sequence: Sequence) -> Encoding:
        return self._exact if sequence.request.is_exact else self._usual

    def _is_worth(self, tier: Tier, num_blocks: int, num_bytes: int) -> bool:
        """Whether to read so many blocks. Any thread."""
        return self._planner.is_worth(tier.name, num_blocks * BLOCK_SIZE, num_bytes, tier.read_bytes_per_s)

    def _deadline_s(self, held: _Held) -> float:
        """When to stop waiting for the next run, or for the first to be begun."""
        if self._fetch == "timeout":
            return held.begun_s + self._timeout_s
        if self._fetch == "planned":
            num_blocks = held.stop_block - held.first_block
            if held.is_begun:
                num_blocks = min(self._mover.run_blocks, num_blocks)
            return held.progress_s + self._planner.wait_s(num_blocks * BLOCK_SIZE)
        return held.progress_s + _STALLED_S

    def _is_on_its_way(self, digest: bytes) -> bool:
        """Whether a restore is bringing this block, or has brought it and it is about to be taken in."""
        return any(held.restore is not None and digest in held.restore.wanted for held in self._held.values())

    def _let_go(self, held: _Held) -> Sequence:
        if held.restore is not None:
            self._mover.cancel(held.restore)
        del self._held[held.sequence.request.request_id]
        return held.sequence

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
            is_taken = self._take_in(held.sequence, run)
            self._mover.give_back(run)
            held.progress_s = now_s
            if not is_taken:
                return True
        return False

    def _take_in(self, sequence: Sequence, run: BlockRun) -> bool:
        """Copy a run into blocks of the pools and commit it; False if it no longer fits on, or there is no room."""
        ids = sequence.known_ids
        stop_block = run.first_block + run.num_blocks
        stop = stop_block * BLOCK_SIZE
        with self._cache.open_restore(sequence.request.namespace, ids[: stop + 1]) as lease:
            start = lease.num_computed_tokens
            first_block = start // BLOCK_SIZE
            if start >= stop:
                return True
            if first_block < run.first_block or self._cache.grow(lease, stop) is None:
                return False
            for group, pool in enumerate(self._pools):
                table = lease.block_table(group)
                payloads = islice(run.payloads[group], first_block - run.first_block, None)
                for block_id, payload in zip(table[first_block:stop_block].tolist(), payloads, strict=True):
                    pool[block_id] = payload
                if run.is_rounded:
                    self._cache.mark_rounded(group, table[first_block:stop_block])
            self._commit(lease, sequence, ids, start, stop)
        sequence.restored.append((start, stop, run.tier))
        tier = next((use.tier for use in self._uses if use.is_exclusive and use.tier.name == run.tier), None)
        if tier is not None and not run.is_rounded:  # the pools have it now, and give it back when it is evicted
            digests = self._chain(sequence).digests[run.first_block : stop_block]
            self._mover.discard(tier, self._keys(digests))
        return True

    def _commit(self, lease: Lease, sequence: Sequence, token_ids: NDArray[np.int32], start: int, stop: int) -> None:
        chain, encoding = self._chain(sequence), self._encoding(sequence)
        first, last = start // BLOCK_SIZE, stop // BLOCK_SIZE
        if first == last:
            self._cache.commit(lease, token_ids[start:stop])
            return
        written = [lease.block_table(group)[first:last].copy() for group in range(len(self._pools))]
        self._cache.commit(lease, token_ids[start:stop])
        chain.extend(token_ids[:stop])
        for group, before in enumerate(written):
            # Blocks may have been exchanged for equal ones; those that slid out of a window are the ones written.
            now = lease.block_table(group)[first:last]
            block_ids = np.where(now >= 0, now, before)
            tags = [self._header(chain, encoding, index, group, token_ids).encode() for index in range(first, last)]
            self._cache.tag(group, block_ids, tags)
            self._offloader.note_committed(group, block_ids, tags)

    def _header(
        self, chain: KeyChain, encoding: Encoding, index: int, group: int, token_ids: NDArray[np.int32]
    ) -> ExtentHeader:
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
