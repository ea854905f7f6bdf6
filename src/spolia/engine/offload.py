"""What goes down, and when: see `Offloader`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

import numpy as np
from numpy.typing import NDArray

from spolia.kvcache import KVCache, Tag
from spolia.tiers import Encoding, Mover, Tier, TierUse, key_of, layout_of

__all__ = ["Offloader"]

_MAX_COUNTED = 1 << 16
"""Blocks whose uses are counted for selective tiers: the last ones used."""


class Offloader:
    """Copies blocks out of the pools, into buffers that the mover writes from.

        committed ──▶ write_through        so that a process that is killed leaves it behind
        used often ─▶ selective
        evicted ────▶ the first write_back, and whatever above it still lacks the block

    What finds no room in the buffers waits in its tier's line, in its pool: its tag tells whether it is still there. A
    tier that hangs holds up nobody else's.

    Args:
        pools: uint8 `[num_blocks, block_bytes]` a group.
        uses: the tiers, the fastest first.
        encodings: how blocks are written; a tag, which is an extent's header, names its own.
    """

    def __init__(
        self, pools: Seq[NDArray[np.uint8]], mover: Mover, uses: Seq[TierUse], encodings: Seq[Encoding]
    ) -> None:
        self._pools = pools
        self._encodings = {encoding.layout: encoding for encoding in encodings}
        self._mover = mover
        self._write_through: list[Tier] = []
        self._write_back: list[Tier] = []
        self._selective: list[TierUse] = []
        self.use(uses)
        self._num_uses: OrderedDict[bytes, int] = OrderedDict()  # by key, for selective tiers
        self._lines: dict[Tier, dict[tuple[int, int], Tag]] = {}  # by (group, block id); none is empty
        self.num_lost_blocks = 0  # evicted before there was room to copy them

    def use(self, uses: Seq[TierUse]) -> None:
        """From now on, write to these."""
        self._write_through = [use.tier for use in uses if use.write == "write_through"]
        self._write_back = [use.tier for use in uses if use.write == "write_back"][:1]
        self._selective = [use for use in uses if use.write == "selective"]
        for index, use in enumerate(uses):
            below = next((other.tier for other in uses[index + 1 :] if other.write == "write_back"), None)
            use.tier.hand_down(None if below is None else partial(self._mover.demote, below))

    def note_committed(self, group: int, block_ids: NDArray[np.int32], tags: Seq[Tag]) -> None:
        """These blocks are whole and committed."""
        for tier in self._write_through:
            self._line_up(tier, group, block_ids, tags)

    def note_used(self, group: int, block_ids: NDArray[np.int32], tags: Seq[Tag]) -> None:
        """One more request is done with these blocks."""
        self.note_committed(group, block_ids, tags)  # those that a tier could not take before
        if not self._selective:
            return
        for block_id, tag in zip(block_ids.tolist(), tags, strict=True):
            num_uses = self._num_uses.get(key := key_of(tag), 0) + 1
            self._num_uses[key] = num_uses
            self._num_uses.move_to_end(key)
            for use in self._selective:
                if num_uses >= use.min_uses:
                    self._line_up(use.tier, group, np.array([block_id], np.int32), [tag])
        while len(self._num_uses) > _MAX_COUNTED:
            self._num_uses.popitem(last=False)

    def on_evict(self, group: int, block_ids: NDArray[np.int32], tags: Seq[Tag | None]) -> None:
        """The last chance to copy these."""
        for block_id, tag in zip(block_ids.tolist(), tags, strict=True):
            if tag is None:
                continue
            key = key_of(tag)
            tiers = [*self._write_through, *self._write_back]
            tiers += [use.tier for use in self._selective if self._num_uses.get(key, 0) >= use.min_uses]
            tiers += [tier for tier in list(self._lines) if self._take(tier, (group, block_id)) == tag]
            taken = [self._copy(tier, group, block_id, tag) for tier in dict.fromkeys(tiers)]
            if not all(taken):
                self.num_lost_blocks += 1

    def pump(self, cache: KVCache, max_bytes: int | None) -> None:
        """Copy from the lines, in turn, what there is room for, up to `max_bytes`."""
        num_bytes = 0
        while ready := [tier for tier in self._lines if self._has_room(tier)]:
            for tier in ready:
                if max_bytes is not None and num_bytes >= max_bytes:
                    return
                group, block_id = place = next(iter(self._lines[tier]))
                tag = self._take(tier, place)
                if tag is not None and cache.tags(group, np.array([block_id], np.int32)) == [tag]:
                    self._copy(tier, group, block_id, tag)
                    num_bytes += self._pools[group].shape[1]

    @property
    def can_pump(self) -> bool:
        """Whether `pump` has something to do."""
        return any(map(self._has_room, self._lines))

    def send(self, tier: Tier, group: int, block_ids: NDArray[np.int32], tags: Seq[Tag]) -> None:
        """Have these blocks written to a tier, whatever its use."""
        self._line_up(tier, group, block_ids, tags)

    def forget(self, is_unwanted: Callable[[Tag], bool]) -> None:
        """Write nothing of that kind that is still in line."""
        for tier, line in list(self._lines.items()):
            for place in [place for place, tag in line.items() if is_unwanted(tag)]:
                self._take(tier, place)

    def num_waiting_for(self, tier: Tier) -> int:
        """Blocks in line, or on their way, to one tier."""
        return len(self._lines.get(tier, ())) + self._mover.num_pending_for(tier)

    @property
    def num_waiting(self) -> int:
        """Blocks in line, each as often as there are tiers that it waits for."""
        return sum(map(len, self._lines.values()))

    def _line_up(self, tier: Tier, group: int, block_ids: NDArray[np.int32], tags: Seq[Tag]) -> None:
        for block_id, tag in zip(block_ids.tolist(), tags, strict=True):
            if not self._mover.has(tier, key_of(tag)):
                self._lines.setdefault(tier, {})[group, block_id] = tag

    def _take(self, tier: Tier, place: tuple[int, int]) -> Tag | None:
        """Out of a tier's line; None: it is not there."""
        line = self._lines.get(tier, {})
        tag = line.pop(place, None)
        if not line:
            self._lines.pop(tier, None)
        return tag

    def _has_room(self, tier: Tier) -> bool:
        """Whether the first in a tier's line need not wait; a tier that is down gets nothing, and keeps nobody."""
        group, _ = next(iter(self._lines[tier]))
        return not tier.is_usable or self._mover.has_room(tier, group)

    def _copy(self, tier: Tier, group: int, block_id: int, tag: Tag) -> bool:
        """To a tier, if it lacks the block; False if there was no room. A tier that is down gets nothing."""
        if self._mover.has(tier, key_of(tag)):
            return True
        if not tier.is_usable:
            return False
        return self._mover.store(tier, tag, group, self._pools[group][block_id], self._encodings[layout_of(tag)])
