"""Who is served next when several tenants wait: each gets its share of what is computed of prompts.

A tenant's *account* is the prompt tokens that were computed for it, divided by its weight; the least account is next.
A tenant that comes back after a while begins at the least account of those that are there: idleness is not saved up.

    waiting    a: a1 a2 a3 ... a900      b: b1            accounts  a 41,000   b 40,200      next: b1

Within a tenant, the order is the scheduler's: few tokens to compute, many cached, with ageing.

A step's tokens are divided in the same way among the prompts that could use them (`divide`).

Source: virtual token counters, Sheng et al. 2024 (arXiv:2401.00588); within a tenant, locality as in deficit longest
prefix match, Cao et al. 2025 (arXiv:2501.14312).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from spolia.errors import InvalidRequest

if TYPE_CHECKING:
    from spolia.engine.request import Sequence

__all__ = ["FairShares", "Prompt", "Tenant", "WaitingRoom", "divide"]

_QUICK_PART = 4
"""One of so many of a tenant's tokens is for prompts with less left than its oldest has."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whoever a request is for, as far as sharing the machine goes.

    Attributes:
        name: "" where nobody is told apart.
        weight: its share of prompt tokens, relative to others'.
        kv_quota: bytes of KV that it may have cached; None: no limit of its own.
    """

    name: str = ""
    weight: float = 1.0
    kv_quota: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise InvalidRequest(f"weight is {self.weight}; it must be a positive number", param="weight")
        if self.kv_quota is not None and self.kv_quota < 1:
            raise InvalidRequest(f"kv_quota is {self.kv_quota}; it must be at least 1 byte", param="kv_quota")


class Prompt(NamedTuple):
    """One that could use tokens of a step.

    Attributes:
        num_left: tokens to compute, at least one.
        has_aged: it was passed over too often, and is not to be again.
    """

    tenant: Tenant
    num_left: int
    has_aged: bool = False


def divide(budget: int, prompts: Seq[Prompt]) -> list[int]:
    """Tokens of `budget` for each prompt.

    Each tenant has its weight's share, and what one does not need goes to the others. Within a tenant the oldest goes
    first, but for a quarter of the share, which goes to prompts with less left than the oldest, the least first. So a
    short one never waits for a long one, and the oldest always has three quarters: nobody starves.

    Args:
        prompts: of each tenant the oldest first.

    Source: shortest remaining time first, Schrage 1968, with a bound on what it may cost the others.
    """
    left = [prompt.num_left for prompt in prompts]
    queues: dict[Tenant, list[int]] = {}
    for index, prompt in enumerate(prompts):
        queues.setdefault(prompt.tenant, []).append(index)
    quick = {
        tenant: sorted(
            (index for index in queue[1:] if prompts[index].has_aged or left[index] < left[queue[0]]),
            key=lambda index: (not prompts[index].has_aged, left[index]),
        )
        for tenant, queue in queues.items()
    }

    def serve(queue: list[int], budget: int) -> int:
        for index in queue:
            granted = min(budget, left[index])
            left[index] -= granted
            budget -= granted
        return budget

    while budget > 0 and queues:
        share = budget / sum(tenant.weight for tenant in queues)
        for tenant, queue in list(queues.items()):
            mine = min(budget, max(1, int(share * tenant.weight)))
            spare = serve(quick[tenant], mine // _QUICK_PART)
            spare = serve(queue, mine - mine // _QUICK_PART + spare)
            budget -= mine - spare
            if not any(left[index] for index in queue):
                del queues[tenant]
    return [prompt.num_left - more for prompt, more in zip(prompts, left, strict=True)]


class FairShares:
    """The tenants that have sequences, and their accounts."""

    def __init__(self) -> None:
        self._accounts: dict[str, float] = {}
        self._num_sequences: Counter[str] = Counter()

    @property
    def num_tenants(self) -> int:
        return len(self._num_sequences)

    def enter(self, tenant: Tenant) -> None:
        """One more sequence of this tenant is in the engine."""
        if not self._num_sequences[tenant.name]:
            others = [self._accounts[name] for name in self._num_sequences if name != tenant.name]
            self._accounts[tenant.name] = max(self._accounts.get(tenant.name, 0.0), min(others, default=0.0))
        self._num_sequences[tenant.name] += 1

    def leave(self, tenant: Tenant) -> None:
        self._num_sequences[tenant.name] -= 1
        if not self._num_sequences[tenant.name]:
            del self._num_sequences[tenant.name]
            if not self._num_sequences:
                self._accounts.clear()  # nobody left to compare with

    def charge(self, tenant: Tenant, num_tokens: int) -> None:
        """So many of its prompt tokens are going to be computed."""
        self._accounts[tenant.name] += num_tokens / tenant.weight

    def account(self, name: str) -> float:
        return self._accounts.get(name, 0.0)


class WaitingRoom:
    """Sequences that wait, by tenant, each tenant's in order of arrival."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, dict[str, Sequence]] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        for waiting in self._by_tenant.values():
            yield from waiting.values()

    def add(self, sequence: Sequence) -> None:
        waiting = self._by_tenant.setdefault(sequence.request.tenant.name, {})
        waiting[sequence.request.request_id] = sequence
        self._num_waiting += 1

    def discard(self, sequence: Sequence) -> bool:
        """Take it out; False if it does not wait."""
        name = sequence.request.tenant.name
        waiting = self._by_tenant.get(name, {})
        if waiting.pop(sequence.request.request_id, None) is None:
            return False
        if not waiting:
            del self._by_tenant[name]
        self._num_waiting -= 1
        return True

    def tenants(self) -> Iterable[str]:
        return self._by_tenant.keys()

    def oldest(self, name: str, count: int) -> list[Sequence]:
        return list(islice(self._by_tenant[name].values(), count))

    def start(self, sequence: Sequence) -> None:
        """Take it out; those of its tenant that came before it were passed over."""
        for earlier in self._by_tenant[sequence.request.tenant.name].values():
            if earlier is sequence:
                break
            earlier.num_passed_over += 1
        self.discard(sequence)
