"""A trace through the real cache: `KVCache` with its tree, policies and queues, on block ids that nobody computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from spolia.kvcache import GroupSpec, KVCache, Lease, Outcome, make_policy

from .belady import belady
from .trace import Trace, TraceRequest

__all__ = ["HitRates", "Replayed", "default_sizes", "hit_rates", "replay"]

_BLOCK_TOKENS = 16
_SENTINEL = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a cache made of a trace.

    Attributes:
        num_refused: requests that did not fit into the whole cache; their content was not cached.
    """

    policy: str
    size_tokens: int
    num_input_tokens: int
    num_hit_tokens: int
    num_refused: int = 0

    @property
    def hit_rate(self) -> float:
        return self.num_hit_tokens / self.num_input_tokens if self.num_input_tokens else 0.0


@dataclass(frozen=True, slots=True)
class HitRates:
    """Hit rates by policy (rows) and size (columns), 0 to 1.

    Attributes:
        bound: by size, what no policy could pass.
        unlimited: what a cache without a limit would hit.
    """

    trace: str
    num_requests: int
    num_input_tokens: int
    sizes: tuple[int, ...]
    rates: dict[str, tuple[float, ...]]
    bound: tuple[float, ...]
    unlimited: float

    def gap_closed(self, policy: str, base: str = "lru") -> tuple[float | None, ...]:
        """By size, the part of the way from `base` to the bound that `policy` goes; None where there is no way."""
        return tuple(
            None if most - least < 1e-3 else (rate - least) / (most - least)
            for rate, least, most in zip(self.rates[policy], self.rates[base], self.bound, strict=True)
        )


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def replay(trace: Trace, policy: str, size_tokens: int) -> Replayed:
    """The trace through a cache of `size_tokens` tokens.

    Requests come one after the other, in no time. Where the trace's units are tokens, blocks and partial reuse are the
    engine's too; else a unit is a block.

    Raises:
        ValueError: no such policy, or not even one block fits.
    """
    block_size = _BLOCK_TOKENS if trace.unit_tokens == 1 else 1
    num_blocks = size_tokens // (trace.unit_tokens * block_size)
    clock = _Clock()
    cache = KVCache(
        [GroupSpec(num_blocks)], clock=clock, policy=make_policy(policy), block_size=block_size, event_capacity=1
    )
    num_hit = num_refused = 0
    for request in trace.requests:
        clock.now_s = request.time_s
        with _open(cache, trace, request) as lease:
            num_hit += min(lease.num_computed_tokens * trace.unit_tokens, request.num_input_tokens)
            if cache.grow(lease, len(request.unit_ids)) is None:
                num_refused += 1
                lease.close(Outcome.BROKEN_OFF)
            else:
                cache.commit(lease, request.unit_ids[lease.num_computed_tokens :])
                lease.close(request.outcome)
    return Replayed(policy, size_tokens, trace.num_input_tokens, num_hit, num_refused)


def _open(cache: KVCache, trace: Trace, request: TraceRequest) -> Lease:
    namespace = b"%d" % request.tenant
    if trace.unit_tokens == 1:
        prompt = request.unit_ids[: request.num_input_tokens]
    else:  # the last token of the prompt, which is computed in any case, is not a unit
        prompt = np.append(request.unit_ids, np.int32(_SENTINEL))
    return cache.open(namespace, prompt)


def default_sizes(trace: Trace, count: int = 7) -> tuple[int, ...]:
    """Sizes in tokens, each twice the one before, up to what holds all of the trace."""
    most = max(trace.num_distinct_tokens, trace.unit_tokens * _BLOCK_TOKENS)
    return tuple(max(most >> shift, trace.unit_tokens * _BLOCK_TOKENS) for shift in range(count - 1, -1, -1))


def hit_rates(
    trace: Trace,
    policies: Sequence[str],
    sizes: Sequence[int],
    *,
    progress: Callable[[Replayed], None] = lambda _: None,
) -> HitRates:
    """Every policy at every size, and the bound.

    Raises:
        ValueError: as `replay`.
    """
    rates = {}
    for policy in policies:
        row = []
        for size in sizes:
            replayed = replay(trace, policy, size)
            progress(replayed)
            row.append(replayed.hit_rate)
        rates[policy] = tuple(row)
    *bound, unlimited = belady(trace, [*sizes, None])
    return HitRates(
        trace.name, len(trace.requests), trace.num_input_tokens, tuple(sizes), rates, tuple(bound), unlimited
    )
