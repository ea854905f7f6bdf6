"""Whatever an engine does, in whatever order: every invariant, the ledger and every byte, after every step."""

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

from spolia.kvcache import GroupSpec

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)
NAMESPACES = st.sampled_from([b"ns", b"two"])
PICK = st.integers(0, 1_000)


class CacheMachine(RuleBasedStateMachine):
    """An engine with a few sequences at a time and pools that are always short."""

    num_steps = 0

    @initialize(window=st.sampled_from([None, 1, 15, 16, 17, 40]))
    def start(self, window):
        groups = (GroupSpec(14),) if window is None else (GroupSpec(14), GroupSpec(11, window=window))
        self.world = World(*groups)
        self.prompts = [np.zeros(0, np.int32)]

    def pick(self, number):
        return self.world.running[number % len(self.world.running)]

    def is_busy(self):
        return bool(self.world.running)

    @precondition(lambda self: len(self.world.running) < 4)
    @rule(base=PICK, keep=PICK, tail=TOKENS, namespace=NAMESPACES)
    def open(self, base, keep, tail, namespace):
        base = self.prompts[base % len(self.prompts)]
        prompt = np.append(base[: keep % (len(base) + 1)], np.array(tail, np.int32)).astype(np.int32)[:100]
        self.prompts = [*self.prompts[-20:], prompt]
        self.world.open(prompt, namespace)

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

    @precondition(is_busy)
    @rule(number=PICK)
    def close(self, number):
        sequence = self.pick(number)
        self.prompts = [*self.prompts[-20:], sequence.token_ids]
        self.world.close(sequence)

    @rule(namespace=st.none() | NAMESPACES)
    def clear(self, namespace):
        self.world.cache.clear(namespace)

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
        self.world.cache.clear()
        assert all(entry.free == entry.total for entry in self.world.cache.ledger())


def test_ten_thousand_random_steps_break_no_invariant():
    CacheMachine.num_steps = 0
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=220, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    assert CacheMachine.num_steps >= 10_000
