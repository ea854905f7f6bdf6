"""Names of blocks: the same in every process, on every machine and in every tier.

    namespace ──▶ root ──▶ digest of block 0 ──▶ digest of block 1 ──▶ ...
                            ▲ its 16 token ids     ▲ its 16 token ids

A digest binds the namespace (model weights, KV type, layout, numerics, tenant) and every token up to the block's end,
so what is found under it is the KV of that prefix and of no other. A key is the digest and a byte for the cache group.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK_SIZE", "DIGEST_BYTES", "KEY_BYTES", "Ids", "KeyChain", "block_key", "link", "root_digest"]

Ids: TypeAlias = NDArray[np.int32]

BLOCK_SIZE = 16
"""Tokens of a block, and of an extent."""

DIGEST_BYTES = 32
KEY_BYTES = DIGEST_BYTES + 1


def root_digest(namespace: bytes) -> bytes:
    """What the first block's digest hangs on."""
    return blake2b(namespace, digest_size=DIGEST_BYTES, person=b"spolia.kv.root").digest()


def link(parent: bytes, token_ids: bytes) -> bytes:
    """The digest of a block whose parent has this one. `token_ids`: little-endian int32."""
    return blake2b(parent + token_ids, digest_size=DIGEST_BYTES, person=b"spolia.kv.block").digest()


def block_key(digest: bytes, group: int) -> bytes:
    return digest + bytes([group])


class KeyChain:
    """The digests of one sequence's whole blocks, as far as its tokens are known.

    Attributes:
        digests: `digests[i]` is that of block i.
    """

    def __init__(self, namespace: bytes) -> None:
        self.namespace = namespace
        self.root = root_digest(namespace)
        self.digests: list[bytes] = []

    def parent(self, index: int) -> bytes:
        """The digest that block `index` hangs on."""
        return self.digests[index - 1] if index else self.root

    def extend(self, token_ids: Ids) -> None:
        """Go on to the last whole block of `token_ids`, the sequence from its first token on. O(new tokens)."""
        first, stop = len(self.digests), len(token_ids) // BLOCK_SIZE
        if first >= stop:
            return
        ids = token_ids[first * BLOCK_SIZE : stop * BLOCK_SIZE].astype("<i4").tobytes()
        size = 4 * BLOCK_SIZE
        digest = self.parent(first)
        for offset in range(0, len(ids), size):
            digest = link(digest, ids[offset : offset + size])
            self.digests.append(digest)
