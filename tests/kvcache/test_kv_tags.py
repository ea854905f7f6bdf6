"""What other tiers rely on: tags that say what a block holds, and word of each eviction while its KV is still there."""

import random

import numpy as np
import pytest
from kvcache_world import BLOCK, Running, World, random_prompt

from spolia.kvcache import GroupSpec, KVCache


def digest_tag(digest) -> bytes:
    return int(digest).to_bytes(8, "little", signed=True)


class TaggingWorld(World):
    """Tags each whole block at its commit, as an engine with tiers does, and checks what evictions report."""

    def __init__(self, *groups: GroupSpec) -> None:
        super().__init__(*groups, thorough=False)
        self.cache = KVCache(groups, clock=self.clock, on_evict=self.on_evict)
        self.evicted: list[bytes] = []

    def on_evict(self, group, ids, tags) -> None:
        for block, tag in zip(ids.tolist(), tags, strict=True):
            if tag is not None:
                assert digest_tag(self.memory[group][block, -1]) == tag, "the block holds something else"
                self.evicted.append(tag)

    def step(self, sequence: Running, num_tokens: int | None = None) -> bool:
        start = sequence.lease.num_computed_tokens
        if not super().step(sequence, num_tokens):
            return False
        stop = sequence.lease.num_computed_tokens
        for group in range(len(self.memory)):
            table = sequence.lease.block_table(group)
            whole = np.arange(start // BLOCK, stop // BLOCK)
            whole = whole[table[whole] >= 0]
            ends = sequence.digests[(whole + 1) * BLOCK - 1]
            self.cache.tag(group, table[whole], [digest_tag(digest) for digest in ends])
        return True


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("windows", [(None,), (None, 40), (40,)])
def test_an_evicted_block_still_holds_what_its_tag_says(windows, seed):
    rng = random.Random(seed)
    world = TaggingWorld(*(GroupSpec(14, window) for window in windows))
    known = []
    for _ in range(300):
        prompt = random_prompt(rng, 3, 120, known)
        known = [*known[-20:], prompt]
        sequence = world.open(prompt)
        while sequence.num_pending:
            assert world.step(sequence, rng.randrange(1, 50))
        world.close(sequence)
        world.check()
    assert len(world.evicted) > 500


def test_a_tag_is_forgotten_when_its_block_is_taken_anew():
    cache = KVCache([GroupSpec(1)], clock=lambda: 0.0)
    with cache.open(b"", range(16)) as lease:
        cache.grow(lease, 16)
        cache.commit(lease, range(16))
        cache.tag(0, lease.block_table(0), [b"name"])
        assert cache.tags(0, lease.block_table(0)) == [b"name"]
    with cache.open(b"", range(100, 116)) as lease:
        cache.grow(lease, 16)
        assert cache.tags(0, lease.block_table(0)) == [None]


def test_what_is_cleared_is_not_reported_as_evicted():
    world = TaggingWorld(GroupSpec(8))
    world.remember(np.arange(64, dtype=np.int32))
    world.cache.clear()
    assert world.evicted == []
    world.remember(np.arange(200, 328, dtype=np.int32))
    assert world.evicted == []


def test_opening_to_restore_counts_as_nobodys_request():
    world = World(GroupSpec(8))
    world.remember(np.arange(40, dtype=np.int32))
    num_opened = world.cache.stats.num_opened
    with world.cache.open_restore(b"ns", np.arange(48)) as lease:
        assert lease.num_computed_tokens == 40
    assert world.cache.stats.num_opened == num_opened
