"""The engine's side of the tiers: what goes down, and what comes up before a prompt is computed.

    EngineCore ──▶ Tiering ─┬─ TiersInUse   which there are; what reads from them, writes to them and decides what
                            ├─ KVBlocks     bytes into blocks of the pools, and what blocks are called below
                            ├─ Restores     sequences that wait for their prefix
                            ├─ Meetings     sequences that compute one end while the other is read
                            └─ Transfers    what moves though no request waits for it

An engine without tiers has one of these, too: it has nothing to wait for, and costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from spolia.engine.kv_blocks import KVBlocks
from spolia.engine.meetings import Meetings
from spolia.engine.request import Sequence
from spolia.engine.restores import Restores
from spolia.engine.tiers_in_use import TiersInUse
from spolia.engine.transfers import Transfers
from spolia.tiers import FetchPolicy, Planner, TierStats

__all__ = ["Tiering"]

_LOOK_S = 0.25
"""How often to see whether what is read for nobody's request has come to a stop."""

_BYTES_A_STEP = 32 << 20
"""Copied between two steps at most, in each direction, while there is something to compute."""


class Tiering:
    """Offload and restore for one engine. Nothing here waits; all of it is called on the engine's thread.

    Args:
        clock: seconds; only differences matter.
        fetch: who waits for a restore.
        timeout_s: how long at most, if `fetch` is "timeout".

    Attributes:
        planner: what restoring and computing have cost so far.
        transfers: what moves though no request waits for it.
    """

    def __init__(
        self,
        tiers: TiersInUse,
        blocks: KVBlocks,
        *,
        clock: Callable[[], float],
        fetch: FetchPolicy = "planned",
        timeout_s: float = 1.0,
    ) -> None:
        self.tiers = tiers
        self.blocks = blocks
        self.planner = Planner(clock)
        self.meetings = Meetings(blocks, tiers.mover, self.planner)
        self.restores = Restores(
            blocks, tiers, self.meetings, self.planner, clock=clock, fetch=fetch, timeout_s=timeout_s
        )
        self.transfers = Transfers(blocks, tiers, clock)
        self._clock = clock

    def set_waker(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on any thread, when there is something for `poll` to do."""
        self.tiers.mover.notify = wake

    def stats(self) -> tuple[TierStats, ...]:
        """Of each tier. Any thread."""
        return tuple(tier.stats for tier in self.tiers.mover.tiers)

    def note_cleared(self, keys: Iterable[bytes]) -> None:
        """Somebody has dropped these from tiers, by what they are called there: who misses them is told so."""
        self.blocks.note_cleared(keys, self._clock())

    # -- A sequence's way ----------------------------------------------------------------------------------------------

    def begin(self, sequence: Sequence) -> bool:
        """Look for what of the prompt is below. True: the sequence is held back until `poll` returns it."""
        self.blocks.explain_cleared(self.blocks.chain_of(sequence), sequence.reusable_ids)
        return self.restores.begin(sequence)

    def start(self, sequence: Sequence) -> None:
        """Its turn has come: what is still on its way is no longer wanted, but for what may meet it half-way."""
        self.restores.drop(sequence)
        self.meetings.start(sequence)

    def commit(self, sequence: Sequence) -> None:
        """Commit what was computed, and name the blocks that it completes."""
        lease, blocks = sequence.held_lease, self.blocks
        if not self.tiers.uses:
            blocks.cache.commit(lease, sequence.uncommitted_ids)
            return
        start, stop = lease.num_computed_tokens, sequence.num_computed_tokens
        chain, encoding = blocks.chain_of(sequence), blocks.encoding_of(sequence)
        blocks.commit(lease, chain, encoding, sequence.token_ids, start, stop)

    def finish(self, sequence: Sequence) -> None:
        """It is about to let go of its lease. Whatever of it is not below yet gets in line; all of it was just used."""
        if not self.tiers.uses:
            return
        blocks, mover = self.blocks, self.tiers.mover
        chain = blocks.chain_of(sequence)
        chain.extend(sequence.token_ids[: sequence.held_lease.num_computed_tokens])
        for group in range(blocks.num_groups):
            table = sequence.held_lease.block_table(group)[: len(chain.digests)]
            ids = table[table >= 0]
            tagged = [
                (block_id, tag)
                for block_id, tag in zip(ids.tolist(), blocks.cache.tags(group, ids), strict=True)
                if tag is not None
            ]
            self.tiers.offloader.note_used(
                group, np.array([block_id for block_id, _ in tagged], np.int32), [tag for _, tag in tagged]
            )
        keys = blocks.keys(chain.digests)
        for tier in mover.tiers:
            if keys and tier.is_usable:
                mover.touch(tier, keys)

    def drop(self, sequence: Sequence) -> bool:
        """Forget a sequence; False if it was not held back."""
        was_held = self.restores.drop(sequence)
        self.meetings.drop(sequence)
        return was_held

    # -- The loop ------------------------------------------------------------------------------------------------------

    def note_step(self, num_tokens: int, duration_s: float) -> None:
        """A step took that long."""
        self.planner.note_step(num_tokens, duration_s)

    def poll(self, *, is_busy: bool) -> list[Sequence]:
        """Take in what arrived, send down what waits; the sequences that need to wait no longer.

        Args:
            is_busy: others have something to compute, so do not take long.
        """
        max_bytes = _BYTES_A_STEP if is_busy else None
        self.tiers.offloader.pump(self.blocks.cache, max_bytes)
        self.transfers.poll(is_busy=is_busy or not self.restores.is_idle)
        self.meetings.poll()
        return self.restores.poll(max_bytes)

    def take_met(self) -> Counter[str]:
        """Tokens by tier that met running sequences since this was last called."""
        return self.meetings.take_met()

    @property
    def idle_s(self) -> float | None:
        """For how long `poll` will have nothing to do unless the waker is called: 0: not at all; None: for ever."""
        if self.tiers.offloader.can_pump or (self.transfers.has_something and self.restores.is_idle):
            return 0.0
        idle_s = self.restores.idle_s
        if not self.transfers.is_reading:
            return idle_s
        return _LOOK_S if idle_s is None else min(idle_s, _LOOK_S)

    def close(self, timeout_s: float) -> None:
        """Write what waits, for so long at most, and end the I/O."""
        offloader, mover = self.tiers.offloader, self.tiers.mover
        self.transfers.cancel()
        deadline_s = self._clock() + timeout_s
        while offloader.num_waiting and self._clock() < deadline_s:
            offloader.pump(self.blocks.cache, None)
            mover.flush(0.05)
        mover.flush(max(0.0, deadline_s - self._clock()))
        mover.close()
