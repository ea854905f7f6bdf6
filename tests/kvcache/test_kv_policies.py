"""Each policy against a naive model of it, on items of one block; then what policies have in common."""

import random
from collections import OrderedDict

import numpy as np
import pytest
from kvcache_world import BLOCK, FakeClock

from spolia.kvcache import POLICIES, GroupSpec, KVCache, MissReason, Outcome, RetentionPolicy, Wish, make_policy

NS = b"ns"
CAPACITY = 20


class ManualClock:
    """Stands nearly still unless it is moved."""

    now = 0.0

    def __call__(self):
        self.now += 1e-6
        return self.now


def block_of(item):
    return np.arange(BLOCK, dtype=np.int32) + BLOCK * item


def use(cache, ids, wishes=(), outcome=Outcome.TURN, namespace=NS):
    """As a request would: reuse what is there, compute the rest; whether all of it was there."""
    ids = np.asarray(ids, np.int32)
    with cache.open(namespace, np.append(ids, np.int32(1_000_000)), wishes=wishes) as lease:
        missing = ids[lease.num_computed_tokens :]
        if len(missing):
            assert cache.grow(lease, len(ids)) is not None
            cache.commit(lease, missing)
        lease.close(outcome)
    return not len(missing)


# -- Naive models: a list of items, and how one is chosen to go --------------------------------------------------------


class NaiveLru:
    def __init__(self):
        self.items = OrderedDict()

    def access(self, item):
        is_hit = item in self.items
        if is_hit:
            self.hit(item)
        else:
            if len(self.items) == CAPACITY:
                self.evict()
            self.items[item] = 0
        return is_hit

    def hit(self, item):
        self.items.move_to_end(item)

    def evict(self):
        self.items.popitem(last=False)


class NaiveFifo(NaiveLru):
    def hit(self, item):
        pass


class NaiveLfu(NaiveLru):
    def hit(self, item):
        self.items[item] += 1
        self.items.move_to_end(item)

    def evict(self):
        least = min(self.items.values())
        del self.items[next(item for item, hits in self.items.items() if hits == least)]


class NaiveSlru(NaiveLru):
    """`items` are those on probation; at an eviction, what is too much comes down from the protected list."""

    def __init__(self):
        super().__init__()
        self.protected = OrderedDict()

    def access(self, item):
        if item in self.protected:
            self.protected.move_to_end(item)
            return True
        if item in self.items:
            del self.items[item]
            self.protected[item] = 0
            return True
        if len(self.items) + len(self.protected) == CAPACITY:
            while len(self.protected) > 0.8 * CAPACITY:
                self.items[self.protected.popitem(last=False)[0]] = 0
            self.items.popitem(last=False)
        self.items[item] = 0
        return False


class NaiveS3Fifo:
    def __init__(self):
        self.small, self.main, self.ghost, self.credit = [], [], set(), {}

    def access(self, item):
        if item in self.credit:
            self.credit[item] = min(3, self.credit[item] + 1)
            return True
        while len(self.credit) == CAPACITY:
            self.evict()
        self.credit[item] = 0
        (self.main if item in self.ghost else self.small).append(item)
        return False

    def evict(self):
        if len(self.small) > 0.1 * CAPACITY or not self.main:
            item = self.small.pop(0)
            if self.credit[item] > 1:
                self.credit[item] = 0
                self.main.append(item)
                return
        else:
            item = self.main.pop(0)
            if self.credit[item]:
                self.credit[item] -= 1
                self.main.append(item)
                return
        self.ghost.add(item)
        del self.credit[item]


class NaiveCost(NaiveLru):
    """All items are as long and begin at 0, so they differ by uses and by the level at which they came."""

    per_token = 1 + 0.5 * BLOCK / 4096

    def __init__(self):
        super().__init__()
        self.level, self.worth, self.hits = 0.0, {}, {}

    def access(self, item):
        is_hit = super().access(item)
        self.hits[item] = self.hits[item] + 1 if is_hit else 0
        self.worth[item] = self.level + (1 + self.hits[item]) * self.per_token
        return is_hit

    def evict(self):
        least = min(self.items, key=lambda item: self.worth[item])
        self.level = self.worth[least]
        del self.items[least]


NAIVE = {
    "lru": NaiveLru,
    "priority": NaiveLru,
    "lifecycle": NaiveLru,
    "ttl": NaiveLru,
    "fifo": NaiveFifo,
    "lfu": NaiveLfu,
    "slru": NaiveSlru,
    "s3fifo": NaiveS3Fifo,
    "cost": NaiveCost,
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_a_policy_hits_and_misses_as_its_naive_model(name, seed):
    rng = random.Random(seed)
    cache = KVCache([GroupSpec(CAPACITY)], clock=FakeClock(), policy=make_policy(name))
    naive = NAIVE[name]()
    outcomes = []
    for number in range(1_500):
        # Few items are popular, and which they are changes.
        item = int(rng.paretovariate(0.8)) % 300 if rng.random() < 0.8 else 300 + (number // 50) % 40
        expected = naive.access(item)
        assert use(cache, block_of(item)) == expected, f"access {number}, of item {item}"
        outcomes.append(expected)
    assert 300 < sum(outcomes) < 1_400
    cache.check()


def test_the_models_tell_the_policies_apart():
    """Seven orders, seven sets of hits: a policy that did as another would be caught."""
    rng = random.Random(0)
    items = [int(rng.paretovariate(0.8)) % 300 for _ in range(1_500)]
    hits = {model: tuple(map(model().access, items)) for model in set(NAIVE.values())}
    assert len(set(hits.values())) == len(hits)


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_leased_stays_and_everything_else_can_go(name):
    cache = KVCache([GroupSpec(10)], clock=FakeClock(), policy=make_policy(name))
    for item in range(8):
        for _ in range(item % 3 + 1):
            use(cache, block_of(item))
    with cache.open(NS, np.append(block_of(5), 1)) as held, cache.open(NS, np.arange(9_000, 9_200)) as hog:
        assert held.num_computed_tokens == BLOCK
        assert cache.grow(hog, 9 * BLOCK) is not None
        assert cache.grow(hog, 10 * BLOCK) is None
        cache.check()
    assert cache.probe(NS, np.append(block_of(5), 1)) == BLOCK


# -- Wishes ------------------------------------------------------------------------------------------------------------


def make(num_blocks=4, policy="lru"):
    clock = ManualClock()
    return KVCache([GroupSpec(num_blocks)], clock=clock, policy=make_policy(policy)), clock


def is_there(cache, item):
    return cache.probe(NS, np.append(block_of(item), 1)) == BLOCK


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"priority"}))
def test_priority_comes_before_the_policy_in_three_levels(name):
    cache, _ = make(policy=name)
    for item, priority in enumerate((90, 50, 10, 50)):
        use(cache, block_of(item), [Wish(priority)])
    use(cache, block_of(4))
    assert [is_there(cache, item) for item in range(5)] == [True, True, False, True, True]
    use(cache, block_of(5))
    use(cache, block_of(6))
    use(cache, block_of(7))
    assert is_there(cache, 0)


def test_the_priority_policy_tells_each_level_from_the_next():
    cache, _ = make(policy="priority")
    for item, priority in enumerate((63, 61, 62, 64)):
        use(cache, block_of(item), [Wish(priority)])
    for gone, item in enumerate((4, 5, 6), start=1):
        use(cache, block_of(item), [Wish(99)])
        assert sum(is_there(cache, old) for old in range(4)) == 4 - gone
    assert [is_there(cache, item) for item in range(4)] == [False, False, False, True]


def test_what_has_expired_goes_first_and_can_be_hit_until_it_does():
    cache, clock = make()
    use(cache, block_of(0), [Wish(ttl_s=10, priority=100)])
    for item in (1, 2, 3):
        clock.now += 4
        use(cache, block_of(item))
    clock.now = 9.9
    use(cache, block_of(0))  # within its time: that begins anew
    clock.now = 25.0
    assert is_there(cache, 0)
    use(cache, block_of(4))
    assert [is_there(cache, item) for item in range(5)] == [False, True, True, True, True]
    explanation = cache.explain(NS, np.append(block_of(0), 1)).explanation
    assert (explanation.reason, explanation.evicted.cause) == (MissReason.EXPIRED, "lru")


def test_before_it_expires_its_priority_holds():
    cache, clock = make()
    use(cache, block_of(0), [Wish(ttl_s=10, priority=100)])
    for item in range(1, 9):
        clock.now += 1
        use(cache, block_of(item))
    assert is_there(cache, 0)


def test_a_wish_for_a_range_leaves_the_rest_alone():
    cache, _ = make(num_blocks=8)
    prompt = np.arange(5 * BLOCK)
    use(cache, prompt, [Wish(90, stop=40)])
    for item in range(100, 110):
        use(cache, block_of(item))
    assert cache.probe(NS, np.append(prompt, 1)) == 40
    cache.check()


def test_of_several_wishes_for_the_same_tokens_the_strongest_counts():
    for wishes in ([Wish(90), Wish(10)], [Wish(10), Wish(90)]):
        cache, _ = make()
        use(cache, block_of(0), wishes)
        use(cache, block_of(0), [Wish(20)])
        for item in range(1, 9):
            use(cache, block_of(item))
        assert is_there(cache, 0)


def test_who_cares_little_does_not_take_from_others_what_they_share():
    cache, _ = make()
    use(cache, block_of(0))
    use(cache, block_of(0), [Wish(0)])
    use(cache, block_of(1))
    use(cache, block_of(2), [Wish(0)])
    use(cache, block_of(2))  # others use it as well
    for item in (3, 4):
        use(cache, block_of(item))
    assert [is_there(cache, item) for item in range(5)] == [False, True, True, True, True]  # plain LRU


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"priority": 101}, "priority is 101"),
        ({"priority": -1}, "from 0 to 100"),
        ({"ttl_s": -1}, "ttl_s is -1"),
        ({"ttl_s": float("inf")}, "ttl_s is inf"),
        ({"start": 5, "stop": 5}, "no range"),
        ({"start": -1}, "no range"),
    ],
)
def test_impossible_wishes_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Wish(**fields)


# -- Outcomes, closed conversations ------------------------------------------------------------------------------------


def test_lifecycle_keeps_what_waits_for_a_tool_for_a_minute():
    cache, clock = make(policy="lifecycle")
    use(cache, block_of(0), outcome=Outcome.TOOL_CALL)
    for item in range(1, 20):
        clock.now += 3
        use(cache, block_of(item))
        assert is_there(cache, 0)
    clock.now += 3.5
    use(cache, block_of(20))
    assert not is_there(cache, 0)


def test_lifecycle_lets_go_of_it_when_the_turn_has_ended():
    cache, clock = make(policy="lifecycle")
    use(cache, block_of(0), outcome=Outcome.TOOL_CALL)
    use(cache, block_of(0), outcome=Outcome.TURN)
    for item in range(1, 5):
        clock.now += 1
        use(cache, block_of(item))
    assert not is_there(cache, 0)


@pytest.mark.parametrize("name", POLICIES)
def test_a_closed_conversation_goes_first_but_not_what_it_shares(name):
    cache, _ = make(num_blocks=12, policy=name)
    trunk = np.arange(3 * BLOCK)
    talks = [np.append(trunk, block_of(100 + talk)) for talk in range(3)]
    for talk in talks:
        use(cache, talk)
    use(cache, np.append(talks[2], block_of(200)))
    use(cache, np.arange(9_000, 9_000 + 3 * BLOCK))
    cache.spend(NS, np.append(talks[2], block_of(200)))
    use(cache, block_of(300))
    use(cache, np.append(block_of(301), block_of(302)))
    use(cache, block_of(303))
    left = [cache.probe(NS, np.append(talk, 1)) for talk in talks]
    assert left == [4 * BLOCK, 4 * BLOCK, 3 * BLOCK]
    reason = cache.explain(NS, np.append(talks[2], 1)).explanation.reason
    assert reason is MissReason.EXPIRED


def test_a_closed_conversation_that_comes_back_is_like_any_other():
    cache, _ = make(policy="lru")
    use(cache, block_of(0))
    cache.spend(NS, block_of(0))
    for item in (1, 2, 3):
        use(cache, block_of(item))
    use(cache, block_of(0))
    use(cache, block_of(4))
    assert [is_there(cache, item) for item in range(5)] == [True, False, True, True, True]


# -- Pins --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_a_pin_outlasts_everything_else(name):
    cache, _ = make(num_blocks=6, policy=name)
    prompt = np.arange(40)
    use(cache, prompt)
    pin = cache.pin(NS, prompt)
    assert (pin.num_tokens, pin.until) == (40, None)
    for item in range(100, 130):
        use(cache, block_of(item), [Wish(100)])
        use(cache, block_of(item))
    assert cache.probe(NS, np.append(prompt, 1)) == 40
    assert cache.unpin(pin.id)
    for item in range(200, 220):
        for _ in range(3):
            use(cache, block_of(item), [Wish(100)])
    assert cache.probe(NS, np.append(prompt, 1)) == 0
    assert not cache.unpin(pin.id)
    cache.check()


def test_a_pin_ends_at_its_last_token_whatever_follows():
    cache, _ = make(num_blocks=8)
    use(cache, np.arange(60))
    cache.pin(NS, np.arange(37))
    use(cache, np.append(np.arange(37), np.arange(500, 520)))
    for item in range(100, 110):
        use(cache, block_of(item))
    assert cache.probe(NS, np.arange(60)) == 37
    cache.check()


def test_pins_have_a_quota_and_share_what_they_share():
    cache, _ = make(num_blocks=8)  # a quota of four blocks
    use(cache, np.arange(48))
    use(cache, np.append(np.arange(32), np.arange(500, 540)))
    assert cache.pin(NS, np.arange(48)) is not None
    assert cache.pin(NS, np.arange(40)) is not None  # nothing new
    assert cache.pin(NS, np.append(np.arange(32), np.arange(500, 540))) is None
    assert cache.pin(NS, np.append(np.arange(32), np.arange(500, 516))) is not None


def test_pins_that_take_no_room_are_bounded_too(monkeypatch):
    monkeypatch.setattr("spolia.kvcache.pins._MAX_PINS", 3)
    cache, _ = make(num_blocks=8)
    made = [cache.pin(NS, []) for _ in range(4)]
    assert [pin is not None for pin in made] == [True, True, True, False]
    assert cache.pin(NS, [], pin_id=made[0].id, label="again") is not None  # in its own place
    assert [pin.label for pin, _ in cache.pinned()] == ["", "", "again"]
    assert cache.unpin(made[1].id)
    assert cache.pin(NS, []) is not None
    assert len(cache.pins()) == 3
    cache.check()


def test_a_pin_lifts_itself_when_its_time_is_over():
    cache, clock = make()
    use(cache, block_of(0))
    cache.pin(NS, block_of(0), ttl_s=10)
    for item in range(1, 10):
        clock.now += 1
        use(cache, block_of(item))
        assert is_there(cache, 0)
    clock.now += 1
    assert cache.pins() == ()
    use(cache, block_of(10))
    assert not is_there(cache, 0)


def test_a_sequence_that_needs_everything_comes_before_a_pin():
    cache, _ = make()
    use(cache, block_of(0))
    pin = cache.pin(NS, block_of(0))
    with cache.open(NS, np.arange(900, 990)) as hog:
        assert cache.grow(hog, 4 * BLOCK) is not None
        cache.check()
    assert not is_there(cache, 0)
    use(cache, block_of(0))
    assert [held.num_tokens for held in cache.pins()] == [0]  # computed again, not pinned again, and told
    cache.clear()
    assert not is_there(cache, 0)
    assert cache.unpin(pin.id)
    cache.check()


# -- Evidence ----------------------------------------------------------------------------------------------------------


def test_an_eviction_says_for_whom():
    cache, _ = make()
    for item in range(4):
        use(cache, block_of(item))
    with cache.open(b"theirs", np.arange(900, 990), label="request-7") as hog:
        cache.grow(hog, BLOCK)
    evicted = cache.explain(NS, np.append(block_of(0), 1)).explanation.evicted
    assert evicted.beneficiary == ("request-7", b"theirs")


# -- Names -------------------------------------------------------------------------------------------------------------


class Backwards(RetentionPolicy):
    """One of a user's own."""

    name = "backwards"

    def rank(self, node, now):
        return (-now,)


def test_a_policy_of_ones_own_is_found_by_its_import_path():
    assert isinstance(make_policy("test_kv_policies:Backwards"), RetentionPolicy)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mru", "there are lru, fifo"),
        ("no.such.module:Class", "cannot be imported"),
        ("test_kv_policies:Nothing", "cannot be imported"),
        ("test_kv_policies:ManualClock", "derive a class"),
        (":", "cannot be imported"),
    ],
)
def test_what_is_no_policy_is_refused_with_what_there_is(name, message):
    with pytest.raises(ValueError, match=message):
        make_policy(name)
