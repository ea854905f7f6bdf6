"""The extent: one block's KV as it lies in a tier, with all that is needed to distrust it.

    magic, version, sizes | digest | parent | namespace | layout | token ids | payload | seal
    |<------------------------ header, a multiple of 64 bytes ------------->|         | 32 bytes

The seal is BLAKE3 over everything before it. Reading checks it, and that the digest is the one asked for and follows
from parent and token ids; then payload, place and owner are what was written, or the extent is refused. A refused
extent is a miss, never an answer.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from .keys import BLOCK_SIZE, DIGEST_BYTES, Ids, block_key, link, root_digest

__all__ = [
    "SEAL_BYTES",
    "Checksum",
    "ExtentError",
    "ExtentHeader",
    "Sealer",
    "extent_bytes",
    "header_bytes",
    "key_of",
    "layout_of",
    "open_extent",
    "payload_of",
    "secret_at",
]

Payload: TypeAlias = NDArray[np.uint8]

_MAGIC = b"SPOLIAKV"
_VERSION = 1
_FIXED = struct.Struct("<8sHHBxHIIQ")  # magic, version, header bytes, group, layout bytes, start, tokens, payload bytes
_GROUP_AT = 12
_LAYOUT_AT = _FIXED.size + 3 * DIGEST_BYTES
_ALIGNMENT = 64

SEAL_BYTES = 32

MAX_HEADER_BYTES = 4_096
"""More than any header has."""


class ExtentError(Exception):
    """What was read is not the extent that was asked for; the message says in which respect."""


@dataclass(frozen=True, slots=True, eq=False)
class ExtentHeader:
    """What a block is: tokens [start, start + len(token_ids)) of the sequence that hangs on `parent`.

    Attributes:
        namespace: 32 bytes: who may read it.
        layout: how the payload's bytes are arranged and computed, in words.
        payload_bytes: size of the KV.
    """

    namespace: bytes
    parent: bytes
    digest: bytes
    group: int
    start: int
    token_ids: bytes
    layout: str
    payload_bytes: int

    @property
    def key(self) -> bytes:
        return block_key(self.digest, self.group)

    @property
    def ids(self) -> Ids:
        return np.frombuffer(self.token_ids, "<i4").astype(np.int32)

    def encode(self) -> bytes:
        layout = self.layout.encode()
        size = header_bytes(self.layout, len(self.token_ids) // 4)
        fixed = _FIXED.pack(
            _MAGIC,
            _VERSION,
            size,
            self.group,
            len(layout),
            self.start,
            len(self.token_ids) // 4,
            self.payload_bytes,
        )
        return (fixed + self.digest + self.parent + self.namespace + layout + self.token_ids).ljust(size, b"\0")

    @classmethod
    def decode(cls, extent: memoryview) -> ExtentHeader:
        """The header of an extent whose seal was checked, or is about to be.

        Raises:
            ExtentError: these bytes do not begin with a header of this version.
        """
        return cls._decode(extent, len(extent))

    @classmethod
    def peek(cls, beginning: memoryview, num_bytes: int) -> ExtentHeader:
        """The header of an extent of `num_bytes` bytes of which only the beginning was read.

        Raises:
            ExtentError: as `decode`.
        """
        return cls._decode(beginning, num_bytes)

    @classmethod
    def _decode(cls, extent: memoryview, num_bytes: int) -> ExtentHeader:
        if len(extent) < _LAYOUT_AT:
            raise ExtentError(f"it has {len(extent)} bytes, fewer than a header")
        magic, version, size, group, layout_bytes, start, num_tokens, payload_bytes = _FIXED.unpack_from(extent)
        if magic != _MAGIC:
            raise ExtentError("it does not begin with SPOLIAKV")
        if version != _VERSION:
            raise ExtentError(f"it is of version {version}; this is Spolia's version {_VERSION}")
        ids_at = _LAYOUT_AT + layout_bytes
        if ids_at + 4 * num_tokens > min(size, len(extent)) or size + payload_bytes + SEAL_BYTES != num_bytes:
            raise ExtentError(f"its parts do not add up to its {num_bytes} bytes")
        digest, parent, namespace = (
            bytes(extent[_FIXED.size + DIGEST_BYTES * i : _FIXED.size + DIGEST_BYTES * (i + 1)]) for i in range(3)
        )
        try:
            layout = str(extent[_LAYOUT_AT:ids_at], "utf-8")
        except UnicodeDecodeError:
            raise ExtentError("its layout is not UTF-8") from None
        token_ids = bytes(extent[ids_at : ids_at + 4 * num_tokens])
        return cls(namespace, parent, digest, group, start, token_ids, layout, payload_bytes)


def header_bytes(layout: str, num_tokens: int = BLOCK_SIZE) -> int:
    """Size of an encoded header."""
    return -(-(_LAYOUT_AT + len(layout.encode()) + 4 * num_tokens) // _ALIGNMENT) * _ALIGNMENT


def secret_at(extent: memoryview) -> int:
    """Where what tells about a text begins: token ids, then the payload. What is before says whose it is."""
    layout_bytes: int = _FIXED.unpack_from(extent)[4]
    return _LAYOUT_AT + layout_bytes


def key_of(header: bytes) -> bytes:
    """The key of an encoded header."""
    return block_key(header[_FIXED.size : _FIXED.size + DIGEST_BYTES], header[_GROUP_AT])


def layout_of(header: bytes) -> str:
    """The layout that an encoded header names."""
    (layout_bytes,) = _FIXED.unpack_from(header)[4:5]
    return header[_LAYOUT_AT : _LAYOUT_AT + layout_bytes].decode()


def extent_bytes(num_header_bytes: int, payload_bytes: int) -> int:
    """Size of the whole extent."""
    return num_header_bytes + payload_bytes + SEAL_BYTES


class Sealer(Protocol):
    """Closes extents and tells whether one is as it was closed. Any thread may call."""

    name: str

    def seal(self, extent: memoryview) -> None:
        """Fill in the last `SEAL_BYTES` bytes over all before. May make token ids and payload unreadable in place."""

    def unseal(self, extent: memoryview) -> None:
        """Check an extent whose header decodes, and make token ids and payload readable in place.

        Raises:
            ExtentError: it is not as it was sealed.
        """


class Checksum:
    """A seal against accidents: BLAKE3 of header and payload."""

    name = "blake3"

    def seal(self, extent: memoryview) -> None:
        extent[-SEAL_BYTES:] = blake3(extent[:-SEAL_BYTES]).digest()

    def unseal(self, extent: memoryview) -> None:
        if blake3(extent[:-SEAL_BYTES]).digest() != extent[-SEAL_BYTES:]:
            raise ExtentError("its checksum is wrong")


def open_extent(extent: memoryview, sealer: Sealer, key: bytes | None = None) -> tuple[ExtentHeader, Payload]:
    """Header and payload (a view of `extent`, as long as that lives) of what a tier returned.

    Args:
        key: what it was asked for; None: whatever it says it is.

    Raises:
        ExtentError: it is not what was stored under `key`.
    """
    header = ExtentHeader.decode(extent)
    if key is not None and header.key != key:
        raise ExtentError(f"it is that of another key, {header.key.hex()}")
    sealer.unseal(extent)
    header = ExtentHeader.decode(extent)
    if link(header.parent, header.token_ids) != header.digest:
        raise ExtentError("its digest does not follow from its parent and tokens")
    if header.start == 0 and header.parent != root_digest(header.namespace):
        raise ExtentError("its parent is not the root of its namespace")
    return header, payload_of(header, extent)


def payload_of(header: ExtentHeader, extent: memoryview) -> Payload:
    """The KV of an extent that was opened: a view."""
    payload_at = len(extent) - SEAL_BYTES - header.payload_bytes
    return np.frombuffer(extent[payload_at:-SEAL_BYTES], np.uint8)
