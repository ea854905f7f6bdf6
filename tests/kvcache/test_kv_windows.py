"""Window groups: what slides out, what stays usable, what goes first."""

import numpy as np
import pytest
from kvcache_world import BLOCK, World

from spolia.errors import LeaseError
from spolia.kvcache import GroupSpec, MissReason

SIZES = [
    (window, length) for window in (1, 2, 15, 16, 17, 33, 64) for length in (window - 1, window, window + 1, 3 * window)
]


def tokens(count, first=0):
    return np.arange(first, first + count, dtype=np.int32)


@pytest.mark.parametrize(("window", "length"), [size for size in SIZES if size[1] > 0])
@pytest.mark.parametrize("chunk", [1, 7, 40, None])
def test_the_same_prompt_twice_is_a_hit_at_every_size(window, length, chunk):
    world = World(GroupSpec(64), GroupSpec(64, window=window))
    world.remember(tokens(length), chunk=chunk)
    assert world.remember(tokens(length), chunk=chunk) == length - 1


@pytest.mark.parametrize("window", [2, 16, 17, 40])
def test_a_lease_holds_the_window_of_its_next_token_and_no_more(window):
    world = World(GroupSpec(64), GroupSpec(64, window=window))
    sequence = world.open(tokens(200))
    while sequence.num_pending:
        world.step(sequence, 9)
        table = sequence.lease.block_table(1)
        first = max(0, sequence.lease.num_computed_tokens - window + 1) // BLOCK
        assert (table[:first] == -1).all()
        assert (table[first:] >= 0).all()
    assert (sequence.lease.block_table(0) >= 0).all()


def test_blocks_that_slid_out_stay_cached_until_room_is_short():
    world = World(GroupSpec(64), GroupSpec(16, window=32))
    sequence = world.compute(tokens(160), chunk=16)
    assert world.cache.ledger()[1].cached == 160 // BLOCK - 2
    assert world.cache.probe(b"ns", tokens(50)) == 49  # inside the part that slid out
    world.close(sequence)
    world.remember(tokens(240, 1_000), chunk=16)
    assert world.cache.probe(b"ns", tokens(161)) == 160  # the interior went, the end is whole
    assert world.cache.probe(b"ns", tokens(50)) == 0


def test_a_missing_window_makes_a_shorter_hit_or_none_and_says_so():
    world = World(GroupSpec(64), GroupSpec(13, window=32))
    world.remember(tokens(160), chunk=16)
    world.remember(tokens(150, 1_000), chunk=16)
    prompt = np.append(tokens(100), tokens(10, 500))
    hit = world.cache.explain(b"ns", prompt)
    assert hit.explanation.reason is MissReason.OUTSIDE_WINDOW
    assert hit.explanation.num_matched_tokens == 100 > hit.num_tokens == hit.explanation.divergence


def test_recomputing_mends_what_was_missing():
    world = World(GroupSpec(64), GroupSpec(13, window=32))
    world.remember(tokens(160), chunk=16)
    world.remember(tokens(150, 1_000), chunk=16)
    prompt = np.append(tokens(100), tokens(10, 500))
    assert world.remember(prompt, chunk=16) < 100
    assert world.remember(np.append(tokens(100), tokens(10, 700)), chunk=16) == 100


def test_a_window_group_shares_its_pool_among_long_sequences():
    """Each sequence is four times the window pool: only the sliding makes room."""
    world = World(GroupSpec(200), GroupSpec(6, window=32), thorough=False)
    for first in range(0, 5_000, 1_000):
        world.remember(tokens(400, first), chunk=16)
    world.check()
    assert world.cache.probe(b"ns", tokens(401, 4_000)) == 400


def test_the_window_of_a_running_sequence_stays_shared():
    world = World(GroupSpec(64), GroupSpec(8, window=32))
    world.compute(tokens(64))
    world.remember(tokens(32, 1_000))
    hog = world.open(tokens(200, 2_000))
    assert world.cache.grow(hog.lease, 6 * BLOCK) == []  # all but the running sequence's window
    assert world.cache.probe(b"ns", np.append(tokens(64), 900)) == 64


def test_a_block_that_a_split_went_through_is_found_in_both_halves():
    world = World(GroupSpec(64), GroupSpec(7, window=32))
    world.remember(tokens(40))
    world.remember(np.append(tokens(20), tokens(10, 500)))  # splits the first inside its second block
    holder = world.open(np.append(tokens(20), 700))
    hog = world.open(tokens(200, 1_000))
    assert world.cache.grow(hog.lease, 5 * BLOCK) == []  # all but the two blocks of the holder
    world.close(holder)
    assert world.cache.grow(hog.lease, 7 * BLOCK) == []
    world.check()


def test_shared_prefixes_rarely_need_a_search_for_room():
    """The queues find what can go; looking through all nodes is the exception."""
    world = World(GroupSpec(400), GroupSpec(40, window=48), thorough=False)
    trunk = tokens(90)
    for turn in range(300):
        world.remember(np.append(trunk, tokens(60, 1_000 + 100 * (turn % 20))), chunk=32)
    world.check()
    assert world.cache.stats.num_evicted_blocks > 300
    assert world.cache.stats.num_rescans <= 3


@pytest.mark.parametrize("window", [1, 16, 17, 40])
@pytest.mark.parametrize("num_spare", [0, 1, 100])
def test_what_is_brought_in_without_what_a_window_has_passed_takes_no_room_for_it_and_goes_on(window, num_spare):
    world = World(GroupSpec(64), GroupSpec(64, window=window))
    assert world.bring_in(tokens(200), num_spare=num_spare)
    needed = max(0, 192 - window + 1) // BLOCK
    assert world.cache.ledger()[1].cached == 12 - max(0, needed - num_spare)
    assert world.remember(tokens(220)) == 192
    assert world.remember(tokens(220)) == 219


def test_bringing_in_the_end_mends_nothing_before_it_and_breaks_nothing():
    """What is known ends inside the last block that is brought in, in a leaf that others go on from."""
    world = World(GroupSpec(64), GroupSpec(64, window=20))
    world.remember(tokens(100))
    running = world.compute(tokens(100))
    assert world.bring_in(tokens(160))
    world.check()
    running.append(100)
    assert world.step(running)
    world.check()
    world.close(running)
    assert world.cache.probe(b"ns", tokens(161)) == 160


def test_what_an_end_needs_is_not_brought_in_without_it():
    world = World(GroupSpec(64), GroupSpec(64, window=40))
    with world.cache.open_restore(b"ns", tokens(161), whole_blocks=True) as lease:
        with pytest.raises(LeaseError, match="group 1 has nothing before block 8"):
            world.cache.grow_sparse(lease, 160, (0, 8))
        with pytest.raises(LeaseError, match="group 0 has nothing before block 1"):
            world.cache.grow_sparse(lease, 160, (1, 0))
    world.check()


def test_the_window_of_the_last_whole_block_stays_as_long_as_that_of_the_end():
    world = World(GroupSpec(64), GroupSpec(10, window=32))
    world.remember(tokens(110), chunk=16)  # the end needs tokens from 79 on, its last whole block's from 65 on
    world.remember(tokens(90, 1_000), chunk=16)
    with world.cache.open_restore(b"ns", np.append(tokens(110), 0), whole_blocks=True) as lease:
        assert lease.num_computed_tokens == 96
