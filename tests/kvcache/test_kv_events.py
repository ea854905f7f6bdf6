"""The event stream alone is enough to know what is stored."""

import random

import numpy as np
import pytest
from kvcache_world import World, random_prompt

from spolia.kvcache import Cleared, GroupSpec, Removed, Stored


class Follower:
    """An index elsewhere, kept by events: namespace -> branch -> (parent, where it hangs, tokens)."""

    def __init__(self):
        self.branches = {}
        self.next = 0

    def follow(self, cache):
        batch = cache.events_since(self.next)
        if batch.num_dropped:
            self.branches = {}
            snapshot = cache.snapshot()
            for event in snapshot.stored:
                self.apply(event)
            self.next = snapshot.next_sequence_number
            return
        for number, event in enumerate(batch.events, self.next):
            assert event.sequence_number == number
            self.apply(event)
        self.next = batch.next_sequence_number

    def apply(self, event):
        branches = self.branches.setdefault(event.namespace, {})
        match event:
            case Stored():
                _, start, tokens = branches.setdefault(event.branch, (event.parent, event.start, []))
                assert start + len(tokens) == event.start
                tokens.extend(event.token_ids.tolist())
            case Removed():
                _, start, tokens = branches[event.branch]
                assert start + len(tokens) == event.start + event.num_tokens
                del tokens[event.start - start :]
                if not tokens:
                    del branches[event.branch]
            case Cleared():
                branches.clear()

    def sequence(self, namespace, branch, stop=None):
        if branch == 0:
            return []
        parent, start, tokens = self.branches[namespace][branch]
        before = self.sequence(namespace, parent, start)
        assert len(before) == start
        return (before + tokens)[:stop]

    def prefixes(self):
        return {
            (namespace, tuple(whole[:n]))
            for namespace, branches in self.branches.items()
            for branch in branches
            for whole in [self.sequence(namespace, branch)]
            for n in range(1, len(whole) + 1)
        }


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
