"""The cache against the naive model, under random operations."""

import random

import numpy as np
import pytest
from kvcache_world import World, random_prompt

from spolia.kvcache import GroupSpec

GROUPS = {
    "full": (GroupSpec(24),),
    "roomy": (GroupSpec(4_000),),
    "full and window": (GroupSpec(24), GroupSpec(14, window=20)),
    "two windows": (GroupSpec(30), GroupSpec(16, window=33), GroupSpec(12, window=5)),
    "windows only": (GroupSpec(14, window=20), GroupSpec(12, window=7)),
}


@pytest.mark.parametrize("alphabet", [2, 4, 50_000])  # small alphabets force splits
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_a_lease_reads_its_own_prefix_and_nothing_else(groups, alphabet):
    rng = random.Random(alphabet)
    world = World(*groups)
    known = []
    for _ in range(400):
        act = rng.random()
        if act < 0.35 and len(world.running) < 4:
            prompt = random_prompt(rng, alphabet, 90, known)
            known = [*known[-30:], prompt]
            world.open(prompt, rng.choice([b"ns", b"other"]))
        elif act < 0.85 and world.running:
            sequence = rng.choice(world.running)
            if not sequence.num_pending:
                sequence.append(rng.randrange(alphabet))
            if not world.step(sequence, rng.randrange(1, 40)):
                world.close(rng.choice(world.running))
        elif act < 0.98 and world.running:
            sequence = rng.choice(world.running)
            known = [*known[-30:], sequence.token_ids]
            world.close(sequence)
        elif act > 0.99:
            world.cache.clear(rng.choice([None, b"ns"]))
        world.check()
    for sequence in list(world.running):
        world.close(sequence)
    world.cache.clear()
    assert [entry.free for entry in world.cache.ledger()] == [group.num_blocks for group in groups]


@pytest.mark.parametrize("alphabet", [2, 4, 50_000])
def test_with_room_for_all_a_hit_is_the_longest_prefix_ever_committed(alphabet):
    rng = random.Random(alphabet)
    world = World(GroupSpec(10_000), thorough=False)
    committed = set()
    known = []
    for _ in range(250):
        prompt = random_prompt(rng, alphabet, 120, known)
        known.append(prompt)
        length = max((n for n in range(len(prompt)) if prompt[:n].tobytes() in committed), default=0)
        assert world.remember(prompt, chunk=rng.randrange(1, 60)) == length
        committed.update(prompt[:n].tobytes() for n in range(1, len(prompt) + 1))
    world.check()


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_a_lease_that_is_alone_gets_whatever_it_needs(groups):
    rng = random.Random(7)
    world = World(*groups, thorough=False)
    known = []
    step = 12
    for _ in range(60):
        for _ in range(rng.randrange(4)):  # fill the cache in all shapes, then leave one
            prompt = random_prompt(rng, 2, 90, known)
            known = [*known[-30:], prompt]
            sequence = world.open(prompt)
            if not world.step(sequence, rng.randrange(1, 90)):
                break
        for sequence in list(world.running):
            world.close(sequence)
        longest = max(n for n in range(1, 250) if world.cache.fits(n, step))
        prompt = random_prompt(rng, 2, longest, known)
        sequence = world.open(prompt)
        while len(sequence.token_ids) < longest or sequence.num_pending:
            if not sequence.num_pending:
                sequence.append(rng.randrange(2))
            assert world.step(sequence, step)
        world.check()
        world.close(sequence)


def test_a_thousand_opens_and_closes_leave_the_pool_as_found():
    rng = random.Random(3)
    world = World(GroupSpec(64), GroupSpec(32, window=24), thorough=False)
    world.remember(np.arange(200))
    world.cache.clear()
    before = world.cache.ledger()
    known = []
    for _ in range(1_000):
        prompt = random_prompt(rng, 4, 100, known)
        known = [*known[-10:], prompt]
        sequence = world.open(prompt)
        if rng.random() < 0.5:
            world.cache.grow(sequence.lease, rng.randrange(len(prompt)) + 1)  # aborted before the step
        elif rng.random() < 0.5:
            world.step(sequence, rng.randrange(1, 50))
        if rng.random() < 0.7:
            world.close(sequence)
        for other in world.running[:-3]:
            world.close(other)
    for sequence in list(world.running):
        world.close(sequence)
    world.check()
    assert all(entry.leased == 0 for entry in world.cache.ledger())
    world.cache.clear()
    assert world.cache.ledger() == before
