"""The event stream alone is enough to know what is stored."""

import random

import numpy as np
import pytest
from kvcache_world import BLOCK, World, random_prompt

from spolia.kvcache import BlocksStored, CacheMirror, GroupSpec


class Follower:
    """An index elsewhere, kept by events, and the set of whole blocks, kept by what the mirror says of them."""

    def __init__(self):
        self.mirror = CacheMirror(BLOCK)
        self.names = set()
        self.next = 0

    def follow(self, cache):
        batch = cache.events_since(self.next)
        if batch.num_dropped:
            snapshot = cache.snapshot()
            self.mirror.reset(snapshot.stored)
            self.names = set()
            self.note(self.mirror.blocks())
            self.next = snapshot.next_sequence_number
            return
        for number, event in enumerate(batch.events, self.next):
            assert event.sequence_number == number
            self.apply(event)
        self.next = batch.next_sequence_number

    def apply(self, event):
        self.note(self.mirror.apply(event))

    def note(self, changes):
        for change in changes:
            if isinstance(change, BlocksStored):
                assert len(change.token_ids) == BLOCK * len(change.names)
                assert change.parent is None or change.parent in self.names
                assert not self.names & set(change.names)
                self.names |= set(change.names)
            else:
                assert self.names >= set(change.names)
                self.names -= set(change.names)

    def prefixes(self):
        assert self.names == {name for run in self.mirror.blocks() for name in run.names}
        return all_prefixes(self.mirror.sequences())


def all_prefixes(stored):
    return {(namespace, whole[:n]) for namespace, whole in stored for n in range(1, len(whole) + 1)}


@pytest.mark.parametrize("capacity", [4_096, 7])
def test_following_the_events_gives_what_is_stored(capacity):
    rng = random.Random(11)
    world = World(GroupSpec(20), GroupSpec(20, window=24), event_capacity=capacity, thorough=False)
    follower, late = Follower(), Follower()
    known = []
    for _ in range(250):
        prompt = random_prompt(rng, 3, 70, known)
        known = [*known[-20:], prompt]
        world.step(world.open(prompt, rng.choice([b"ns", b"two"])), rng.randrange(1, 70))
        for sequence in world.running[: -rng.randrange(1, 4)]:
            world.close(sequence)
        if rng.random() < 0.03:
            world.cache.clear(rng.choice([None, b"ns"]))
        follower.follow(world.cache)
        assert follower.prefixes() == all_prefixes(world.stored())
        assert len(follower.names) == len({whole for whole in follower.prefixes() if len(whole[1]) % BLOCK == 0})
        if rng.random() < 0.05:
            late.follow(world.cache)
            assert late.prefixes() == all_prefixes(world.stored())


def test_a_reader_that_comes_too_late_is_told_how_much_it_missed():
    world = World(GroupSpec(8), event_capacity=3)
    for first in range(0, 500, 100):
        world.remember(np.arange(first, first + 10))
    batch = world.cache.events_since(0)
    assert batch.num_dropped == batch.next_sequence_number - 3 > 0
    assert [event.sequence_number for event in batch.events] == list(
        range(batch.num_dropped, batch.next_sequence_number)
    )
    assert world.cache.events_since(batch.next_sequence_number) == ((), batch.next_sequence_number, 0)


def test_numbers_that_were_not_given_out_yet_are_refused():
    with pytest.raises(ValueError, match="allowed: 0 to 0"):
        World(GroupSpec(8)).cache.events_since(1)
