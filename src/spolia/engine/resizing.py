"""The size of the KV pools, at the start and while they are used: see `PoolSizes`.

memory    |  blocks in use or free                    |  withheld: reserved, and given back to the system  |
          0                                       kv_memory                                            capacity
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spolia.engine.core import EngineCore
from spolia.engine.memory import available_bytes, split_blocks
from spolia.errors import InvalidRequest, Overloaded
from spolia.kernels import release_blocks
from spolia.kvcache import KVCache

__all__ = ["PoolSizes", "fitting_tokens"]


def fitting_tokens(cache: KVCache, max_context: int, max_batch_tokens: int) -> int:
    """Most tokens of prompt and answer that fit when they have all pools to themselves; the last one has no KV.

    Of two contexts, at most: a guided answer has two sequences, each of which may begin a block more than it fills.
    """
    most = 2 * (max_context + cache.block_size)
    return bisect_left(range(1, most), True, key=lambda kept: not cache.fits(kept, max_batch_tokens)) + 1


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PoolSizes:
    """How one engine's KV memory is split over its pools.

    Attributes:
        pools: uint8 `[capacity, block_bytes]` a group. Memory is committed as it is first written.
        max_context, max_sequences, max_batch_tokens: of the engine.
    """

    pools: Sequence[NDArray[np.uint8]]
    windows: Sequence[int | None]
    max_context: int
    max_sequences: int
    max_batch_tokens: int

    def most_bytes(self, cache: KVCache) -> int:
        """How far it can grow now: into what was reserved, as far as sequences can fill it and there is memory."""
        most = self._bytes_of(self._split(sum(pool.nbytes for pool in self.pools)))
        return min(most, self.num_bytes(cache) + available_bytes())

    def num_bytes(self, cache: KVCache) -> int:
        """What the cache may take now."""
        return self._bytes_of([ledger.total for ledger in cache.ledger()])

    def resize(self, core: EngineCore, kv_bytes: int) -> int:
        """Let the pools take so many bytes from the next step on; on the engine's thread.

        Returns:
            Most tokens of a prompt and its answer that fit from now on.

        Raises:
            InvalidRequest: less than a block, or more than `most_bytes`. Nothing has changed.
            Overloaded: requests that have not ended need more. Nothing has changed.
        """
        before = [ledger.total for ledger in core.cache.ledger()]
        most = self.most_bytes(core.cache)
        if kv_bytes > max(most, self._bytes_of(before)):
            raise InvalidRequest(
                f"kv_memory is {kv_bytes}; this engine can grow to {most}: as far as it reserved at its start, "
                "max_sequences of max_context could fill it, and memory is free now; ask for no more, or restart it",
                param="kv_memory",
            )
        counts = self._split(kv_bytes)
        withheld = core.cache.resize(counts)
        if withheld is None:
            raise Overloaded(f"running requests hold more than {kv_bytes} bytes of KV; try again when fewer run")
        if not all(map(core.can_end, core.in_flight)):
            core.cache.resize(before)
            raise Overloaded(f"a request that has not ended could not be ended in {kv_bytes} bytes; try again later")
        for pool, ids in zip(self.pools, withheld, strict=True):
            release_blocks(pool, ids)
        core.note_resized()
        return fitting_tokens(core.cache, self.max_context, self.max_batch_tokens)

    def _split(self, kv_bytes: int) -> list[int]:
        counts = split_blocks(
            kv_bytes,
            [pool.shape[1] for pool in self.pools],
            self.windows,
            max_context=self.max_context,
            max_sequences=self.max_sequences,
            max_batch_tokens=self.max_batch_tokens,
        )
        return [min(count, len(pool)) for count, pool in zip(counts, self.pools, strict=True)]

    def _bytes_of(self, counts: Sequence[int]) -> int:
        return sum(count * pool.shape[1] for count, pool in zip(counts, self.pools, strict=True))
