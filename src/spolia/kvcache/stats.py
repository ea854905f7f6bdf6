"""What the cache counts: every share has its denominator."""

from __future__ import annotations

from dataclasses import dataclass, field

from .explain import MissReason

__all__ = ["CacheStats"]


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
