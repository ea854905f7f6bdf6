"""Hit rates: against naive models, against the bound, and what the policies promise."""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache
from itertools import combinations

import numpy as np
import pytest

from spolia.kvcache import POLICIES, Outcome
from spolia.sim import Trace, TraceRequest, belady, default_sizes, hit_rates, load_trace, replay

from .traces import mooncake_lines, session_lines, write


@pytest.fixture(scope="module")
def traces(tmp_path_factory) -> dict[str, Trace]:
    folder = tmp_path_factory.mktemp("traces")
    return {
        "agents": load_trace(write(folder / "agents.jsonl", session_lines(60)), spread_s=3600),
        "chats": load_trace(write(folder / "chats.jsonl", mooncake_lines(600))),
    }


def naive_lru(trace: Trace, size_tokens: int) -> float:
    """LRU by units, of those used at once the deepest first; a hit is a prefix."""
    capacity = size_tokens // trace.unit_tokens
    kept: OrderedDict[int, None] = OrderedDict()
    num_hit = 0
    for request in trace.requests:
        units = request.unit_ids.tolist()
        num_reused = next((i for i, unit in enumerate(units) if unit not in kept), len(units))
        num_hit += min(num_reused * trace.unit_tokens, request.num_input_tokens)
        if len(units) > capacity:
            continue
        for unit in reversed(units):
            kept[unit] = None
            kept.move_to_end(unit)
        while len(kept) > capacity:
            kept.popitem(last=False)
    return num_hit / trace.num_input_tokens


@pytest.mark.parametrize("name", ["agents", "chats"])
def test_lru_is_the_naive_lru(traces, name):
    trace = traces[name]
    for size in default_sizes(trace, 4):
        assert replay(trace, "lru", size).hit_rate == pytest.approx(naive_lru(trace, size), abs=0.005)


@pytest.mark.parametrize("name", ["agents", "chats"])
def test_no_policy_passes_the_bound_and_with_room_for_all_each_reaches_it(traces, name):
    trace = traces[name]
    sizes = (*default_sizes(trace, 6), 2 * trace.num_distinct_tokens)
    result = hit_rates(trace, list(POLICIES), sizes)
    assert list(result.bound) == sorted(result.bound)
    for rates in result.rates.values():
        assert all(rate <= bound + 1e-9 for rate, bound in zip(rates, result.bound, strict=True))
        assert rates[-1] == pytest.approx(result.unlimited)
    assert len(set(result.rates.values())) >= 6  # the policies are told apart


@pytest.mark.parametrize("name", ["agents", "chats"])
def test_lifecycle_is_never_a_point_below_lru(traces, name):
    trace = traces[name]
    result = hit_rates(trace, ["lru", "lifecycle"], default_sizes(trace))
    for lru, lifecycle in zip(result.rates["lru"], result.rates["lifecycle"], strict=True):
        assert lifecycle >= lru - 0.01


def test_lifecycle_is_better_for_agents_under_pressure(traces):
    trace = traces["agents"]
    result = hit_rates(trace, ["lru", "lifecycle"], default_sizes(trace))
    assert max(share for share in result.gap_closed("lifecycle") if share is not None) > 0.1


def best_possible(requests: list[list[int]], capacity: int) -> int:
    """Most hits on whole units, trying every choice of what to keep after each request."""

    @lru_cache(None)
    def best(index: int, kept: frozenset[int]) -> int:
        if index == len(requests):
            return 0
        units = frozenset(requests[index])
        there = kept | units
        choices = combinations(sorted(there), min(capacity, len(there)))
        return len(kept & units) + max(best(index + 1, frozenset(choice)) for choice in choices)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_is_the_best_of_all_choices(seed):
    rng = np.random.default_rng(seed)
    paths = [[1, 2, 3], [1, 2, 4], [1, 5], [6, 7], [6, 8], [9]]
    chosen = [paths[i] for i in rng.integers(0, len(paths), 8)]
    requests = tuple(TraceRequest(float(i), np.array(p, np.int32), 16 * len(p)) for i, p in enumerate(chosen))
    trace = Trace("t", 16, requests)
    for capacity in (1, 2, 3, 5):
        (rate,) = belady(trace, [16 * capacity])
        assert round(rate * trace.num_input_tokens) == 16 * best_possible(chosen, capacity)


def test_token_exact_traces_are_replayed_to_the_token():
    def request(time_s: float, runs: list[range], num_input: int) -> TraceRequest:
        return TraceRequest(time_s, np.concatenate([np.array(run, np.int32) for run in runs]), num_input)

    trace = Trace(
        "t", 1, (request(0, [range(50)], 40), request(1, [range(45), range(100, 140)], 80), request(2, [range(45)], 45))
    )
    replayed = replay(trace, "lru", 4096)
    assert replayed.num_hit_tokens == 0 + 45 + 44  # of the third, the last token is computed in any case


def test_tenants_share_nothing():
    ids = np.arange(64, dtype=np.int32)
    trace = Trace("t", 1, tuple(TraceRequest(i, ids, 64, tenant=i % 2) for i in range(4)))
    assert replay(trace, "lru", 4096).num_hit_tokens == 2 * 63
    assert belady(trace, [None]) == [0.5]


def test_a_request_larger_than_the_cache_is_refused_and_counted():
    trace = Trace(
        "t", 16, tuple(TraceRequest(i, np.arange(n, dtype=np.int32), 16 * n) for i, n in enumerate((4, 9, 4)))
    )
    replayed = replay(trace, "lru", 16 * 8)
    assert (replayed.num_refused, replayed.num_hit_tokens) == (1, 16 * (4 + 4))


def test_outcomes_reach_the_policy():
    """What waits for a tool outlasts what does not."""
    a, b, c = (np.arange(first, first + 4, dtype=np.int32) for first in (0, 100, 200))
    steps = [(0, a, Outcome.TOOL_CALL), (1, b, Outcome.TURN), (2, c, Outcome.TURN), (3, a, Outcome.TURN)]
    trace = Trace("t", 16, tuple(TraceRequest(t, ids, 64, outcome) for t, ids, outcome in steps))
    assert replay(trace, "lru", 16 * 8).num_hit_tokens == 0
    assert replay(trace, "lifecycle", 16 * 8).num_hit_tokens == 64
