"""How far tiers reach, where what a window has passed may be missing: as somebody who tries every length would say."""

from __future__ import annotations

import random

import pytest

from spolia.tiers import BLOCK_SIZE, Tier, block_key, reach

from .faults import FaultyBackend

WINDOWS = [(None,), (None, 40), (40,), (100, None, 40), (1, None)]


def first_needed(windows, group: int, num_blocks: int) -> int:
    window = windows[group]
    return 0 if window is None else max(0, num_blocks * BLOCK_SIZE - window + 1) // BLOCK_SIZE


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("seed", range(30))
def test_it_is_the_longest_prefix_that_has_all_that_the_next_token_looks_at(windows, seed):
    rng = random.Random(seed)
    first_block, num_blocks = rng.choice([0, 3]), rng.randrange(1, 20)
    digests = [rng.randbytes(32) for _ in range(num_blocks)]
    backends = [FaultyBackend(), FaultyBackend()]
    tiers = [Tier(name, backend) for name, backend in zip(("fast", "slow"), backends, strict=True)]
    num_gaps = rng.choice([0, 1, 3, num_blocks])
    gaps = {(rng.randrange(num_blocks), rng.randrange(len(windows))) for _ in range(num_gaps)}
    there = {}
    for index, digest in enumerate(digests):
        for group in range(len(windows)):
            if (index, group) not in gaps:
                tier = rng.randrange(2)
                there[index, group] = tiers[tier]
                backends[tier].values[block_key(digest, group)] = b""

    def needed(length: int) -> list[list[int]]:
        return [
            list(range(max(0, first_needed(windows, group, first_block + length) - first_block), length))
            for group in range(len(windows))
        ]

    lengths = [
        length
        for length in range(num_blocks + 1)
        if all((index, group) in there for group, indices in enumerate(needed(length)) for index in indices)
    ]
    num_known = next((index for index in range(num_blocks) if any(gap[0] == index for gap in gaps)), num_blocks)
    same = min((index for index in range(num_known) if len({there[index, g] for g in range(len(windows))}) > 1),
               default=num_known)  # fmt: skip
    known = [there[index, 0] for index in range(same)]
    for told in ([], known):
        found = reach(
            tiers, digests, first_block, len(windows), lambda group, count: first_needed(windows, group, count), told
        )
        assert found.num_blocks == max(lengths)
        assert found.places == tuple(
            tuple(there[index, group] for index in indices) for group, indices in enumerate(needed(found.num_blocks))
        )
        ends = [first_block, *(stop for _, stop, _ in found.ranges)]
        assert [start for start, _, _ in found.ranges] == ends[:-1]
        assert ends[-1] == found.stop_block
