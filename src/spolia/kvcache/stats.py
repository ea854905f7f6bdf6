"""What the cache counts: every share has its denominator."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import ClassVar

from .explain import MissReason

__all__ = ["CacheStats", "Durations"]


class Durations:
    """How many tokens' KV had how long: `counts[i]` up to `BOUNDS_S[i]` seconds, and the last one for longer."""

    BOUNDS_S: ClassVar = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0)

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(self.BOUNDS_S) + 1)
        self.sum_s = 0.0

    def note(self, seconds: float, num_tokens: int) -> None:
        self.counts[bisect_left(self.BOUNDS_S, seconds)] += num_tokens
        self.sum_s += seconds * num_tokens

    def __add__(self, other: Durations) -> Durations:
        both = Durations()
        both.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        both.sum_s = self.sum_s + other.sum_s
        return both


@dataclass(slots=True)
class CacheStats:
    """Counters since the start; they only grow.

    `num_asked_tokens == num_reused_tokens + sum(num_missed_tokens.values())`. Sequences that come back after a
    preemption are counted in `num_resumed_*` alone, so that finding one's own work again never looks like a hit.
    """

    num_opened: int = 0
    num_asked_tokens: int = 0
    num_reused_tokens: int = 0
    num_missed_tokens: dict[MissReason, int] = field(default_factory=lambda: dict.fromkeys(MissReason, 0))
    num_resumed_opened: int = 0
    num_resumed_asked_tokens: int = 0
    num_resumed_reused_tokens: int = 0
    num_committed_tokens: int = 0
    num_duplicate_tokens: int = 0
    """Of the committed ones, those that somebody else had committed meanwhile, or that were recomputed."""
    num_copied_blocks: int = 0
    num_refused_grows: int = 0
    num_evicted_blocks: int = 0
    num_evicted_tokens: int = 0
    num_cleared_tokens: int = 0
    num_rescans: int = 0
    """Times that all nodes were looked through for a block to give up."""
    evicted_ages: Durations = field(default_factory=Durations)
    """Of what was given up: since it was first there."""
    evicted_idle_times: Durations = field(default_factory=Durations)
    """Of what was given up: since it was used last."""
    reuse_gaps: Durations = field(default_factory=Durations)
    """Of what a request found: since it was used before. A run of tokens counts whole if a part of it was found."""
