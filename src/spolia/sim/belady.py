"""What no policy can pass: Belady's rule, which knows the future, on the trace's units.

Of all units that could be kept after a request, those that are used again soonest are kept, and what would go first is
not even brought in. It may keep a unit without those before it, which a prefix cache cannot: so it is a bound, perhaps
not one that can be reached. Units that are always used together are one item with a size, of which a part may be kept.

Source: Belady 1966; for items of one size with bypassing, furthest use first is optimal.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .trace import Trace

__all__ = ["belady"]


class _Use(NamedTuple):
    """One item in one request: its key, its size in units, and the index of the next request that uses it, or None."""

    item: int
    size: int
    next_use: int | None


def belady(trace: Trace, sizes_tokens: Sequence[int | None]) -> list[float]:
    """The highest hit rate that is possible at each size; None: without a limit."""
    uses = _uses(trace)
    return [_hit_rate(trace, uses, None if size is None else size // trace.unit_tokens) for size in sizes_tokens]


def _uses(trace: Trace) -> list[list[_Use]]:
    """By request, its items. An item ends where the number of requests that have a unit changes along the prompt."""
    num_keys, paths = trace.unit_keys()
    counts = np.zeros(num_keys, np.int64)
    for path in paths:
        counts[path] += 1
    next_uses: dict[int, int] = {}
    uses: list[list[_Use]] = []
    for index in range(len(paths) - 1, -1, -1):
        path = paths[index]
        heads = np.append(0, np.flatnonzero(np.diff(counts[path])) + 1) if len(path) else np.empty(0, np.int64)
        sizes = np.diff(np.append(heads, len(path)))
        items = path[heads].tolist()
        uses.append([_Use(item, size, next_uses.get(item)) for item, size in zip(items, sizes.tolist(), strict=True)])
        next_uses.update(dict.fromkeys(items, index))
    uses.reverse()
    return uses


def _hit_rate(trace: Trace, uses: Sequence[Sequence[_Use]], capacity: int | None) -> float:
    kept: dict[int, tuple[int, int]] = {}  # item -> (units kept, next use)
    furthest: list[tuple[int, int]] = []  # (-next use, item): a heap with dead entries
    num_kept = num_hit_tokens = 0
    for request, items in zip(trace.requests, uses, strict=True):
        num_hit_units = 0
        for item, size, next_use in items:
            num_units, _ = kept.pop(item, (0, 0))
            num_hit_units += num_units
            num_kept -= num_units
            if next_use is not None:
                kept[item] = size, next_use
                num_kept += size
                if capacity is not None:
                    heapq.heappush(furthest, (-next_use, item))
        num_hit_tokens += min(num_hit_units * trace.unit_tokens, request.num_input_tokens)
        while capacity is not None and num_kept > capacity:
            negative, item = heapq.heappop(furthest)
            num_units, next_use = kept.get(item, (0, 0))
            if not num_units or next_use != -negative:
                continue
            num_gone = min(num_units, num_kept - capacity)
            num_kept -= num_gone
            if num_gone < num_units:
                kept[item] = num_units - num_gone, next_use
                heapq.heappush(furthest, (negative, item))
            else:
                del kept[item]
    return num_hit_tokens / trace.num_input_tokens if trace.num_input_tokens else 0.0
