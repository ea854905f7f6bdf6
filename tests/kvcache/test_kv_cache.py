"""What the cache promises, one behaviour at a time."""

import itertools

import numpy as np
import pytest
from kvcache_world import World

from spolia.errors import LeaseError
from spolia.kvcache import GroupSpec, KVCache, RetentionPolicy


def tokens(count, first=0):
    return np.arange(first, first + count, dtype=np.int32)


def test_an_unknown_prompt_is_a_hit_of_nothing():
    sequence = World(GroupSpec(8)).open(tokens(20))
    assert sequence.lease.hit.num_tokens == 0
    assert sequence.lease.block_table(0).tolist() == []


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 32, 33, 100])
def test_a_fully_cached_prompt_recomputes_exactly_one_token(size):
    world = World(GroupSpec(32))
    world.remember(tokens(size))
    assert world.remember(tokens(size)) == size - 1


def test_a_hit_may_end_inside_a_block():
    world = World(GroupSpec(32))
    world.remember(tokens(100))
    assert world.remember(np.append(tokens(37), tokens(40, 900))) == 37


def test_the_copy_of_a_shared_block_has_just_the_shared_tokens():
    world = World(GroupSpec(32))
    world.remember(tokens(100))
    lease = world.open(np.append(tokens(37), 900)).lease
    (copy,) = world.cache.grow(lease, 38)
    assert copy.num_tokens == 5
    assert copy.dst == lease.block_table(0)[2] != copy.src


def test_nothing_is_copied_when_a_conversation_goes_on_at_its_end():
    world = World(GroupSpec(32))
    world.remember(tokens(37))
    lease = world.open(tokens(60)).lease
    assert lease.hit.num_tokens == 37
    assert world.cache.grow(lease, 60) == []


def test_only_one_of_two_sequences_writes_on_in_a_block():
    world = World(GroupSpec(32))
    world.remember(tokens(37))
    one, other = world.open(tokens(60)), world.open(np.append(tokens(37), tokens(20, 900)))
    copies = [world.cache.grow(sequence.lease, 50) for sequence in (one, other)]
    assert sum(map(len, copies)) >= 1
    assert one.lease.block_table(0)[2] != other.lease.block_table(0)[2]


def test_computed_tokens_are_visible_before_the_sequence_ends():
    world = World(GroupSpec(32))
    sequence = world.open(tokens(100))
    for num_computed in (7, 40, 100):
        world.step(sequence, num_computed - sequence.lease.num_computed_tokens)
        assert world.cache.probe(b"ns", tokens(200)) == num_computed


def test_generated_tokens_are_reused_by_the_next_turn():
    world = World(GroupSpec(32))
    sequence = world.compute(tokens(30))
    for token in range(30, 60):
        sequence.append(token)
        world.step(sequence)
    world.close(sequence)
    assert world.remember(tokens(90)) == 60


def test_the_same_prompt_computed_twice_at_once_is_kept_once():
    world = World(GroupSpec(32))
    one, other = world.open(tokens(48)), world.open(tokens(48))
    for sequence in (one, other):
        world.step(sequence)
    assert world.cache.stats.num_duplicate_tokens == 48
    assert one.lease.block_table(0).tolist() == other.lease.block_table(0).tolist()
    assert world.cache.ledger()[0].leased == 3


def test_two_continuations_of_one_sequence_both_stay():
    world = World(GroupSpec(64))
    one = world.compute(tokens(37))
    other = world.compute(np.append(tokens(37), tokens(30, 900)))
    one.append(500)
    world.step(one)
    world.check()
    world.close(one)
    world.close(other)
    assert world.remember(np.append(tokens(37), [500, 501])) == 38
    assert world.remember(np.append(tokens(37), tokens(31, 900))) == 67


def test_a_block_is_not_kept_twice_when_its_other_branch_is_gone():
    world = World(GroupSpec(6))
    world.remember(tokens(20))  # ends inside block 1
    world.remember(np.append(tokens(20), tokens(12, 100)))
    world.remember(np.append(tokens(20), tokens(12, 200)))  # branches off inside block 1, with a copy
    assert world.cache.ledger()[0].cached == 3
    hog = world.compute(tokens(64, 900))  # makes the older branch go
    world.close(hog)
    assert world.cache.ledger()[0].cached == 6
    assert world.cache.probe(b"ns", np.append(tokens(20), tokens(12, 200))) == 31


def test_the_least_recently_used_goes_first_and_from_its_tail():
    world = World(GroupSpec(12))
    for first in (0, 1_000, 2_000):
        world.remember(tokens(64, first))
    world.cache.open(b"ns", tokens(64)).close()  # used again
    world.remember(tokens(32, 3_000))
    assert world.cache.probe(b"ns", tokens(65)) == 64
    assert world.cache.probe(b"ns", tokens(65, 1_000)) == 32
    assert world.cache.probe(b"ns", tokens(65, 2_000)) == 64


def test_what_is_leased_is_never_evicted():
    world = World(GroupSpec(8))
    held = world.compute(tokens(64))
    other = world.open(tokens(80, 1_000))
    assert not world.step(other)
    assert world.step(other, 64)
    assert not world.step(other)
    world.check()
    assert held.lease.block_table(0).tolist() != other.lease.block_table(0).tolist()


def test_no_token_goes_that_would_free_nothing():
    world = World(GroupSpec(6))
    world.remember(tokens(60))
    held = world.open(np.append(tokens(20), 900))  # holds the second block for four of its tokens
    world.remember(tokens(64, 1_000))
    world.remember(tokens(64, 2_000))
    assert world.cache.probe(b"ns", tokens(60)) == 32
    world.close(held)


def test_a_refused_grow_takes_nothing_and_evicts_nothing_in_vain():
    world = World(GroupSpec(8))
    world.remember(tokens(32))
    held = world.compute(tokens(64, 1_000))
    before = world.cache.ledger()
    other = world.open(tokens(200, 2_000))
    assert world.cache.grow(other.lease, 200) is None
    assert world.cache.ledger() == before
    assert other.lease.num_reserved_tokens == 0
    assert world.cache.stats.num_refused_grows == 1
    world.close(held)


def test_the_last_blocks_are_not_lost_to_a_copy_of_a_shared_one():
    world = World(GroupSpec(4))
    world.remember(tokens(30))
    sequence = world.open(np.append(tokens(20), tokens(44, 900)))
    assert sequence.lease.hit.num_tokens == 20
    assert world.step(sequence)  # needs all four, so the tree gives up the ten tokens beyond the shared ones
    world.check()
    assert world.cache.probe(b"ns", tokens(30)) == 20


def test_the_last_blocks_are_not_lost_to_a_second_copy_of_ones_own():
    world = World(GroupSpec(3))
    world.remember(tokens(31))
    sequence = world.compute(tokens(31))  # its last token is computed again, into a block of its own
    for token in tokens(17, 31):
        sequence.append(token)
    assert world.step(sequence)
    world.check()
    assert world.cache.ledger()[0].leased == 3


def test_a_shared_block_that_others_stand_in_is_not_taken_from_them():
    world = World(GroupSpec(4))
    other = world.compute(tokens(30))
    sequence = world.open(np.append(tokens(20), tokens(44, 900)))
    assert not world.step(sequence)
    world.check()
    world.close(other)
    assert world.step(sequence)


@pytest.mark.parametrize("groups", [(GroupSpec(5),), (GroupSpec(10), GroupSpec(5, window=32))])
def test_the_source_of_a_copy_stays_until_the_step_has_run(groups):
    world = World(*groups)
    world.remember(tokens(30))
    one = world.open(np.append(tokens(20), 900)).lease
    copies = world.cache.grow(one, 21)
    other = world.open(tokens(48, 5_000)).lease
    assert world.cache.grow(other, 48) is None  # two blocks are free, and the copy's source is not to be had
    assert world.cache.grow(other, 32) == []
    assert all(copy.src not in other.block_table(copy.group) for copy in copies)
    world.cache.check()


def test_what_was_reserved_but_not_committed_is_free_after_an_abort():
    world = World(GroupSpec(8))
    sequence = world.open(tokens(100))
    world.cache.grow(sequence.lease, 100)
    world.close(sequence)
    assert world.cache.ledger()[0].free == 8


def test_growing_within_a_reserved_block_takes_nothing():
    world = World(GroupSpec(8))
    sequence = world.open(tokens(1))
    world.cache.grow(sequence.lease, 1)
    assert sequence.lease.num_reserved_tokens == 16
    assert world.cache.grow(sequence.lease, 16) == []
    assert world.cache.ledger()[0].leased == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda cache, lease: cache.grow(lease, 10),
        lambda cache, lease: cache.commit(lease, tokens(1)),
        lambda cache, lease: cache.release(lease),
        lambda cache, lease: lease.close(),
        lambda cache, lease: lease.block_table(0),
        lambda cache, lease: lease.__enter__(),
    ],
)
def test_a_stale_lease_raises(use):
    world = World(GroupSpec(8))
    world.remember(tokens(40))
    lease = world.cache.open(b"ns", tokens(40))
    lease.close()
    before = world.cache.ledger()
    with pytest.raises(LeaseError):
        use(world.cache, lease)
    assert world.cache.ledger() == before
    world.check()


def test_a_lease_of_another_cache_is_refused():
    lease = KVCache([GroupSpec(4)], clock=lambda: 0.0).open(b"ns", tokens(4))
    with pytest.raises(LeaseError, match="another cache"):
        KVCache([GroupSpec(4)], clock=lambda: 0.0).grow(lease, 4)


def test_more_than_was_reserved_cannot_be_committed():
    world = World(GroupSpec(8))
    lease = world.open(tokens(40)).lease
    world.cache.grow(lease, 16)
    with pytest.raises(LeaseError, match="only 16 are reserved"):
        world.cache.commit(lease, tokens(17))
    assert lease.num_computed_tokens == 0


def test_a_lease_closes_at_the_end_of_its_block_even_if_it_raises():
    world = World(GroupSpec(8))
    lease = world.cache.open(b"ns", tokens(4))
    world.cache.grow(lease, 4)
    with pytest.raises(ZeroDivisionError), lease:
        raise ZeroDivisionError
    assert not lease.is_open
    assert world.cache.ledger()[0].free == 8


def test_namespaces_share_nothing():
    world = World(GroupSpec(16))
    world.remember(tokens(64), namespace=b"one")
    assert world.cache.probe(b"two", tokens(64)) == 0
    assert world.remember(tokens(64), namespace=b"two") == 0
    assert world.cache.ledger()[0].cached == 8


def test_clear_drops_what_is_not_leased_and_counts_it():
    world = World(GroupSpec(32))
    world.remember(tokens(100))
    held = world.compute(np.append(tokens(40), tokens(8, 500)))
    world.remember(tokens(50), namespace=b"two")
    assert world.cache.clear(b"ns") == 60
    world.check()
    assert world.cache.probe(b"two", tokens(50)) == 49
    world.close(held)
    assert world.cache.clear() == 48 + 50
    assert world.cache.ledger()[0].free == 32
    assert world.cache.stats.num_cleared_tokens == 158


def test_a_request_that_can_never_fit_is_known_before_it_starts():
    cache = KVCache([GroupSpec(8), GroupSpec(6, window=32)], clock=lambda: 0.0)
    assert cache.blocks_needed(128, max_step_tokens=16) == (8, 4)
    assert cache.fits(128, max_step_tokens=16)
    assert not cache.fits(129, max_step_tokens=16)
    assert not cache.fits(128, max_step_tokens=64)


def test_shares_have_their_denominators_and_preemption_is_counted_apart():
    world = World(GroupSpec(32))
    world.remember(tokens(100))
    world.remember(np.append(tokens(40), tokens(60, 900)))
    world.cache.open(b"ns", tokens(70, 5_000)).close()  # found no room: it counts when it comes back
    with world.cache.open(b"ns", tokens(100), resumed=True) as lease:
        world.cache.grow(lease, 100)
        world.cache.grow(lease, 120)
    stats = world.cache.stats
    assert (stats.num_opened, stats.num_asked_tokens, stats.num_reused_tokens) == (2, 200, 40)
    assert stats.num_asked_tokens == stats.num_reused_tokens + sum(stats.num_missed_tokens.values())
    assert (stats.num_resumed_opened, stats.num_resumed_asked_tokens, stats.num_resumed_reused_tokens) == (1, 100, 99)


def test_a_policy_decides_what_goes_first():
    class MostRecentFirst(RetentionPolicy):
        name = "mru"

        def rank(self, node, now):
            return (-now,)

    world = World(GroupSpec(12), policy=MostRecentFirst())
    for first in (0, 1_000, 2_000):
        world.remember(tokens(64, first))
    world.remember(tokens(64, 3_000))
    assert world.cache.probe(b"ns", tokens(65, 2_000)) == 0
    assert world.cache.probe(b"ns", tokens(65)) == world.cache.probe(b"ns", tokens(65, 1_000)) == 64
    assert world.cache.explain(b"ns", tokens(65, 2_000)).explanation.evicted.cause == "mru"
    world.open(np.append(tokens(20), 900))  # its key falls, and the tail beyond is still to be had
    world.check()


def test_a_flood_of_namespaces_does_not_grow_the_cache():
    cache = KVCache([GroupSpec(4)], clock=itertools.count().__next__)
    for number in range(5_000):
        with cache.open(b"%d" % number, tokens(10)) as lease:
            assert cache.grow(lease, 10) == []
            cache.commit(lease, tokens(10))
    cache.check()
    assert len(cache._tree.roots) <= 1_100


def test_bad_group_sizes_are_refused():
    for bad in ({"num_blocks": 0}, {"num_blocks": 4, "window": 0}):
        with pytest.raises(ValueError):
            GroupSpec(**bad)
    with pytest.raises(ValueError):
        KVCache([], clock=lambda: 0.0)


def test_a_resize_goes_down_to_what_is_leased_though_the_tree_has_copies_of_it():
    world = World(GroupSpec(8))
    world.remember(tokens(5))
    sequence = world.open(tokens(5))
    assert world.step(sequence, 5)
    (ledger,) = world.cache.ledger()
    assert (ledger.leased, ledger.cached) == (1, 1)  # the last token was computed again, into a block of its own
    assert world.cache.resize([1]) is not None
    world.check()
    sequence.append(9)
    assert world.step(sequence, 1)
    world.check()


def test_a_resize_goes_down_to_what_is_leased_though_the_lease_reads_a_block_of_what_was_cleared():
    world = World(GroupSpec(8))
    world.remember(tokens(1))
    for last in (7, 8):  # two that go on from the first token, each with a block of its own
        world.remember([0, last])
    sequence = world.open(np.array([0, 8], np.int32))
    world.cache.clear()
    (ledger,) = world.cache.ledger()
    assert ledger.leased == 1
    assert world.cache.resize([1]) is not None
    world.check()
    assert world.step(sequence, 1)
    world.check()
