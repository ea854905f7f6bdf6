"""Between the bytes that tiers and files move and the blocks of the pools: see `KVBlocks`."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from spolia.engine.request import Sequence
from spolia.engine.tiers_in_use import TiersInUse
from spolia.kernels import BLOCK_SIZE
from spolia.kvcache import KVCache, Lease
from spolia.tiers import BlockRun, Encoding, ExtentHeader, KeyChain, block_key

__all__ = ["KVBlocks"]

Ids = NDArray[np.int32]


class KVBlocks:
    """The pools' blocks, and what their content is called elsewhere. All of it is called on the engine's thread.

    A prefix that was brought in is committed like a computed one, so it is found in the tree as any other.

    Args:
        pools: the cache's, uint8 `[num_blocks, block_bytes]` a group.
        encodings: how blocks are written: those of requests that want exact KV, and those of the others.
    """

    def __init__(
        self,
        cache: KVCache,
        pools: Seq[NDArray[np.uint8]],
        tiers: TiersInUse,
        encodings: tuple[Encoding, Encoding],
    ) -> None:
        self.cache = cache
        self.pools = pools
        self.exact, self.usual = encodings
        self._tiers = tiers

    @property
    def num_groups(self) -> int:
        return len(self.pools)

    def encoding(self, *, is_exact: bool) -> Encoding:
        """How the blocks of those who want exact KV are written, or those of the others."""
        return self.exact if is_exact else self.usual

    def encoding_of(self, sequence: Sequence) -> Encoding:
        """How its blocks are written."""
        return self.encoding(is_exact=sequence.request.is_exact)

    def chain_of(self, sequence: Sequence) -> KeyChain:
        """The names of its whole blocks, as far as somebody has asked for them."""
        if sequence.chain is None:
            sequence.chain = KeyChain(sequence.request.namespace)
        return sequence.chain

    def keys(self, digests: Seq[bytes]) -> list[bytes]:
        """What tiers call these blocks, all groups of a block together."""
        return [block_key(digest, group) for digest in digests for group in range(self.num_groups)]

    def header(self, chain: KeyChain, encoding: Encoding, index: int, group: int, token_ids: Ids) -> ExtentHeader:
        """What block `index` of a sequence is called."""
        start = index * BLOCK_SIZE
        return ExtentHeader(
            namespace=chain.namespace,
            parent=chain.parent(index),
            digest=chain.digests[index],
            group=group,
            start=start,
            token_ids=token_ids[start : start + BLOCK_SIZE].astype("<i4").tobytes(),
            layout=encoding.layout,
            payload_bytes=encoding.payload_bytes[group],
        )

    def decoded(self, encoding: Encoding, group: int, payload: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The bytes of a block that was written in some encoding."""
        if encoding.codec is None:
            return payload
        block = np.empty(encoding.block_bytes[group], np.uint8)
        encoding.codec.decode(group, payload, block)
        return block

    def num_rounded_tokens(self, sequence: Sequence, num_tokens: int) -> dict[str, int]:
        """How many of its first tokens have KV that was kept in fewer bits, by the kind of these; {} if none has."""
        codec = self.encoding_of(sequence).codec
        if codec is None or sequence.lease is None:
            return {}
        num_rounded = self.cache.num_rounded_tokens(sequence.lease, num_tokens)
        return {codec.name: num_rounded} if num_rounded else {}

    def fill(self, group: int, block_ids: Ids, payloads: Iterable[NDArray[np.uint8]], *, is_rounded: bool) -> None:
        """Write KV to blocks that a lease has, before it is committed."""
        for block_id, payload in zip(block_ids.tolist(), payloads, strict=True):
            self.pools[group][block_id] = payload
        if is_rounded:
            self.cache.mark_rounded(group, block_ids)

    def commit(self, lease: Lease, chain: KeyChain, encoding: Encoding, token_ids: Ids, start: int, stop: int) -> None:
        """Commit what is in the lease's blocks, and name the blocks that it completes."""
        first, last = start // BLOCK_SIZE, stop // BLOCK_SIZE
        if first == last:
            self.cache.commit(lease, token_ids[start:stop])
            return
        written = [lease.block_table(group)[first:last].copy() for group in range(self.num_groups)]
        self.cache.commit(lease, token_ids[start:stop])
        chain.extend(token_ids[:stop])
        for group, before in enumerate(written):
            # Blocks may have been exchanged for equal ones; those that slid out of a window are the ones written.
            now = lease.block_table(group)[first:last]
            block_ids = np.where(now >= 0, now, before)
            indices = first + np.flatnonzero(block_ids >= 0)  # a file may lack what a window has passed
            tags = [self.header(chain, encoding, index, group, token_ids).encode() for index in indices.tolist()]
            self.cache.tag(group, block_ids[indices - first], tags)
            self._tiers.offloader.note_committed(group, block_ids[indices - first], tags)

    def take_in(
        self,
        namespace: bytes,
        ids: Ids,
        chain: KeyChain,
        encoding: Encoding,
        run: BlockRun,
        restored: list[tuple[int, int, str]] | None = None,
    ) -> bool:
        """Copy a run into blocks of the pools and commit it; False if it no longer fits on, or there is no room.

        Args:
            ids: of the prefix, and at least one more.
            restored: gets (start, stop, tier) of what was taken in.
        """
        stop_block = run.first_block + run.num_blocks
        stop = stop_block * BLOCK_SIZE
        with self.cache.open_restore(namespace, ids[: stop + 1]) as lease:
            start = lease.num_computed_tokens
            first_block = start // BLOCK_SIZE
            if start >= stop:
                return True
            if first_block < run.first_block or self.cache.grow(lease, stop) is None:
                return False
            for group, payloads in enumerate(run.payloads):
                table = lease.block_table(group)[first_block:stop_block]
                missing = islice(payloads, first_block - run.first_block, None)
                self.fill(group, table, missing, is_rounded=run.is_rounded)
            self.commit(lease, chain, encoding, ids, start, stop)
        if restored is not None:
            restored.append((start, stop, run.tier))
        if not run.is_rounded:
            self._tiers.note_restored(run.tier, self.keys(chain.digests[run.first_block : stop_block]))
        return True
