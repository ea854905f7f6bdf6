"""What goes first: a policy gives each use of a node a key, and queues hand out nodes by least key.

A queue is a heap that is put right lazily. A node's key mostly grows (it was used again), which costs nothing here: its
old entry stays, and is re-filed under the new key only when it comes up. So a use is O(1), a pop O(log n) amortised.

    heap     (3, a) (5, b) (9, c)      a was used at 12 since: pop re-files a under 12 and yields b
    queued   a: 3   b: 5   c: 9        one live entry a node; an entry that `queued` does not confirm is dead

Invariant: every leaf with something to give up is queued, at its key or below; see `KVCache.check`. For window groups
the queues may miss a block (see `Evictor`), so they are refilled when they run dry too soon.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .radix_tree import RadixNode

__all__ = ["EvictionQueue", "Lru", "Retention", "RetentionPolicy"]


class RetentionPolicy(Protocol):
    """The order in which content is given up. `name` appears in explanations.

    Whatever the policy, leaves go before the nodes they hang on and nothing leased goes at all.
    """

    name: str

    def key(self, node: RadixNode, now: float) -> float:
        """Order of a node that is being used `now`, at the start or the end of a lease: the least goes first."""


class Lru:
    """The least recently used goes first."""

    name = "lru"

    def key(self, node: RadixNode, now: float) -> float:
        return now


class EvictionQueue:
    """Nodes by least key; of equal keys, the deeper node first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, RadixNode]] = []
        self._queued: dict[RadixNode, float] = {}
        self._num_pushed = 0

    def __contains__(self, node: RadixNode) -> bool:
        return self._queued.get(node, float("inf")) <= node.key

    def push(self, node: RadixNode) -> None:
        """Queue a node under its key, unless it already is at that key or below."""
        if self._queued.get(node, float("inf")) > node.key:
            self._queued[node] = node.key
            self._num_pushed += 1
            heapq.heappush(self._heap, (node.key, -node.start, self._num_pushed, node))

    def pop(self) -> RadixNode | None:
        """Take out the node of the least key; None if the queue is empty."""
        while self._heap:
            key, _, _, node = heapq.heappop(self._heap)
            if self._queued.get(node) != key:
                continue  # dead: the node is gone, or was queued again under a lesser key
            del self._queued[node]
            if node.key <= key:
                return node
            self.push(node)
        return None

    def discard(self, node: RadixNode) -> None:
        """Forget a node; its entry is dead from now on. Dead entries never outnumber live ones for long."""
        self._queued.pop(node, None)
        if len(self._heap) > 2 * len(self._queued) + 64:
            self._heap = [entry for entry in self._heap if self._queued.get(entry[3]) == entry[0]]
            heapq.heapify(self._heap)


@dataclass(frozen=True, slots=True)
class WindowQueues:
    """Nodes of one window group by what they could give up.

    interior: blocks that no hit at or beyond the node's end looks at. They go first.
    live: any block.
    """

    interior: EvictionQueue = field(default_factory=EvictionQueue)
    live: EvictionQueue = field(default_factory=EvictionQueue)


class Retention:
    """Keys of nodes and the queues that they wait in."""

    def __init__(self, policy: RetentionPolicy, clock: Callable[[], float], windows: Sequence[int | None]) -> None:
        self.policy = policy
        self.clock = clock
        self.leaves = EvictionQueue()
        self.window_queues = {group: WindowQueues() for group, window in enumerate(windows) if window is not None}

    def touch(self, path: Iterable[RadixNode]) -> None:
        """These nodes are used now."""
        now = self.clock()
        for node in path:
            before = node.key
            node.key = self.policy.key(node, now)
            if node.key < before:
                self.offer(node)

    def offer(self, node: RadixNode) -> None:
        """The node may have something to give up. Offering in vain does no harm; failing to offer is a leak."""
        if not node.children:
            self.leaves.push(node)
        for queues in self.window_queues.values():
            queues.interior.push(node)
            queues.live.push(node)

    def forget(self, node: RadixNode) -> None:
        """The node is gone."""
        self.leaves.discard(node)
        for queues in self.window_queues.values():
            queues.interior.discard(node)
            queues.live.discard(node)
