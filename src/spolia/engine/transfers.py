"""KV that is moved because somebody said so, or is likely to: up ahead of a request, down to a tier, out and in.

    bring      tiers ──▶ device      what a session's next turn will ask for; into free blocks, unless told otherwise
    send       device ──▶ a tier
    take_out   device ──▶ extents    for a file
    put_in     extents ──▶ device    and from there down, as if it had been computed

Nobody waits here: requests go first, and one transfer after the other is done between their steps. All of it is called
on the engine's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from spolia.errors import InvalidRequest, Overloaded
from spolia.kernels import BLOCK_SIZE
from spolia.tiers import SEAL_BYTES, ExtentHeader, KeyChain, Restore, Tier, block_key

if TYPE_CHECKING:
    from spolia.engine.tiering import Tiering

__all__ = ["Transfers"]

Ids = NDArray[np.int32]

_MAX_TRIES = 16
"""To bring up what somebody waits for, while requests take the room for it."""


@dataclass(slots=True, eq=False)
class _Bring:
    """A prefix on its way up.

    Attributes:
        ids: its tokens, and one more: who asks the cache for tokens gets all but the last.
        may_evict: others may have to make room for it.
        num_tries: how often a restore was begun.
    """

    namespace: bytes
    ids: Ids
    chain: KeyChain
    may_evict: bool
    future: Future[int] = field(default_factory=Future)
    restore: Restore | None = None
    num_tries: int = 0


class Transfers:
    """Those of one engine."""

    def __init__(self, tiering: Tiering) -> None:
        self._tiering = tiering
        self._waiting: deque[_Bring] = deque()
        self._current: _Bring | None = None

    # -- Up ------------------------------------------------------------------------------------------------------------

    def bring(self, namespace: bytes, token_ids: Seq[int], *, may_evict: bool = False) -> Future[int]:
        """Have the KV of these tokens on the device, as far as the tiers have it.

        Returns:
            How many of the tokens are there, when no more will be.
        """
        ids = np.append(np.asarray(token_ids, np.int32), np.int32(0))
        bring = _Bring(namespace, ids, KeyChain(namespace), may_evict)
        bring.chain.extend(ids[:-1])
        self._waiting.append(bring)
        return bring.future

    @property
    def has_something(self) -> bool:
        """Whether `poll` has something to do now."""
        restore = None if self._current is None else self._current.restore
        return bool(self._waiting) if restore is None else restore.has_arrived or restore.is_done

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way up, or waits to be."""
        return self._current is None and not self._waiting

    def poll(self, *, is_busy: bool) -> None:
        """Take in what arrived, and begin the next transfer: while requests run, only one that somebody waits for."""
        while True:
            if self._current is None:
                self._current = next((each for each in self._waiting if each.may_evict or not is_busy), None)
                if self._current is None:
                    return
                self._waiting.remove(self._current)
                self._begin(self._current)
            if not self._advance(self._current):
                return
            if self._is_short(self._current):
                self._begin(self._current)
            else:
                self._end(self._current)

    def cancel(self, namespaces: Collection[bytes] | None = None) -> None:
        """Bring nothing more of some namespaces, or of any."""
        for bring in (*([] if self._current is None else [self._current]), *self._waiting):
            if namespaces is None or bring.namespace in namespaces:
                self._end(bring)

    def _begin(self, bring: _Bring) -> None:
        if bring.restore is not None:
            self._tiering.mover.cancel(bring.restore)
            bring.restore = None
        bring.num_tries += 1
        with self._tiering.cache.open_restore(bring.namespace, bring.ids) as lease:  # what is here was just used
            first = lease.num_computed_tokens // BLOCK_SIZE
        digests = bring.chain.digests[first:]
        if digests and self._has_room(bring, 1):
            bring.restore = self._tiering.mover.fetch(digests, first, self._tiering.usual)

    def _advance(self, bring: _Bring) -> bool:
        """Take in runs; whether it is done."""
        restore = bring.restore
        if restore is None:
            return True
        is_done = restore.is_done
        while (run := restore.take_run()) is not None:
            stop = run.first_block + run.num_blocks
            is_taken = self._has_room(bring, run.num_blocks) and self._tiering.take_in(
                bring.namespace, bring.ids[: BLOCK_SIZE * stop + 1], bring.chain, self._tiering.usual, run
            )
            self._tiering.mover.give_back(run)
            if not is_taken:
                return True
        return is_done

    def _is_short(self, bring: _Bring) -> bool:
        """Whether the tiers had more than has come. While it was read, requests may have taken the room of what was
        here, or brought the same blocks, which then went from one tier to another."""
        return (
            bring.may_evict
            and bring.num_tries < _MAX_TRIES
            and bring.restore is not None
            and bool(bring.restore.num_found)
            and self._num_here(bring) // BLOCK_SIZE < len(bring.chain.digests)
        )

    def _end(self, bring: _Bring) -> None:
        if bring.restore is not None:
            self._tiering.mover.cancel(bring.restore)
        if bring is self._current:
            self._current = None
        else:
            self._waiting.remove(bring)
        if bring.future.set_running_or_notify_cancel():  # else whoever asked has gone
            bring.future.set_result(self._num_here(bring))

    def _num_here(self, bring: _Bring) -> int:
        return self._tiering.cache.probe(bring.namespace, bring.ids)

    def _has_room(self, bring: _Bring, num_blocks: int) -> bool:
        return bring.may_evict or all(ledger.free > num_blocks for ledger in self._tiering.cache.ledger())

    # -- Down ----------------------------------------------------------------------------------------------------------

    def send(self, namespace: bytes, token_ids: Seq[int], tier: str) -> int:
        """Have what the device has of these tokens written to a tier, whatever is written there by itself.

        Returns:
            How many tokens that are.

        Raises:
            InvalidRequest: there is no such tier.
        """
        target = self.tier(tier)
        return self._visit(
            namespace, token_ids, lambda group, ids, tags: self._tiering.offloader.send(target, group, ids, tags)
        )

    def num_unsent(self, tier: str) -> int:
        """Blocks that are to be written to a tier and are not yet."""
        return self._tiering.offloader.num_waiting_for(self.tier(tier))

    def digests(self, namespace: bytes, token_ids: Seq[int]) -> list[bytes]:
        """Of the whole blocks of these tokens."""
        chain = KeyChain(namespace)
        chain.extend(np.asarray(token_ids, np.int32))
        return chain.digests

    def keys(self, namespace: bytes, token_ids: Seq[int]) -> list[bytes]:
        """What the tiers call the whole blocks of these tokens, all groups of a block together."""
        groups = range(len(self._tiering.pools))
        return [block_key(digest, group) for digest in self.digests(namespace, token_ids) for group in groups]

    def tier(self, name: str) -> Tier:
        """
        Raises:
            InvalidRequest: there is no such tier.
        """
        for tier in self._tiering.mover.tiers:
            if tier.name == name:
                return tier
        there = ", ".join(tier.name for tier in self._tiering.mover.tiers) or "none"
        raise InvalidRequest(f"there is no tier {name!r}; there are: {there}", param="tier")

    # -- Out and in ----------------------------------------------------------------------------------------------------

    def take_out(self, namespace: bytes, token_ids: Seq[int]) -> list[bytearray]:
        """Extents, without seals, of what the device has of these tokens."""
        extents: dict[tuple[int, int], bytearray] = {}

        def copy(group: int, block_ids: Ids, headers: Seq[bytes]) -> None:
            pool, codec = self._tiering.pools[group], self._tiering.usual.codec
            for index, (block_id, header) in enumerate(zip(block_ids.tolist(), headers, strict=True)):
                block = pool[block_id] if codec is None else codec.encode(group, pool[block_id])
                if block is None:
                    raise InvalidRequest(f"block {index} cannot be written in so few bits", param="prompt")
                extents[index, group] = bytearray(header) + block.tobytes() + bytes(SEAL_BYTES)

        self._visit(namespace, token_ids, copy)
        return [extents[place] for place in sorted(extents)]

    def put_in(self, parts: Seq[tuple[ExtentHeader, NDArray[np.uint8]]]) -> int:
        """Make the KV of extents, whose seals were checked, part of the cache; how many tokens that are.

        Raises:
            InvalidRequest: they do not begin at a conversation's beginning, have gaps, or are of another layout.
            Overloaded: there is no room for them.
        """
        tiering, encoding = self._tiering, self._tiering.usual
        by_place = {(header.start // BLOCK_SIZE, header.group): (header, payload) for header, payload in parts}
        num_blocks = len({index for index, _ in by_place})
        places = [(index, group) for index in range(num_blocks) for group in range(len(tiering.pools))]
        if not places or sorted(by_place) != places:
            raise InvalidRequest("the file holds no conversation from its beginning on, without gaps", param="file")
        for (_, group), (header, payload) in by_place.items():
            if header.layout != encoding.layout or payload.nbytes != encoding.payload_bytes[group]:
                raise InvalidRequest(
                    f"the file's blocks are {header.layout}, of {payload.nbytes} bytes, and here {encoding.layout}",
                    param="file",
                )
        namespace = by_place[0, 0][0].namespace
        ids = np.concatenate([by_place[index, 0][0].ids for index in range(num_blocks)])
        stop = num_blocks * BLOCK_SIZE
        with tiering.cache.open_restore(namespace, np.append(ids, np.int32(0))) as lease:
            start = lease.num_computed_tokens
            if start < stop:
                if tiering.cache.grow(lease, stop) is None:
                    raise Overloaded(f"there is no room for {stop} tokens; try again when fewer requests run")
                for group, pool in enumerate(tiering.pools):
                    table = lease.block_table(group)
                    for index in range(start // BLOCK_SIZE, num_blocks):
                        payload = by_place[index, group][1]
                        if encoding.codec is None:
                            pool[table[index]] = payload
                        else:
                            encoding.codec.decode(group, payload, pool[table[index]])
                    if encoding.codec is not None:
                        tiering.cache.mark_rounded(group, table[start // BLOCK_SIZE : num_blocks])
                tiering.commit_blocks(lease, KeyChain(namespace), encoding, ids, start, stop)
        return stop

    # -- Parts ---------------------------------------------------------------------------------------------------------

    def _visit(self, namespace: bytes, token_ids: Seq[int], visit: Callable[[int, Ids, Seq[bytes]], object]) -> int:
        """Show (group, block ids, headers) of the whole blocks that the device has of these tokens; their tokens."""
        tiering = self._tiering
        ids = np.asarray(token_ids, np.int32)
        chain = KeyChain(namespace)
        with tiering.cache.open_restore(namespace, np.append(ids, np.int32(0))) as lease:
            num_blocks = lease.num_computed_tokens // BLOCK_SIZE
            if any((lease.block_table(group)[:num_blocks] < 0).any() for group in range(len(tiering.pools))):
                raise InvalidRequest(
                    "this model looks back over a window, and memory no longer has what lies before it; use "
                    "`spolia cache export DIR`",
                    param="prompt",
                )
            chain.extend(ids[: num_blocks * BLOCK_SIZE])
            for group in range(len(tiering.pools)):
                encoding = tiering.usual
                headers = [tiering.header(chain, encoding, index, group, ids).encode() for index in range(num_blocks)]
                block_ids = lease.block_table(group)[:num_blocks].copy()
                tiering.cache.tag(group, block_ids, headers)
                visit(group, block_ids, headers)
        return num_blocks * BLOCK_SIZE
