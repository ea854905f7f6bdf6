"""What llama.cpp's clients call a slot: a place for one conversation. Here it only says which one was there last.

All slots share one cache, so a slot holds nothing back from another. Its tokens are those of its last request's prompt
and answer; saving a slot writes their KV to a file.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Slot", "Slots"]


@dataclass(slots=True)
class Slot:
    """
    Attributes:
        token_ids: of the conversation that was here last.
        cache_salt: whose it was: nobody else may save it.
        running: the engine's requests that are being answered here, in the order of their beginning.
        used: grows with each use.
    """

    token_ids: list[int] = field(default_factory=list)
    cache_salt: str = ""
    running: list[str] = field(default_factory=list)
    used: int = 0


class Slots:
    """One model's. Event loop only."""

    def __init__(self) -> None:
        self._by_id: dict[int, Slot] = {}
        self._clock = itertools.count(1)

    def get(self, id_slot: int) -> Slot:
        """Slot number `id_slot`, which the caller has checked."""
        return self._by_id.setdefault(id_slot, Slot())

    def choose(self, prompt_ids: Sequence[int], cache_salt: str, num_slots: int) -> int:
        """For who does not say which: an idle one that has most of this prompt; of equals the one used longest ago."""

        def rank(id_slot: int) -> tuple[bool, int, int]:
            slot = self.get(id_slot)
            mine = slot.token_ids if slot.cache_salt == cache_salt else []
            num_common = next(
                (i for i, (one, other) in enumerate(zip(mine, prompt_ids, strict=False)) if one != other),
                min(len(mine), len(prompt_ids)),
            )
            return bool(slot.running), -num_common, slot.used

        return min(range(num_slots), key=rank)

    def begin(self, id_slot: int, request_id: str) -> None:
        slot = self.get(id_slot)
        slot.running.append(request_id)
        slot.used = next(self._clock)

    def end(self, id_slot: int, request_id: str, token_ids: Sequence[int], cache_salt: str) -> None:
        """The request has ended; without tokens it leaves the slot as it was."""
        slot = self.get(id_slot)
        slot.running.remove(request_id)
        if token_ids:
            slot.token_ids, slot.cache_salt = list(token_ids), cache_salt
