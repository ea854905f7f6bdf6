"""KV that is moved because somebody said so, or is likely to: up ahead of a request, down to a tier.

    bring    tiers ──▶ device    what a session's next turn will ask for; into free blocks, unless told otherwise
    send     device ──▶ a tier

Nobody waits here: requests go first, and one transfer after the other is done between their steps. All of it is called
on the engine's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from spolia.engine.kv_blocks import KVBlocks
from spolia.engine.tiers_in_use import TiersInUse
from spolia.kernels import BLOCK_SIZE
from spolia.tiers import Encoding, KeyChain, Restore

__all__ = ["Transfers"]

Ids = NDArray[np.int32]

_PATIENCE_S = 1.0
"""While a tier hangs, who waits for what may never come waits so long for the next of it."""

_MAX_TRIES = 16
"""To bring up what somebody waits for, while requests take the room for it."""


@dataclass(slots=True, eq=False)
class _Bring:
    """A prefix on its way up.

    Attributes:
        ids: its tokens, and one more: who asks the cache for tokens gets all but the last.
        encoding: how the namespace's blocks are written.
        may_evict: others may have to make room for it.
        num_tries: how often a restore was begun.
        progress_s: when it was, or when something last arrived.
    """

    namespace: bytes
    ids: Ids
    chain: KeyChain
    encoding: Encoding
    may_evict: bool
    future: Future[int] = field(default_factory=Future)
    restore: Restore | None = None
    num_tries: int = 0
    progress_s: float = 0.0


class Transfers:
    """Those of one engine."""

    def __init__(self, blocks: KVBlocks, tiers: TiersInUse, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._blocks = blocks
        self._tiers = tiers
        self._mover = tiers.mover
        self._waiting: deque[_Bring] = deque()
        self._current: _Bring | None = None

    # -- Up ------------------------------------------------------------------------------------------------------------

    def bring(
        self, namespace: bytes, token_ids: Seq[int], *, is_exact: bool = False, may_evict: bool = False
    ) -> Future[int]:
        """Have the KV of these tokens on the device, as far as the tiers have it.

        Args:
            is_exact: the namespace is of those who want exact KV.
            may_evict: others may have to make room for it.

        Returns:
            How many of the tokens are there, when no more will be.
        """
        ids = np.append(np.asarray(token_ids, np.int32), np.int32(0))
        encoding = self._blocks.encoding(is_exact=is_exact)
        bring = _Bring(namespace, ids, KeyChain(namespace), encoding, may_evict)
        bring.chain.extend(ids[:-1])
        self._waiting.append(bring)
        return bring.future

    @property
    def has_something(self) -> bool:
        """Whether `poll` has something to do now."""
        restore = None if self._current is None else self._current.restore
        return bool(self._waiting) if restore is None else restore.has_arrived or restore.is_done

    @property
    def is_reading(self) -> bool:
        """Whether something is on its way up, and `poll` has to see that it does not take for ever."""
        return self._current is not None and self._current.restore is not None

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
            self._mover.cancel(bring.restore)
            bring.restore = None
        bring.num_tries += 1
        bring.progress_s = self._clock()
        with self._blocks.cache.open_restore(bring.namespace, bring.ids) as lease:  # what is here was just used
            first = lease.num_computed_tokens // BLOCK_SIZE
        digests = bring.chain.digests[first:]
        if digests and self._has_room(bring, 1):
            bring.restore = self._mover.fetch(digests, first, bring.encoding, first_needed=self._blocks.first_needed)

    def _advance(self, bring: _Bring) -> bool:
        """Take in runs; whether it is done."""
        restore = bring.restore
        if restore is None:
            return True
        is_done = restore.is_done
        while (run := restore.take_run()) is not None:
            is_taken = self._has_room(bring, run.num_blocks) and self._blocks.take_in(
                bring.namespace, bring.ids[: BLOCK_SIZE * run.stop_block + 1], bring.chain, bring.encoding, run
            )
            self._mover.give_back(run)
            if not is_taken:
                return True
            bring.progress_s = self._clock()
        return is_done or (self._tiers.has_stalled and self._clock() - bring.progress_s > _PATIENCE_S)

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
            self._mover.cancel(bring.restore)
        if bring is self._current:
            self._current = None
        else:
            self._waiting.remove(bring)
        if bring.future.set_running_or_notify_cancel():  # else whoever asked has gone
            bring.future.set_result(self._num_here(bring))

    def _num_here(self, bring: _Bring) -> int:
        return self._blocks.cache.probe(bring.namespace, bring.ids)

    def _has_room(self, bring: _Bring, num_blocks: int) -> bool:
        return bring.may_evict or all(ledger.free > num_blocks for ledger in self._blocks.cache.ledger())

    # -- Down ----------------------------------------------------------------------------------------------------------

    def send(self, namespace: bytes, token_ids: Seq[int], tier: str, *, is_exact: bool = False) -> int:
        """Have what the device has of these tokens written to a tier, whatever is written there by itself.

        What lies before a window is, as far as the device still has it.

        Args:
            is_exact: the namespace is of those who want exact KV.

        Returns:
            How many tokens that are.

        Raises:
            InvalidRequest: there is no such tier.
        """
        target = self._tiers.tier(tier)
        blocks, encoding = self._blocks, self._blocks.encoding(is_exact=is_exact)
        ids = np.asarray(token_ids, np.int32)
        chain = KeyChain(namespace)
        with blocks.cache.open_restore(namespace, np.append(ids, np.int32(0)), whole_blocks=True) as lease:
            num_tokens = lease.num_computed_tokens
            chain.extend(ids[:num_tokens])
            for group in range(blocks.num_groups):
                table = blocks.cache.stored_table(lease, group)
                indices = np.flatnonzero(table >= 0)
                tags = [blocks.header(chain, encoding, index, group, ids).encode() for index in indices.tolist()]
                blocks.cache.tag(group, table[indices], tags)
                self._tiers.offloader.send(target, group, table[indices], tags)
        return num_tokens
