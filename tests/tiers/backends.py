"""Every backend that there is, made fresh for a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from spolia.tiers import FolderBackend, HostBackend, StorageBackend

Maker = Callable[[Path, int | None], AbstractContextManager[StorageBackend]]
"""From an empty folder and a capacity in bytes."""


@contextmanager
def folder_backend(folder: Path, capacity_bytes: int | None) -> Iterator[StorageBackend]:
    yield FolderBackend(folder / "kv", capacity_bytes)


@contextmanager
def host_backend(folder: Path, capacity_bytes: int | None) -> Iterator[StorageBackend]:
    yield HostBackend(1 << 30 if capacity_bytes is None else capacity_bytes)


BACKENDS: dict[str, Maker] = {"folder": folder_backend, "host": host_backend}

BOUNDED = ["folder", "host"]
"""Those that keep to a capacity."""
