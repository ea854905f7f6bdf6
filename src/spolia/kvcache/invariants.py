"""Every invariant of the cache core as code: what `KVCache.check` asserts, by recounting from scratch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from .eviction import Evictor
from .lease import Lease
from .radix_tree import TOKEN_BYTES, RadixNode, RadixTree
from .retention import Retention

__all__ = ["check_invariants"]


def check_invariants(tree: RadixTree, retention: Retention, evictor: Evictor, leases: set[Lease]) -> None:
    """O(size of the cache).

    Raises:
        AssertionError: naming the first invariant that does not hold.
    """
    nodes = list(tree.nodes())
    for root in tree.roots.values():
        _check_root(root)
    for node in nodes:
        _check_node(tree, node)
        if not node.children and evictor.evictable_end(node) < node.end:
            assert retention.is_offered(node), "an evictable leaf is not queued"
            owner = retention.owners.get(node.namespace)
            assert owner is None or node in owner.leaves, "an evictable leaf is not in its owner's queue"
        if not node.children and not node.cursors and not any((blocks.view >= 0).any() for blocks in node.blocks):
            assert all(node in queues.live for queues in retention.window_queues.values()), "a bare leaf is not queued"
    _check_sizes(retention, nodes)
    for lease in leases:
        _check_lease(lease)
    num_cursors = sum(len(node.cursors) for node in [*tree.roots.values(), *nodes])
    assert num_cursors == len(leases), "cursors are not those of the open leases"
    for group, pool in enumerate(tree.pools):
        held = [lease.tables[group].view[lease.first_blocks[group] :] for lease in leases]
        held += [ids for lease in leases for other, ids in lease.borrowed if other == group]
        kept = [blocks[blocks >= 0] for blocks in (node.blocks[group].view for node in nodes)]
        pool.check(_count(held, pool.capacity), _count(kept, pool.capacity))


def _check_root(root: RadixNode) -> None:
    assert root.start == root.end == len(root.edge) == 0, "a root has no tokens"
    assert all(cursor.position == 0 for cursor in root.cursors)
    assert root.children or root.cursors or root.scars, "a root with nothing to say"


def _check_node(tree: RadixTree, node: RadixNode) -> None:
    assert node.parent is not None
    assert node.start == node.parent.end < node.end
    assert len(node.edge) == TOKEN_BYTES * (node.end - node.start)
    assert node.parent.children[node.token_ids.item(0)] is node
    num_touched = tree.num_blocks(node.end) - node.start // tree.block_size
    for blocks, window in zip(node.blocks, tree.windows, strict=True):
        assert blocks.size == num_touched, "one entry for each block that the tokens touch"
        assert window is not None or (blocks.view >= 0).all(), "a full group has no tombstones"
    if len(node.children) == 1 and node.end % tree.block_size:
        (child,) = node.children.values()
        for ours, theirs, window in zip(node.blocks, child.blocks, tree.windows, strict=True):
            assert window is not None or ours.view[-1] == theirs.view[0], "two copies where one would do"
    for cursor in node.cursors:
        assert cursor.node is node
        assert node.start < cursor.position <= node.end
    assert all(node.start < position <= node.end for position, _ in node.scars)


def _check_sizes(retention: Retention, nodes: list[RadixNode]) -> None:
    by_segment = [0] * len(retention.segment_tokens)
    by_namespace: Counter[bytes] = Counter()
    num_pinned = 0
    for node in nodes:
        by_segment[node.standing.segment] += node.end - node.start
        by_namespace[node.namespace] += node.end - node.start
        num_pinned += (node.end - node.start) * bool(node.standing.pins)
    assert retention.segment_tokens == by_segment, "segments' sizes differ from a recount"
    for owner in set(retention.owners.values()):
        owned = sum(by_namespace[name] for name, other in retention.owners.items() if other is owner)
        assert owner.num_tokens == owned, "an owner's size differs from a recount"
    assert retention.namespace_tokens == +by_namespace, "namespaces' sizes differ from a recount"
    assert retention.num_pinned_tokens == num_pinned, "the size of what is pinned differs from a recount"


def _check_lease(lease: Lease) -> None:
    assert lease.cursor in lease.cursor.node.cursors
    assert lease.num_computed_tokens <= lease.num_reserved_tokens
    assert len({table.size for table in lease.tables}) == 1, "groups reserve alike"
    for table, first in zip(lease.tables, lease.first_blocks, strict=True):
        assert (table.view[:first] == -1).all()
        assert (table.view[first:] >= 0).all()


def _count(ids: Iterable[np.ndarray], num_blocks: int) -> np.ndarray:
    return np.bincount(np.concatenate([np.empty(0, np.int32), *ids]), minlength=num_blocks)
