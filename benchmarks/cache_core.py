"""What the cache core costs per operation, and how that grows with the size of the tree.

The tree is filled with `nodes` nodes: random branches off one trunk of 4,000 tokens, of two blocks of their own
each. Then, on prompts of 4,000 tokens, the median time of

    match          find the longest usable prefix
    open+close     match, hold, explain, and let go
    insert         grow and commit, for a prompt that shares 3,900 tokens and brings 100 new ones
    decode         one more token for each of 64 sequences: grow and commit, per sequence
    evict          room for one block in a full pool
    evict chunk    room for the 16 blocks of a 256-token step in a full pool, per block

Prints one JSON line a size. Goals: match and insert below 50 us each, eviction below 20 us a block, flat in the size.
The trunk is cut into 40 nodes by its branches, which is what matching costs; without them it is one.

    python benchmarks/cache_core.py [nodes ...]
"""

from __future__ import annotations

import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from spolia.kvcache import GroupSpec, KVCache

NAMESPACE = b"benchmark"
TRUNK = np.arange(4_000, dtype=np.int32)


def filled_cache(num_nodes: int, *windows: int) -> KVCache:
    num_blocks = 4_000 + 8 * num_nodes
    groups = [GroupSpec(num_blocks), *(GroupSpec(num_blocks, window) for window in windows)]
    cache = KVCache(groups, clock=time.monotonic)
    rng = random.Random(num_nodes)
    remember(cache, TRUNK)
    while sum(1 for _ in cache._tree.nodes()) < num_nodes:
        for _ in range(max(1, num_nodes // 4)):
            branch = np.array([rng.randrange(1_000_000, 2_000_000) for _ in range(32)], np.int32)
            remember(cache, np.append(TRUNK[: rng.randrange(1, 40) * 100], branch))
    return cache


def remember(cache: KVCache, prompt: np.ndarray) -> None:
    with cache.open(NAMESPACE, prompt) as lease:
        if cache.grow(lease, len(prompt)) is None:
            raise SystemExit("the pool is too small for the workload")
        cache.commit(lease, prompt[lease.num_computed_tokens :])


def median_us(act: Callable[[int], None], repeat: int) -> float:
    times = []
    for number in range(repeat):
        start = time.perf_counter()
        act(number)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def measure(num_nodes: int, *windows: int) -> dict[str, object]:
    cache = filled_cache(num_nodes, *windows)
    cache.check()
    match = median_us(lambda _: cache.probe(NAMESPACE, TRUNK), 300)
    hold = median_us(lambda _: cache.open(NAMESPACE, TRUNK).close(), 300)
    prompts = [np.append(TRUNK[:3_900], np.arange(100) + 10_000_000 + 100 * n).astype(np.int32) for n in range(300)]
    opened = [cache.open(NAMESPACE, prompt) for prompt in prompts]

    def insert_tail(number: int) -> None:
        cache.grow(opened[number], 4_000)
        cache.commit(opened[number], prompts[number][3_900:])

    insert = median_us(insert_tail, 300)
    for lease in opened:
        lease.close()

    leases = [cache.open(NAMESPACE, np.append(TRUNK[:2_000], [n]).astype(np.int32)) for n in range(64)]
    token = np.array([7], np.int32)

    def decode(_: int) -> None:
        for lease in leases:
            cache.grow(lease, lease.num_computed_tokens + 1)
            cache.commit(lease, token)

    for number, lease in enumerate(leases):  # each on its own branch
        cache.grow(lease, 2_001)
        cache.commit(lease, np.array([3_000_000 + number], np.int32))
    decode_step = median_us(decode, 64)
    for lease in leases:
        lease.close()

    free = cache.ledger()[0].free
    hog = cache.open(b"hog", np.zeros(1, np.int32))
    cache.grow(hog, free * cache.block_size)
    evict = median_us(lambda _: cache.grow(hog, hog.num_reserved_tokens + 1), 300)
    evict_chunk = median_us(lambda _: cache.grow(hog, hog.num_reserved_tokens + 256), 100)
    cache.check()
    return {
        "nodes": num_nodes,
        "windows": windows,
        "match_us": round(match, 1),
        "open_close_us": round(hold, 1),
        "insert_us": round(insert, 1),
        "decode_us_per_sequence": round(decode_step / 64, 2),
        "evict_us": round(evict, 1),
        "evict_chunk_us_per_block": round(evict_chunk / 16, 1),
        "rescans": cache.stats.num_rescans,
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    for size in [int(argument) for argument in sys.argv[1:]] or [10, 100, 1_000, 10_000, 100_000]:
        print(json.dumps(measure(size)))
        print(json.dumps(measure(size, 512)))
