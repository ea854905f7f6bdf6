"""Whatever an engine does, in whatever order: every invariant, the ledger and every byte, after every step.

The same steps each time; `SPOLIA_EXAMPLES=20000 pytest tests/kvcache/test_kv_state_machine.py` takes others, so many.
"""

import os

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kvcache_world import World

from spolia.kvcache import POLICIES, GroupSpec, Outcome, Wish, make_policy

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)
NAMESPACES = st.sampled_from([b"ns", b"two"])
PICK = st.integers(0, 1_000)
WISHES = st.lists(
    st.builds(
        lambda priority, ttl_s, start, size: Wish(priority, ttl_s, start, size and start + size),
        st.integers(0, 100),
        st.none() | st.integers(0, 200),
        st.integers(0, 50),
        st.none() | st.integers(1, 50),
    ),
    max_size=2,
)


class CacheMachine(RuleBasedStateMachine):
    """An engine with a few sequences at a time and pools that are always short."""

    num_steps = 0
    policies = set()  # noqa: RUF012 - counted over all runs

    @initialize(window=st.sampled_from([None, 1, 15, 16, 17, 40]), policy=st.sampled_from(sorted(POLICIES)))
    def start(self, window, policy):
        groups = (GroupSpec(14),) if window is None else (GroupSpec(14), GroupSpec(11, window=window))
        self.world = World(*groups, policy=make_policy(policy))
        CacheMachine.policies.add(policy)
        self.prompts = [np.zeros(0, np.int32)]
        self.pinned = {}

    def pick(self, number):
        return self.world.running[number % len(self.world.running)]

    def is_busy(self):
        return bool(self.world.running)

    @precondition(lambda self: len(self.world.running) < 4)
    @rule(base=PICK, keep=PICK, tail=TOKENS, namespace=NAMESPACES, wishes=WISHES)
    def open(self, base, keep, tail, namespace, wishes):
        base = self.prompts[base % len(self.prompts)]
        prompt = np.append(base[: keep % (len(base) + 1)], np.array(tail, np.int32)).astype(np.int32)[:100]
        self.prompts = [*self.prompts[-20:], prompt]
        self.world.open(prompt, namespace, wishes)

    @precondition(is_busy)
    @rule(number=PICK, size=st.integers(1, 50))
    def compute(self, number, size):
        sequence = self.pick(number)
        if not sequence.num_pending:
            sequence.append(number % 3)
        self.world.step(sequence, size)

    @precondition(is_busy)
    @rule(number=PICK, size=st.integers(1, 20))
    def decode(self, number, size):
        sequence = self.pick(number)
        for token in range(size):
            if not sequence.num_pending:
                sequence.append(token % 3)
            if not self.world.step(sequence, 1):
                break

    @precondition(is_busy)
    @rule(number=PICK, size=st.integers(1, 60))
    def reserve_and_abort(self, number, size):
        sequence = self.pick(number)
        self.world.cache.grow(sequence.lease, sequence.lease.num_computed_tokens + size)
        self.world.close(sequence)

    @rule(base=PICK, keep=PICK, tail=TOKENS, namespace=NAMESPACES, num_spare=st.integers(0, 2))
    def bring_in(self, base, keep, tail, namespace, num_spare):
        base = self.prompts[base % len(self.prompts)]
        prompt = np.append(base[: keep % (len(base) + 1)], np.array(tail, np.int32)).astype(np.int32)[:100]
        self.prompts = [*self.prompts[-20:], prompt]
        self.world.bring_in(prompt, namespace, num_spare)

    @rule(sizes=st.tuples(st.integers(1, 14), st.integers(1, 11)))
    def resize(self, sizes):
        cache = self.world.cache
        leased = [ledger.leased for ledger in cache.ledger()]
        sizes = sizes[: len(leased)]
        before = [ledger.total for ledger in cache.ledger()]
        withheld = cache.resize(sizes)
        assert (withheld is None) == any(size < held for size, held in zip(sizes, leased, strict=True))
        assert [ledger.total for ledger in cache.ledger()] == (before if withheld is None else list(sizes))

    @rule(policy=st.sampled_from(sorted(POLICIES)))
    def use_policy(self, policy):
        cached = [ledger.cached for ledger in self.world.cache.ledger()]
        self.world.cache.use_policy(make_policy(policy))
        assert [ledger.cached for ledger in self.world.cache.ledger()] == cached

    @rule(base=PICK, keep=PICK, namespace=NAMESPACES, is_alone=st.booleans())
    def clear_prefix(self, base, keep, namespace, is_alone):
        base = self.prompts[base % len(self.prompts)]
        self.world.cache.clear_prefix(namespace, base[: keep % (len(base) + 1)], is_alone=is_alone)

    @precondition(is_busy)
    @rule(number=PICK, outcome=st.sampled_from(Outcome))
    def close(self, number, outcome):
        sequence = self.pick(number)
        self.prompts = [*self.prompts[-20:], sequence.token_ids]
        self.world.close(sequence, outcome)

    @rule(number=PICK, namespace=NAMESPACES, ttl_s=st.none() | st.integers(0, 200))
    def pin(self, number, namespace, ttl_s):
        prompt = self.prompts[number % len(self.prompts)]
        pin = self.world.cache.pin(namespace, prompt, ttl_s)
        if pin is not None:
            self.pinned[pin.id] = prompt[: pin.num_tokens]

    @rule(namespace=NAMESPACES, blocks=st.integers(0, 14))
    def set_quota(self, namespace, blocks):
        self.world.cache.set_quota(namespace, "one" if namespace == b"ns" else "two", 16 * blocks)

    @rule(number=PICK)
    def unpin(self, number):
        pins = self.world.cache.pins()
        if pins:
            assert self.world.cache.unpin(pins[number % len(pins)].id)

    @rule(number=PICK, namespace=NAMESPACES)
    def spend(self, number, namespace):
        self.world.cache.spend(namespace, self.prompts[number % len(self.prompts)])

    @rule(namespace=st.none() | NAMESPACES)
    def clear(self, namespace):
        cache = self.world.cache

        def held():
            pins = cache.pins(namespace)
            return {pin: cache.probe(pin.namespace, self.pinned[pin.id][: pin.num_tokens]) for pin in pins}

        before = held()
        cache.clear(namespace)
        after = held()
        assert all(found >= before[pin] for pin, found in after.items())  # more, where a child's block mends a gap
        assert all(pin in after or pin.until is not None for pin in before)  # time passes meanwhile: some may run out

    @invariant()
    def everything_holds(self):
        if hasattr(self, "world"):
            CacheMachine.num_steps += 1
            self.world.check()
            for entry in self.world.cache.ledger():
                assert entry.free + entry.cached + entry.leased == entry.total

    def teardown(self):
        for sequence in list(self.world.running):
            self.world.close(sequence)
        self.world.cache.clear(pinned=True)
        assert all(entry.free == entry.total for entry in self.world.cache.ledger())


def test_ten_thousand_random_steps_break_no_invariant():
    CacheMachine.num_steps = 0
    CacheMachine.policies.clear()
    num_examples = os.environ.get("SPOLIA_EXAMPLES")
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=int(num_examples or 220),
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=num_examples is None,
        ),
    )
    assert CacheMachine.num_steps >= 10_000
    assert CacheMachine.policies == set(POLICIES)
