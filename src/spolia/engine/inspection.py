"""What runs at this moment, for people to look at. To be called between two steps: `await engine.call(lanes)`."""

from __future__ import annotations

from dataclasses import dataclass

from spolia.engine.core import EngineCore

__all__ = ["LaneView", "lanes"]


@dataclass(frozen=True, slots=True)
class LaneView:
    """One lane of the batch; `request_id` is None, and the counts are 0, while it is idle."""

    lane: int
    request_id: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0


def lanes(core: EngineCore) -> list[LaneView]:
    """All lanes, by number."""
    busy = {
        sequence.lane: LaneView(
            sequence.lane,
            sequence.request.request_id,
            sequence.num_prompt_tokens,
            sequence.num_cached_tokens,
            sequence.num_computed_tokens,
            sequence.num_generated_tokens,
        )
        for sequence in core.sequences()
        if sequence.lease is not None
    }
    return [busy.get(lane, LaneView(lane)) for lane in range(core.max_sequences)]
