"""Exact blocks that tiers hold, written anew in fewer bits: see `compress`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .encoding import Encoding
from .extent import SEAL_BYTES, ExtentError, ExtentHeader
from .keys import link, root_digest
from .tier import Tier

__all__ = ["Compressed", "compress"]


@dataclass(slots=True)
class Compressed:
    """What became of a tier's blocks.

    Attributes:
        num_blocks: written in fewer bits.
        num_skipped: left as they were: damaged or gone, with values that fit in no fewer bits, without room, or going
            on from a block of which one of these is true.
        num_bytes_before, num_bytes_after: that the tier had, and has now, for the blocks that were written.
    """

    num_blocks: int = 0
    num_skipped: int = 0
    num_bytes_before: int = 0
    num_bytes_after: int = 0


def compress(
    found: Mapping[Tier, Iterable[ExtentHeader]],
    namespaces: Mapping[bytes, bytes],
    exact: Encoding,
    rounded: Encoding,
    kept: Collection[bytes] = (),
) -> dict[str, Compressed]:
    """Have tiers hold blocks in fewer bits, under the names of a namespace of such; the exact ones go.

    A block, which is all its groups in all tiers, goes when the other is written, and no block is written without that
    which it goes on from: without it, nobody would find it. Reads all and takes as long as that does.

    Args:
        found: what to do it with.
        namespaces: from those of exact KV to those of rounded KV.
        rounded: with a codec.
        kept: digests of blocks that stay as well, since others go on from them.

    Returns:
        By tier.
    """
    reports = {tier.name: Compressed() for tier in found}
    digests = {root_digest(old): root_digest(new) for old, new in namespaces.items()}
    written: dict[Tier, list[bytes]] = {tier: [] for tier in found}
    by_block: dict[bytes, list[tuple[Tier, ExtentHeader]]] = {}  # the copies of all groups, in all tiers
    for tier, headers in found.items():
        for header in headers:
            by_block.setdefault(header.digest, []).append((tier, header))
    for digest, copies in sorted(by_block.items(), key=lambda item: item[1][0][1].start):  # parents first
        parent = digests.get(copies[0][1].parent)
        made = None if parent is None else _rewritten(copies, namespaces, parent, exact, rounded)
        if made is None or not all(tier.put([new.key], [memoryview(extent)]) for tier, _, new, extent in made):
            for tier, _ in copies:
                reports[tier.name].num_skipped += 1
            continue
        for tier, header, new, extent in made:
            digests[digest] = new.digest
            written[tier].append(new.key)
            report = reports[tier.name]
            report.num_blocks += 1
            report.num_bytes_before += exact.extent_bytes[header.group]
            report.num_bytes_after += len(extent)
            if digest in kept:
                report.num_bytes_after += exact.extent_bytes[header.group]
            else:
                tier.delete([header.key])
    for tier, keys in written.items():
        tier.touch(keys)  # a chain is kept from its head, which was written first
    return reports


def _rewritten(
    copies: Iterable[tuple[Tier, ExtentHeader]],
    namespaces: Mapping[bytes, bytes],
    parent: bytes,
    exact: Encoding,
    rounded: Encoding,
) -> list[tuple[Tier, ExtentHeader, ExtentHeader, bytearray]] | None:
    """For each copy of a block: its tier, its header, the new one and the new extent, yet to be sealed.

    None if one cannot be read, or not be written in fewer bits: then none may go, for the block is all its groups.
    """
    made = []
    for tier, listed in copies:
        header, payload = _read(tier, listed, exact)
        encoded = None if header is None or rounded.codec is None else rounded.codec.encode(header.group, payload)
        if header is None or encoded is None:
            return None
        new = replace(
            header,
            namespace=namespaces[header.namespace],
            parent=parent,
            digest=link(parent, header.token_ids),
            layout=rounded.layout,
            payload_bytes=len(encoded),
        )
        made.append((tier, header, new, bytearray(new.encode() + encoded.tobytes() + bytes(SEAL_BYTES))))
    return made


def _read(tier: Tier, listed: ExtentHeader, exact: Encoding) -> tuple[ExtentHeader | None, NDArray[np.uint8]]:
    """A block that a tier lists, checked; no header if it is not what it should be.

    The header is that of what was read: tokens in a listed one may be encrypted.
    """
    nothing = np.empty(0, np.uint8)
    if listed.layout != exact.layout or listed.group >= len(exact.block_bytes):
        return None, nothing
    buffer = np.empty(exact.extent_bytes[listed.group], np.uint8)
    (payload,) = tier.get_into([listed.key], [buffer.data])
    if payload is None or payload.nbytes != exact.payload_bytes[listed.group]:
        return None, nothing
    try:
        header = ExtentHeader.decode(buffer.data)
    except ExtentError:  # it is shorter than such a block is
        return None, nothing
    return (header, payload) if header.namespace == listed.namespace else (None, nothing)
