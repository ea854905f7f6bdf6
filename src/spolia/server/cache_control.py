"""`cache_control`, Anthropic's mark on a block: "keep the prompt up to here", five minutes or an hour from each use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spolia.engine import Wish

__all__ = ["last_mark", "ttl_s_of", "wish_up_to"]

_PRIORITY = 75
_TTLS_S = {"5m": 300.0, "1h": 3600.0}


def ttl_s_of(mark: object) -> float:
    """The seconds of a `cache_control`; five minutes, as with Anthropic, where it does not say."""
    ttl = mark.get("ttl") if isinstance(mark, Mapping) else None
    return _TTLS_S.get(ttl if isinstance(ttl, str) else "", _TTLS_S["5m"])


def wish_up_to(num_tokens: int, ttl_s: float) -> list[Wish]:
    """What a mark after so many tokens of a prompt asks of the cache."""
    return [Wish(_PRIORITY, ttl_s, 0, num_tokens)] if num_tokens else []


def last_mark(messages: Sequence[Mapping[str, Any]]) -> tuple[int, float] | None:
    """The last message with a mark, on itself or on a part of it, and its seconds; None if there is none."""
    for index in range(len(messages) - 1, -1, -1):
        marks = list(_marks(messages[index]))
        if marks:
            return index, max(map(ttl_s_of, marks))
    return None


def _marks(message: Mapping[str, Any]) -> Iterator[object]:
    content = message.get("content")
    for block in (message, *(content if isinstance(content, list) else ())):
        if isinstance(block, Mapping) and block.get("cache_control"):
            yield block["cache_control"]
