"""What other cache sizes would hit, live: caches without memory, beside the one that has it.

A ghost is a `KVCache` of another size, with the same policy, that sees the same requests and computes nothing. Its hit
rate is what an engine with that much memory would have had. A request costs each ghost what it costs the real cache,
some tenths of a millisecond, on a thread of their own; what comes faster than they are is left out, and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spolia.kvcache import GroupSpec, KVCache, Outcome, make_policy

__all__ = ["FACTORS", "CurvePoint", "GhostCaches"]

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One size: `factor` times the real one."""

    factor: float
    size_tokens: int
    hit_rate: float


class _Ghost:
    def __init__(self, factor: float, num_blocks: int, policy: str, block_size: int) -> None:
        self.factor = factor
        self.size_tokens = num_blocks * block_size
        self.now_s = 0.0
        self.num_hit_tokens = 0
        self._cache = KVCache(
            [GroupSpec(num_blocks)],
            clock=lambda: self.now_s,
            policy=make_policy(policy),
            block_size=block_size,
            event_capacity=1,
        )

    def take(self, namespace: bytes, ids: Sequence[int], num_prompt_tokens: int, outcome: Outcome) -> None:
        all_ids = np.asarray(ids, np.int32)
        with self._cache.open(namespace, all_ids[:num_prompt_tokens]) as lease:
            self.num_hit_tokens += lease.num_computed_tokens
            if self._cache.grow(lease, len(all_ids)) is not None:
                self._cache.commit(lease, all_ids[lease.num_computed_tokens :])
            lease.close(outcome)


class GhostCaches:
    """Ghosts of several sizes. One thread.

    Args:
        num_blocks: of the real cache.
    """

    def __init__(self, num_blocks: int, policy: str, *, block_size: int = 16) -> None:
        self.num_prompt_tokens = 0
        self.num_requests = 0
        sizes = ((factor, int(factor * num_blocks)) for factor in FACTORS)
        self._ghosts = [_Ghost(factor, size, policy, block_size) for factor, size in sizes if size >= 1]

    def take(
        self, now_s: float, namespace: bytes, prompt_ids: Sequence[int], output_ids: Sequence[int], outcome: Outcome
    ) -> None:
        """A request that has ended."""
        ids = [*prompt_ids, *output_ids[:-1]]  # the last token of an answer has no KV
        self.num_requests += 1
        self.num_prompt_tokens += len(prompt_ids)
        for ghost in self._ghosts:
            ghost.now_s = now_s
            ghost.take(namespace, ids, len(prompt_ids), outcome)

    def curve(self) -> list[CurvePoint]:
        """Hit rates since the start, by size, the smallest first."""
        asked = max(1, self.num_prompt_tokens)
        return [CurvePoint(g.factor, g.size_tokens, g.num_hit_tokens / asked) for g in self._ghosts]
