"""What other cache sizes would hit, live: caches without memory, beside the one that has it.

A ghost is a `KVCache` of another size, with the same policy, that sees the same requests and computes nothing. Its hit
rate is what an engine with that much memory would have had. A request costs each ghost what it costs the real cache,
some tenths of a millisecond, on a thread of their own; what comes faster than they are is left out, and counted.

Large caches have ghosts that see a part of the blocks, drawn by the digest of the prefix that each ends, and are
smaller by as much. So a prefix of a prompt becomes a prefix of what is drawn from it, and the tree keeps its shape:

    blocks     a b c d e f g h            drawn: b, e, h        a ghost's "tokens", one a block, in 1/3 of the memory
    prefix     a b c d e                  drawn: b, e

Source: sampling references by their hash: SHARDS (Waldspurger et al. 2015, FAST).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from spolia.kvcache import GroupSpec, KVCache, Outcome, RetentionPolicy, Wish

__all__ = ["FACTORS", "CurvePoint", "GhostCaches", "prefix_digests"]

Ids: TypeAlias = NDArray[np.int32]

_MIN_BLOCKS = 2_048
"""Blocks of the real cache that are drawn at least: fewer tell too little."""

_MIX = np.uint64(0x9E3779B97F4A7C15)

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One size: `factor` times the real one."""

    factor: float
    size_tokens: int
    hit_rate: float


class _Ghost:
    """One cache that has no memory.

    Args:
        most_blocks: that it can be made to hold, drawn ones only.
    """

    def __init__(self, factor: float, most_blocks: int, policy: RetentionPolicy, block_size: int) -> None:
        self.factor = factor
        self.now_s = 0.0
        self.num_hits = 0
        self._most_blocks = most_blocks
        self._cache = KVCache(
            [GroupSpec(most_blocks)],
            clock=lambda: self.now_s,
            policy=policy,
            block_size=block_size,
            event_capacity=1,
        )

    def resize(self, num_blocks: int) -> None:
        """As the real cache: what is too much goes."""
        self._cache.resize([min(max(1, num_blocks), self._most_blocks)])

    def use_policy(self, policy: RetentionPolicy) -> None:
        self._cache.use_policy(policy)

    def take(self, namespace: bytes, ids: Ids, asked: Ids, outcome: Outcome, wishes: Sequence[Wish]) -> None:
        """A request that asked for the KV of all `asked` tokens but the last, and left that of `ids`."""
        with self._cache.open(namespace, asked, wishes=wishes) as lease:
            self.num_hits += lease.num_computed_tokens
            if len(ids) and self._cache.grow(lease, len(ids)) is not None:
                self._cache.commit(lease, ids[lease.num_computed_tokens :])
            lease.close(outcome)


class GhostCaches:
    """Ghosts of several sizes. One thread.

    Args:
        num_blocks: of the real cache.
        policy: makes one that is like the real cache's.
        most_blocks: that the real cache may be made to have; None: it stays as it is.
        share: of the blocks that the ghosts see; None: all of a small cache's, fewer of a large one's.
    """

    def __init__(
        self,
        num_blocks: int,
        policy: Callable[[], RetentionPolicy],
        *,
        most_blocks: int | None = None,
        block_size: int = 16,
        share: float | None = None,
    ) -> None:
        self.num_prompt_tokens = 0
        self.num_requests = 0
        self.share = share or _share(num_blocks)
        self._block_size = block_size
        self._policy = policy
        self._num_blocks = num_blocks
        self._num_drawn_blocks = 0  # of prompts
        # Where all are seen, blocks are the cache's; where some are, each is one token.
        unit = block_size if self.share == 1.0 else 1
        self.most_blocks = max(num_blocks, most_blocks or 0)
        self._ghosts = [
            _Ghost(factor, size, policy(), unit)
            for factor in FACTORS
            if (size := int(factor * self.most_blocks * self.share)) >= 1
        ]
        self._resize()

    def follow(self, num_blocks: int, policy: Callable[[], RetentionPolicy]) -> bool:
        """The real cache has this size and policy by now; whether that is news, so that all is counted anew.

        What ghosts hold stays, as it does in the real one.
        """
        if (num_blocks, policy) == (self._num_blocks, self._policy):
            return False
        if policy != self._policy:
            for ghost in self._ghosts:
                ghost.use_policy(policy())
        self._num_blocks, self._policy = num_blocks, policy
        self._resize()
        self.num_prompt_tokens = self.num_requests = self._num_drawn_blocks = 0
        for ghost in self._ghosts:
            ghost.num_hits = 0
        return True

    def _resize(self) -> None:
        for ghost in self._ghosts:
            ghost.resize(int(ghost.factor * self._num_blocks * self.share))

    def take(
        self,
        now_s: float,
        namespace: bytes,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        outcome: Outcome,
        wishes: Sequence[Wish] = (),
    ) -> None:
        """A request that has ended."""
        ids = np.asarray([*prompt_ids, *output_ids[:-1]], np.int32)  # the last token of an answer has no KV
        self.num_requests += 1
        self.num_prompt_tokens += len(prompt_ids)
        asked = ids[: len(prompt_ids)]
        if self.share < 1.0:
            ids, num_drawn = self._draw(ids)
            num_asked = num_drawn[len(prompt_ids) // self._block_size]
            wishes = _drawn_wishes(wishes, num_drawn, self._block_size)
            self._num_drawn_blocks += num_asked
            if not len(ids):
                return
            asked = np.append(ids[:num_asked], np.int32(-1))
        for ghost in self._ghosts:
            ghost.now_s = now_s
            ghost.take(namespace, ids, asked, outcome, wishes)

    def curve(self) -> list[CurvePoint]:
        """Hit rates, by size, the smallest first: since the start, or since the real cache was changed."""
        asked = max(1, self.num_prompt_tokens if self.share == 1.0 else self._num_drawn_blocks)
        return [
            CurvePoint(ghost.factor, int(ghost.factor * self._num_blocks) * self._block_size, ghost.num_hits / asked)
            for ghost in self._ghosts
        ]

    def _draw(self, ids: Ids) -> tuple[Ids, list[int]]:
        """A token for each whole block that is drawn, and for 0, 1, ... blocks how many of so many first are drawn."""
        digests = prefix_digests(ids, self._block_size)
        is_drawn = (digests >> np.uint64(40)) < np.uint64(int(self.share * (1 << 24)))
        tokens = (digests[is_drawn] & np.uint64(0x7FFFFFFF)).astype(np.int32)
        return tokens, [0, *np.cumsum(is_drawn).tolist()]


def _drawn_wishes(wishes: Sequence[Wish], num_drawn: Sequence[int], block_size: int) -> list[Wish]:
    """Wishes for token ranges as wishes for what is drawn of them."""
    drawn = []
    for wish in wishes:
        start, stop = (
            None if place is None else num_drawn[min(place // block_size, len(num_drawn) - 1)]
            for place in (wish.start, wish.stop)
        )
        if start is not None and (stop is None or stop > start):
            drawn.append(replace(wish, start=start, stop=stop))
    return drawn


def prefix_digests(ids: Ids, block_size: int) -> NDArray[np.uint64]:
    """64 bits for the prefix that each whole block ends; against accidents only, not against anybody.

    A sum over the blocks before it, each weighted by its place, so that numpy does it in one go.
    """
    blocks = ids[: len(ids) // block_size * block_size].reshape(-1, block_size).astype(np.uint64)
    with np.errstate(over="ignore"):
        inside = np.cumprod(np.full(block_size, _MIX))  # odd, so that nothing is lost
        each = _mixed(((blocks + np.uint64(1)) * inside).sum(axis=1, dtype=np.uint64))
        places = np.cumprod(np.full(len(blocks), _MIX ^ np.uint64(0xD6E8FEB86659FD92)) | np.uint64(1))
        return _mixed(np.cumsum(each * places))


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each bit of a value reaches all. Source: the finaliser of SplitMix64 (Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _share(num_blocks: int) -> float:
    """A power of two."""
    share = 1.0
    while num_blocks * share >= 2 * _MIN_BLOCKS:
        share /= 2
    return share
