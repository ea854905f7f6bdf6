"""How blocks are written below the pools: as they are, or in fewer bits.

What is not written as it is does not come back as it was, so its namespace is another: nobody who asks for the KV of
one encoding can be given that of another. See `Encoding`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .extent import extent_bytes, header_bytes

__all__ = ["Codec", "Encoding"]

Bytes: TypeAlias = NDArray[np.uint8]


class Codec(Protocol):
    """Blocks in fewer bytes and back, nearly. Any thread may call, several at a time."""

    @property
    def name(self) -> str:
        """What is left of a value: "int8", "int4"."""

    def payload_bytes(self, group: int) -> int:
        """Size of an encoded block of this cache group."""

    def encode(self, group: int, block: Bytes) -> Bytes | None:
        """uint8 `[payload_bytes(group)]`; None if the block holds values that cannot be written in so few bits."""

    def decode(self, group: int, payload: Bytes, block: Bytes) -> None:
        """Write to `block` nearly what was encoded. Any bytes decode to something: what they are, the seal has told."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """How the blocks of some namespaces are written.

    Attributes:
        layout: of a payload's bytes, in words; goes into the header of each extent and tells encodings apart.
        block_bytes: size of a block in its pool, by cache group.
        codec: None: payloads are blocks as they lie in their pools.
    """

    layout: str
    block_bytes: tuple[int, ...]
    codec: Codec | None = None

    @property
    def num_header_bytes(self) -> int:
        return header_bytes(self.layout)

    @property
    def payload_bytes(self) -> tuple[int, ...]:
        """By cache group."""
        if self.codec is None:
            return self.block_bytes
        return tuple(map(self.codec.payload_bytes, range(len(self.block_bytes))))

    @property
    def extent_bytes(self) -> tuple[int, ...]:
        """By cache group."""
        return tuple(extent_bytes(self.num_header_bytes, size) for size in self.payload_bytes)
