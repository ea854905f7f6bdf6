"""Which tokens the next step computes, and who waits, runs and gives way.

    submit -> waiting --admit--> running --finish--> (gone)
              preempted <-preempt--+
                  +------admit-----^

Order. Preempted sequences come back first, oldest first; no new one is admitted before them. Of the waiting ones,
that one goes first which has the fewest tokens to compute, less those that are cached for it and may be gone later; the
oldest `LOOKAHEAD` are compared. Nobody is passed over more than `MAX_PASSED_OVER` times: then it is first. A sequence
whose prefix a running one is computing at this moment waits for that, as long as it has not aged.

Shares. Of the step's tokens each running sequence has one, and each tenant its weight's share of the others. Within a
tenant the oldest prompt goes first, but for a quarter: that is for prompts with less left than the oldest has, the
least first, whether they run or wait. So a short question has its answer while a long document is being read, and the
document is read at three quarters of the speed at worst; among equals, the order is that of arrival.

    budget 256    running: 30,000 left -> 200    waiting: 40,000 and 56 left -> 0 and 56

Room. Running sequences are served oldest first. If one cannot grow, the newest gives way: it has no grant in this step
to take back, and what it computed stays in the tree until somebody needs the blocks. A sequence is admitted only if all
its known tokens fit beside what the running ones still need, and some headroom to grow. Headroom doubles at each
preemption and shrinks with each sequence that finishes, so a storm calms down by itself.

Progress. `Admission` refuses what would not fit in empty pools; the oldest running sequence is never preempted for
another; with nothing running, the first in order is admitted without regard to headroom.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from spolia.engine.fairness import FairShares, Prompt, Tenant, WaitingRoom, divide
from spolia.engine.request import Sequence
from spolia.errors import Bug
from spolia.kernels import BLOCK_SIZE
from spolia.kvcache import BlockCopy, KVCache, Outcome

__all__ = ["LOOKAHEAD", "MAX_EXTRA_LOGITS", "MAX_PASSED_OVER", "Entry", "Scheduler", "StepPlan"]

LOOKAHEAD = 32
"""Waiting sequences that are compared at each admission: bounds its cost, however many wait."""

MAX_PASSED_OVER = 16
"""Later requests that may be admitted before an earlier one."""

MAX_EXTRA_LOGITS = 64
"""Rows of a step whose logits are wanted besides the last of each sequence: bounds the memory for them."""

_MAX_HEADROOM = 64  # blocks a running sequence: 1,024 tokens


class Entry(NamedTuple):
    """The step computes tokens [start, stop) of `sequence`, and its logits if that is all of its tokens."""

    sequence: Sequence
    start: int
    stop: int


class Candidate(NamedTuple):
    """A waiting sequence, and how many of its tokens are cached."""

    sequence: Sequence
    num_cached_tokens: int

    @property
    def num_left(self) -> int:
        """Tokens to compute until it has its first."""
        return max(1, self.sequence.num_tokens - self.num_cached_tokens)

    @property
    def has_aged(self) -> bool:
        """It was passed over often enough, or has run before."""
        return self.sequence.num_passed_over >= MAX_PASSED_OVER or self.sequence.num_ever_computed_tokens > 0


Order = dict[str, list[Candidate]]
"""By tenant, who may start, the next first."""


@dataclass(slots=True)
class StepPlan:
    """One step.

    Attributes:
        entries: in the order of the step's rows.
        copies: to be made before the step, in order.
        num_preempted: sequences that gave way.
        num_extra_logits: rows whose logits are wanted besides the last of each sequence; 0: the step is a plain one.
        is_plain: no sequence has drafts to check, a prompt to score, or another that it is paired with.
    """

    entries: list[Entry] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    num_preempted: int = 0
    num_extra_logits: int = 0
    is_plain: bool = True

    def add(self, sequence: Sequence, start: int, stop: int) -> None:
        self.entries.append(Entry(sequence, start, stop))
        self.is_plain = self.is_plain and not sequence.is_paired

    def take_back(self, sequence: Sequence) -> int:
        """Undo the last `add`, if it was of this sequence; how many tokens it was granted."""
        if not self.entries or self.entries[-1].sequence is not sequence:
            return 0
        entry = self.entries.pop()
        return entry.stop - entry.start


class Scheduler:
    """Owns all sequences that are not finished, and their leases. One thread.

    Args:
        max_batch_tokens: token budget of a step, at least `max_sequences`.
        token_bytes: a token's KV in all groups.
    """

    def __init__(self, cache: KVCache, *, max_batch_tokens: int, max_sequences: int, token_bytes: int = 1) -> None:
        self._cache = cache
        self._token_bytes = token_bytes
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self._waiting = WaitingRoom()
        self._shares = FairShares()
        self._preempted: deque[Sequence] = deque()  # oldest first
        self._running: list[Sequence] = []  # oldest first
        self._free_lanes = list(range(max_sequences - 1, -1, -1))
        self._headroom = 1
        self._is_full = False  # there was no room for the first in order, and nothing has changed since

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._preempted)

    @property
    def running(self) -> list[Sequence]:
        """Oldest first. Not to be changed."""
        return self._running

    @property
    def num_running(self) -> int:
        return len(self._running)

    def sequences(self) -> Iterable[Sequence]:
        """All of them: running, preempted, waiting."""
        return [*self._running, *self._preempted, *self._waiting]

    def submit(self, sequence: Sequence) -> None:
        self._waiting.add(sequence)
        self._shares.enter(sequence.request.tenant)
        self._is_full = False

    def note_room(self) -> None:
        """There may be room where there was none."""
        self._is_full = False

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is. Its blocks are evictable or free at once."""
        if sequence.lease is not None:
            for one in (sequence, sequence.guide):
                if one is not None:
                    self._running.remove(one)
                    self._stop_running(one, sequence.outcome)
            self._headroom = max(1, self._headroom - 1)
        elif not self._waiting.discard(sequence):
            self._preempted.remove(sequence)
        self._shares.leave(sequence.request.tenant)

    def restart(self, sequence: Sequence, change: Callable[[], None]) -> None:
        """Let a running sequence begin anew with other tokens: what it computed stays with the tokens it was of."""
        self._running.remove(sequence)
        self._stop_running(sequence, Outcome.BROKEN_OFF)
        change()
        self._preempted.appendleft(sequence)

    def plan_step(self) -> StepPlan:
        """Choose which tokens the next step computes; empty only if there are no sequences.

        There is no prefill or decode phase: a sequence lags by `num_pending_tokens` and a step lets it catch up within
        the token budget, of which each running sequence behind it keeps one token.
        """
        plan = StepPlan()
        budget = self.max_batch_tokens
        order = self._order() if self._can_admit else None
        grants = self._grants(budget, order or {})
        index = 0
        while index < len(self._running):
            sequence = self._running[index]
            num_behind = len(self._running) - index - 1
            start = sequence.num_computed_tokens
            most = budget - num_behind
            if grants is not None and sequence.num_pending_tokens > 1:
                most = min(most, grants[index])
            stop = min(sequence.num_tokens, start + most)
            if sequence.meets_at is not None and start < sequence.meets_at:
                stop = min(stop, sequence.meets_at)
            if sequence.num_drafts or sequence.is_scoring:
                stop = self._stop_of_special(sequence, start, stop, start + most, plan)
            if stop <= sequence.num_slots or self._grow(sequence, stop, plan):
                if stop > start:  # else it waits for the other of its pair
                    plan.add(sequence, start, stop)
                budget -= stop - start
                index += 1
            elif sequence.leader is not None:  # which was before it, and gave way with it
                budget += plan.take_back(sequence.leader)
                index -= 1
        if budget and self._can_admit:
            budget = self._admit(plan, budget, self._order() if order is None else order)
        if budget and grants is not None:
            self._top_up(plan, budget)
        if not plan.entries and self.num_waiting:
            raise Bug(f"{self.num_waiting} sequences wait, none runs, and none could be admitted")
        return plan

    @property
    def _can_admit(self) -> bool:
        return bool(self.num_waiting and self._free_lanes and not self._is_full)

    def _grants(self, budget: int, order: Order) -> list[int] | None:
        """Tokens of the budget for each running sequence; None: they need not share.

        What those of `order` get is left, so that they can be admitted in this step.
        """
        behind = [index for index, sequence in enumerate(self._running) if sequence.num_pending_tokens > 1]
        if not behind:
            return None
        newcomers = self._newcomers(order)
        if len(behind) + len(newcomers) == 1:
            return None
        prompts = [
            Prompt(self._running[index].request.tenant, self._running[index].num_pending_tokens - 1) for index in behind
        ] + [Prompt(one.sequence.request.tenant, one.num_left, has_aged=one.has_aged) for one in newcomers]
        grants = [1] * len(self._running)
        for index, granted in zip(behind, divide(budget - len(grants), prompts), strict=False):
            grants[index] += granted
        return grants

    def _newcomers(self, order: Order) -> list[Candidate]:
        """Whoever could be admitted in this step, the first of each tenant first."""
        if self._preempted and self._can_admit:
            return [self._candidate(self._preempted[0])]
        return [one for candidates in order.values() for one in candidates if self._would_start(one)]

    def _would_start(self, candidate: Candidate) -> bool:
        return self._may_start(candidate.sequence.request.tenant) and not self._is_being_computed(candidate)

    def _top_up(self, plan: StepPlan, budget: int) -> None:
        """What newcomers have left goes to the oldest that can use it, if nobody has to give way for it."""
        for place, (sequence, start, stop) in enumerate(plan.entries):
            if sequence.is_scoring or sequence.num_drafts or sequence.meets_at is not None:
                continue
            more = min(budget, sequence.num_tokens - stop)
            if more > 0 and (stop + more <= sequence.num_slots or self._take_slots(sequence, stop + more, plan)):
                plan.entries[place] = Entry(sequence, start, stop + more)
                budget -= more

    def _stop_of_special(self, sequence: Sequence, start: int, stop: int, most: int, plan: StepPlan) -> int:
        """How far a sequence goes of whose tokens more than the last have logits that are wanted.

        Drafts take what is free, and nothing that anybody else could use: no token of another's budget, no cached
        block.
        """
        plan.is_plain = False
        left = MAX_EXTRA_LOGITS - plan.num_extra_logits
        if sequence.is_scoring:
            stop = max(start + 1, min(stop, start + left))
        if stop == sequence.num_tokens and sequence.num_drafts:
            stop = min(stop + min(sequence.num_drafts, max(left, 0)), most)
            room = -(-sequence.num_tokens // BLOCK_SIZE) * BLOCK_SIZE  # it gets these slots in any case
            if stop > room and not self._takes_free_blocks(sequence, stop, plan):
                stop = room
        sequence.num_drafts = max(0, stop - sequence.num_tokens)
        plan.num_extra_logits += max(0, stop - sequence.first_logit(start) - 1)
        return stop

    def _takes_free_blocks(self, sequence: Sequence, stop: int, plan: StepPlan) -> bool:
        """Give `sequence` slots up to `stop` if that costs nobody anything."""
        if stop <= sequence.num_slots:
            return True
        num_blocks = 1 + -(-(stop - sequence.num_slots) // BLOCK_SIZE)  # one to copy a shared block to
        if any(ledger.free < num_blocks for ledger in self._cache.ledger()):
            return False
        return self._take_slots(sequence, stop, plan)

    def _grow(self, sequence: Sequence, stop: int, plan: StepPlan) -> bool:
        """Give `sequence` slots up to `stop`, preempting from the newest on; False if it had to give way itself."""
        while not self._take_slots(sequence, stop, plan):
            victim = self._running.pop()
            if victim.leader is not None:  # a pair gives way together; the leader is before its guide
                self._stop_running(victim, Outcome.BROKEN_OFF)
                victim = self._running.pop()
            self._preempt(victim)
            plan.num_preempted += 1
            if sequence in (victim, victim.guide):
                return False
        return True

    def _take_slots(self, sequence: Sequence, stop: int, plan: StepPlan) -> bool:
        num_slots = -(-stop // BLOCK_SIZE) * BLOCK_SIZE
        copies = self._cache.grow(sequence.held_lease, num_slots)
        if copies is None:
            return False
        plan.copies += copies
        sequence.num_slots = num_slots
        sequence.table_changed = True
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._stop_running(sequence, Outcome.BROKEN_OFF)
        self._preempted.appendleft(sequence)
        self._headroom = min(2 * self._headroom, _MAX_HEADROOM)

    def _stop_running(self, sequence: Sequence, outcome: Outcome) -> None:
        lease = sequence.held_lease
        if len(ids := sequence.uncommitted_ids):
            self._cache.commit(lease, ids)
        lease.close(outcome)
        sequence.lease = None
        self._free_lanes.append(sequence.lane)
        self._is_full = False
        sequence.num_ever_computed_tokens = max(sequence.num_ever_computed_tokens, sequence.num_computed_tokens)
        sequence.num_computed_tokens = sequence.num_slots = sequence.num_drafts = 0

    # Admission.

    def _order(self) -> Order:
        """By tenant, its oldest waiting sequences, in the order to start them; the preempted ones are before all."""
        return {name: self._order_of(name) for name in self._waiting.tenants()}

    def _order_of(self, tenant: str) -> list[Candidate]:
        candidates = map(self._candidate, self._waiting.oldest(tenant, LOOKAHEAD))
        # The sort is stable, so equals stay in order of arrival.
        return sorted(candidates, key=lambda one: (not one.has_aged, one.num_left - one.num_cached_tokens))

    def _candidate(self, sequence: Sequence) -> Candidate:
        return Candidate(sequence, self._cache.probe(sequence.request.namespace, sequence.known_ids))

    def _admit(self, plan: StepPlan, budget: int, order: Order) -> int:
        """Start sequences while there is budget, a lane, and room for the next in order.

        Returns:
            What is left of the budget.
        """
        while self._preempted and budget and self._free_lanes:
            num_granted = self._start(self._preempted[0], plan, budget)
            if num_granted is None:
                return budget
            self._preempted.popleft()
            budget -= num_granted
        unfinished: dict[str, int] = {}  # by tenant, what is left of the oldest prompt that the step does not finish
        for sequence, start, stop in plan.entries:
            if stop < sequence.num_tokens:
                unfinished.setdefault(sequence.request.tenant.name, sequence.num_tokens - start)
        for candidate in self._by_account(order):
            if not budget or not self._free_lanes:
                break
            sequence = candidate.sequence
            most = unfinished.get(sequence.request.tenant.name)
            if not candidate.has_aged and most is not None and candidate.num_left >= most:
                continue  # it would have crumbs, and keep a lane and blocks for them
            if self._is_being_computed(candidate):
                continue
            num_granted = self._start(sequence, plan, budget)
            if num_granted is None:
                break
            self._waiting.start(sequence)
            budget -= num_granted
        return budget

    def _by_account(self, order: Order) -> Iterator[Candidate]:
        """All of `order`. Each time the tenant of the least account is next: it is charged for what was started."""
        queues = {name: deque(candidates) for name, candidates in order.items()}
        while queues:
            name = min(queues, key=self._shares.account)
            candidate = queues[name].popleft()
            may_start = self._may_start(candidate.sequence.request.tenant)
            if not queues[name] or not may_start:
                del queues[name]
            if may_start:
                yield candidate

    def _may_start(self, tenant: Tenant) -> bool:
        """Whether this tenant may have one more lane: where tenants are told apart, none takes the last quarter."""
        if not tenant.name:
            return True
        num_lanes = sum(sequence.request.tenant.name == tenant.name for sequence in self._running)
        return num_lanes < max(1, self.max_sequences - self.max_sequences // 4)

    def _is_being_computed(self, candidate: Candidate) -> bool:
        """Whether a running prefill is about to compute tokens that `candidate`, not aged, would have to compute.

        Waiting costs a step or so, which that prefill fills. A common beginning of less than a block (BOS, say) is not
        worth it.
        """
        sequence, ids = candidate.sequence, candidate.sequence.known_ids
        wanted = max(candidate.num_cached_tokens + 1, BLOCK_SIZE)
        if candidate.has_aged or wanted >= len(ids):  # the last token is computed in any case
            return False
        return any(
            other.num_computed_tokens < wanted <= other.num_tokens
            and other.num_pending_tokens > 1
            and other.request.namespace == sequence.request.namespace
            and np.array_equal(other.token_ids[:wanted], ids[:wanted])
            for other in self._running
        )

    def _start(self, sequence: Sequence, plan: StepPlan, budget: int) -> int | None:
        """Make `sequence` run, with its guide if it has one, and grant it tokens.

        Returns:
            Their number, or None, with nothing changed, if there is no room.
        """
        guide, must_fit = sequence.guide, bool(self._running)
        if guide is not None and (len(self._free_lanes) < 2 or budget < 2):
            return None
        num_copies = len(plan.copies)
        num_granted = self._start_one(sequence, plan, budget - (guide is not None), must_fit=must_fit)
        if num_granted is not None and guide is not None:
            num_more = self._start_one(guide, plan, budget - num_granted, must_fit=must_fit)
            if num_more is None:
                plan.take_back(sequence)
                del plan.copies[num_copies:]
                self._running.remove(sequence)
                self._free_lanes.append(sequence.lane)
                _close(sequence)
                return None
            num_granted += num_more
        if num_granted is not None and not sequence.num_ever_computed_tokens:
            self._shares.charge(sequence.request.tenant, sequence.num_tokens - sequence.num_computed_tokens)
        return num_granted

    def _start_one(self, sequence: Sequence, plan: StepPlan, budget: int, *, must_fit: bool) -> int | None:
        """As `_start`, for one sequence.

        Args:
            must_fit: leave room for what the running ones still need.
        """
        request = sequence.request
        if request.tenant.kv_quota is not None:
            self._cache.set_quota(request.namespace, request.tenant.name, request.tenant.kv_quota // self._token_bytes)
        lease = self._cache.open(
            request.namespace,
            sequence.known_ids,
            resumed=sequence.num_ever_computed_tokens > 0,
            label=request.request_id,
            wishes=() if sequence.num_shifted_tokens else request.wishes,  # they go by places
            most=sequence.num_scored,
            history=request.history,
            num_restored=sequence.restored[-1][1] if sequence.restored else 0,
        )
        start = lease.num_computed_tokens
        stop = min(sequence.num_tokens, start + budget)
        if sequence.is_scoring:
            stop = self._stop_of_special(sequence, start, stop, stop, plan)
        sequence.lease = lease
        sequence.num_computed_tokens = sequence.num_slots = start
        if (must_fit and not self._has_room(sequence)) or not self._take_slots(sequence, stop, plan):
            _close(sequence)
            self._is_full = True
            return None
        sequence.lane = self._free_lanes.pop()
        self._running.append(sequence)
        plan.add(sequence, start, stop)
        return stop - start

    def _has_room(self, newcomer: Sequence) -> bool:
        """Whether what `newcomer` needs fits beside what the running sequences still need, headroom included."""
        num_needed = [0] * len(self._cache.groups)
        for sequence in (*self._running, newcomer):
            final = len(sequence.token_ids) - 1  # the last token of an answer has no KV
            num_tokens = min(sequence.num_tokens + self._headroom * BLOCK_SIZE, final)
            # A shared partial block counts as missing: it is copied before it is written.
            missing = -(-num_tokens // BLOCK_SIZE) - sequence.num_slots // BLOCK_SIZE
            if missing:
                for group, most in enumerate(self._cache.blocks_needed(num_tokens, self.max_batch_tokens)):
                    num_needed[group] += min(missing, most)
        return all(
            needed <= ledger.free + ledger.cached
            for needed, ledger in zip(num_needed, self._cache.ledger(), strict=True)
        )


def _close(sequence: Sequence) -> None:
    """Undo what a start has given a sequence."""
    sequence.held_lease.close(Outcome.BROKEN_OFF)
    sequence.lease = None
    sequence.num_computed_tokens = sequence.num_slots = 0
