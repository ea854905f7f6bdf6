"""Which tiers an engine uses: they come and go while it runs. See `TiersInUse`."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from spolia.engine.offload import Offloader
from spolia.errors import InvalidRequest
from spolia.tiers import Mover, Tier, TierState, TierUse

__all__ = ["TiersInUse"]


class TiersInUse:
    """The tiers of one engine, the fastest first.

        attach ──▶ in use ──retire──▶ nothing is read from it, what waits for it is written, ──detach──▶ closed
                     ▲                what it alone has goes to the tier below
                     │                          │
                     └────────reinstate─────────┘

    Attributes:
        mover: reads from them and writes to them.
        offloader: decides what is written.
    """

    def __init__(self, uses: Seq[TierUse], mover: Mover, offloader: Offloader) -> None:
        self._uses = tuple(uses)
        self.mover = mover
        self.offloader = offloader

    @property
    def uses(self) -> tuple[TierUse, ...]:
        """The tiers, the fastest first."""
        return self._uses

    @property
    def any_usable(self) -> bool:
        """Whether there is a tier that is worth asking."""
        return any(tier.is_usable for tier in self.mover.tiers)

    @property
    def has_stalled(self) -> bool:
        """Whether there is a tier that hangs."""
        return any(tier.state is TierState.STALLED for tier in self.mover.tiers)

    def tier(self, name: str) -> Tier:
        """
        Raises:
            InvalidRequest: there is none of that name.
        """
        return self._uses[self._index(name)].tier

    def attach(self, use: TierUse, index: int | None = None) -> None:
        """Use one more tier, as the `index`-th fastest; None: as the slowest. What is committed from now on goes there.

        Raises:
            InvalidRequest: there is one of that name.
        """
        if any(other.tier.name == use.tier.name for other in self._uses):
            raise InvalidRequest(f"there is a tier {use.tier.name!r} already; detach it first", param="tier")
        index = len(self._uses) if index is None else index
        self.mover.attach(use.tier, index)
        self._uses = (*self._uses[:index], use, *self._uses[index:])
        self.offloader.use(self._uses)

    def retire(self, name: str) -> tuple[TierUse, int]:
        """Begin to take a tier out of use: nothing is read from it, and only what waits for it now is written to it.

        Returns:
            The tier, and its place, for `reinstate`.

        Raises:
            InvalidRequest: there is none of that name.
        """
        index = self._index(name)
        use = self._uses[index]
        self._uses = tuple(other for other in self._uses if other is not use)
        self.mover.hide(use.tier)
        self.offloader.use(self._uses)
        return use, index

    def reinstate(self, use: TierUse, index: int) -> None:
        """Undo `retire`."""
        self._uses = (*self._uses[:index], use, *self._uses[index:])
        self.mover.show(use.tier, index)
        self.offloader.use(self._uses)

    def detach(self, use: TierUse) -> None:
        """Let go of a tier that was retired."""
        self.mover.detach(use.tier)

    def below(self, index: int) -> tuple[Tier, ...]:
        """The tiers from the `index`-th fastest on: those below one that was retired from there."""
        return tuple(use.tier for use in self._uses[index:])

    def num_unwritten(self, tier: Tier) -> int:
        """Blocks that are to be written to a tier, retired or not, and are not yet."""
        return self.offloader.num_waiting_for(tier)

    def note_restored(self, name: str, keys: Seq[bytes]) -> None:
        """The pools have these from that tier now, and give them back when they are evicted: if it is exclusive, it
        lets go of them."""
        tier = next((use.tier for use in self._uses if use.is_exclusive and use.tier.name == name), None)
        if tier is not None:
            self.mover.discard(tier, keys)

    def _index(self, name: str) -> int:
        for index, use in enumerate(self._uses):
            if use.tier.name == name:
                return index
        there = ", ".join(use.tier.name for use in self._uses) or "none"
        raise InvalidRequest(f"there is no tier {name!r}; there are: {there}", param="tier")
