"""Ghosts that see a part of the blocks predict what those that see all do, for a part of the work."""

from __future__ import annotations

import random

import numpy as np
import pytest

from spolia.kvcache import POLICIES, Outcome, Wish
from spolia.sim.ghosts import GhostCaches, prefix_digests

NUM_BLOCKS = 8_192
SHARE = 1 / 4


def talks(count: int, seed: int = 3) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) of conversations that come back, under system prompts that they share."""
    rng = random.Random(seed)
    systems = [[rng.randrange(50_000) for _ in range(600)] for _ in range(4)]
    open_talks: list[list[int]] = []
    requests = []
    for _ in range(count):
        if len(open_talks) < 60 or rng.random() < 0.2:
            open_talks.append(list(rng.choice(systems)))
        talk = rng.choice(open_talks[-60:])
        talk += [rng.randrange(50_000) for _ in range(rng.randrange(40, 400))]
        answer = [rng.randrange(50_000) for _ in range(rng.randrange(20, 200))]
        requests.append((list(talk), answer))
        talk += answer
    return requests


def replay(requests, num_blocks: int, policy: str, share: float) -> GhostCaches:
    ghosts = GhostCaches(num_blocks, POLICIES[policy], share=share)
    for now, (prompt, answer) in enumerate(requests):
        ghosts.take(float(now), b"ns", prompt, answer, Outcome.TURN)
    return ghosts


@pytest.mark.parametrize("policy", ["lru", "slru"])
def test_a_sample_predicts_the_curve_within_two_points(policy):
    requests = talks(600)
    exact = replay(requests, NUM_BLOCKS, policy, 1.0)
    sampled = replay(requests, NUM_BLOCKS, policy, SHARE)
    for one, other in zip(exact.curve(), sampled.curve(), strict=True):
        assert (one.factor, one.size_tokens) == (other.factor, other.size_tokens)
        assert other.hit_rate == pytest.approx(one.hit_rate, abs=0.02)
    assert exact.curve()[0].hit_rate < exact.curve()[-1].hit_rate - 0.1, "else there is nothing to predict"


def test_it_keeps_that_part_of_the_blocks():
    requests = talks(200)
    kept = [
        sum(
            ledger.cached
            for ghost in replay(requests, NUM_BLOCKS, "lru", share)._ghosts
            for ledger in ghost._cache.ledger()
        )
        for share in (1.0, SHARE)
    ]
    assert kept[1] == pytest.approx(SHARE * kept[0], rel=0.15)


def test_a_large_cache_is_sampled_and_a_small_one_is_not():
    assert GhostCaches(2_000, POLICIES["lru"]).share == 1.0
    assert GhostCaches(NUM_BLOCKS, POLICIES["lru"]).share == SHARE
    assert GhostCaches(32_768, POLICIES["lru"]).share == 1 / 16


def test_a_prefix_has_the_digests_of_what_begins_with_it_and_no_others_has():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50_000, 4_000, dtype=np.int32)
    digests = prefix_digests(ids, 16)
    assert (prefix_digests(ids[:1_007], 16) == digests[: 1_007 // 16]).all()
    other = ids.copy()
    other[100] += 1  # in block 6
    assert (prefix_digests(other, 16)[:6] == digests[:6]).all()
    assert not (prefix_digests(other, 16)[6:] == digests[6:]).any()
    swapped = np.concatenate([ids[16:32], ids[:16], ids[32:]])
    assert not (prefix_digests(swapped, 16) == digests).any()
    assert len(set(digests.tolist())) == len(digests)


def test_they_follow_a_change_of_size_and_policy_with_what_they_hold():
    """From then on they are what ghosts of that size and policy would have been, and count anew."""
    requests = talks(400)
    ghosts = GhostCaches(400, POLICIES["fifo"], most_blocks=2_000)
    fresh = GhostCaches(1_200, POLICIES["lru"])
    for now, (prompt, answer) in enumerate(requests):
        if now == 200:
            assert ghosts.follow(1_200, POLICIES["lru"])
            assert ghosts.num_requests == 0
            fresh.follow(1_200, POLICIES["slru"])
            fresh.follow(1_200, POLICIES["lru"])  # counts anew
        assert not ghosts.follow(ghosts._num_blocks, ghosts._policy)
        ghosts.take(float(now), b"ns", prompt, answer, Outcome.TURN)
        fresh.take(float(now), b"ns", prompt, answer, Outcome.TURN)
    assert ghosts.num_requests == 200
    # The smallest has nothing left of what it held at the change; larger ones still miss what they could not hold.
    one, other = ghosts.curve()[1], fresh.curve()[1]
    assert (one.size_tokens, other.size_tokens) == (600 * 16, 600 * 16)
    assert one.hit_rate == pytest.approx(other.hit_rate, abs=0.02)
    assert {ghost._cache.policy.name for ghost in ghosts._ghosts} == {"lru"}


@pytest.mark.parametrize("share", [1.0, SHARE])
def test_they_grant_the_wishes_that_requests_had(share):
    """A system prompt that is worth keeping outlasts what came later, and the rest of its request does not."""
    num_blocks = 512
    rng = random.Random(1)
    system, rest = ([rng.randrange(50_000) for _ in range(2_000)] for _ in range(2))
    flood = [[rng.randrange(50_000) for _ in range(4_000)] for _ in range(4)]

    def hits(wishes) -> float:
        ghosts = GhostCaches(num_blocks, POLICIES["lru"], share=share)
        for now, prompt in enumerate([system + rest, *flood, system + rest]):
            mine = prompt == system + rest
            ghosts.take(float(now), b"ns", prompt, [1], Outcome.TURN, wishes if mine else ())
        now_point = next(point for point in ghosts.curve() if point.factor == 1.0)
        return now_point.hit_rate * ghosts.num_prompt_tokens

    assert hits(()) == 0
    assert hits([Wish(90, start=0, stop=2_000)]) == pytest.approx(2_000, rel=0.35 if share < 1 else 0.01)
