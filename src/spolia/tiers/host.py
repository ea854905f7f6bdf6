"""A tier in this process's memory: extents in a dictionary, the least recently used first to go."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from .backend import Buffer, Entry, Health
from .extent import ExtentError, ExtentHeader

__all__ = ["HostBackend"]


class HostBackend:
    """At most `capacity_bytes` of extents in RAM. An `EvictingBackend`."""

    def __init__(self, capacity_bytes: int) -> None:
        self.on_evict: Callable[[bytes, Buffer], None] | None = None
        self._capacity = capacity_bytes
        self._lock = threading.Lock()  # guards what follows
        self._extents: OrderedDict[bytes, NDArray[np.uint8]] = OrderedDict()
        self._num_bytes = 0

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._extents for key in keys]

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[int | None]:
        with self._lock:
            found = [self._extents.get(key) for key in keys]
        return [_copy(extent, buffer) for extent, buffer in zip(found, buffers, strict=True)]

    def put(self, keys: Sequence[bytes], values: Sequence[Buffer]) -> list[bool]:
        return [self._put(key, value) for key, value in zip(keys, values, strict=True)]

    def delete(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                extent = self._extents.pop(key, None)
                if extent is not None:
                    self._num_bytes -= len(extent)

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            for key in reversed(keys):
                if key in self._extents:
                    self._extents.move_to_end(key)
            return [key in self._extents for key in keys]

    def health(self) -> Health:
        with self._lock:
            return Health(len(self._extents), self._num_bytes, self._capacity)

    def entries(self) -> list[Entry]:
        """What it holds, the least recently used first; nobody notes when that was."""
        with self._lock:
            return [Entry(key, len(extent), 0.0) for key, extent in self._extents.items()]

    def read_header(self, key: bytes) -> ExtentHeader | None:
        """The header of an extent; None if it is not there."""
        with self._lock:
            extent = self._extents.get(key)
        try:
            return None if extent is None else ExtentHeader.decode(extent.data)
        except ExtentError:
            return None

    def close(self) -> None:
        with self._lock:
            self._extents.clear()
            self._num_bytes = 0

    def _put(self, key: bytes, value: Buffer) -> bool:
        if len(value) > self._capacity:
            return False
        while True:
            with self._lock:
                if key in self._extents:
                    return True
                if self._num_bytes + len(value) <= self._capacity:  # the hard limit: before anything is copied
                    self._num_bytes += len(value)
                    break
                if not self._extents:  # all room is promised to puts that go on beside this one
                    return False
                old_key, extent = self._extents.popitem(last=False)
                self._num_bytes -= len(extent)
            if self.on_evict is not None:
                self.on_evict(old_key, extent.data)
        try:
            kept = np.frombuffer(value, np.uint8).copy()
        except MemoryError:  # there is less than was promised
            with self._lock:
                self._num_bytes -= len(value)
            raise
        with self._lock:
            if key in self._extents:  # somebody else was quicker
                self._num_bytes -= len(value)
            else:
                self._extents[key] = kept
        return True


def _copy(extent: NDArray[np.uint8] | None, buffer: Buffer) -> int | None:
    if extent is None or len(extent) > len(buffer):
        return None
    buffer[: len(extent)] = extent.data
    return len(extent)
