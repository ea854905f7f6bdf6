"""The KV cache: what the engine talks to. See `KVCache`."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..errors import Bug, LeaseError
from .block_pool import BlockPool, Ledger, Tag
from .events import EventBatch, EventLog, Stored
from .eviction import Evictor, OnEvict
from .explain import Beneficiary, Eviction, Explanation, History, MissReason, PrefixHit, attribute
from .int_buffer import Ids, IntBuffer
from .invariants import check_invariants
from .lease import BlockCopy, Lease
from .pins import Pin, Pins
from .policies import Lru, RetentionPolicy
from .radix_tree import Cursor, RadixNode, RadixTree
from .retention import Retention
from .stats import CacheStats, Durations
from .view import CacheView, NodeView
from .wishes import Outcome, Wish, borders

__all__ = ["GroupSpec", "KVCache", "Snapshot"]

NUM_SHOWN_TOKENS = 8
"""Tokens of the other continuation that an explanation carries."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers with one need: `num_blocks` in their pool, and how far back a token looks.

    `window` = W: a token at position p attends to positions (p - W, p], itself included. None: to all before it.
    """

    num_blocks: int
    window: int | None = None

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise ValueError(f"num_blocks is {self.num_blocks}; at least 1")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; at least 1, or None for full attention")


class Snapshot(NamedTuple):
    """The tree as if it had just been stored, and the number of the first event after it."""

    stored: tuple[Stored, ...]
    next_sequence_number: int


class KVCache:
    """Who has computed what, in which blocks: a radix tree per namespace over one block pool per group.

    A sequence's life:

        lease = cache.open(namespace, prompt_ids)        what is known is held: num_computed_tokens = hit.num_tokens
        repeat  copies = cache.grow(lease, stop)         slots for tokens [0, stop); None: no room, nothing taken
                run the copies, then the step: it writes tokens [num_computed_tokens, stop)
                cache.commit(lease, new_ids)             visible to others from now on
        lease.close()                                    stays in the tree until retention gives it up

    `num_computed_tokens <= num_reserved_tokens` always. A sequence that is aborted or preempted just closes its lease:
    what was committed stays, what was only reserved is free, and copies that its last `grow` asked for must be dropped.

    Promises
      * A committed slot is never written again; a block has at most one writer.
      * What a lease holds is neither evicted nor moved.
      * A lease that is alone gets all the blocks that `blocks_needed` says, whatever is cached.

    Ids only: the engine owns the memory. One engine loop owns the cache; not thread-safe. `clock` is called when leases
    open and close and when something is evicted.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        *,
        clock: Callable[[], float],
        policy: RetentionPolicy | None = None,
        block_size: int = 16,
        event_capacity: int = 4_096,
        on_evict: OnEvict | None = None,
        pin_share: float = 0.5,
    ) -> None:
        if not groups:
            raise ValueError("groups is empty; a model without attention needs no KV cache")
        windows = [group.window for group in groups]
        self.groups = tuple(groups)
        self.block_size = block_size
        self.stats = CacheStats()
        self._pools = [BlockPool(group.num_blocks, block_size) for group in groups]
        self._retention = Retention(policy or Lru(), clock, windows)
        self._events = EventLog(event_capacity)
        self._tree = RadixTree(self._pools, windows, block_size, self._retention, self._events)
        self._evictor = Evictor(self._tree, self._retention, self._events, self.stats, on_evict)
        self._leases: set[Lease] = set()
        self._pin_share = pin_share
        self._pins = Pins(self._tree, self._retention, self._pin_quota)

    @property
    def policy(self) -> RetentionPolicy:
        return self._retention.policy

    # -- The life of a sequence ----------------------------------------------------------------------------------------

    def probe(self, namespace: bytes, token_ids: ArrayLike) -> int:
        """How many tokens `open` would reuse now. No side effects."""
        ids = _as_ids(token_ids)
        path, length = self._tree.match(namespace, ids)
        return self._tree.usable(path, min(length, max(0, len(ids) - 1)))

    def continuation(self, lease: Lease, token_ids: Ids, num_tokens: int) -> Ids:
        """What followed a lease's tokens and `token_ids` before, up to `num_tokens` of it, by the latest path.

        Often nothing, and then at once: only what lies beyond the lease is looked at.
        """
        node, position = lease.cursor.node, lease.cursor.position
        if position == node.end and not node.children:
            return np.empty(0, np.int32)
        wanted = len(token_ids) + num_tokens
        found: list[Ids] = []
        count = 0
        part = node.token_ids[position - node.start :]
        while True:
            part = part[: wanted - count].copy()
            known = token_ids[count : count + len(part)]
            if not np.array_equal(part[: len(known)], known):
                return np.empty(0, np.int32)
            found.append(part)
            count += len(part)
            if count < len(token_ids):
                following = node.children.get(token_ids.item(count))
            else:
                following = next(reversed(node.children.values()), None)
            if count == wanted or following is None:
                return np.concatenate(found)[len(token_ids) :]
            node, part = following, following.token_ids

    def open(
        self,
        namespace: bytes,
        token_ids: ArrayLike,
        *,
        resumed: bool = False,
        label: str = "",
        wishes: Sequence[Wish] = (),
        most: int | None = None,
        history: History | None = None,
        num_restored: int = 0,
    ) -> Lease:
        """Find the longest usable prefix and hold it. Never fails: no hit is a hit of 0 tokens.

        At most `len(token_ids) - 1` tokens are reused, since somebody wants the logits of the last. It counts as a
        request when it first grows: one that finds no room is opened again.

        Args:
            resumed: this sequence ran before and was preempted; its tokens are counted apart.
            label: names the sequence in the memory of what is evicted for it.
            wishes: how long what it uses and computes is worth keeping.
            most: reuse so many tokens at most: the model's results for the others are wanted. None: all that can be.
            history: what is known of the tokens; it tells reasons apart that look alike from here.
            num_restored: where what was brought up for it from elsewhere ends; 0: nothing was.
        """
        path, hit = self._look_up(namespace, _as_ids(token_ids), most, history, num_restored)
        if not resumed:
            self._retention.hit(path)
        gaps = None if resumed else self.stats.reuse_gaps
        lease = self._hold(Beneficiary(label, namespace), path, hit, wishes, gaps)
        lease.to_count = "resumed" if resumed else "asked"
        return lease

    def open_restore(self, namespace: bytes, token_ids: ArrayLike, *, whole_blocks: bool = False) -> Lease:
        """Hold what is known of tokens whose KV is about to be brought in from elsewhere: nobody's request, no hit.

        `grow` and `commit` it as any lease. The copies that `grow` asks for need not be made if the blocks they go to
        are written whole.

        Args:
            whole_blocks: what can be reused of whole blocks alone.
        """
        ids = _as_ids(token_ids)
        path, hit = self._look_up(namespace, ids)
        while whole_blocks and hit.num_tokens % self.block_size:
            ids = ids[: hit.num_tokens // self.block_size * self.block_size + 1]
            path, hit = self._look_up(namespace, ids)
        return self._hold(Beneficiary("restore", namespace), path, hit, ())

    def _hold(
        self,
        beneficiary: Beneficiary,
        path: list[RadixNode],
        hit: PrefixHit,
        wishes: Sequence[Wish],
        gaps: Durations | None = None,
    ) -> Lease:
        root = self._tree.open_root(beneficiary.namespace)
        node = path[-1] if path else root
        cursor = Cursor(node, hit.num_tokens)
        node.cursors.append(cursor)
        tables, first_blocks = [], []
        num_shared = hit.num_tokens
        for group, pool in enumerate(self._pools):
            first = self._tree.first_needed_block(group, hit.num_tokens)
            table = IntBuffer(self._tree.path_table(path, group, first, hit.num_tokens))
            idle = np.flatnonzero(pool.num_leases(table.view[first:]) == 0)
            if len(idle):
                num_shared = min(num_shared, (first + int(idle[0])) * self.block_size)
            pool.hold(table.view[first:])
            tables.append(table)
            first_blocks.append(first)
        lease = Lease(self, hit, cursor, tables, first_blocks, beneficiary=beneficiary, wishes=wishes)
        lease.num_shared_tokens = num_shared
        self._leases.add(lease)
        self._retention.touch(path, gaps)
        return lease

    def grow(self, lease: Lease, num_tokens: int) -> list[BlockCopy] | None:
        """Reserve slots for tokens [0, num_tokens), evicting if need be.

        If the sequence would write into a block of another's, it gets one of its own, and the copies that bring the
        shared tokens there are returned: run them before the step. No block is read by one copy and written by another.

        Returns:
            Copies to run, often none; or None, having taken nothing, if there is no room.
        """
        self._require(lease)
        if num_tokens <= lease.num_reserved_tokens:
            self._count(lease)
            return []
        num_new = [self._tree.num_blocks(num_tokens) - lease.tables[0].size] * len(self._pools)
        return self._reserve(lease, num_new)

    def grow_sparse(self, lease: Lease, num_tokens: int, first_blocks: Sequence[int]) -> bool:
        """As `grow`, for content of which a window group has nothing before some block: there, it gets tombstones.

        Args:
            lease: one that ends at a block's end.
            first_blocks: by group, the first block that there is: 0 in full groups, in window groups none that the
                token after `num_tokens` looks at comes before it.

        Returns:
            Whether there was room.
        """
        self._require(lease)
        size = lease.tables[0].size
        num_new = self._tree.num_blocks(num_tokens) - size
        if num_new <= 0 or lease.tail_is_shared:
            raise LeaseError(f"from {lease.num_reserved_tokens} to {num_tokens} tokens there are no whole blocks")
        for group, first in enumerate(first_blocks):
            if first > self._tree.first_needed_block(group, num_tokens):
                raise LeaseError(f"group {group} has nothing before block {first}, which {num_tokens} tokens need")
        num_gone = [min(max(0, first - size), num_new) for first in first_blocks]
        if not self._make_room(lease, [num_new - gone for gone in num_gone]):
            self.stats.num_refused_grows += 1
            return False
        for group, first in enumerate(first_blocks):
            if first > size:
                lowest = lease.first_blocks[group]
                self._let_go(lease, group, size)
                self._offer(lease.cursor.node, lowest)
                lease.tables[group].extend(np.full(num_gone[group], -1, np.int32))
                lease.first_blocks[group] = first
        return self._reserve(lease, [num_new - gone for gone in num_gone]) is not None

    def _reserve(self, lease: Lease, num_new: Sequence[int]) -> list[BlockCopy] | None:
        """Take `num_new` blocks in each group, with what they need to be writable; None if there is no room."""
        if not self._make_room(lease, num_new):
            self.stats.num_refused_grows += 1
            return None
        self._count(lease)
        copies: list[BlockCopy] = []
        for group, count in enumerate(self._num_to_take(lease, num_new)):
            ids = self._pools[group].take(count)
            if ids is None:
                raise Bug(f"group {group} has fewer than {count} free blocks after room was made")
            table = lease.tables[group]
            if count > num_new[group]:
                shared, own, ids = table.view[-1:].copy(), ids.item(0), ids[1:]
                table.view[-1] = own
                lease.borrowed.append((group, shared))
                num_shared = lease.num_computed_tokens % self.block_size
                copies.append(BlockCopy(group, shared.item(), own, num_shared))
                self._pools[group].copy_marks(shared.item(), own, num_shared)
            elif lease.tail_is_shared:  # it became the writer of the block itself
                self._pools[group].unmark(table.view[-1].item(), lease.num_computed_tokens % self.block_size)
            table.extend(ids)
        lease.tail_is_shared = False
        lease.num_reserved_tokens = lease.tables[0].size * self.block_size
        self.stats.num_copied_blocks += len(copies)
        return copies

    def commit(self, lease: Lease, token_ids: ArrayLike) -> None:
        """The KV of `token_ids`, the tokens that follow `num_computed_tokens`, is in the lease's blocks: share it.

        O(new tokens). In a window group, blocks outside the next token's window are let go. Where somebody else has
        committed the same tokens meanwhile, the lease's copies may be exchanged for theirs, which are equal to the bit.

        Raises:
            LeaseError: if it has not reserved so many slots.
        """
        self._require(lease)
        ids = _as_ids(token_ids)
        cursor = lease.cursor
        if cursor.position + len(ids) > lease.num_reserved_tokens:
            reserved = f"only {lease.num_reserved_tokens} are reserved; grow the lease first"
            raise LeaseError(f"{len(ids)} tokens were committed after {cursor.position}, but {reserved}")
        first_block = cursor.position // self.block_size
        node = cursor.node
        num_known = self._tree.insert(cursor, ids, lease.tables)
        if cursor.node is not node:
            self._retention.touch((cursor.node,))
        if num_known or lease.borrowed:
            self._return_borrowed(lease)
            self._offer(cursor.node, first_block)
        self.stats.num_committed_tokens += len(ids)
        self.stats.num_duplicate_tokens += num_known
        if self._retention.window_queues:
            self._slide(lease)

    def release(self, lease: Lease, outcome: Outcome = Outcome.TURN) -> None:
        """Close a lease: see `Lease.close`."""
        self._require(lease)
        lease.is_open = False
        self._leases.remove(lease)
        self._return_borrowed(lease)
        for group, pool in enumerate(self._pools):
            pool.release(lease.tables[group].view[lease.first_blocks[group] :])
        for border in borders(lease.wishes, lease.num_computed_tokens):
            self._tree.split_path(lease.cursor.node, border)
        node = lease.cursor.node
        node.cursors.remove(lease.cursor)
        path = list(node.ancestry())
        self._retention.wish(path, lease.wishes, lease.hit.num_tokens)
        self._retention.ended(path, outcome)
        self._retention.touch(path)
        self._retention.offer(node)
        for group in self._retention.window_queues:
            self._offer(node, lease.first_blocks[group])
        if node.parent is None:
            self._tree.retire_root(node)
        else:
            self._evictor.prune(node)
        if self._retention.owners:
            self._hold_to_quota(lease.beneficiary.namespace)

    # -- What other tiers need -----------------------------------------------------------------------------------------

    def first_needed_block(self, group: int, num_tokens: int) -> int:
        """The first block of so many tokens that the token after them looks at in this group."""
        return self._tree.first_needed_block(group, num_tokens)

    def stored_table(self, lease: Lease, group: int) -> Ids:
        """As the lease's block table, of its whole committed blocks, with those, too, that slid out of a window and
        are still there. Only until the next call."""
        self._require(lease)
        num_tokens = lease.num_computed_tokens
        path = list(lease.cursor.node.ancestry())[::-1]
        return self._tree.path_table(path, group, 0, num_tokens)[: num_tokens // self.block_size]

    def tag(self, group: int, block_ids: Ids, tags: Sequence[Tag]) -> None:
        """Say what the content of whole, committed blocks is called elsewhere. Forgotten when a block is taken anew."""
        self._pools[group].tag(block_ids, tags)

    def tags(self, group: int, block_ids: Ids) -> list[Tag | None]:
        """What the content of these blocks is called; None where nobody has said so since they were taken.

        A block that has a tag has that content, also while it is free.
        """
        return self._pools[group].tags(block_ids)

    def mark_rounded(self, group: int, block_ids: Ids) -> None:
        """The content of these blocks came back from where it was kept in fewer bits: it is nearly what was computed.

        The mark goes with the content: to copies at the first write, and away when a block is taken anew.
        """
        self._pools[group].mark_rounded(block_ids)

    def num_rounded_tokens(self, lease: Lease, num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens of a lease have KV that was rounded, in any group."""
        num_blocks = self._tree.num_blocks(num_tokens)
        is_rounded = np.zeros((num_blocks, self.block_size), np.bool_)
        for group, pool in enumerate(self._pools):
            first = lease.first_blocks[group]
            is_rounded[first:] |= pool.rounded(lease.tables[group].view[first:num_blocks])
        return int(np.count_nonzero(is_rounded.ravel()[:num_tokens]))

    # -- Around it -----------------------------------------------------------------------------------------------------

    def blocks_needed(self, num_tokens: int, max_step_tokens: int) -> tuple[int, ...]:
        """The most blocks per group that a sequence of `num_tokens` holds, in steps of up to `max_step_tokens`."""
        most = self._tree.num_blocks(num_tokens)
        needs = []
        for group in self.groups:
            # A step reads the window of its first token and writes the rest; the span may start anywhere in a block.
            span = num_tokens if group.window is None else group.window - 1 + max_step_tokens
            needs.append(min(most, (span + self.block_size - 2) // self.block_size + 1))
        return tuple(needs)

    def fits(self, num_tokens: int, max_step_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` tokens can ever be computed here; if not, refuse it at submission."""
        needs = self.blocks_needed(num_tokens, max_step_tokens)
        return all(need <= pool.num_blocks for need, pool in zip(needs, self._pools, strict=True))

    def explain(self, namespace: bytes, token_ids: ArrayLike, *, other_namespaces: bool = False) -> PrefixHit:
        """What `open` would find now, and why no more. No side effects.

        Args:
            other_namespaces: also say whether another namespace has more of it. That tells one tenant about others: for
                operators only.
        """
        ids = _as_ids(token_ids)
        _, hit = self._look_up(namespace, ids)
        if other_namespaces and hit.explanation.reason is not MissReason.FULL:
            others = [other for other in self._tree.roots if other != namespace]
            elsewhere = max((self._tree.match(other, ids)[1] for other in others), default=0)
            if elsewhere > hit.explanation.num_matched_tokens:
                explanation = Explanation(MissReason.OTHER_NAMESPACE, hit.num_tokens, elsewhere)
                return PrefixHit(hit.num_tokens, len(ids), explanation)
        return hit

    def clear(self, namespace: bytes | None = None, *, pinned: bool = False) -> int:
        """Drop what is not leased, of one namespace or of all.

        Args:
            pinned: what is pinned, too.

        Returns:
            How many tokens were dropped.
        """
        self._pins.lift_expired()
        eviction = Eviction(self._retention.clock(), MissReason.CLEARED, "clear")
        num_tokens = 0
        for cleared in [namespace] if namespace is not None else list(self._tree.roots):
            for node in reversed(list(self._tree.nodes(cleared))):
                end = max(node.start, node.floor)
                if not node.children and end < node.end and (pinned or not node.standing.pins):
                    num_tokens += self._tree.cut(node, end, eviction)
            self._events.cleared(cleared)
            for node in self._tree.nodes(cleared):
                for group in () if node.standing.pins and not pinned else self._retention.window_queues:
                    self._tree.give_up(node, group, self._evictor.unleased(node, group, node.blocks[group].size))
                self._store_again(node)
        self.stats.num_cleared_tokens += num_tokens
        return num_tokens

    def num_known(self, namespace: bytes, token_ids: ArrayLike) -> int:
        """How many of these tokens are in the tree, whether they could be reused or not."""
        return self._tree.match(namespace, _as_ids(token_ids))[1]

    def note_cleared(self, namespace: bytes, token_ids: ArrayLike, time: float) -> None:
        """What of these tokens is not cached was elsewhere until somebody cleared it, at that time: who misses it is
        told so, whatever became of it here before."""
        ids = _as_ids(token_ids)
        path, length = self._tree.match(namespace, ids)
        if length == len(ids):
            return
        node = path[-1] if path else self._tree.open_root(namespace)
        before = self._tree.scar(node, length, ids.item(length))
        if before is None or before.reason is not MissReason.CLEARED:
            num_tokens = max(len(ids) - length, 0 if before is None else before.num_tokens)
            node.add_scar(length, ids.item(length), Eviction(time, MissReason.CLEARED, "clear", num_tokens=num_tokens))
        if not path:
            self._tree.retire_root(node)

    def clear_prefix(
        self, namespace: bytes, token_ids: ArrayLike, *, is_alone: bool = False, pinned: bool = False
    ) -> tuple[int, list[Tag]]:
        """Drop what is not leased of all that begins with these tokens, and of these what nothing else hangs on.

        Args:
            is_alone: only these tokens, and what is left of their last block, as far as nobody else uses them: what
                goes on from them for more than that stays.
            pinned: what is pinned, too.

        Returns:
            How many tokens were dropped, and what their blocks were called elsewhere.
        """
        self._pins.lift_expired()
        ids = _as_ids(token_ids)
        path, length = self._tree.match(namespace, ids)
        if not path or (length < len(ids) and not is_alone):
            return 0, []
        last = path[-1]
        if not is_alone:
            below = [last]
            for node in below:
                below.extend(node.children.values())
            doomed = below[::-1]
        else:
            doomed = [last] if last.end - length < self.block_size else []
        doomed += path[-2::-1]
        eviction = Eviction(self._retention.clock(), MissReason.CLEARED, "clear")
        num_tokens, tags = 0, list[Tag]()
        for node in doomed:
            end = max(node.start, node.floor)
            if node.children or end >= node.end or (node.standing.pins and not pinned):
                continue
            before = [pool.num_free for pool in self._pools]
            self._events.removed(node.namespace, node.branch, end, node.end - end, "clear")
            num_tokens += self._tree.cut(node, end, eviction)
            for pool, num_free in zip(self._pools, before, strict=True):
                freed = pool.freed_since(num_free)
                tags += [tag for tag in pool.tags(freed) if tag is not None]
        self.stats.num_cleared_tokens += num_tokens
        return num_tokens, tags

    # -- Changing it while it is used ----------------------------------------------------------------------------------

    @property
    def capacity(self) -> tuple[int, ...]:
        """Blocks of each group for which there is memory: `resize` goes so far."""
        return tuple(pool.capacity for pool in self._pools)

    def resize(self, num_blocks: Sequence[int]) -> list[Ids] | None:
        """Let each group have so many blocks from now on, evicting what is too much.

        Returns:
            The blocks of each group that are withheld by that, whose memory nobody reads any more; None, with the
            sizes as they were, if more are leased.
        """
        for count, pool in zip(num_blocks, self._pools, strict=True):
            if not 1 <= count <= pool.capacity:
                raise ValueError(f"{count} blocks are not among 1 to {pool.capacity}")
            if count < pool.num_leased:
                return None
        excess = [max(0, pool.num_blocks - count) for count, pool in zip(num_blocks, self._pools, strict=True)]
        if not self._evictor.make_room(excess, Beneficiary("resize", b"")):
            # What is left may be copies of what leases have in blocks of their own.
            claimed = [self._claim_tail(lease) for lease in self._leases]
            if not any(claimed) or not self._evictor.make_room(excess, Beneficiary("resize", b"")):
                return None
        withheld = []
        for count, pool in zip(num_blocks, self._pools, strict=True):
            pool.grant(max(0, count - pool.num_blocks))
            ids = pool.withhold(pool.num_blocks - count)
            if ids is None:
                raise Bug(f"{pool.num_blocks - count} blocks are not free after room was made")
            withheld.append(ids)
        self._pins.set_quota(self._pin_quota)
        return withheld

    def use_policy(self, policy: RetentionPolicy) -> None:
        """Give content up in another order from now on. What is cached stays; the new policy knows when it was used,
        how often, and what was wished for it. O(nodes)."""
        self._retention.use_policy(policy, list(self._tree.nodes()))

    @property
    def _pin_quota(self) -> int:
        return int(self._pin_share * min(pool.num_blocks for pool in self._pools)) * self.block_size

    # -- Retention -----------------------------------------------------------------------------------------------------

    def spend(self, namespace: bytes, token_ids: ArrayLike) -> None:
        """The conversation of these tokens is closed: what it alone uses goes first of all, whatever the policy."""
        path, length = self._tree.match(namespace, _as_ids(token_ids))
        self._retention.spend([node for node in reversed(path) if node.end <= length])

    def set_quota(self, namespace: bytes, owner: str, quota_tokens: int) -> None:
        """Let an owner's namespaces have so many tokens cached at most, together.

        What is leased is not counted out: running sequences are the scheduler's to bound. When they end, or need
        room, the owner's least valuable content goes until the quota holds again, however much room there is.
        """
        self._retention.set_quota(namespace, owner, quota_tokens, self._tree.nodes(namespace))

    def _hold_to_quota(self, namespace: bytes, num_new_tokens: int = 0) -> None:
        owner = self._retention.owners.get(namespace)
        if owner is not None and owner.num_tokens + num_new_tokens > owner.quota_tokens:
            self._evictor.trim(owner, max(0, owner.quota_tokens - num_new_tokens))

    def pin(
        self,
        namespace: bytes,
        token_ids: ArrayLike,
        ttl_s: float | None = None,
        *,
        pin_id: int | None = None,
        label: str = "",
    ) -> Pin | None:
        """Let what is cached of these tokens go last of all: only if a running sequence could not go on otherwise.

        Args:
            ttl_s: seconds until it is lifted by itself; None: never.
            pin_id: of a pin that this one takes the place of, here or in the cache before this one; None: it is new.
            label: kept with it.

        Returns:
            The pin, to be lifted by its id; None if it would exceed the quota, `pin_share` of the smallest pool, or if
            there are thousands.
        """
        return self._pins.pin(namespace, _as_ids(token_ids), ttl_s, pin_id, label)

    def unpin(self, pin_id: int) -> bool:
        """Lift a pin; False if there is none of that id."""
        return self._pins.lift(pin_id)

    def pins(self, namespace: bytes | None = None, token_ids: ArrayLike = ()) -> tuple[Pin, ...]:
        """Those that hold now, the oldest first.

        Args:
            namespace: only those of one namespace.
            token_ids: only those of what begins with these, or of their beginning.
        """
        return self._pins.of(namespace, _as_ids(token_ids))

    def pinned(self) -> list[tuple[Pin, Ids]]:
        """Each pin, and the token ids that it was put on, also where it holds less of them by now."""
        return self._pins.contents()

    # -- Looking over it -----------------------------------------------------------------------------------------------

    def ledger(self) -> tuple[Ledger, ...]:
        """Free, cached and leased blocks of each group.

        Raises:
            Bug: if they do not add up to the total.
        """
        return tuple(pool.ledger() for pool in self._pools)

    @property
    def next_event_number(self) -> int:
        """Of the next event; whoever asks on another thread sees one that is old by a moment."""
        return self._events.next_sequence_number

    def events_since(self, sequence_number: int) -> EventBatch:
        """What was stored, removed and cleared from that event on; see `events`."""
        return self._events.since(sequence_number)

    def snapshot(self) -> Snapshot:
        """All that is stored, for a follower of the events that begins or came too late."""
        number = self._events.next_sequence_number
        stored = tuple(
            Stored(number, node.namespace, node.branch, _parent_branch(node), node.start, node.token_ids.copy())
            for node in self._tree.nodes()
        )
        return Snapshot(stored, number)

    def view(self, max_nodes: int = 256, num_first_ids: int = 12) -> CacheView:
        """What is cached, for people to look at. O(blocks and nodes).

        Args:
            max_nodes: at most so many, chosen from the beginnings down, the longest first.
        """
        views: list[NodeView] = []
        waiting = [(-child.end + child.start, number, -1, child) for number, child in enumerate(self._beginnings())]
        heapq.heapify(waiting)
        number = len(waiting)
        while waiting and len(views) < max_nodes:
            _, _, parent, node = heapq.heappop(waiting)
            first_ids = tuple(node.token_ids[:num_first_ids].tolist())
            views.append(
                NodeView(
                    parent,
                    node.namespace,
                    node.start,
                    node.end - node.start,
                    first_ids,
                    node.num_hits,
                    len(node.cursors),
                    bool(node.standing.pins),
                )
            )
            for child in node.children.values():
                number += 1
                heapq.heappush(waiting, (child.start - child.end, number, len(views) - 1, child))
        num_nodes = sum(1 for _ in self._tree.nodes())
        return CacheView(tuple(pool.states() for pool in self._pools), tuple(views), num_nodes)

    def _beginnings(self) -> Iterator[RadixNode]:
        for root in self._tree.roots.values():
            yield from root.children.values()

    def check(self) -> None:
        """Assert every invariant by recounting everything. O(size of the cache): for tests and `--check`."""
        check_invariants(self._tree, self._retention, self._evictor, self._leases)

    # -- Parts ---------------------------------------------------------------------------------------------------------

    def _look_up(
        self,
        namespace: bytes,
        ids: Ids,
        most: int | None = None,
        history: History | None = None,
        num_restored: int = 0,
    ) -> tuple[list[RadixNode], PrefixHit]:
        path, matched = self._tree.match(namespace, ids)
        last = path[-1] if path else self._tree.roots.get(namespace)
        wanted = max(0, len(ids) - 1)
        known = min(matched, wanted)
        length = self._tree.usable(path, known if most is None else min(known, most))
        if length == wanted:
            explanation = Explanation(MissReason.FULL, None, matched)
        elif length == known:
            explanation = self._explain_end(last, matched, ids.item(matched), history)
            # Nothing tells whether they were computed before; no other tier could have kept them, and it kept the rest.
            is_rest = history is None and 0 < num_restored == matched and len(ids) - matched < self.block_size
            if is_rest and explanation.reason is MissReason.NEVER_SEEN:
                explanation = replace(explanation, reason=MissReason.TOO_SHORT)
        else:
            reason = MissReason.RESULTS_WANTED if most is not None else MissReason.OUTSIDE_WINDOW
            beyond = self._explain_end(last, matched, ids.item(matched), history) if matched < len(ids) else None
            explanation = Explanation(reason, length, matched, beyond=beyond, until=matched)
        return path, PrefixHit(length, len(ids), explanation)

    def _explain_end(self, node: RadixNode | None, position: int, token: int, history: History | None) -> Explanation:
        """Why the tree, known to `position` in `node`, does not go on with `token`."""
        if node is None:
            return Explanation(MissReason.NEVER_SEEN, position, position)
        # What has a name elsewhere is there, or was. The tokens after it, where they do not fill a block, never were.
        is_tail = self._is_named(node, position)
        num_known = 0 if history is None else history.num_tokens - position
        scar = self._tree.scar(node, position, token)
        if scar is not None:
            until = position + scar.num_tokens if scar.num_tokens else None
            is_short = is_tail and 0 < scar.num_tokens < self.block_size and scar.reason is MissReason.EVICTED
            reason = MissReason.TOO_SHORT if is_short else scar.reason
            return Explanation(reason, position, position, evicted=scar, until=until)
        if position == node.end and node.children:
            node = next(reversed(node.children.values()))  # the latest to branch off
        there = node.token_ids[position - node.start :][:NUM_SHOWN_TOKENS]
        # If all of a known conversation is there, what others said after it is no reason: this is new text.
        goes_on = position > 0 and len(there) > 0 and (history is None or num_known > 0)
        is_exact = history is not None and history.is_exact
        if is_tail and 0 < num_known < self.block_size and (is_exact or not goes_on):
            return Explanation(MissReason.TOO_SHORT, position, position, until=position + num_known)
        if not goes_on:
            return Explanation(MissReason.NEVER_SEEN, position, position)
        reason = MissReason.TEMPLATE_DRIFT if num_known > 0 and not is_exact else MissReason.DIVERGED
        return Explanation(reason, position, position, continuation=tuple(there.tolist()))

    def _is_named(self, node: RadixNode, position: int) -> bool:
        """Whether a block ends at `position`, in `node`, that is called something elsewhere."""
        index = position // self.block_size - 1 - node.start // self.block_size
        if position % self.block_size or index < 0:
            return False
        blocks = zip(self._pools, (held.view[index : index + 1] for held in node.blocks), strict=True)
        return any(tag is not None for pool, ids in blocks for tag in pool.tags(ids[ids >= 0]))

    def _count(self, lease: Lease) -> None:
        """Count what a lease found, once, when it goes on from there: one that finds no room is opened again."""
        stats, hit, what = self.stats, lease.hit, lease.to_count
        lease.to_count = None
        if what is None:
            return
        if what == "resumed":
            stats.num_resumed_opened += 1
            stats.num_resumed_asked_tokens += hit.num_prompt_tokens
            stats.num_resumed_reused_tokens += hit.num_tokens
        else:
            stats.num_opened += 1
            stats.num_asked_tokens += hit.num_prompt_tokens
            stats.num_reused_tokens += hit.num_tokens
            for start, stop, _, reason in attribute(
                hit.explanation, num_shared=0, num_reused=hit.num_tokens, num_prompt_tokens=hit.num_prompt_tokens
            ):
                if reason is not None:
                    stats.num_missed_tokens[reason] += stop - start

    def _require(self, lease: Lease) -> None:
        lease.require_open()
        if lease not in self._leases:
            raise LeaseError("this lease belongs to another cache")

    def _make_room(self, lease: Lease, num_new: Sequence[int]) -> bool:
        """Evict until the lease can take `num_new` blocks in each group, and what it needs to copy to."""
        if any(count > pool.num_free + pool.num_cached for count, pool in zip(num_new, self._pools, strict=True)):
            return False  # hopeless: evict nothing in vain
        self._pins.lift_expired()
        if self._retention.owners:
            self._hold_to_quota(lease.beneficiary.namespace, max(num_new) * self.block_size)
        if self._evictor.make_room(self._num_to_take(lease, num_new), lease.beneficiary):
            return True
        return self._claim_tail(lease) and self._evictor.make_room(self._num_to_take(lease, num_new), lease.beneficiary)

    def _num_to_take(self, lease: Lease, num_new: Sequence[int]) -> list[int]:
        """Blocks to take per group: the new ones, and one to copy the shared last block to, where it must be copied.

        Where nobody but this lease and the tree holds that block, and the tree has no more tokens in it than the lease,
        the lease becomes its writer instead: nobody could tell the difference.
        """
        if not lease.tail_is_shared:
            return list(num_new)
        cursor = lease.cursor
        ends_here = not cursor.node.children and cursor.node.end == cursor.position
        return [
            count + (not ends_here or pool.num_leases(table.view[-1:]).item() > 1)
            for count, pool, table in zip(num_new, self._pools, lease.tables, strict=True)
        ]

    def _claim_tail(self, lease: Lease) -> bool:
        """Let there be one copy of the lease's partly filled last block, its own. False if others need theirs.

        The last resort when all else has been evicted: the tree gives up the few tokens that it has beyond the lease in
        that block, so that the lease can write on in it, and its own copy of those that the lease has.
        """
        cursor = lease.cursor
        node, position = cursor.node, cursor.position
        if position % self.block_size == 0 or node.children or node.floor > position:
            return False
        if node.end > position:
            self._evictor.cut(node, position)
        self._tree.own_last_block(node, lease.tables)
        return True

    def _slide(self, lease: Lease) -> None:
        """In window groups, let go of the blocks that the next token does not look at."""
        lowest = None
        for group in self._retention.window_queues:
            first = lease.first_blocks[group]
            needed = self._tree.first_needed_block(group, lease.num_computed_tokens)
            if needed > first:
                self._let_go(lease, group, needed)
                lowest = first if lowest is None else min(lowest, first)
        if lowest is not None:
            self._offer(lease.cursor.node, lowest)

    def _let_go(self, lease: Lease, group: int, stop: int) -> None:
        """Release a lease's blocks before block `stop` of a window group."""
        gone = lease.tables[group].view[lease.first_blocks[group] : stop]
        self._pools[group].release(gone)
        gone[:] = -1
        lease.first_blocks[group] = stop

    def _offer(self, node: RadixNode, first_block: int) -> None:
        """A lease let go of blocks from `first_block` on, on the path down to `node`: they may be evictable now."""
        for holder in node.ancestry():
            if holder.end <= first_block * self.block_size:
                break
            self._retention.offer(holder)

    def _return_borrowed(self, lease: Lease) -> None:
        for group, ids in lease.borrowed:
            self._pools[group].release(ids)
        lease.borrowed.clear()

    def _store_again(self, node: RadixNode) -> None:
        self._events.stored(node.namespace, node.branch, _parent_branch(node), node.start, node.token_ids)


def _as_ids(token_ids: ArrayLike) -> Ids:
    return np.asarray(token_ids, dtype=np.int32)


def _parent_branch(node: RadixNode) -> int:
    return 0 if node.parent is None else node.parent.branch
