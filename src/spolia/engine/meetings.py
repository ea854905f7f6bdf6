"""Both ends meeting in the middle: a prompt's end is read while its front is computed. See `Meetings`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from spolia.engine.kv_blocks import KVBlocks
from spolia.engine.request import Sequence
from spolia.errors import Bug
from spolia.kernels import BLOCK_SIZE
from spolia.kvcache import Lease
from spolia.tiers import BlockRun, Mover, Planner, Restore, Tier

__all__ = ["Meetings"]

_MIN_MEETING = 4
"""Blocks that are worth bringing up from the far end."""


@dataclass(slots=True)
class _Meeting:
    """A sequence that computes its prompt while the prompt's end is brought up.

        tokens   |  computed  ->   |  to do  |  <-  in the lease's blocks  |
                                             low_block                     stop_block

    Attributes:
        lease: whose blocks are filled from the end; if the sequence has another, it was preempted.
        low_block: None: nothing has arrived.
        ranges: (start, stop, tier) of what is there, the last first.
    """

    sequence: Sequence
    restore: Restore
    lease: Lease
    low_block: int | None = None
    ranges: list[tuple[int, int, str]] = field(default_factory=list)


class Meetings:
    """Those of one engine. All of it is called on the engine's thread."""

    def __init__(self, blocks: KVBlocks, mover: Mover, planner: Planner) -> None:
        self._blocks = blocks
        self._mover = mover
        self._planner = planner
        self._planned: dict[str, int] = {}  # by request that has not begun: the block where what is there ends
        self._meetings: dict[str, _Meeting] = {}  # by request
        self._met: Counter[str] = Counter()

    def plan(self, sequence: Sequence, stop_block: int, tier: Tier | None) -> None:
        """Blocks up to that one are there, and were not waited for: read them from the end, if that is of use.

        Args:
            tier: the one that reading alone from was not worth while.
        """
        num_known = self._blocks.cache.probe(sequence.request.namespace, sequence.reusable_ids)
        num_blocks = stop_block - num_known // BLOCK_SIZE
        num_bytes = num_blocks * sum(self._blocks.encoding_of(sequence).payload_bytes)
        rate = None if tier is None else tier.read_bytes_per_s
        if num_blocks >= _MIN_MEETING and self._planner.is_worth_meeting(num_blocks * BLOCK_SIZE, num_bytes, rate):
            self._planned[sequence.request.request_id] = stop_block

    def start(self, sequence: Sequence) -> None:
        """Its turn to be computed has come: begin to read its other end, if that was planned."""
        stop_block = self._planned.pop(sequence.request.request_id, None)
        first_block = -(-sequence.num_computed_tokens // BLOCK_SIZE)
        if stop_block is None or stop_block - first_block < _MIN_MEETING or sequence.is_scoring:
            return
        digests = self._blocks.chain_of(sequence).digests[first_block:stop_block]
        encoding = self._blocks.encoding_of(sequence)
        restore = self._mover.fetch(digests, first_block, encoding, is_backward=True)
        self._meetings[sequence.request.request_id] = _Meeting(sequence, restore, sequence.held_lease)

    def poll(self) -> None:
        """Take in what arrived."""
        for meeting in list(self._meetings.values()):
            if self._advance(meeting):
                self._end(meeting)

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self._planned.pop(sequence.request.request_id, None)
        meeting = self._meetings.get(sequence.request.request_id)
        if meeting is not None:
            self._end(meeting)

    def take_met(self) -> Counter[str]:
        """Tokens by tier that met running sequences since this was last called."""
        met, self._met = self._met, Counter()
        return met

    def _advance(self, meeting: _Meeting) -> bool:
        """Put what has arrived into its place; whether there is no more to come, or both ends have met."""
        sequence, lease = meeting.sequence, meeting.lease
        if sequence.lease is not lease:
            return True  # preempted: its blocks are gone
        is_done = meeting.restore.is_done
        while (run := meeting.restore.take_run()) is not None:
            is_taken = self._place(meeting, run)
            self._mover.give_back(run)
            if not is_taken:
                return True
        if sequence.meets_at is None or lease.num_computed_tokens < sequence.meets_at:
            return is_done and sequence.meets_at is None
        start = lease.num_computed_tokens
        ranges = [(max(first, start), stop, tier) for first, stop, tier in reversed(meeting.ranges) if stop > start]
        if ranges:
            stop = ranges[-1][1]
            chain, encoding = self._blocks.chain_of(sequence), self._blocks.encoding_of(sequence)
            self._blocks.commit(lease, chain, encoding, sequence.known_ids, start, stop)
            sequence.note_met(ranges)
            sequence.num_rounded_tokens = self._blocks.num_rounded_tokens(sequence, stop)
            sequence.table_changed = True
            for first, last, tier in ranges:
                self._met[tier] += last - first
        return True

    def _place(self, meeting: _Meeting, run: BlockRun) -> bool:
        """Copy a run into the lease's blocks; False if there is no room for it.

        Blocks that the front has begun stay as they are: they are committed, so others may read them, and a window may
        have let go of them.
        """
        sequence, lease = meeting.sequence, meeting.lease
        stop_block = run.stop_block
        first_block = max(run.first_block, -(-lease.num_computed_tokens // BLOCK_SIZE))
        if first_block >= stop_block:
            return True
        if meeting.low_block not in (None, stop_block):
            return False
        stop = stop_block * BLOCK_SIZE
        if lease.num_reserved_tokens < stop:
            copies = self._blocks.cache.grow(lease, stop)
            if copies is None:
                return False
            if copies:
                raise Bug(f"request {sequence.request.request_id} shares a block that it has written to")
            sequence.num_slots = lease.num_reserved_tokens
            sequence.table_changed = True
        for group, payloads in enumerate(run.payloads):
            table = lease.block_table(group)[first_block:stop_block]
            missing = payloads[first_block - run.first_block :]
            self._blocks.fill(group, table, missing, is_rounded=run.is_rounded)
        meeting.low_block = first_block
        (_, _, tier) = run.ranges[0]
        meeting.ranges.append((first_block * BLOCK_SIZE, stop, tier))
        sequence.meets_at = first_block * BLOCK_SIZE
        return True

    def _end(self, meeting: _Meeting) -> None:
        del self._meetings[meeting.sequence.request.request_id]
        self._mover.cancel(meeting.restore)
        meeting.sequence.meets_at = None
