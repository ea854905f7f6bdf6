"""What a cache has stored and given up, for followers on other threads: `core.cache`'s events, or all there is."""

from __future__ import annotations

from typing import NamedTuple

from spolia.engine.core import EngineCore
from spolia.kvcache import Event

__all__ = ["CacheNews", "cache_news"]


class CacheNews(NamedTuple):
    """
    Attributes:
        is_snapshot: `events` are all that is stored, as it were from nothing; else they follow what was asked for.
        next_number: to ask for next time.
    """

    is_snapshot: bool
    events: tuple[Event, ...]
    next_number: int


def cache_news(core: EngineCore, since: int | None) -> CacheNews:
    """Events from number `since` on; a snapshot if that is None, was forgotten already, or never was.

    To be called between two steps.
    """
    if since is not None and 0 <= since <= core.cache.next_event_number:
        batch = core.cache.events_since(since)
        if not batch.num_dropped:
            return CacheNews(False, batch.events, batch.next_sequence_number)
    snapshot = core.cache.snapshot()
    return CacheNews(True, snapshot.stored, snapshot.next_sequence_number)
