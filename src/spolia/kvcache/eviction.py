"""Making room: which blocks are given up when a pool runs short.

In a full group, the least valuable leaf is shortened from its tail, block by block, and with it the tokens: all groups
lose them. In a window group, tombstones are left and the tokens stay: first blocks in the interior of some node, which
no hit at or beyond that node's end looks at; when there are none, any. What a lease holds is never given up.

    full        [ a0 a1 a2 a3 a4 ]──[ b5 b6 b7 ]        b7, b6, b5, then a4 ...
    window 32   [ a0 a1 a2 a3 a4 ]──[ b5 b6 b7 ]        a0 a1 a2, b5; then any
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .block_pool import Tag
from .events import EventLog
from .explain import NOBODY, Beneficiary, Eviction, MissReason
from .int_buffer import Ids
from .radix_tree import RadixNode, RadixTree
from .retention import Owner, Retention
from .stats import CacheStats

__all__ = ["Evictor", "OnEvict"]

OnEvict: TypeAlias = Callable[[int, Ids, Sequence[Tag | None]], None]
"""Hears of evicted blocks (group, ids, tags) when they are free and before anybody can take them: time to copy them."""


class Evictor:
    """Gives up what is least valuable, and says so: events, counters and the tree's memory of it."""

    def __init__(
        self,
        tree: RadixTree,
        retention: Retention,
        events: EventLog,
        stats: CacheStats,
        on_evict: OnEvict | None = None,
    ) -> None:
        self._tree = tree
        self._on_evict = on_evict
        self._retention = retention
        self._events = events
        self._stats = stats
        self._beneficiary = NOBODY

    def make_room(self, num_blocks: Sequence[int], beneficiary: Beneficiary = NOBODY) -> bool:
        """Evict until each group has that many free blocks. False if it cannot have; some are evicted by then."""
        self._beneficiary = beneficiary
        if any(pool.num_free < count for pool, count in zip(self._tree.pools, num_blocks, strict=True)):
            self._retention.review()
        return all(
            self._evict_leaves(group, count) if window is None else self._evict_window(group, count)
            for group, (window, count) in enumerate(zip(self._tree.windows, num_blocks, strict=True))
        )

    def cut(self, node: RadixNode, end: int, *, cause: str | None = None) -> None:
        """Drop a leaf's tokens from `end` on, to make room; `cause` if it was not the policy."""
        policy = cause or self._retention.policy.name
        before = [pool.num_free for pool in self._tree.pools]
        now = self._retention.clock()
        reason = MissReason.EXPIRED if self._retention.has_expired(node, now) else MissReason.EVICTED
        self._retention.policy.evicted(node)
        used, born = node.standing.used, node.standing.born
        num_tokens = self._tree.cut(node, end, Eviction(now, reason, policy, self._beneficiary))
        self._events.removed(node.namespace, node.branch, end, num_tokens, policy)
        self._stats.num_evicted_tokens += num_tokens
        self._stats.evicted_idle_times.note(now - used, num_tokens)
        self._stats.evicted_ages.note(now - (used if born is None else born), num_tokens)
        for group, num_free in enumerate(before):
            self._note_freed(group, num_free)

    def trim(self, owner: Owner, num_tokens: int) -> None:
        """Give up an owner's least valuable content until it has `num_tokens` at most, or only what is leased."""
        block_size = self._tree.block_size
        self._retention.review()
        while (excess := owner.num_tokens - num_tokens) > 0:
            leaf = owner.leaves.pop()
            if leaf is None:
                return
            if leaf.children:
                continue  # it is offered again when the last of them goes
            furthest = self.evictable_end(leaf)
            end = max(furthest, (leaf.end - excess) // block_size * block_size)
            if end >= leaf.end:
                continue  # leased to its tail; it is offered again when the lease ends
            parent = leaf.parent
            self.cut(leaf, end, cause=f"quota of {owner.name}")
            if end > furthest:
                self._retention.offer(leaf)
            elif end == leaf.start and parent is not None:
                self.prune(parent)

    def prune(self, node: RadixNode) -> None:
        """Remove a leaf without any block, and so on upwards: there are such only where every group has a window."""
        while (
            node.parent is not None
            and not node.children
            and not node.cursors
            and not any((blocks.view >= 0).any() for blocks in node.blocks)
        ):
            parent = node.parent
            self.cut(node, node.start)
            node = parent

    def evictable_end(self, node: RadixNode) -> int:
        """How far a leaf can be shortened so that each step frees a block."""
        if node.floor == node.start:
            return node.start
        return min(node.end, self._tree.num_blocks(node.floor) * self._tree.block_size)

    def interior(self, node: RadixNode, group: int) -> int:
        """So many of the node's blocks lie before the window of its end in this window group.

        That of its last whole block's end, which is where it can be kept elsewhere.
        """
        block_size = self._tree.block_size
        end = node.end // block_size * block_size
        return max(0, self._tree.first_needed_block(group, end) - node.start // block_size)

    def unleased(self, node: RadixNode, group: int, stop: int) -> NDArray[np.intp]:
        """Indices, among the node's first `stop` entries, of blocks that no lease holds."""
        blocks = node.blocks[group].view[:stop]
        return np.flatnonzero((blocks >= 0) & (self._tree.pools[group].num_leases(blocks) == 0))

    def _note_freed(self, group: int, num_free: int) -> None:
        """Count the blocks that an eviction has freed, and tell of them while their KV is still there."""
        pool = self._tree.pools[group]
        self._stats.num_evicted_blocks += pool.num_free - num_free
        if self._on_evict is not None and pool.num_free > num_free:
            ids = pool.freed_since(num_free)
            self._on_evict(group, ids, pool.tags(ids))

    def _evict_leaves(self, group: int, num_blocks: int) -> bool:
        pool, block_size = self._tree.pools[group], self._tree.block_size
        while pool.num_free < num_blocks:
            leaf = self._retention.next_leaf()
            if leaf is None:
                return False
            furthest = self.evictable_end(leaf)
            keep = self._tree.num_blocks(leaf.end) - (num_blocks - pool.num_free)
            end = max(furthest, keep * block_size)
            if leaf.children or end == leaf.end:  # leased to its tail
                self._retention.withdraw(leaf)
                continue
            parent = leaf.parent
            self.cut(leaf, end)
            if end == leaf.start and parent is not None:
                self.prune(parent)
        return True

    def _evict_window(self, group: int, num_blocks: int) -> bool:
        pool = self._tree.pools[group]
        self._leave_tombstones(group, num_blocks)
        if pool.num_free < num_blocks and pool.num_cached > 0:
            # Whatever is cached can go, but a block that a split went through may lie in nodes off the path of the
            # lease that held it last, where nobody has offered it.
            self._stats.num_rescans += 1
            for node in self._tree.nodes():
                self._retention.offer(node)
            self._leave_tombstones(group, num_blocks)
        return pool.num_free >= num_blocks

    def _leave_tombstones(self, group: int, num_blocks: int) -> None:
        pool = self._tree.pools[group]
        queues = self._retention.window_queues[group]
        for queue in (queues.interior, queues.live):
            while pool.num_free < num_blocks:
                node = queue.pop()
                if node is None:
                    break
                stop = self.interior(node, group) if queue is queues.interior else node.blocks[group].size
                indices = self.unleased(node, group, stop)
                wanted = indices[: num_blocks - pool.num_free]
                before = pool.num_free
                self._tree.give_up(node, group, wanted)
                self._note_freed(group, before)
                if len(wanted) < len(indices):
                    queue.push(node)
                self.prune(node)
