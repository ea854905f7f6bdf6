"""The token-exact radix tree: which sequences are cached, and in which blocks their KV lies.

A node holds a run of tokens (its edge) and, for each group, the blocks that these tokens touch. Runs end at any token,
blocks every `block_size`, so a node may end in the middle of a block:

    position   0               16              32    38        48
    block      |       0       |       1       |     2         |
    root ──────[ A: tokens 0..37 ····················]──┬──[ B: tokens 38..47 ]      A  a0 a1 a2
                                                        │                            B        a2       (A's last)
                                                        └──[ C: tokens 38..60 ··     C        c2 c3

    B was written by the sequence that wrote A, on into a2. C was written by another that shared A's tokens 32..37 for
    reading, and had the block copied before its first own token: c2 = the first six tokens of a2, then C's.

    The deepest node on a path that touches a block gives the path's block: it holds the KV of *all* the path's
    tokens in that block, up to the node's end. So a lookup concatenates block lists, deeper ones overwriting.

Splitting A at 20 moves ids, never KV. Both halves keep block 1:

    [ A': 0..19 ]  a0 a1  ──  [ A: 20..37 ]  a1 a2       the lower half stays the same object, so leases need no search

A window group (a token looks back at W - 1 others) may have given up blocks of tokens that the tree still knows. Such a
tombstone is -1. A prefix of length L is usable where each window group has the blocks of positions (L - W, L):

    full group      a0 a1 a2 a3 a4 a5
    window of 32    -1 -1 -1 a3 a4 a5        usable at L = 96 (needs 65..95, in a4 a5), also at 79, not at 78 (47..77)

Leases stand in the tree with a `Cursor` at the end of their committed tokens. What is before a cursor stays.

Invariants, for each node; see `check`:
  * `edge` is `end - start` tokens, at least one, but a root's, which is empty; children differ in their first tokens.
  * it has one entry per group and block that its tokens touch; -1 only in window groups.
  * it is one holder (`BlockPool.keep`) of each of its blocks, until it is cut.
  * its cursors have `start < position <= end`; a root's are at 0.

Source: a radix tree over KV: Zheng et al. 2023, SGLang (arXiv:2312.07104). Sharing inside blocks, window groups and
cursors are ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..errors import Bug
from .block_pool import BlockPool
from .events import ROOT_BRANCH, EventLog
from .explain import Eviction, MissReason
from .int_buffer import Ids, IntBuffer
from .policies import Rank
from .retention import Retention
from .wishes import Standing

__all__ = ["Cursor", "RadixNode", "RadixTree", "common_prefix"]

TOKEN_BYTES = 4

MAX_SCARS = 1_024
"""Cut continuations that one node remembers."""

MAX_EMPTY_ROOTS = 1_024
"""Namespaces that have nothing cached, and are kept only to say what they had."""


@dataclass(slots=True, eq=False)
class Cursor:
    """A lease's place in the tree: the end of its committed tokens. The tree moves it along when it splits nodes."""

    node: RadixNode
    position: int


@dataclass(slots=True, eq=False)
class RadixNode:
    """Tokens [start, end) of every sequence that passes here, and the blocks that they touch.

    Attributes:
        edge: int32 token ids as bytes: it grows in place, and comparing a whole edge is one memcmp.
        blocks: per group, block ids by block index, from that of `start` on.
        branch: for events: nodes cut from one run have one branch.
        key, num_hits, standing: retention's.
        scars: what was cut off here: (position, first token cut off) -> when and why.
    """

    namespace: bytes
    parent: RadixNode | None
    start: int
    end: int
    edge: bytearray
    blocks: list[IntBuffer]
    branch: int
    key: Rank = (0.0,)
    num_hits: int = 0
    standing: Standing = field(default_factory=Standing)
    children: dict[int, RadixNode] = field(default_factory=dict)
    cursors: list[Cursor] = field(default_factory=list)
    scars: dict[tuple[int, int], Eviction] = field(default_factory=dict)

    @property
    def token_ids(self) -> Ids:
        """The edge as int32. A view: let go of it before the edge grows or shrinks (Python insists)."""
        return np.frombuffer(self.edge, np.int32)

    @property
    def floor(self) -> int:
        """Tokens before this position may not be cut from this node."""
        if not self.cursors:
            return self.start
        return max(cursor.position for cursor in self.cursors)

    @property
    def is_sealed(self) -> bool:
        """Whether it may not be lengthened: what was said of its tokens need not hold for those that follow."""
        return self.standing.wish is not None or bool(self.standing.pins)

    def ancestry(self) -> Iterator[RadixNode]:
        """This node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def add_scar(self, position: int, token: int, eviction: Eviction) -> None:
        if len(self.scars) >= MAX_SCARS:
            del self.scars[next(iter(self.scars))]
        self.scars[position, token] = eviction


def common_prefix(left: Ids, right: Ids) -> int:
    """Length of the longest common prefix; neither may be empty."""
    size = min(len(left), len(right))
    differs = left[:size] != right[:size]
    first = int(differs.argmax())
    return first if differs[first] else size


class RadixTree:
    """One tree per namespace over shared pools. One engine loop owns it; not thread-safe."""

    def __init__(
        self,
        pools: Sequence[BlockPool],
        windows: Sequence[int | None],
        block_size: int,
        retention: Retention,
        events: EventLog,
    ) -> None:
        self.pools = pools
        self.windows = windows
        self.block_size = block_size
        self.roots: dict[bytes, RadixNode] = {}
        self._retention = retention
        self._events = events
        self._empty_roots: dict[bytes, None] = {}
        self._num_branches = ROOT_BRANCH

    # -- Looking up: no side effects -----------------------------------------------------------------------------------

    def match(self, namespace: bytes, token_ids: Ids) -> tuple[list[RadixNode], int]:
        """The path of nodes that begins like `token_ids`, and for how many tokens. The last may match in part."""
        path: list[RadixNode] = []
        length = 0
        node = self.roots.get(namespace)
        wanted = token_ids.tobytes()
        while node is not None and length < len(token_ids):
            node = node.children.get(token_ids.item(length))
            if node is None:
                break
            path.append(node)
            if not wanted.startswith(node.edge, TOKEN_BYTES * length):
                return path, length + common_prefix(node.token_ids, token_ids[length:])
            length = node.end
        return path, length

    def usable(self, path: list[RadixNode], length: int) -> int:
        """The longest prefix within `length` tokens that every group can serve. Cuts `path` to the nodes it needs."""
        while True:
            while path and path[-1].start >= length:
                path.pop()
            served = length
            for group, window in enumerate(self.windows):
                if window is not None and served > 0:
                    served = self._served_by_window(path, group, window, served)
            if served == length:
                return length
            # What ends in an upper node is decided with its own blocks: look again without this one.
            length = max(served, path[-1].start)

    def scar(self, node: RadixNode, position: int, token: int) -> Eviction | None:
        """What is remembered of tokens that went on from `position` in `node` with `token`, and were cut off there.

        Of what has come back since, in part, the rest is told: of that it is known how long it was, not what it said.
        """
        scar = node.scars.get((position, token))
        if scar is not None or position != node.end or node.children:
            return scar
        places = [(place, first, scar) for (place, first), scar in node.scars.items()]
        if node.parent is not None:
            first = node.token_ids.item(0)
            above = node.parent.scars.get((node.start, first))
            places += [] if above is None else [(node.start, first, above)]
        for place, first, cut in places:
            num_left = place + cut.num_tokens - position
            if place < position and num_left > 0 and node.token_ids.item(place - node.start) == first:
                return cut._replace(num_tokens=num_left)
        return None

    def path_table(self, path: Sequence[RadixNode], group: int, first: int, length: int) -> Ids:
        """The path's block table for its first `length` tokens, from block index `first` on; -1 before."""
        ids = np.empty(self.num_blocks(path[-1].end) if path else 0, np.int32)
        for node in path:
            if node.end > first * self.block_size:
                blocks = node.blocks[group]
                offset = node.start // self.block_size
                ids[offset : offset + blocks.size] = blocks.view
        ids[:first] = -1
        return ids[: self.num_blocks(length)]

    def first_needed_block(self, group: int, length: int) -> int:
        """Index of the first block of a prefix of `length` tokens that its next token looks at in this group."""
        window = self.windows[group]
        return 0 if window is None else max(0, length - window + 1) // self.block_size

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that the first `num_tokens` tokens touch."""
        return -(-num_tokens // self.block_size)

    def _served_by_window(self, path: Sequence[RadixNode], group: int, window: int, length: int) -> int:
        """The longest prefix within `length` whose window of blocks is present in this group."""
        first = self.first_needed_block(group, length)
        if (self.path_table(path, group, first, length)[first:] >= 0).all():
            return length
        # A shorter prefix needs earlier blocks, so only prefixes that end just before a gap can do better.
        gaps = np.flatnonzero(self.path_table(path, group, 0, length) < 0)
        ends = gaps * self.block_size
        needs = np.maximum(0, ends - window + 1) // self.block_size
        previous_gaps = np.concatenate(([-1], gaps[:-1]))
        return int(ends[previous_gaps < needs].max())

    # -- Growing -------------------------------------------------------------------------------------------------------

    def open_root(self, namespace: bytes) -> RadixNode:
        """The root of a namespace, made at its first use."""
        self._empty_roots.pop(namespace, None)
        root = self.roots.get(namespace)
        if root is None:
            none = np.empty(0, np.int32)
            root = RadixNode(namespace, None, 0, 0, bytearray(), [IntBuffer(none) for _ in self.pools], ROOT_BRANCH)
            self.roots[namespace] = root
        return root

    def retire_root(self, root: RadixNode) -> None:
        """If nothing hangs on or stands at this root, keep it only while it is among the last to have become empty."""
        if root.children or root.cursors:
            return
        self._empty_roots.pop(root.namespace, None)
        if root.scars:
            self._empty_roots[root.namespace] = None
        else:
            del self.roots[root.namespace]
        if len(self._empty_roots) > MAX_EMPTY_ROOTS:
            oldest = next(iter(self._empty_roots))
            del self._empty_roots[oldest], self.roots[oldest]

    def insert(self, cursor: Cursor, token_ids: Ids, tables: Sequence[IntBuffer]) -> int:
        """Make `token_ids`, computed after the cursor into the blocks of `tables`, part of the tree; move the cursor.

        Walks on from the cursor. At each turn one of four cases holds:

          1. The tree goes on inside an edge. Where its tokens differ from ours, split it: the next turn finds case 4.
             The tokens before are computed twice, to the same bits: `_share`.
          2. The node ends here, and a child begins with our next token: step down; the next turn finds case 1.
          3. The node ends here and is a leaf: lengthen it. Decoding stays in this case: O(1) amortised per token.
          4. The node ends here and others branch off (or it is the root, or sealed): a new child.

        `tables` are the lease's block ids by group; blocks of which the tree has an equal are exchanged for the tree's.
        Where a window group has none, -1, the tree gets a tombstone.

        Returns:
            How many of the tokens the tree already had.
        """
        end = cursor.position + len(token_ids)
        num_known = 0
        while cursor.position < end:
            node, position = cursor.node, cursor.position
            rest = token_ids[position - end :]
            if position < node.end:  # 1
                size = common_prefix(node.token_ids[position - node.start :], rest)
                if size < len(rest) and position + size < node.end:
                    self._split(node, position + size)
                self._share(cursor.node, position, position + size, tables)
                cursor.position += size
                num_known += size
            elif rest.item(0) in node.children:  # 2
                self._step(cursor, node.children[rest.item(0)])
            elif node.parent is not None and not node.children and not node.is_sealed:  # 3
                self._extend(node, rest, tables)
                cursor.position = end
            else:  # 4
                self._step(cursor, self._attach(node, rest, tables))
                cursor.position = end
        return num_known

    def _step(self, cursor: Cursor, child: RadixNode) -> None:
        cursor.node.cursors.remove(cursor)
        child.cursors.append(cursor)
        cursor.node = child

    def _extend(self, leaf: RadixNode, token_ids: Ids, tables: Sequence[IntBuffer]) -> None:
        start = leaf.end
        leaf.edge += token_ids.tobytes()
        leaf.end += len(token_ids)
        first, stop = start // self.block_size, self.num_blocks(leaf.end)
        for group, table in enumerate(tables):
            blocks = leaf.blocks[group]
            new = table.view[first:stop]
            if start % self.block_size:  # the writer's block has all that ours has in it, and more
                if new.item(0) < 0:  # ours has not what it would stand for now
                    last = blocks.view[-1:]
                    self.pools[group].drop(last[last >= 0])
                    last[:] = -1
                self._replace_last_block(leaf, group, new[:1])
                new = new[1:]
            if len(new):
                self.pools[group].keep(new[new >= 0])
                blocks.extend(new)
        self._retention.resized(leaf, len(token_ids))
        self._events.stored(leaf.namespace, leaf.branch, leaf.branch, start, token_ids)

    def _attach(self, parent: RadixNode, token_ids: Ids, tables: Sequence[IntBuffer]) -> RadixNode:
        start, end = parent.end, parent.end + len(token_ids)
        first, stop = start // self.block_size, self.num_blocks(end)
        blocks = [IntBuffer(table.view[first:stop]) for table in tables]
        for pool, ids in zip(self.pools, blocks, strict=True):
            pool.keep(ids.view[ids.view >= 0])
        self._num_branches += 1
        edge = bytearray(token_ids.tobytes())
        child = RadixNode(parent.namespace, parent, start, end, edge, blocks, self._num_branches, key=parent.key)
        parent.children[token_ids.item(0)] = child
        if len(parent.children) == 1 and parent.parent is not None and start % self.block_size:
            # A sealed leaf got its first child, whose first block has all that its own last one has in it.
            for group, ids in enumerate(child.blocks):
                self._replace_last_block(parent, group, ids.view[:1])
        scar = parent.scars.get((start, token_ids.item(0)))
        was_evicted = scar is not None and scar.reason is not MissReason.CLEARED
        self._retention.added(child, was_evicted=was_evicted)
        self._events.stored(child.namespace, child.branch, parent.branch, start, token_ids)
        return child

    def _share(self, node: RadixNode, start: int, stop: int, tables: Sequence[IntBuffer]) -> None:
        """Tokens [start, stop) of `node` have been computed again into `tables`: keep one copy, and mend tombstones."""
        first, last = start // self.block_size, self.num_blocks(stop)
        whole = stop // self.block_size - first  # so many blocks the lease will not write to again
        offset = node.start // self.block_size
        # So many have all the tokens that the node's entry stands for.
        complete = last - first if stop == node.end else whole
        for pool, table, blocks in zip(self.pools, tables, node.blocks, strict=True):
            theirs = table.view[first:last]
            ours = blocks.view[first - offset : last - offset]
            gaps = np.flatnonzero((ours[:complete] < 0) & (theirs[:complete] >= 0))
            if len(gaps):
                pool.keep(theirs[gaps])
                ours[gaps] = theirs[gaps]
            twice = np.flatnonzero((ours[:whole] != theirs[:whole]) & (theirs[:whole] >= 0))
            if len(twice):
                pool.hold(ours[twice])
                pool.release(theirs[twice])
                theirs[twice] = ours[twice]

    def split_path(self, node: RadixNode, position: int) -> None:
        """Let a node end at `position`, which lies within the tokens of the path down to `node`."""
        for part in node.ancestry():
            if part.start < position < part.end:
                self._split(part, position)
                return

    def _split(self, node: RadixNode, position: int) -> None:
        """Cut an edge in two; cursors at or before `position` move to the new, upper half."""
        parent = node.parent
        if parent is None:
            raise Bug("a root has no edge to split")
        first_token, lower_token = node.token_ids[[0, position - node.start]].tolist()
        size = TOKEN_BYTES * (position - node.start)
        offset = node.start // self.block_size
        stop, lower_first = self.num_blocks(position), position // self.block_size
        upper = RadixNode(
            node.namespace,
            parent,
            node.start,
            position,
            node.edge[:size],
            [IntBuffer(blocks.view[: stop - offset]) for blocks in node.blocks],
            node.branch,
            key=node.key,
            num_hits=node.num_hits,
            standing=node.standing.copy(),
        )
        if lower_first < stop:  # both halves keep the block that the cut goes through
            for pool, blocks in zip(self.pools, upper.blocks, strict=True):
                shared = blocks.view[-1:]
                pool.keep(shared[shared >= 0])
        parent.children[first_token] = upper
        upper.children[lower_token] = node
        node.parent = upper
        node.start = position
        node.edge = node.edge[size:]
        node.blocks = [IntBuffer(blocks.view[lower_first - offset :]) for blocks in node.blocks]
        upper.cursors = [cursor for cursor in node.cursors if cursor.position <= position]
        node.cursors = [cursor for cursor in node.cursors if cursor.position > position]
        for cursor in upper.cursors:
            cursor.node = upper
        upper.scars = {place: eviction for place, eviction in node.scars.items() if place[0] <= position}
        node.scars = {place: eviction for place, eviction in node.scars.items() if place[0] > position}
        self._retention.offer(upper)
        self._retention.offer(node)

    # -- Shrinking -----------------------------------------------------------------------------------------------------

    def cut(self, node: RadixNode, end: int, eviction: Eviction) -> int:
        """Drop the tokens of a leaf from position `end` on; the node itself if none remain.

        Returns:
            How many tokens went. Their blocks are free, except those that somebody else holds.
        """
        if node.children or node.parent is None or not max(node.floor, node.start) <= end < node.end:
            raise Bug(f"a node of tokens {node.start} to {node.end}, held to {node.floor}, cannot be cut at {end}")
        num_tokens = node.end - end
        # What was cut off at its end before went on from these tokens.
        beyond = max((scar.num_tokens for place, scar in node.scars.items() if place[0] == node.end), default=0)
        eviction = eviction._replace(num_tokens=num_tokens + beyond)
        self._retention.resized(node, -num_tokens)
        token = node.token_ids.item(end - node.start)
        if end > node.start:
            del node.edge[TOKEN_BYTES * (end - node.start) :]
            node.end = end
            num_kept = self.num_blocks(end) - node.start // self.block_size
            node.scars = {place: scar for place, scar in node.scars.items() if place[0] <= end}
            node.add_scar(end, token, eviction)
        else:
            num_kept = 0
            self._unlink(node, node.parent, token, eviction)
        for pool, blocks, window in zip(self.pools, node.blocks, self.windows, strict=True):
            dropped = blocks.view[num_kept:]
            pool.drop(dropped if window is None else dropped[dropped >= 0])
            blocks.truncate(num_kept)
        return num_tokens

    def give_up(self, node: RadixNode, group: int, indices: NDArray[np.intp]) -> None:
        """Leave tombstones in place of these entries of a window group's block list."""
        blocks = node.blocks[group].view
        self.pools[group].drop(blocks[indices])
        blocks[indices] = -1

    def own_last_block(self, node: RadixNode, tables: Sequence[IntBuffer]) -> None:
        """At the node's end, let the tree keep the lease's copies of the last block in place of its own."""
        index = (node.end - 1) // self.block_size
        for group, table in enumerate(tables):
            self._replace_last_block(node, group, table.view[index : index + 1])

    def _unlink(self, node: RadixNode, parent: RadixNode, token: int, eviction: Eviction) -> None:
        del parent.children[token]
        parent.add_scar(parent.end, token, eviction)
        self._retention.forget(node)
        if parent.parent is None:
            self.retire_root(parent)
            return
        if len(parent.children) == 1 and parent.end % self.block_size:
            # The only child's first block has all that the parent's last has in it: two copies are one too many.
            (child,) = parent.children.values()
            for group, blocks in enumerate(child.blocks):
                self._replace_last_block(parent, group, blocks.view[:1])
        self._retention.offer(parent)

    def _replace_last_block(self, node: RadixNode, group: int, block: Ids) -> None:
        """Keep `block` (one id, or a tombstone), which has the same tokens, in place of the node's last one.

        If that is also the node's first, and goes on from the parent's last, the parent follows, and so on upwards.
        """
        while block.item() >= 0:
            last = node.blocks[group].view[-1:]
            if last.item() != block.item():
                self.pools[group].keep(block)
                self.pools[group].drop(last[last >= 0])
                last[:] = block
                self._retention.offer(node)
            parent = node.parent
            if node.blocks[group].size > 1 or node.start % self.block_size == 0 or parent is None:
                return
            if len(parent.children) > 1:
                return
            node = parent

    # -- Looking over it -----------------------------------------------------------------------------------------------

    def nodes(self, namespace: bytes | None = None) -> Iterator[RadixNode]:
        """All nodes, or those of one namespace, parents first, without roots."""
        if namespace is None:
            pending = [child for root in self.roots.values() for child in root.children.values()]
        else:
            root = self.roots.get(namespace)
            pending = [] if root is None else list(root.children.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())
