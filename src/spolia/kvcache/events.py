"""What enters and leaves the tree, as a stream that an index elsewhere (a router, a dashboard) can follow.

Tokens are named by *branch*: a run of tokens that hangs on its parent branch at a fixed position. Splits cut nodes,
never branches, so they make no events.

    branch 1   ................          Stored(1, parent 0, start  0, 16 tokens)
    branch 2           └........         Stored(2, parent 1, start  8,  9 tokens)
    branch 2           └......           Removed(2, start 14): branch 2 now ends at 14

Sequence numbers count up by one without gaps. The log is a ring: a reader that comes too late is told how many events
it missed, and starts again from a snapshot.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeAlias

from .int_buffer import Ids

__all__ = ["Cleared", "Event", "EventBatch", "EventLog", "Removed", "Stored"]

ROOT_BRANCH = 0
"""Parent of branches that begin at position 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """`token_ids` now follow position `start` of `branch`; a branch not heard of before hangs on `parent` there."""

    sequence_number: int
    namespace: bytes
    branch: int
    parent: int
    start: int
    token_ids: Ids


@dataclass(frozen=True, slots=True, eq=False)
class Removed:
    """`branch` lost its tokens from position `start` on; without tokens it is gone."""

    sequence_number: int
    namespace: bytes
    branch: int
    start: int
    num_tokens: int
    cause: str


@dataclass(frozen=True, slots=True, eq=False)
class Cleared:
    """All branches of `namespace` are gone; what running sequences still hold follows as `Stored`."""

    sequence_number: int
    namespace: bytes


Event: TypeAlias = Stored | Removed | Cleared


class EventBatch(NamedTuple):
    """Events in order, the number to ask from next time, and how many were missed before the first."""

    events: tuple[Event, ...]
    next_sequence_number: int
    num_dropped: int


class EventLog:
    """The last `capacity` events."""

    def __init__(self, capacity: int) -> None:
        self._ring: deque[Event] = deque(maxlen=capacity)
        self.next_sequence_number = 0

    def stored(self, namespace: bytes, branch: int, parent: int, start: int, token_ids: Ids) -> None:
        self._append(Stored(self.next_sequence_number, namespace, branch, parent, start, token_ids.copy()))

    def removed(self, namespace: bytes, branch: int, start: int, num_tokens: int, cause: str) -> None:
        self._append(Removed(self.next_sequence_number, namespace, branch, start, num_tokens, cause))

    def cleared(self, namespace: bytes) -> None:
        self._append(Cleared(self.next_sequence_number, namespace))

    def since(self, sequence_number: int) -> EventBatch:
        """Events from `sequence_number` on.

        Raises:
            ValueError: for a number that has not been given out yet.
        """
        if not 0 <= sequence_number <= self.next_sequence_number:
            raise ValueError(f"sequence_number is {sequence_number}; allowed: 0 to {self.next_sequence_number}")
        oldest = self.next_sequence_number - len(self._ring)
        events = tuple(islice(self._ring, max(0, sequence_number - oldest), None))
        return EventBatch(events, self.next_sequence_number, max(0, oldest - sequence_number))

    def _append(self, event: Event) -> None:
        self._ring.append(event)
        self.next_sequence_number += 1
