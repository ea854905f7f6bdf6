"""What a follower of the events knows: the stored tokens, and the whole blocks that they make.

Nodes are not mirrored, since where a run is split is nobody's business elsewhere. A block is named by a chain: its name
depends on the namespace and on all tokens up to its end, so equal names mean equal KV.

    branch 1   [ block 0 ][ block 1 ][ bl            whole blocks end inside the branch that has their last token
    branch 2          ck 0'][ block 1' ]             branch 2 hangs on branch 1 inside block 0: its block 0' is another
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from .events import Cleared, Event, Removed, Stored

__all__ = ["BlocksRemoved", "BlocksStored", "CacheMirror"]


class BlocksStored(NamedTuple):
    """Whole blocks that follow one another, after the one named `parent`, if any."""

    namespace: bytes
    names: tuple[int, ...]
    parent: int | None
    token_ids: tuple[int, ...]


class BlocksRemoved(NamedTuple):
    """Blocks that are not there any more."""

    namespace: bytes
    names: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Branch:
    """Tokens [start, start + len(tokens)); `names` of the whole blocks that end among them."""

    parent: _Branch | None
    start: int
    tokens: list[int] = field(default_factory=list)
    names: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def before(self, first: int, stop: int) -> list[int]:
        """Tokens [first, stop) of the sequence that ends in this branch."""
        own = self.tokens[max(0, first - self.start) : stop - self.start]
        if first >= self.start or self.parent is None:
            return own
        return self.parent.before(first, min(stop, self.start)) + own


class CacheMirror:
    """A tree as its events tell it. Feed it all events in order, a snapshot's `stored` first after a gap.

    Args:
        block_size: tokens of a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._namespaces: dict[bytes, dict[int, _Branch]] = {}

    def reset(self, snapshot: Iterable[Event]) -> None:
        """Begin again from a snapshot."""
        self._namespaces.clear()
        for event in snapshot:
            self.apply(event)

    def apply(self, event: Event) -> list[BlocksStored | BlocksRemoved]:
        """Take an event; what it changes for whole blocks, often nothing."""
        branches = self._namespaces.setdefault(event.namespace, {})
        match event:
            case Stored():
                branch = branches.get(event.branch)
                if branch is None:
                    branch = branches[event.branch] = _Branch(branches.get(event.parent), event.start)
                branch.tokens += event.token_ids.tolist()
                return self._name_blocks(event.namespace, branch)
            case Removed():
                branch = branches[event.branch]
                del branch.tokens[event.start - branch.start :]
                if not branch.tokens:
                    del branches[event.branch]
                num_kept = branch.end // self._block_size - branch.start // self._block_size
                gone = branch.names[num_kept:]
                del branch.names[num_kept:]
            case Cleared():
                gone = [name for branch in branches.values() for name in branch.names]
                branches.clear()
        return [BlocksRemoved(event.namespace, tuple(gone))] if gone else []

    def sequences(self) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        """(namespace, tokens) for the end of each branch: all that is stored are their beginnings."""
        for namespace, branches in self._namespaces.items():
            for branch in branches.values():
                yield namespace, tuple(branch.before(0, branch.end))

    def blocks(self) -> Iterator[BlocksStored]:
        """All whole blocks, none before the one that it follows."""
        size = self._block_size
        for namespace, branches in self._namespaces.items():
            for branch in branches.values():
                if branch.names:
                    first = branch.start // size
                    tokens = branch.before(size * first, size * (first + len(branch.names)))
                    yield BlocksStored(namespace, tuple(branch.names), self._name_of(branch, first - 1), tuple(tokens))

    def _name_blocks(self, namespace: bytes, branch: _Branch) -> list[BlocksStored | BlocksRemoved]:
        size = self._block_size
        first = branch.start // size + len(branch.names)
        stop = branch.end // size
        if first == stop:
            return []
        tokens = branch.before(size * first, size * stop)
        parent = name = self._name_of(branch, first - 1)
        for at in range(0, len(tokens), size):
            name = _chained(namespace, name, tokens[at : at + size])
            branch.names.append(name)
        return [BlocksStored(namespace, tuple(branch.names[first - stop :]), parent, tuple(tokens))]

    def _name_of(self, branch: _Branch, block: int) -> int | None:
        """Of that block of the sequence which ends in `branch`; None before the first."""
        if block < 0:
            return None
        at: _Branch | None = branch
        while at is not None and block < at.start // self._block_size:
            at = at.parent
        return None if at is None else at.names[block - at.start // self._block_size]


def _chained(namespace: bytes, parent: int | None, tokens: list[int]) -> int:
    """64 bits of a digest: too few against an enemy, which is why names are not keys to anything."""
    digest = blake2b(namespace if parent is None else parent.to_bytes(8, "big"), digest_size=8)
    digest.update(np.array(tokens, np.int32).tobytes())
    return int.from_bytes(digest.digest(), "big")
