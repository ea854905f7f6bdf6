"""Every miss has a reason: each of the closed list is produced, with its evidence."""

import numpy as np
from kvcache_world import World

from spolia.kvcache import GroupSpec, History, MissReason, attribute
from spolia.kvcache.radix_tree import MAX_SCARS


def tokens(count, first=0):
    return np.arange(first, first + count, dtype=np.int32)


def explain(world, token_ids, **options):
    return world.cache.explain(b"ns", token_ids, **options).explanation


def test_full_when_all_but_the_last_token_is_reused():
    world = World(GroupSpec(16))
    world.remember(tokens(50))
    explanation = explain(world, tokens(50))
    assert explanation.reason is MissReason.FULL
    assert explanation.divergence is None
    assert explain(world, tokens(51)).reason is MissReason.FULL


def test_never_seen_on_an_empty_cache_and_for_new_text_at_the_end():
    world = World(GroupSpec(16))
    assert explain(world, tokens(50)).reason is MissReason.NEVER_SEEN
    world.remember(tokens(50))
    assert explain(world, tokens(50, 900)).reason is MissReason.NEVER_SEEN
    explanation = explain(world, tokens(80))
    assert (explanation.reason, explanation.divergence) == (MissReason.NEVER_SEEN, 50)


def test_diverged_shows_where_and_what_is_cached_instead():
    world = World(GroupSpec(16))
    world.remember(tokens(50))
    explanation = explain(world, np.append(tokens(37), tokens(20, 900)))
    assert (explanation.reason, explanation.divergence) == (MissReason.DIVERGED, 37)
    assert explanation.continuation == tuple(range(37, 45))


def test_diverged_at_a_branch_shows_the_latest_branch():
    world = World(GroupSpec(32))
    for first in (100, 200):
        world.remember(np.append(tokens(20), tokens(20, first)))
    explanation = explain(world, np.append(tokens(20), tokens(20, 300)))
    assert (explanation.reason, explanation.divergence) == (MissReason.DIVERGED, 20)
    assert explanation.continuation[0] == 200


def test_evicted_says_when_and_by_what():
    world = World(GroupSpec(8))
    world.remember(tokens(100))
    world.remember(tokens(60, 900))
    explanation = explain(world, tokens(100))
    assert explanation.reason is MissReason.EVICTED
    assert explanation.divergence == explanation.num_matched_tokens == 64
    assert explanation.evicted.cause == "lru"
    assert 0 < explanation.evicted.time <= world.clock.now


def test_evicted_entirely_is_remembered_at_the_root_and_told_from_new_text():
    world = World(GroupSpec(8))
    world.remember(tokens(100))
    world.remember(tokens(128, 900))
    assert explain(world, tokens(100)).reason is MissReason.EVICTED
    assert explain(world, tokens(100, 500)).reason is MissReason.NEVER_SEEN


def test_an_evicted_branch_is_told_from_one_that_never_was():
    world = World(GroupSpec(8))
    for first in (100, 200):
        world.remember(np.append(tokens(32), tokens(32, first)))
    world.remember(tokens(64, 900))
    assert explain(world, np.append(tokens(32), tokens(32, 100))).reason is MissReason.EVICTED
    assert explain(world, np.append(tokens(32), tokens(32, 300))).reason is MissReason.DIVERGED


def test_what_is_computed_again_is_no_longer_evicted():
    world = World(GroupSpec(8))
    world.remember(tokens(100))
    world.remember(tokens(60, 900))
    world.remember(tokens(100))
    assert explain(world, tokens(100)).reason is MissReason.FULL
    assert explain(world, tokens(120)).reason is MissReason.NEVER_SEEN


def test_an_eviction_is_remembered_where_a_branch_grows_later():
    world = World(GroupSpec(8))
    world.remember(tokens(100))
    world.remember(tokens(60, 900))  # cuts the first at 64
    for first in (500, 700):  # goes on from there otherwise, then branches off there
        world.remember(np.append(tokens(64), tokens(10, first)))
    assert explain(world, tokens(100)).reason is MissReason.EVICTED
    assert explain(world, tokens(100)).divergence == 64


def test_cleared():
    world = World(GroupSpec(8))
    world.remember(tokens(100))
    world.cache.clear()
    explanation = explain(world, tokens(100))
    assert explanation.reason is MissReason.CLEARED
    assert explanation.evicted.cause == "clear"


def test_another_namespace_is_told_only_to_who_asks():
    world = World(GroupSpec(32))
    world.remember(tokens(100), namespace=b"theirs")
    world.remember(tokens(20))
    assert explain(world, tokens(100)).reason is MissReason.NEVER_SEEN
    explanation = explain(world, tokens(100), other_namespaces=True)
    assert explanation.reason is MissReason.OTHER_NAMESPACE
    assert (explanation.divergence, explanation.num_matched_tokens) == (20, 100)
    assert world.cache.open(b"ns", tokens(100)).hit.explanation.reason is MissReason.NEVER_SEEN


def test_explaining_changes_nothing():
    world = World(GroupSpec(8))
    world.remember(tokens(100))
    before = world.cache.snapshot().next_sequence_number, world.cache.ledger(), world.clock.now
    explain(world, tokens(50, 900), other_namespaces=True)
    world.cache.probe(b"unknown", tokens(10))
    assert (world.cache.snapshot().next_sequence_number, world.cache.ledger(), world.clock.now) == before
    assert list(world.cache._tree.roots) == [b"ns"]


def test_the_memory_of_evictions_is_bounded():
    world = World(GroupSpec(4), thorough=False)
    for first in range(0, 200_000, 100):
        world.remember(tokens(40, first))
    assert len(world.cache._tree.roots[b"ns"].scars) == MAX_SCARS
    assert explain(world, tokens(40)).reason is MissReason.NEVER_SEEN
    assert explain(world, tokens(40, 199_700)).reason is MissReason.EVICTED


def named(world, token_ids) -> None:
    """Let the whole blocks of these tokens be called something elsewhere, as tiers do."""
    with world.cache.open(b"ns", np.append(token_ids, np.int32(0))) as lease:
        table = lease.block_table(0)[: len(token_ids) // 16].copy()
        world.cache.tag(0, table, [bytes([index]) * 32 for index in range(len(table))])


def test_a_tail_that_filled_no_block_was_too_short_to_store():
    world = World(GroupSpec(8))
    world.remember(tokens(53))
    named(world, tokens(53))
    world.remember(tokens(80, 900))  # takes the tail's block
    explanation = explain(world, tokens(100))
    assert (explanation.reason, explanation.divergence, explanation.until) == (MissReason.TOO_SHORT, 48, 53)
    assert explanation.evicted.cause == "lru"
    ranges = attribute(explanation, num_shared=0, num_reused=48, num_prompt_tokens=100)
    assert [part[:2] + part[3:] for part in ranges[1:]] == [
        (48, 53, MissReason.TOO_SHORT),
        (53, 100, MissReason.NEVER_SEEN),
    ]


def test_without_a_name_elsewhere_the_same_tail_was_evicted():
    world = World(GroupSpec(8))
    world.remember(tokens(53))
    world.remember(tokens(80, 900))
    assert explain(world, tokens(100)).reason is MissReason.EVICTED


def test_what_came_back_in_part_says_of_the_rest_that_it_was_too_short():
    """All of it is evicted, then the whole blocks come back, as from a tier."""
    world = World(GroupSpec(8))
    world.remember(tokens(53))
    world.remember(tokens(127, 900))
    world.remember(tokens(48))
    assert explain(world, tokens(100)).reason is MissReason.EVICTED  # nothing is known of another place
    named(world, tokens(48))
    explanation = explain(world, tokens(100))
    assert (explanation.reason, explanation.divergence, explanation.until) == (MissReason.TOO_SHORT, 48, 53)


def looked_up(world, token_ids, **options):
    with world.cache.open(b"ns", token_ids, **options) as lease:
        return lease.hit


def test_a_conversation_whose_tokens_are_others_this_time_is_template_drift():
    world = World(GroupSpec(16))
    world.remember(tokens(60))
    said = np.append(tokens(40), tokens(40, 900))
    assert looked_up(world, said).explanation.reason is MissReason.DIVERGED
    drifted = looked_up(world, said, history=History(60)).explanation
    assert (drifted.reason, drifted.divergence) == (MissReason.TEMPLATE_DRIFT, 40)
    # What others said after the conversation is no drift, and a session's tokens cannot drift.
    for is_exact in (False, True):
        went_on = looked_up(world, said, history=History(40, is_exact=is_exact)).explanation
        assert (went_on.reason, went_on.divergence) == (MissReason.NEVER_SEEN, 40)
    assert looked_up(world, said, history=History(60, is_exact=True)).explanation.reason is MissReason.DIVERGED


def test_a_session_knows_that_what_a_tier_has_not_was_too_short():
    """After a restart: the whole blocks are back, and no eviction is remembered."""
    world = World(GroupSpec(16))
    world.remember(tokens(48))
    named(world, tokens(48))
    assert looked_up(world, tokens(100)).explanation.reason is MissReason.NEVER_SEEN
    hit = looked_up(world, tokens(100), history=History(53, is_exact=True))
    assert (hit.explanation.reason, hit.explanation.until) == (MissReason.TOO_SHORT, 53)


def test_the_rest_of_a_prompt_that_a_tier_brought_back_was_too_short_if_it_fills_no_block():
    """After a restart, and nothing is known of the conversation."""
    world = World(GroupSpec(16))
    world.remember(tokens(48))
    named(world, tokens(48))

    def reason(token_ids, **options):
        return looked_up(world, token_ids, **options).explanation.reason

    assert reason(tokens(53)) is MissReason.NEVER_SEEN  # it had been on the device
    assert reason(tokens(53), num_restored=48) is MissReason.TOO_SHORT
    assert reason(tokens(63), num_restored=48) is MissReason.TOO_SHORT
    assert reason(tokens(64), num_restored=48) is MissReason.NEVER_SEEN  # a tier might have had the block
    assert reason(tokens(53), num_restored=32) is MissReason.NEVER_SEEN
    assert reason(tokens(49), num_restored=48) is MissReason.FULL
    # That the conversation ends where the tier did is known: new text.
    assert reason(tokens(53), num_restored=48, history=History(48)) is MissReason.NEVER_SEEN
    world.remember(np.append(tokens(48), tokens(20, 900)))
    assert reason(tokens(53), num_restored=48) is MissReason.DIVERGED
    assert world.cache.stats.num_missed_tokens[MissReason.TOO_SHORT] == 0  # no lease grew


def test_what_is_computed_for_its_results_is_told_from_what_is_not_there():
    world = World(GroupSpec(16))
    world.remember(tokens(60))
    hit = looked_up(world, tokens(100), most=10)
    assert hit.num_tokens == 10
    ranges = attribute(hit.explanation, num_shared=0, num_reused=10, num_prompt_tokens=100)
    assert [part[:2] + part[3:] for part in ranges[1:]] == [
        (10, 60, MissReason.RESULTS_WANTED),
        (60, 100, MissReason.NEVER_SEEN),
    ]
    assert looked_up(world, tokens(100, 500), most=0).explanation.reason is MissReason.NEVER_SEEN
