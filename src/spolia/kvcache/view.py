"""The cache for people to look at: its blocks by state, its tree by node. Plain values, safe to hand to any thread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["CacheView", "NodeView"]


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node of the tree: tokens [start, start + num_tokens) of the sequences that pass here.

    Attributes:
        parent: index of its parent in the view; -1 for one that begins a sequence.
        first_ids: its first tokens, for a label.
        num_hits: lookups that went through it.
        num_leases: running sequences that end in it.
    """

    parent: int
    namespace: bytes
    start: int
    num_tokens: int
    first_ids: tuple[int, ...]
    num_hits: int
    num_leases: int
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class CacheView:
    """
    Attributes:
        blocks: per group, uint8 by block: 0 free, 1 cached, 2 leased.
        nodes: parents before their children; the largest parts of the tree, if it has more nodes than were asked for.
        num_nodes: of the whole tree.
    """

    blocks: tuple[NDArray[np.uint8], ...]
    nodes: tuple[NodeView, ...]
    num_nodes: int
