"""In what order content is given up: the policies, by name.

    lru        least recently used
    fifo       oldest
    lfu        least often used, and of those least recently
    slru       least recently used on probation; what was hit once is protected, up to 80 % of all
    s3fifo     oldest of the small queue, a tenth of all; what was hit there moves to the main one, which gives each hit
               another round
    ttl        what has been left longest over its time, else what runs out first
    priority   by the clients' priority, each of its 101 levels, then least recently used
    cost       least worth recomputing: uses x time per byte, from the last eviction's level up
    lifecycle  least recently used, but a reply that ended in a tool call is expected back within a minute

Whatever the policy: leaves go before the nodes they hang on; nothing that is leased goes; what has expired or was
closed goes before the rest, pinned content after it, and in between the clients' priority comes first, in three levels:
below 50, 50, above.

Source: SLRU: Karedla et al. 1994. S3-FIFO: Yang et al. 2023 (SOSP). GreedyDual-Size-Frequency: Cherkasova 1998. Keeping
what waits for a tool: Continuum (arXiv:2511.02230).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias

from .wishes import Outcome

if TYPE_CHECKING:
    from .radix_tree import RadixNode

__all__ = ["POLICIES", "Rank", "RetentionPolicy", "make_policy"]

Rank: TypeAlias = tuple[float, ...]
"""Compared element by element; the least goes first."""


class RetentionPolicy:
    """The order in which content is given up: derive from it, say `name` and `rank`, and what else it takes.

    The cache calls all of it on the engine's thread. A method may change the policy's own part of a node's standing
    (`segment`, `credit`, `mark`) and nothing else. What it costs is paid per node used, so keep it O(1).

    Attributes:
        name: appears in explanations and metrics.
        num_segments: queues that nodes are in, by `standing.segment`.
        default_ttl_s: time limit of content whose users gave none.
        exact_priorities: whether each priority is a level of its own.
    """

    name: str = ""
    num_segments: int = 1
    default_ttl_s: float | None = None
    exact_priorities: bool = False

    def rank(self, node: RadixNode, now: float) -> Rank:
        """Where a node that was used at `standing.used` stands among its like. Called at each use and review."""
        raise NotImplementedError

    def review_at(self, node: RadixNode, now: float) -> float:
        """When to rank the node again though nobody uses it: for ranks that fall with time."""
        return math.inf

    def added(self, node: RadixNode, *, was_evicted: bool) -> None:
        """A new node; `was_evicted` if the tree remembers that its content had to make room not long ago."""

    def hit(self, node: RadixNode) -> None:
        """Another sequence reuses the node; `num_hits` counts it already."""

    def ended(self, node: RadixNode, outcome: Outcome, now: float, *, is_exclusive: bool) -> None:
        """A sequence that passes through the node ended; `is_exclusive` if it is the only conversation that does."""

    def choose(self, segments: Sequence[int], sizes: Sequence[int]) -> int:
        """Of the `segments` that have something to give, the one to take from. `sizes` are all segments' tokens."""
        return segments[0]

    def reprieve(self, node: RadixNode, now: float) -> bool:
        """Whether a node that is about to go stays for now, under a new rank. It may not be so for ever."""
        return False

    def evicted(self, node: RadixNode) -> None:
        """Something of the node was given up to make room."""


class Lru(RetentionPolicy):
    """The least recently used goes first."""

    name = "lru"

    def rank(self, node: RadixNode, now: float) -> Rank:
        return (node.standing.used,)


class Fifo(RetentionPolicy):
    """The oldest goes first."""

    name = "fifo"

    def rank(self, node: RadixNode, now: float) -> Rank:
        return (node.branch,)


class Lfu(RetentionPolicy):
    """The least often hit goes first."""

    name = "lfu"

    def rank(self, node: RadixNode, now: float) -> Rank:
        return (node.num_hits, node.standing.used)


class Slru(RetentionPolicy):
    """Two LRU lists: new content is on probation, what was hit is protected until there is too much of it.

    `standing.mark` is when a node came down from the protected list: it counts like a use.
    """

    name = "slru"
    num_segments = 2
    PROBATION, PROTECTED = 0, 1
    protected_share = 0.8

    def rank(self, node: RadixNode, now: float) -> Rank:
        return (max(node.standing.used, node.standing.mark),)

    def hit(self, node: RadixNode) -> None:
        node.standing.segment = self.PROTECTED

    def choose(self, segments: Sequence[int], sizes: Sequence[int]) -> int:
        is_full = sizes[self.PROTECTED] > self.protected_share * sum(sizes)
        return self.PROTECTED if self.PROTECTED in segments and is_full else segments[0]

    def reprieve(self, node: RadixNode, now: float) -> bool:
        if node.standing.segment == self.PROBATION:
            return False
        node.standing.segment = self.PROBATION
        node.standing.mark = now
        return True


class S3Fifo(RetentionPolicy):
    """A small queue for what is new and a main one for what proved itself; the tree's scars are the ghost queue.

    `standing.credit` counts hits, up to three; `standing.mark` is the place in the queue.
    """

    name = "s3fifo"
    num_segments = 2
    SMALL, MAIN = 0, 1
    small_share = 0.1
    most_credit = 3

    def __init__(self) -> None:
        self._num_queued = 0.0

    def rank(self, node: RadixNode, now: float) -> Rank:
        return (node.standing.mark,)

    def added(self, node: RadixNode, *, was_evicted: bool) -> None:
        self._enqueue(node, self.MAIN if was_evicted else self.SMALL)

    def hit(self, node: RadixNode) -> None:
        node.standing.credit = min(node.standing.credit + 1, self.most_credit)

    def choose(self, segments: Sequence[int], sizes: Sequence[int]) -> int:
        is_due = sizes[self.SMALL] > self.small_share * sum(sizes)
        return self.SMALL if self.SMALL in segments and is_due else segments[-1]

    def reprieve(self, node: RadixNode, now: float) -> bool:
        standing = node.standing
        if standing.segment == self.SMALL:
            if standing.credit <= 1:
                return False
            standing.credit = 0
        elif standing.credit == 0:
            return False
        else:
            standing.credit -= 1
        self._enqueue(node, self.MAIN)
        return True

    def _enqueue(self, node: RadixNode, segment: int) -> None:
        self._num_queued += 1
        node.standing.segment = segment
        node.standing.mark = self._num_queued


class Ttl(RetentionPolicy):
    """What runs out first goes first; without a limit of its own, content has five minutes from its last use."""

    name = "ttl"
    default_ttl_s = 300.0

    def rank(self, node: RadixNode, now: float) -> Rank:
        wish = node.standing.wish
        if wish is None:
            return (node.standing.used + self.default_ttl_s,)
        return (math.inf if wish.ttl_s is None else node.standing.used + wish.ttl_s, node.standing.used)


class Priority(Lru):
    """By the clients' priority; of one priority, the least recently used goes first."""

    name = "priority"
    exact_priorities = True


class Cost(RetentionPolicy):
    """GreedyDual: a node is worth the last evicted one's worth, plus its uses times its time to recompute per byte.

    A token's bytes are all alike, and its time grows with the tokens before it, which it attends to: at
    `even_position`, attention costs as much as the rest. So a deep token is worth more than a shallow one.
    """

    name = "cost"
    even_position = 4_096.0

    def __init__(self) -> None:
        self._level = 0.0

    def rank(self, node: RadixNode, now: float) -> Rank:
        per_token = 1.0 + 0.5 * (node.start + node.end) / self.even_position
        return (self._level + (1 + node.num_hits) * per_token, node.standing.used)

    def evicted(self, node: RadixNode) -> None:
        self._level = max(self._level, node.key[1])


class Lifecycle(RetentionPolicy):
    """LRU that listens: what waits for a tool's result is kept for a minute, ahead of all that waits for a person.

    `standing.mark` is until when the node is expected back.
    """

    name = "lifecycle"
    tool_s = 60.0

    def rank(self, node: RadixNode, now: float) -> Rank:
        return (float(node.standing.mark > now), node.standing.used)

    def review_at(self, node: RadixNode, now: float) -> float:
        return node.standing.mark if node.standing.mark > now else math.inf

    def ended(self, node: RadixNode, outcome: Outcome, now: float, *, is_exclusive: bool) -> None:
        if outcome is Outcome.TOOL_CALL:
            node.standing.mark = now + self.tool_s
        elif outcome is Outcome.TURN and is_exclusive:
            node.standing.mark = 0.0


POLICIES: dict[str, type[RetentionPolicy]] = {
    policy.name: policy for policy in (Lru, Fifo, Lfu, Slru, S3Fifo, Ttl, Priority, Cost, Lifecycle)
}


def make_policy(name: str) -> RetentionPolicy:
    """A policy by its name, or one's own by import path, `package.module:Class`.

    Raises:
        ValueError: there is no such policy, or what is there is none.
    """
    if name in POLICIES:
        return POLICIES[name]()
    module_name, colon, class_name = name.partition(":")
    if not colon:
        raise ValueError(f"{name!r} is no retention policy; there are {', '.join(POLICIES)}, or package.module:Class")
    try:
        found = getattr(import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"the retention policy {name!r} cannot be imported: {error}") from None
    if not (isinstance(found, type) and issubclass(found, RetentionPolicy) and found.name):
        raise ValueError(f"{name!r} is no retention policy: derive a class with a name from RetentionPolicy")
    return found()
