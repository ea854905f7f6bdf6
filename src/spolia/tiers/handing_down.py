"""What a tier alone holds goes to the one below before the tier goes: `hand_down`, a batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spolia.errors import StorageUnavailable

from .backend import Entry, ListableBackend
from .extent import extent_bytes
from .tier import Tier

__all__ = ["HandedDown", "hand_down", "held_alone", "still_there"]


@dataclass(frozen=True, slots=True)
class HandedDown:
    """What became of the blocks that a tier alone held.

    Attributes:
        to: the tier that has them now; None: there was none below.
        num_dropped_blocks, num_dropped_bytes: what nobody has any more; None: the tier could not say.
    """

    to: str | None = None
    num_blocks: int = 0
    num_bytes: int = 0
    num_dropped_blocks: int | None = 0
    num_dropped_bytes: int | None = 0


def held_alone(tier: Tier) -> list[Entry] | None:
    """What a tier holds, the least recently used first, with sizes; None: it cannot say."""
    backend = tier.backend
    if not isinstance(backend, ListableBackend):
        return None
    entries = []
    for entry in backend.entries():
        size = entry.num_bytes
        if not size:
            header = backend.read_header(entry.key)
            size = 0 if header is None else extent_bytes(len(header.encode()), header.payload_bytes)
        entries.append(entry._replace(num_bytes=size))
    return entries


def hand_down(source: Tier, entries: Sequence[Entry], below: Tier) -> None:
    """Copy blocks, checked and sealed anew, to another tier. What cannot be read, or is gone, is left out.

    Raises:
        StorageUnavailable: the tier does not take them.
    """
    wanted = [entry for entry in entries if not below.knows(entry.key)]
    extents = [memoryview(bytearray(entry.num_bytes)) for entry in wanted]
    payloads = source.get_into([entry.key for entry in wanted], extents)
    ready = [
        (entry.key, extent)
        for entry, extent, payload in zip(wanted, extents, payloads, strict=True)
        if payload is not None
    ]
    if ready and below.put([key for key, _ in ready], [extent for _, extent in ready]) < len(ready):
        reason = below.stats.reason or "it has no room for them"
        raise StorageUnavailable(
            f"tier {below.name} does not take what tier {source.name} alone has: {reason}; tier {source.name} stays in "
            f"use. To drop what it has, detach tier {below.name} first"
        )


def still_there(tier: Tier, keys: Sequence[bytes]) -> set[bytes]:
    """Which of these a tier that took them has not given up since."""
    return {key for key, is_here in zip(keys, tier.backend.exists(keys), strict=True) if is_here}
