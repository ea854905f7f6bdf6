"""Extents to store, and what they should be when they come back."""

from __future__ import annotations

import random

import numpy as np

from spolia.kvcache import namespace_key
from spolia.tiers import SEAL_BYTES, Checksum, ExtentHeader, KeyChain, Sealer, extent_bytes

NAMESPACE = namespace_key(model="m")
PAYLOAD_BYTES = 4_096


def headers(count: int, *, seed: int = 0, namespace: bytes = NAMESPACE, group: int = 0) -> list[ExtentHeader]:
    """Those of one sequence's first `count` blocks."""
    ids = np.random.default_rng(seed).integers(0, 1_000, 16 * count).astype(np.int32)
    chain = KeyChain(namespace)
    chain.extend(ids)
    return [
        ExtentHeader(
            namespace=namespace,
            parent=chain.parent(index),
            digest=chain.digests[index],
            group=group,
            start=16 * index,
            token_ids=ids[16 * index : 16 * index + 16].tobytes(),
            layout="test/f32",
            payload_bytes=PAYLOAD_BYTES,
        )
        for index in range(count)
    ]


def payload_of(header: ExtentHeader) -> bytes:
    return random.Random(header.key).randbytes(header.payload_bytes)


def extent_of(header: ExtentHeader, sealer: Sealer | None = None) -> memoryview:
    """The whole extent, sealed."""
    encoded = header.encode()
    extent = bytearray(extent_bytes(len(encoded), header.payload_bytes))
    extent[: len(encoded)] = encoded
    extent[len(encoded) : -SEAL_BYTES] = payload_of(header)
    (sealer or Checksum()).seal(memoryview(extent))
    return memoryview(extent)
