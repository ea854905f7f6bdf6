"""What clients and the engine say about content: how long it is worth keeping.

    wish     "tokens 0 to 4,000: priority 75, for 300 s after each use"     a request's, by token range
    outcome  "that reply ended in a tool call"                              the engine's, when a sequence ends
    pin      "this, until 12:00, whatever else there is"                    an operator's, within a quota (`pins.py`)

Content without a wish has priority 50 and no time limit. When its time is over it goes first of all, and can be hit
until it does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["DEFAULT_PRIORITY", "Outcome", "Standing", "Wish", "borders"]

DEFAULT_PRIORITY = 50


class Outcome(StrEnum):
    """How a sequence ended, as far as it tells whether its content is wanted again."""

    TURN = "turn"
    """It said what it had to say; somebody may answer."""
    TOOL_CALL = "tool_call"
    """It called a tool: the result is due back soon, and everything before it with it."""
    BROKEN_OFF = "broken_off"
    """It was preempted or aborted."""


@dataclass(frozen=True, slots=True)
class Wish:
    """How long tokens [start, stop) of a request are worth keeping.

    Attributes:
        stop: None: to the end, the answer included.
        priority: 0 to 100; of what has to go, the least goes first.
        ttl_s: seconds after its last use from which on nobody expects it back; None: no limit.
    """

    priority: int = DEFAULT_PRIORITY
    ttl_s: float | None = None
    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.priority <= 100:
            raise ValueError(f"priority is {self.priority}; it must be from 0 to 100")
        if self.ttl_s is not None and not 0 <= self.ttl_s < math.inf:
            raise ValueError(f"ttl_s is {self.ttl_s}; it must be 0 or more seconds, or None for no limit")
        if self.start < 0 or (self.stop is not None and self.stop <= self.start):
            raise ValueError(f"tokens {self.start} to {self.stop} are no range; start must be before stop")

    def covers(self, position: int) -> bool:
        return self.start <= position and (self.stop is None or position < self.stop)

    def with_other(self, other: Wish) -> Wish:
        """Both wishes granted: the higher priority, the longer time."""
        unlimited = self.ttl_s is None or other.ttl_s is None
        ttl_s = None if unlimited else max(self.ttl_s or 0.0, other.ttl_s or 0.0)
        return Wish(max(self.priority, other.priority), ttl_s)


@dataclass(slots=True)
class Standing:
    """A node's record with retention.

    Attributes:
        used: when, last.
        born: when first; None: not yet.
        wish: what its users asked for, if anything; its range is of no meaning here.
        pins: ids of the pins that hold it.
        is_spent: nobody expects it back: the conversation was closed. Using it again ends that.
        segment, credit, mark: the policy's own.
    """

    used: float = 0.0
    born: float | None = None
    wish: Wish | None = None
    pins: frozenset[int] = frozenset()
    is_spent: bool = False
    segment: int = 0
    credit: int = 0
    mark: float = 0.0

    def copy(self) -> Standing:
        return Standing(self.used, self.born, self.wish, self.pins, self.is_spent, self.segment, self.credit, self.mark)


def borders(wishes: Sequence[Wish], length: int) -> list[int]:
    """Positions inside the first `length` tokens at which a wish begins or ends, in order."""
    places = {place for wish in wishes for place in (wish.start, wish.stop) if place is not None}
    return sorted(place for place in places if 0 < place < length)
