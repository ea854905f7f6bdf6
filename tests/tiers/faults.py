"""A backend on which everything goes wrong, as told."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from spolia.tiers import Health

__all__ = ["FaultyBackend"]


class FaultyBackend:
    """Keeps values in a dictionary.

    Attributes:
        error: raised by every call while it is set.
        delay_s: each call takes so long.
        bytes_per_s: how fast values are read; None: at once.
        damage: flips a bit of each value read.
        is_full: nothing more is taken.
    """

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.error: Exception | None = None
        self.delay_s = 0.0
        self.bytes_per_s: float | None = None
        self.damage = False
        self.is_full = False
        self.calls: list[str] = []
        self._open = threading.Event()
        self._open.set()

    def hang(self) -> None:
        """Calls do not return until `resume`."""
        self._open.clear()

    def resume(self) -> None:
        self._open.set()

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        time.sleep(self.delay_s)
        self._open.wait()
        if self.error is not None:
            raise self.error

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        self._enter("exists")
        return [key in self.values for key in keys]

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int | None]:
        self._enter("get_into")
        return [self._read(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def _read(self, key: bytes, buffer: memoryview) -> int | None:
        value = self.values.get(key)
        if value is None or len(value) > len(buffer):
            return None
        if self.bytes_per_s is not None:
            time.sleep(len(value) / self.bytes_per_s)
        buffer[: len(value)] = value
        if self.damage:
            buffer[len(value) // 2] ^= 1
        return len(value)

    def put(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> list[bool]:
        self._enter("put")
        if self.is_full:
            return [False] * len(keys)
        self.values.update((key, bytes(value)) for key, value in zip(keys, values, strict=True))
        return [True] * len(keys)

    def delete(self, keys: Sequence[bytes]) -> None:
        self._enter("delete")
        for key in keys:
            self.values.pop(key, None)

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        self._enter("touch")
        return [key in self.values for key in keys]

    def health(self) -> Health:
        self._enter("health")
        return Health(len(self.values), sum(map(len, self.values.values())), None)

    def close(self) -> None:
        self.resume()
