"""A fixed pool of KV blocks of one group, and who holds each.

The pool deals in block ids and never touches tensors. A block has two kinds of holder, counted apart:
leases (running sequences, which read and write it) and tree nodes (which keep it for later). They make its state:

                take                     release, and no node keeps it
      free ───────────────▶ leased ────────────────────────────────────▶ free
                            ▲    │ release, but a node keeps it
                       hold │    ▼
                            cached ── drop by the last node ───────────▶ free

Of the pool's `capacity`, blocks beyond a limit that may change are withheld: neither free nor anybody's.

Invariant: free + cached + leased == num_blocks, kept as plain integers; an id is on the free list, once, exactly when
nobody holds it; see `check`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import BlockNotHeldError, Bug
from .int_buffer import Ids

__all__ = ["BlockPool", "Ledger", "Tag"]

Counts: TypeAlias = NDArray[np.int64]
Places: TypeAlias = NDArray[np.intp]
"""Block ids as numpy indexes by them: by any other integers it takes five times as long."""

Tag: TypeAlias = bytes
"""What somebody outside calls a block's content."""

NODE = 1 << 32
LEASES = NODE - 1
"""A block's holders are one integer: the number of leases + NODE * the number of nodes."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where the blocks of one group are: `free + cached + leased == total`."""

    free: int
    cached: int
    leased: int
    total: int


class BlockPool:
    """Holder counts of ids in [0, capacity). One engine loop owns it; not thread-safe.

    Every method takes an array of distinct ids and costs a few passes of numpy over it.

    Attributes:
        capacity: blocks for which there is memory.
        num_blocks: those of them that are not withheld.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.capacity = self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_cached = 0
        self.num_leased = 0
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # a stack: [0, num_free) are the free ids
        self._holders = np.zeros(num_blocks, np.int64)
        self._tags: NDArray[np.object_] = np.full(num_blocks, None, object)
        self._rounded = np.zeros((num_blocks, block_size), np.bool_)  # by slot
        self._withheld = np.empty(0, np.int32)

    def take(self, count: int) -> Ids | None:
        """Lease `count` free blocks; None, taking nothing, if fewer are free."""
        if count > self.num_free:
            return None
        self.num_free -= count
        self.num_leased += count
        ids = self._free[self.num_free : self.num_free + count][::-1].copy()
        places = ids.astype(np.intp)
        self._holders[places] = 1
        self._tags[places] = None
        self._rounded[places] = False
        return ids

    def hold(self, ids: Ids) -> None:
        """Add a lease to blocks that somebody already holds."""
        places, holders = self._held(ids)
        num_woken = len(ids) - int(np.count_nonzero(holders & LEASES))
        self._holders[places] = holders + 1
        self.num_cached -= num_woken
        self.num_leased += num_woken

    def release(self, ids: Ids) -> None:
        """Remove a lease from each block: the last one leaves it cached if a node keeps it, else free.

        Raises:
            BlockNotHeldError: at a double free, where the bug is, not when the pool runs dry.
        """
        places = ids.astype(np.intp)
        holders: Counts = self._holders[places]
        if np.count_nonzero(holders & LEASES) < len(ids):
            raise BlockNotHeldError(f"among blocks {ids.tolist()} is one that no lease holds: it was freed twice")
        holders -= 1
        self._holders[places] = holders
        num_idle = len(ids) - int(np.count_nonzero(holders & LEASES))
        free = ids[holders == 0]
        self.num_leased -= num_idle
        self.num_cached += num_idle - len(free)
        self._put_back(free)

    def keep(self, ids: Ids) -> None:
        """Let one more tree node keep blocks that somebody already holds."""
        places, holders = self._held(ids)
        self._holders[places] = holders + NODE

    def drop(self, ids: Ids) -> None:
        """Let one tree node give up blocks: those that no other node or lease holds are free.

        Raises:
            BlockNotHeldError: if no node keeps one of them.
        """
        places = ids.astype(np.intp)
        holders: Counts = self._holders[places]
        if np.count_nonzero(holders < NODE):
            raise BlockNotHeldError(f"among blocks {ids.tolist()} is one that no node keeps")
        holders -= NODE
        self._holders[places] = holders
        free = ids[holders == 0]
        self.num_cached -= len(free)
        self._put_back(free)

    def withhold(self, count: int) -> Ids | None:
        """Have `count` free blocks fewer from now on; which, or None, with nothing changed, if fewer are free."""
        if count > self.num_free:
            return None
        self.num_free -= count
        self.num_blocks -= count
        ids = self._free[self.num_free : self.num_free + count].copy()
        self._tags[ids] = None
        self._withheld = np.concatenate([self._withheld, ids])
        return ids

    def grant(self, count: int) -> None:
        """Have `count` of the withheld blocks, which must be so many, back as free ones."""
        keep = len(self._withheld) - count
        self.num_blocks += count
        self._put_back(self._withheld[keep:])
        self._withheld = self._withheld[:keep]

    def num_leases(self, ids: Ids) -> Counts:
        """Leases of each block."""
        leases: Counts = self._holders[ids.astype(np.intp)] & LEASES
        return leases

    def tag(self, ids: Ids, tags: Sequence[Tag]) -> None:
        """Write a name on each block; it stays there until the block is taken anew, also while it is free."""
        for block_id, tag in zip(ids.tolist(), tags, strict=True):
            self._tags[block_id] = tag

    def tags(self, ids: Ids) -> list[Tag | None]:
        """Each block's tag; None: nobody has written one since it was taken."""
        tags: list[Tag | None] = self._tags[ids].tolist()
        return tags

    def mark_rounded(self, ids: Ids) -> None:
        """Note that these blocks' content is not quite what was computed; forgotten when a block is taken anew."""
        self._rounded[ids] = True

    def copy_marks(self, source: int, target: int, num_tokens: int) -> None:
        """The first tokens of one block were copied to another: what is known of them holds there, too."""
        self._rounded[target, :num_tokens] = self._rounded[source, :num_tokens]

    def unmark(self, block_id: int, first_slot: int) -> None:
        """The slots from `first_slot` on will be written anew: they are not what they were, nor is the block."""
        self._rounded[block_id, first_slot:] = False
        self._tags[block_id] = None

    def rounded(self, ids: Ids) -> NDArray[np.bool_]:
        """bool `[len(ids), block_size]`: whether each slot's content is not quite what was computed."""
        return self._rounded[ids]

    def states(self) -> NDArray[np.uint8]:
        """By block: 0 free, 1 cached (only the tree holds it), 2 leased. Withheld ones are left out."""
        holders = np.delete(self._holders, self._withheld)
        states: NDArray[np.uint8] = (holders > 0).astype(np.uint8) + ((holders & LEASES) > 0)
        return states

    def freed_since(self, num_free: int) -> Ids:
        """The blocks that were freed since so many were free; nothing may have been taken in between."""
        return self._free[num_free : self.num_free].copy()

    def ledger(self) -> Ledger:
        """The books, balanced.

        Raises:
            Bug: if they do not balance.
        """
        if self.num_free + self.num_cached + self.num_leased != self.num_blocks:
            parts = f"{self.num_free} free + {self.num_cached} cached + {self.num_leased} leased"
            raise Bug(f"the ledger does not balance: {parts} != {self.num_blocks} blocks")
        return Ledger(self.num_free, self.num_cached, self.num_leased, self.num_blocks)

    def check(self, leases: NDArray[np.integer], nodes: NDArray[np.integer]) -> None:
        """Assert the invariants, and that the caller's recount, `leases` and `nodes` `[capacity]`, agrees."""
        assert (self._holders & LEASES == leases).all(), "lease counts differ from a recount"
        assert (self._holders // NODE == nodes).all(), "node counts differ from a recount"
        assert self.num_blocks == self.capacity - len(self._withheld), "withheld blocks are not accounted for"
        idle = np.sort(np.concatenate([self._free[: self.num_free], self._withheld]))
        assert (idle == np.flatnonzero(self._holders == 0)).all(), "free list != blocks without holder"
        assert self.num_leased == np.count_nonzero(leases)
        assert self.num_cached == np.count_nonzero((leases == 0) & (nodes > 0))
        self.ledger()

    def _held(self, ids: Ids) -> tuple[Places, Counts]:
        places = ids.astype(np.intp)
        holders: Counts = self._holders[places]
        if np.count_nonzero(holders) < len(ids):
            raise BlockNotHeldError(f"among blocks {ids.tolist()} is a free one: it can only be taken")
        return places, holders

    def _put_back(self, ids: Ids) -> None:
        self._free[self.num_free : self.num_free + len(ids)] = ids
        self.num_free += len(ids)
