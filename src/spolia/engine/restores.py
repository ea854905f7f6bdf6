"""What waits for a prefix from the tiers before it is computed: see `Restores`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spolia.engine.kv_blocks import KVBlocks
from spolia.engine.meetings import Meetings
from spolia.engine.request import Sequence
from spolia.engine.tiers_in_use import TiersInUse
from spolia.kernels import BLOCK_SIZE
from spolia.tiers import FetchPolicy, Planner, Restore, Tier

__all__ = ["Restores"]

_STALLED_S = 30.0
"""Nobody waits longer than this for a tier that brings nothing."""

_LOOK_S = 0.25
"""How often to see whether a tier that is waited for has stalled."""


@dataclass(slots=True)
class _Held:
    """A sequence that waits for its prefix.

    Attributes:
        restore: None: it waits for another's, which brings the same blocks.
        begun_s, progress_s: when it began to wait, and when something was last read.
        is_free: it is in the scheduler's hands, and takes what arrives before its turn comes.
        is_begun: readers have got round to it.
        num_parts: what they had read of it when that was last seen.
    """

    sequence: Sequence
    first_block: int
    stop_block: int
    restore: Restore | None
    begun_s: float
    progress_s: float
    is_free: bool = False
    is_begun: bool = False
    num_parts: int = 0


class Restores:
    """Sequences that are held back until what tiers have of their prompts is there.

        begin ──▶ held back ──▶ runs arrive, are copied into blocks and committed ──▶ done, failed or late ──▶ poll
                                                                                        │
                                                                      worth reading on? └──▶ `Meetings`

    A restore that fails half-way leaves what arrived, contiguous. All of it is called on the engine's thread, and
    nothing waits: steps go on between runs.

    Args:
        meetings: gets those that are not worth waiting for.
        clock: seconds; only differences matter.
        fetch: who waits.
        timeout_s: how long at most, if `fetch` is "timeout".
    """

    def __init__(
        self,
        blocks: KVBlocks,
        tiers: TiersInUse,
        meetings: Meetings,
        planner: Planner,
        *,
        clock: Callable[[], float],
        fetch: FetchPolicy,
        timeout_s: float,
    ) -> None:
        self._blocks = blocks
        self._tiers = tiers
        self._mover = tiers.mover
        self._meetings = meetings
        self._planner = planner
        self._clock = clock
        self._fetch: FetchPolicy = fetch
        self._timeout_s = timeout_s
        self._held: dict[str, _Held] = {}  # by request, in order of arrival

    @property
    def num_held(self) -> int:
        """Sequences that are held back."""
        return sum(not held.is_free for held in self._held.values())

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way up for any request."""
        return not self._held

    def begin(self, sequence: Sequence) -> bool:
        """Look for what of the prompt is below. True: the sequence is held back until `poll` returns it."""
        ids = sequence.reusable_ids
        first = self._blocks.cache.probe(sequence.request.namespace, ids) // BLOCK_SIZE
        stop = (len(ids) - 1) // BLOCK_SIZE  # the last token is computed in any case
        if first >= stop or not self._tiers.any_usable:
            return False
        chain = self._blocks.chain_of(sequence)
        chain.extend(ids)
        restore = None
        if not self._is_on_its_way(chain.digests[first]):
            restore = self._mover.fetch(
                chain.digests[first:stop],
                first,
                self._blocks.encoding_of(sequence),
                is_worth=self._is_worth if self._fetch == "planned" else None,
                first_needed=self._blocks.first_needed,
            )
        now_s = self._clock()
        is_free = self._fetch == "best_effort"
        if not is_free or restore is not None:
            self._held[sequence.request.request_id] = _Held(sequence, first, stop, restore, now_s, now_s, is_free)
        return not is_free

    def poll(self, max_bytes: int | None) -> list[Sequence]:
        """Take in what arrived, about `max_bytes` a sequence; the sequences that need to wait no longer."""
        if not self._held:
            return []
        self._mover.replace_readers()
        now_s = self._clock()
        done = [
            held
            for held in self._held.values()
            if held.restore is not None and self._advance(held, held.restore, now_s, max_bytes)
        ]
        for held in done:
            self._let_go(held)
        ready = [held.sequence for held in done if not held.is_free]
        for held in [held for held in self._held.values() if held.restore is None]:
            if not self._is_on_its_way(self._blocks.chain_of(held.sequence).digests[held.first_block]):
                # Whoever brought it is done: most often all is there now.
                del self._held[held.sequence.request.request_id]
                if not self.begin(held.sequence):
                    ready.append(held.sequence)
        return ready

    def drop(self, sequence: Sequence) -> bool:
        """Wait no more for a sequence; False if it was not held back."""
        held = self._held.get(sequence.request.request_id)
        if held is None:
            return False
        self._let_go(held)
        return not held.is_free

    @property
    def idle_s(self) -> float | None:
        """For how long `poll` will have nothing to do unless something arrives: 0: not at all; None: for ever."""
        waits = [(held, held.restore) for held in self._held.values() if held.restore is not None]
        if any(restore.has_arrived or restore.is_done for _, restore in waits):
            return 0.0
        if any(restore.is_begun and not held.is_begun for held, restore in waits):
            return 0.0  # from now on it may wait less long
        if any(restore.num_parts != held.num_parts for held, restore in waits):
            return 0.0  # or longer
        if not waits:
            return 0.0 if self._held else None
        now_s = self._clock()
        return max(0.0, min(_LOOK_S, *(self._deadline_s(held) - now_s for held, _ in waits)))

    # -- Parts ---------------------------------------------------------------------------------------------------------

    def _is_worth(self, tier: Tier, num_blocks: int, num_bytes: int) -> bool:
        """Whether to read so many blocks. Any thread."""
        return self._planner.is_worth(tier.name, num_blocks * BLOCK_SIZE, num_bytes, tier.read_bytes_per_s)

    def _deadline_s(self, held: _Held) -> float:
        """When to stop waiting for the next run, or for the first to be begun."""
        if self._fetch == "timeout":
            return held.begun_s + self._timeout_s
        if self._fetch == "planned":
            num_blocks = held.stop_block - held.first_block
            is_guess = not held.sequence.restored and any(tier.read_bytes_per_s is None for tier in self._mover.tiers)
            if held.is_begun and is_guess:
                return held.progress_s + self._planner.first_wait_s(num_blocks * BLOCK_SIZE)
            if held.is_begun:
                num_blocks = min(self._mover.run_blocks, num_blocks)
            return held.progress_s + self._planner.wait_s(num_blocks * BLOCK_SIZE)
        return held.progress_s + _STALLED_S

    def _is_on_its_way(self, digest: bytes) -> bool:
        """Whether a restore is bringing this block, or has brought it and it is about to be taken in."""
        return any(held.restore is not None and digest in held.restore.wanted for held in self._held.values())

    def _let_go(self, held: _Held) -> None:
        restore = held.restore
        if restore is not None:
            self._mover.cancel(restore)
            if self._fetch == "planned" and restore.num_found:
                self._meetings.plan(held.sequence, restore.first_block + restore.num_found, restore.declined)
        del self._held[held.sequence.request.request_id]

    def _advance(self, held: _Held, restore: Restore, now_s: float, max_bytes: int | None) -> bool:
        """Take in runs; whether the sequence need not wait for more."""
        is_done = restore.is_done  # before looking: what arrived by then is seen below
        if restore.is_begun and not held.is_begun:
            held.is_begun, held.progress_s = True, now_s
        if restore.num_parts != held.num_parts:
            held.num_parts, held.progress_s = restore.num_parts, now_s
        num_bytes = 0
        while max_bytes is None or num_bytes < max_bytes:
            run = restore.take_run()
            if run is None:
                return is_done or now_s >= self._deadline_s(held) or not self._tiers.any_usable
            num_bytes += run.num_bytes
            sequence = held.sequence
            is_taken = self._blocks.take_in(
                sequence.request.namespace,
                sequence.known_ids,
                self._blocks.chain_of(sequence),
                self._blocks.encoding_of(sequence),
                run,
                sequence.restored,
            )
            self._mover.give_back(run)
            held.progress_s = now_s
            if not is_taken:
                return True
        return False
