"""How far tiers reach: the longest prefix of which they have all that the token after it looks at.

full group        b0 b1 b2 b3 b4 b5 b6 b7            it looks at all of these
window group      -- b1 -- -- b4 b5 b6 b7            and here at b5 b6 b7: what is missing before is not needed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple, TypeAlias

from .keys import block_key
from .tier import Tier

__all__ = ["FirstNeeded", "Reach", "reach"]

FirstNeeded: TypeAlias = Callable[[int, int], int]
"""(group, number of blocks) -> the first of these blocks that the token after them looks at in this group."""


class Reach(NamedTuple):
    """Blocks [first_block, stop_block) of a prefix.

    Attributes:
        places: by group, which tier has each of its last blocks, up to `stop_block`: all that are needed.
    """

    first_block: int
    stop_block: int
    places: tuple[tuple[Tier, ...], ...]

    @property
    def num_blocks(self) -> int:
        return self.stop_block - self.first_block

    @property
    def tiers(self) -> list[Tier]:
        """Of each block the tier that it comes from: that of the group of which the most is needed."""
        most = max(self.places, key=len)
        return [*most[:1] * (self.num_blocks - len(most)), *most]

    @property
    def ranges(self) -> list[tuple[int, int, Tier]]:
        """(start, stop, tier) in blocks, in order, without gaps."""
        ranges, stop = [], self.first_block
        for tier, blocks in groupby(self.tiers):
            start, stop = stop, stop + sum(1 for _ in blocks)
            ranges.append((start, stop, tier))
        return ranges


def reach(
    tiers: Sequence[Tier],
    digests: Sequence[bytes],
    first_block: int,
    num_groups: int,
    first_needed: FirstNeeded,
    known: Sequence[Tier] = (),
) -> Reach:
    """How far a prefix goes on that is there up to `first_block`. Asks the tiers; any thread.

    If a needed block is missing, no prefix that ends after it can be had: a longer one looks back less far, but to
    that block all the same. So it ends there, and what then is needed is looked at again.

    Args:
        tiers: the fastest first.
        digests: of the blocks from `first_block` on.
        known: which tier has the first of these blocks, all groups of them.
    """
    num_blocks = len(digests)
    places: dict[int, tuple[int, list[Tier]]] = {}  # by group: the first needed block, and where it and the next are
    # Where all is needed, a prefix ends soonest.
    groups = sorted(range(num_groups), key=lambda group: first_needed(group, first_block + num_blocks))
    while True:
        for group in groups:
            first = min(max(0, first_needed(group, first_block + num_blocks) - first_block), num_blocks)
            if group in places and places[group][0] == first:
                continue  # it ended sooner for another group
            found = list(known[first:num_blocks])
            keys = [block_key(digest, group) for digest in digests[first + len(found) : num_blocks]]
            found += _without_gap(tiers, keys)
            places[group] = first, found
            if first + len(found) < num_blocks:
                num_blocks = first + len(found)
                break
        else:
            there = tuple(tuple(places[group][1][: num_blocks - places[group][0]]) for group in range(num_groups))
            return Reach(first_block, first_block + (num_blocks if any(there) else 0), there)


def _without_gap(tiers: Sequence[Tier], keys: Sequence[bytes]) -> list[Tier]:
    """The first tier that has each of these keys, up to one that none has."""
    found: list[Tier] = []
    while len(found) < len(keys):
        for tier in tiers:
            count = tier.count(keys[len(found) :])
            if count:
                found += [tier] * count
                break
        else:
            break
    return found
