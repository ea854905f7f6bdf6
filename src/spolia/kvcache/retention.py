"""What goes first: each use of a node gives it a key, and queues hand out nodes by least key.

    key      (level, *rank)      level: expired -1, priority 25 | 50 | 75 (or 0 to 100), pinned 1000; rank: the policy's

A queue is a heap that is put right lazily. A node's key mostly grows (it was used again), which costs nothing here: its
old entry stays, and is re-filed under the new key only when it comes up. So a use is O(1), a pop O(log n) amortised.

    heap     (3, a) (5, b) (9, c)      a was used at 12 since: pop re-files a under 12 and yields b
    queued   a: 3   b: 5   c: 9        one live entry a node; an entry that `queued` does not confirm is dead

Keys that fall with time alone (something expires) are looked at again when their time has come, before anything else is
evicted; those nodes wait in a queue of the same kind, by time.

Invariant: every leaf with something to give up is queued, at its key or below; see `KVCache.check`. For window groups
the queues may miss a block (see `Evictor`), so they are refilled when they run dry too soon.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .policies import Rank, RetentionPolicy
from .stats import Durations
from .wishes import DEFAULT_PRIORITY, Outcome, Wish

if TYPE_CHECKING:
    from .radix_tree import RadixNode

__all__ = ["EvictionQueue", "Retention"]

MAX_OWNED_NAMESPACES = 4_096
"""Namespaces under a quota that may be kept in mind though nothing of theirs is cached."""

_EXPIRED, _PINNED = -1.0, 1_000.0


class EvictionQueue:
    """Nodes by least key; of equal keys, the deeper node first."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int, int, RadixNode]] = []
        self._queued: dict[RadixNode, Rank] = {}
        self._num_pushed = 0

    def __contains__(self, node: RadixNode) -> bool:
        queued = self._queued.get(node)
        return queued is not None and queued <= node.key

    def push(self, node: RadixNode) -> None:
        """Queue a node under its key, unless it already is at that key or below."""
        queued = self._queued.get(node)
        if queued is None or queued > node.key:
            self._queued[node] = node.key
            self._num_pushed += 1
            heapq.heappush(self._heap, (node.key, -node.start, self._num_pushed, node))

    def peek(self) -> RadixNode | None:
        """The node of the least key; None if the queue is empty."""
        while self._heap:
            key, _, _, node = self._heap[0]
            if self._queued.get(node) == key:  # else dead: the node is gone, or was queued again under a lesser key
                if node.key <= key:
                    return node
                del self._queued[node]
                heapq.heappop(self._heap)
                self.push(node)
            else:
                heapq.heappop(self._heap)
        return None

    def pop(self) -> RadixNode | None:
        """Take out the node of the least key; None if the queue is empty."""
        node = self.peek()
        if node is not None:
            heapq.heappop(self._heap)
            del self._queued[node]
        return node

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


class _Alarms:
    """Nodes by the time at which to look at them again; a node has one, and an early alarm does no harm."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RadixNode]] = []
        self._set: dict[RadixNode, float] = {}
        self._num_set = 0

    def set(self, node: RadixNode, time: float) -> None:
        if time < self._set.get(node, math.inf):
            self._set[node] = time
            self._num_set += 1
            heapq.heappush(self._heap, (time, self._num_set, node))

    def due(self, now: float) -> Iterable[RadixNode]:
        """Nodes whose time has come, or an earlier one of theirs; their alarms are off."""
        while self._heap and self._heap[0][0] <= now:
            time, _, node = heapq.heappop(self._heap)
            if self._set.get(node) == time:
                del self._set[node]
                yield node

    def drop(self, node: RadixNode) -> None:
        self._set.pop(node, None)
        if len(self._heap) > 2 * len(self._set) + 64:
            self._heap = [entry for entry in self._heap if self._set.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)


@dataclass(eq=False, slots=True)
class Owner:
    """Somebody with a quota: namespaces, their tokens, and their leaves by the policy's order."""

    name: str
    quota_tokens: int
    num_tokens: int = 0
    leaves: EvictionQueue = field(default_factory=EvictionQueue)


class Retention:
    """Keys of nodes and the queues that they wait in.

    Attributes:
        segment_tokens: of each of the policy's segments, all nodes' tokens.
        namespace_tokens: of each namespace that has any.
        owners: by namespace, of those that have a quota.
        num_pinned_tokens: tokens of pinned nodes.
    """

    def __init__(self, policy: RetentionPolicy, clock: Callable[[], float], windows: Sequence[int | None]) -> None:
        self.clock = clock
        self.window_queues = {group: WindowQueues() for group, window in enumerate(windows) if window is not None}
        self.namespace_tokens: Counter[bytes] = Counter()
        self.num_pinned_tokens = 0
        self.owners: dict[bytes, Owner] = {}
        self._take_policy(policy)

    def _take_policy(self, policy: RetentionPolicy) -> None:
        self.policy = policy
        self.segment_tokens = [0] * policy.num_segments
        self._leaves = [EvictionQueue() for _ in range(policy.num_segments)]
        self._alarms = _Alarms()
        # Paths are long: what a policy does not listen to is not told.
        kind = type(policy)
        self._hears_hits = kind.hit is not RetentionPolicy.hit
        self._hears_ends = kind.ended is not RetentionPolicy.ended
        self._is_plain = policy.num_segments == 1 and kind.reprieve is RetentionPolicy.reprieve
        self._reviews = kind.review_at is not RetentionPolicy.review_at

    def use_policy(self, policy: RetentionPolicy, nodes: Sequence[RadixNode]) -> None:
        """Rank all nodes, parents first, by another policy."""
        self._take_policy(policy)
        self.window_queues = {group: WindowQueues() for group in self.window_queues}
        for owner in self.owners.values():
            owner.leaves = EvictionQueue()
        now = self.clock()
        for node in nodes:
            standing = node.standing
            standing.segment, standing.credit, standing.mark = 0, 0, 0.0
            policy.added(node, was_evicted=False)
            self.segment_tokens[standing.segment] += node.end - node.start
            self._rank(node, now)
            self.offer(node)

    # -- What becomes of nodes -----------------------------------------------------------------------------------------

    def added(self, node: RadixNode, *, was_evicted: bool) -> None:
        """A new node is in the tree, with its tokens."""
        self.policy.added(node, was_evicted=was_evicted)
        self.resized(node, node.end - node.start)

    def resized(self, node: RadixNode, num_tokens: int) -> None:
        """The node has got so many tokens more, or, below 0, fewer."""
        self.segment_tokens[node.standing.segment] += num_tokens
        self.namespace_tokens[node.namespace] += num_tokens
        if not self.namespace_tokens[node.namespace]:
            del self.namespace_tokens[node.namespace]
        if node.standing.pins:
            self.num_pinned_tokens += num_tokens
        if self.owners and (owner := self.owners.get(node.namespace)) is not None:
            owner.num_tokens += num_tokens

    def hit(self, path: Iterable[RadixNode]) -> None:
        """Another sequence reuses these nodes."""
        for node in path:
            node.num_hits += 1
            if self._hears_hits:
                segment = node.standing.segment
                self.policy.hit(node)
                self._follow(node, segment)

    def touch(self, path: Iterable[RadixNode], gaps: Durations | None = None) -> None:
        """These nodes are used now.

        Args:
            gaps: takes how long each had not been; None where it is no use that counts.
        """
        now = self.clock()
        for node in path:
            standing = node.standing
            if gaps is not None:
                gaps.note(now - standing.used, node.end - node.start)
            if standing.born is None:
                standing.born = now
            standing.used = now
            standing.is_spent = False
            self._rank(node, now)

    def ended(self, path: Sequence[RadixNode], outcome: Outcome) -> None:
        """A sequence that passes through these nodes, the deepest first, ended; `touch` follows."""
        if not self._hears_ends:
            return
        now = self.clock()
        exclusive = set(exclusive_part(path))
        for node in path:
            self.policy.ended(node, outcome, now, is_exclusive=node in exclusive)

    def wish(self, path: Iterable[RadixNode], wishes: Sequence[Wish], num_reused_tokens: int) -> None:
        """A sequence that passes through these nodes, of which it reused so many tokens, wishes; `touch` follows.

        Of all users' wishes for a node the strongest counts, and no wish is one for priority 50: who cares little for
        content that others use does not take it from them.
        """
        for node in path:
            standing = node.standing
            covering = [wish for wish in wishes if wish.covers(node.start)] if wishes else ()
            if not covering:
                if standing.wish is not None and standing.wish.priority < DEFAULT_PRIORITY:
                    standing.wish = None
                continue
            wish = covering[0]
            for other in covering[1:]:
                wish = wish.with_other(other)
            if standing.wish is not None:
                standing.wish = wish.with_other(standing.wish)
            elif wish.priority >= DEFAULT_PRIORITY or node.start >= num_reused_tokens:
                standing.wish = Wish(wish.priority, wish.ttl_s)

    def spend(self, path: Sequence[RadixNode]) -> None:
        """Nobody expects these nodes, the deepest first, back, but those that others use too."""
        now = self.clock()
        for node in exclusive_part(path):
            node.standing.is_spent = True
            self._rank(node, now)

    def set_pins(self, node: RadixNode, pins: frozenset[int]) -> None:
        standing = node.standing
        if bool(pins) != bool(standing.pins):
            self.num_pinned_tokens += (node.end - node.start) * (1 if pins else -1)
        standing.pins = pins
        self._rank(node, self.clock())

    def set_quota(self, namespace: bytes, name: str, quota_tokens: int, nodes: Iterable[RadixNode]) -> None:
        """Put a namespace, with its `nodes`, under the quota of an owner of that name, who may have others too."""
        if (known := self.owners.get(namespace)) is not None and known.name == name:
            known.quota_tokens = quota_tokens
            return
        owner = next((owner for owner in self.owners.values() if owner.name == name), None)
        owner = owner or Owner(name, quota_tokens)
        owner.quota_tokens = quota_tokens
        if len(self.owners) > MAX_OWNED_NAMESPACES:
            self.owners = {key: held for key, held in self.owners.items() if self.namespace_tokens[key]}
        if self.owners.get(namespace) is not owner:
            self.owners[namespace] = owner
            for node in nodes:
                owner.num_tokens += node.end - node.start
                self.offer(node)

    def has_expired(self, node: RadixNode, now: float) -> bool:
        """Whether nobody expects the node back: its time is over, or its conversation was closed."""
        return node.standing.is_spent or self._expiry(node) <= now

    # -- What goes first -----------------------------------------------------------------------------------------------

    def offer(self, node: RadixNode) -> None:
        """The node may have something to give up. Offering in vain does no harm; failing to offer is a leak."""
        if not node.children:
            self._leaves[node.standing.segment].push(node)
            if self.owners and (owner := self.owners.get(node.namespace)) is not None:
                owner.leaves.push(node)
        for queues in self.window_queues.values():
            queues.interior.push(node)
            queues.live.push(node)

    def is_offered(self, leaf: RadixNode) -> bool:
        return leaf in self._leaves[leaf.standing.segment]

    def review(self) -> None:
        """Rank those again whose time has come; call it before taking."""
        now = self.clock()
        for node in self._alarms.due(now):
            self._rank(node, now)

    def next_leaf(self) -> RadixNode | None:
        """The leaf that goes first; None if there is none. It may have got children since it was offered.

        It stays first until it is gone, or withdrawn.
        """
        if self._is_plain:
            return self._leaves[0].peek()
        while True:
            heads = {segment: head for segment, queue in enumerate(self._leaves) if (head := queue.peek()) is not None}
            if not heads:
                return None
            level = min(head.key[0] for head in heads.values())
            segments = [segment for segment, head in heads.items() if head.key[0] == level]
            segment = segments[0] if len(segments) == 1 else self.policy.choose(segments, self.segment_tokens)
            node = heads[segment]
            now = self.clock()
            if not self.policy.reprieve(node, now):
                return node
            self._follow(node, segment)
            self._rank(node, now)
            self.offer(node)

    def withdraw(self, node: RadixNode) -> None:
        """The node has nothing to give up as a leaf now. It is offered again when it has."""
        for leaves in self._leaves:
            leaves.discard(node)

    def forget(self, node: RadixNode) -> None:
        """The node is gone."""
        self.withdraw(node)
        self._alarms.drop(node)
        if self.owners and (owner := self.owners.get(node.namespace)) is not None:
            owner.leaves.discard(node)
        for queues in self.window_queues.values():
            queues.interior.discard(node)
            queues.live.discard(node)

    def _follow(self, node: RadixNode, segment: int) -> None:
        """The policy may have moved the node from this segment to another."""
        if node.standing.segment != segment:
            self.segment_tokens[segment] -= node.end - node.start
            self.segment_tokens[node.standing.segment] += node.end - node.start
            self._leaves[segment].discard(node)
            self.offer(node)

    def _rank(self, node: RadixNode, now: float) -> None:
        before = node.key
        expiry = self._expiry(node)
        node.key = (self._level(node, expiry <= now), *self.policy.rank(node, now))
        if node.key < before:
            self.offer(node)
        review_at = self.policy.review_at(node, now) if self._reviews else math.inf
        if now < expiry < review_at:
            review_at = expiry
        if review_at < math.inf:
            self._alarms.set(node, review_at)

    def _level(self, node: RadixNode, has_expired: bool) -> float:
        standing = node.standing
        if standing.pins:
            return _PINNED
        if has_expired or standing.is_spent:
            return _EXPIRED
        if standing.wish is None:
            return DEFAULT_PRIORITY
        priority = standing.wish.priority
        if self.policy.exact_priorities:
            return priority
        return DEFAULT_PRIORITY + 25 * ((priority > DEFAULT_PRIORITY) - (priority < DEFAULT_PRIORITY))

    def _expiry(self, node: RadixNode) -> float:
        wish = node.standing.wish
        ttl_s = self.policy.default_ttl_s if wish is None else wish.ttl_s
        return math.inf if ttl_s is None else node.standing.used + ttl_s


def exclusive_part(path: Iterable[RadixNode]) -> Iterable[RadixNode]:
    """Of a path from the deepest node up, those that one conversation alone uses, as far as one can tell.

    Each turn hits all nodes of the turns before it once, so on the way up the hits grow by one a node. Where they grow
    by more, or others branch off or stand, the trunk that is shared begins.
    """
    below: RadixNode | None = None
    for node in path:
        if len(node.children) > (below is not None) or node.cursors:
            return
        if below is not None and node.num_hits > below.num_hits + 1:
            return
        yield node
        below = node
