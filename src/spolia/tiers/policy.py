"""How tiers are used: what is written to them when, and who waits for what they bring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from .tier import Tier

__all__ = ["FetchPolicy", "TierUse", "WritePolicy"]

WritePolicy: TypeAlias = Literal["write_through", "write_back", "selective"]
"""`write_through`: each block as soon as it is committed. `write_back`: when it has to leave the tier above.
`selective`: once it has been used by `min_uses` requests."""

FetchPolicy: TypeAlias = Literal["planned", "wait", "timeout", "best_effort"]
"""`planned`: a request waits as long as restoring is sooner than computing. `wait`: until all is there. `timeout`: for
so long at most. `best_effort`: not at all; what arrived by the time its turn comes is used."""


@dataclass(frozen=True, slots=True, eq=False)
class TierUse:
    """A tier and how it is used.

    Attributes:
        is_exclusive: what is restored from it leaves it: no block is kept twice.
        min_uses: requests that a block must have served before a `selective` tier takes it.
    """

    tier: Tier
    write: WritePolicy = "write_through"
    is_exclusive: bool = False
    min_uses: int = 2
