"""Pins: content that is not given up while anything else can be."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .int_buffer import Ids
from .radix_tree import RadixTree
from .retention import Retention

__all__ = ["Pin", "Pins"]

_MAX_PINS = 4_096
"""A pin on what is pinned, or on nothing, takes no tokens of the quota, but memory all the same."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A hold on cached tokens that are not in use.

    Attributes:
        num_tokens: so many it holds: of what was cached when it was made, what no running sequence needed the room of.
        until: by the cache's clock; None: until it is lifted.
        label: whatever whoever made it will want to know of it.
    """

    id: int
    namespace: bytes
    num_tokens: int
    until: float | None
    label: str = ""


class Pins:
    """Pins that hold, within a quota. Their nodes carry their ids, so several pins can share a prefix.

    A running sequence comes before a pin: else a request that fits in an empty pool could fail. So pinned content may
    be gone when its pin is lifted, which then finds less of it, or nothing.
    """

    def __init__(self, tree: RadixTree, retention: Retention, quota_tokens: int) -> None:
        self._tree = tree
        self._retention = retention
        self._quota_tokens = quota_tokens
        self._held: dict[int, tuple[Pin, Ids]] = {}
        self._num_made = 0

    def set_quota(self, quota_tokens: int) -> None:
        """Change the quota. Pins that hold go on holding."""
        self._quota_tokens = quota_tokens

    def pin(self, namespace: bytes, ids: Ids, ttl_s: float | None, pin_id: int | None, label: str) -> Pin | None:
        """See `KVCache.pin`."""
        self.lift_expired()
        if pin_id is not None:
            self.lift(pin_id)
        path, length = self._tree.match(namespace, ids)
        num_pinned = max((min(node.end, length) for node in path if node.standing.pins), default=0)
        num_tokens = self._retention.num_pinned_tokens + length - num_pinned
        if num_tokens > self._quota_tokens or len(self._held) >= _MAX_PINS:
            return None
        if path:
            self._tree.split_path(path[-1], length)
            path, length = self._tree.match(namespace, ids)
        number = self._num_made + 1 if pin_id is None else pin_id
        self._num_made = max(self._num_made, number)
        until = None if ttl_s is None else self._retention.clock() + ttl_s
        pin = Pin(number, namespace, length, until, label)
        for node in path:
            self._retention.set_pins(node, node.standing.pins | {pin.id})
        self._held[pin.id] = pin, ids[:length].copy()
        return pin

    def lift(self, pin_id: int) -> bool:
        """See `KVCache.unpin`."""
        entry = self._held.pop(pin_id, None)
        if entry is None:
            return False
        pin, ids = entry
        path, _ = self._tree.match(pin.namespace, ids)
        for node in path:
            self._retention.set_pins(node, node.standing.pins - {pin_id})
        return True

    def lift_expired(self) -> None:
        if self._held:
            now = self._retention.clock()
            for pin_id in [pin.id for pin, _ in self._held.values() if pin.until is not None and pin.until <= now]:
                self.lift(pin_id)

    def of(self, namespace: bytes | None, ids: Ids) -> tuple[Pin, ...]:
        """See `KVCache.pins`."""
        self.lift_expired()
        return tuple(
            replace(pin, num_tokens=self._num_held(pin, held))
            for pin, held in self._held.values()
            if namespace in (None, pin.namespace) and not (held[: len(ids)] != ids[: len(held)]).any()
        )

    def contents(self) -> list[tuple[Pin, Ids]]:
        """See `KVCache.pinned`."""
        self.lift_expired()
        return list(self._held.values())

    def _num_held(self, pin: Pin, ids: Ids) -> int:
        """How many tokens the pin still holds: what is computed again after it was given up is not pinned."""
        path, _ = self._tree.match(pin.namespace, ids)
        return max((node.end for node in path if pin.id in node.standing.pins), default=0)
