"""What a place must be able to do to be a tier: see `StorageBackend`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from .extent import ExtentHeader

__all__ = ["Buffer", "Entry", "EvictingBackend", "Health", "ListableBackend", "StorageBackend"]

Buffer: TypeAlias = memoryview
"""Contiguous bytes that the caller owns."""


@dataclass(frozen=True, slots=True)
class Health:
    """How full a backend is.

    Attributes:
        num_entries, num_bytes: what it holds, as far as it can tell without looking everywhere.
        capacity_bytes: its limit; None where it sets none.
    """

    num_entries: int | None
    num_bytes: int | None
    capacity_bytes: int | None


class StorageBackend(Protocol):
    """A tier's storage: sealed extents by key.

    A key already names model, KV type, layout, tenant and tokens, so a backend compares keys and never reads them.
    Promises, checked for every backend by one contract suite:

    * `get_into` yields the bytes that `put` took, or a miss. What else it yields is refused by the seal above it.
    * A miss is an answer. `StorageUnavailable` means that the backend cannot answer now; the message says why.
    * Buffers belong to the caller and are not kept after return. Any thread may call, several at a time.
    * Under its limit it drops what was used least recently, and never more than it must.
    """

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each is there now. It may be gone when it is asked for."""

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[int | None]:
        """Read each value into the buffer at its place: its size in bytes, or None for a miss.

        A value that is larger than its buffer is a miss.
        """

    def put(self, keys: Sequence[bytes], values: Sequence[Buffer]) -> list[bool]:
        """Keep each value; False where it has no room. A key that is there stays as it is."""

    def delete(self, keys: Sequence[bytes]) -> None:
        """Drop those that are there."""

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        """They were used just now, the first of them to be kept longest: a chain is used from its head.

        Returns:
            Whether each is still there, as far as that can be told at little cost.
        """

    def health(self) -> Health: ...

    def close(self) -> None: ...


class Entry(NamedTuple):
    """One value of a listing.

    Attributes:
        num_bytes: 0 where it would take a question for each to know.
        used_s: seconds since the epoch; 0.0 where nobody notes it.
    """

    key: bytes
    num_bytes: int
    used_s: float


@runtime_checkable
class ListableBackend(StorageBackend, Protocol):
    """A backend that can say what it holds, for `spolia cache`."""

    def entries(self) -> Iterable[Entry]:
        """All that it holds, where it notes recency the least recently used first."""

    def read_header(self, key: bytes) -> ExtentHeader | None:
        """What an extent says of itself; None if it is gone, or makes no sense."""


@runtime_checkable
class EvictingBackend(StorageBackend, Protocol):
    """A backend that shows what has to make room, so that the next tier can take it.

    Attributes:
        on_evict: told of each extent that has to go, (key, extent), before it is gone; on the caller's thread. None: it
            is nobody's business.
    """

    on_evict: Callable[[bytes, Buffer], None] | None
