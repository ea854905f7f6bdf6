"""Between the bytes that tiers and files move and the blocks of the pools: see `KVBlocks`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import islice, takewhile

import numpy as np
from numpy.typing import NDArray

from spolia.engine.request import Sequence
from spolia.engine.tiers_in_use import TiersInUse
from spolia.kernels import BLOCK_SIZE
from spolia.kvcache import KVCache, Lease
from spolia.tiers import BlockRun, Encoding, ExtentHeader, FirstNeeded, KeyChain, Reach, Tier, block_key, reach

__all__ = ["KVBlocks"]

_MAX_CLEARED = 1 << 16
"""Blocks of which is known that somebody cleared them from tiers: the last ones."""

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
        self._cleared: OrderedDict[bytes, float] = OrderedDict()  # when, by digest

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

    @property
    def first_needed(self) -> FirstNeeded | None:
        """What the token after so many blocks looks at, by group; None: at all, as nothing looks back over a window."""
        if all(group.window is None for group in self.cache.groups):
            return None
        return lambda group, num_blocks: self.cache.first_needed_block(group, num_blocks * BLOCK_SIZE)

    def reach(self, tiers: Seq[Tier], digests: Seq[bytes], first_block: int = 0) -> Reach:
        """How far a prefix goes on in some tiers; `digests[0]` is that of `first_block`. Asks them: any thread."""
        first_needed = self.first_needed or (lambda group, num_blocks: 0)
        return reach(tiers, digests, first_block, self.num_groups, first_needed)

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

    def note_cleared(self, keys: Iterable[bytes], now_s: float) -> None:
        """Somebody has dropped these from tiers, by what they are called there: who misses them is told so."""
        for key in keys:
            self._cleared[key[:-1]] = now_s
            self._cleared.move_to_end(key[:-1])
        while len(self._cleared) > _MAX_CLEARED:
            self._cleared.popitem(last=False)

    def explain_cleared(self, chain: KeyChain, token_ids: Ids) -> None:
        """If what follows the known of a prompt was cleared from tiers, have the cache say so."""
        if not self._cleared:
            return
        chain.extend(token_ids)
        first = self.cache.num_known(chain.namespace, token_ids) // BLOCK_SIZE
        cleared = list(takewhile(self._cleared.__contains__, chain.digests[first:]))
        if cleared:
            stop = (first + len(cleared)) * BLOCK_SIZE
            self.cache.note_cleared(chain.namespace, token_ids[:stop], self._cleared[cleared[0]])

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
        for digest in chain.digests[first:last] if self._cleared else ():
            self._cleared.pop(digest, None)
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
        stop = run.stop_block * BLOCK_SIZE
        with self.cache.open_restore(namespace, ids[: stop + 1], whole_blocks=run.is_sparse) as lease:
            start = lease.num_computed_tokens
            first_block = start // BLOCK_SIZE
            if start >= stop:
                return True
            if first_block < run.first_block or not self._grow(lease, run):
                return False
            for group, (first, payloads) in enumerate(zip(run.first_blocks, run.payloads, strict=True)):
                begin = max(first, first_block)
                table = lease.block_table(group)[begin : run.stop_block]
                self.fill(group, table, islice(payloads, begin - first, None), is_rounded=run.is_rounded)
            self.commit(lease, chain, encoding, ids, start, stop)
        for first, last, tier in run.ranges:
            if restored is not None and BLOCK_SIZE * last > start:
                restored.append((max(start, BLOCK_SIZE * first), BLOCK_SIZE * last, tier))
            if not run.is_rounded:
                self._tiers.note_restored(
                    tier,
                    [
                        block_key(chain.digests[index], group)
                        for index in range(first, last)
                        for group, first_of_group in enumerate(run.first_blocks)
                        if index >= first_of_group
                    ],
                )
        return True

    def _grow(self, lease: Lease, run: BlockRun) -> bool:
        """Take the blocks that a run goes to; whether there was room."""
        stop = run.stop_block * BLOCK_SIZE
        if not run.is_sparse:
            return self.cache.grow(lease, stop) is not None
        needed = [self.cache.first_needed_block(group, stop) for group in range(self.num_groups)]
        return self.cache.grow_sparse(lease, stop, list(map(min, run.first_blocks, needed)))
