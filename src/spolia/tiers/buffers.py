"""Memory in which extents wait: bounded, and used again and again."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

__all__ = ["BufferPool"]


class BufferPool:
    """Lends buffers of few sizes, `max_bytes` in all at a time. Any thread may call."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_lent_bytes = 0
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self._changed = threading.Condition()

    def has_room(self, size: int) -> bool:
        """Whether `take` would lend that much now. One buffer is lent whatever its size: else nothing would move."""
        with self._changed:
            return self._has_room(size)

    def take(self, size: int, *, timeout_s: float = 0.0) -> NDArray[np.uint8] | None:
        """uint8 `[size]` of any content, the caller's until `give`; None if none came free in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._has_room(size), timeout_s):
                return None
            self._num_lent_bytes += size
            free = self._free.get(size)
            if free:
                return free.pop()
        return np.empty(size, np.uint8)

    def give(self, buffer: NDArray[np.uint8]) -> None:
        """Take a buffer back."""
        with self._changed:
            self._num_lent_bytes -= len(buffer)
            self._free.setdefault(len(buffer), []).append(buffer)
            self._changed.notify_all()

    def _has_room(self, size: int) -> bool:
        return self._num_lent_bytes == 0 or self._num_lent_bytes + size <= self._max_bytes
