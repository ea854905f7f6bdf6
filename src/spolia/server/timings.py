"""llama.cpp's `timings` and `prompt_progress`, for every API whose request asks for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from spolia.engine import AsyncEngine, Delta, LaneView, RequestOutput, lanes
from spolia.server.answer import Answer
from spolia.server.replies import Progress
from spolia.server.sse import next_of

__all__ = ["Stopwatch", "timings_of", "with_progress"]

# Between two looks at how far a prompt has come.
_PROGRESS_S = 0.1


def timings_of(output: RequestOutput) -> dict[str, float]:
    """Milliseconds, and tokens a second; `cache_n` tokens of the prompt were reused, `prompt_n` computed.

    `draft_n` were guessed ahead, of which `draft_n_accepted` were right.
    """
    timings = output.timings
    first_s = timings.first_token_s or timings.total_s
    num_computed = len(output.prompt_token_ids) - output.num_cached_tokens
    prompt_s, predicted_s = first_s - (timings.queue_s or 0.0), timings.total_s - first_s
    figures = _figures(output.num_cached_tokens, num_computed, prompt_s, len(output.token_ids), predicted_s)
    return {**figures, "draft_n": output.num_drafted_tokens, "draft_n_accepted": output.num_accepted_tokens}


def _figures(
    num_cached: int, num_computed: int, prompt_s: float, num_predicted: int, predicted_s: float
) -> dict[str, float]:
    prompt_ms, predicted_ms = max(1e3 * prompt_s, 1e-3), max(1e3 * predicted_s, 1e-3)
    return {
        "cache_n": num_cached,
        "prompt_n": num_computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / max(1, num_computed),
        "prompt_per_second": 1e3 * num_computed / prompt_ms,
        "predicted_n": num_predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / max(1, num_predicted),
        "predicted_per_second": 1e3 * num_predicted / predicted_ms,
    }


class Stopwatch:
    """`timings` of one choice while its tokens come, by the server's clock."""

    def __init__(self, answer: Answer, choice: int) -> None:
        self._request_id = f"{answer.id}-{choice}"
        self._num_prompt_tokens = len(answer.prompt_token_ids(choice))
        self._engine = answer.engine
        self._begun_s = answer.submitted_s
        self._first_s: float | None = None
        self._num_cached = 0
        self._num_predicted = 0

    async def read(self, delta: Delta) -> dict[str, float]:
        """With what `delta` has brought."""
        if delta.output is not None:
            return timings_of(delta.output)
        now_s = time.perf_counter()
        self._num_predicted += len(delta.token_ids)
        if self._first_s is None:
            self._first_s = now_s
            lane = await _lane(self._engine, self._request_id)
            self._num_cached = 0 if lane is None else lane.num_cached_tokens
        num_computed = self._num_prompt_tokens - self._num_cached
        prompt_s, predicted_s = self._first_s - self._begun_s, now_s - self._first_s
        return _figures(self._num_cached, num_computed, prompt_s, self._num_predicted, predicted_s)


async def _lane(engine: AsyncEngine, request_id: str) -> LaneView | None:
    return next((lane for lane in await engine.call(lanes) if lane.request_id == request_id), None)


async def with_progress(answer: Answer, engine: AsyncEngine) -> AsyncIterator[tuple[int, Delta | Progress]]:
    """`answer.deltas()`, and before the first of them how far the prompts are, whenever that has changed.

    Nothing of the progress of an answer that is over before anybody could look.
    """
    begun_s = time.perf_counter()
    deltas = answer.deltas()
    first = asyncio.ensure_future(next_of(deltas))
    cached: dict[int, int] = {}
    told: dict[int, int] = {}

    def note(choice: int, num_done: int, num_tokens: int) -> Progress:
        told[choice] = num_done
        time_ms = round(1e3 * (time.perf_counter() - begun_s))
        return Progress(num_tokens, cached[choice], num_done, time_ms)

    try:
        while not first.done():
            await asyncio.wait([first], timeout=_PROGRESS_S)
            for lane in await engine.call(lanes):
                request_id, _, number = (lane.request_id or "").rpartition("-")
                if request_id == answer.id:
                    choice, done = int(number), min(lane.num_computed_tokens, lane.num_prompt_tokens)
                    cached[choice] = lane.num_cached_tokens
                    if done > told.get(choice, -1) and not first.done():
                        yield choice, note(choice, done, lane.num_prompt_tokens)
        if (begun := await first) is None:  # a search that its client has left
            return
        choice_of_first, delta = begun
        num_tokens = len(answer.prompt_token_ids(choice_of_first))
        if choice_of_first in cached and told.get(choice_of_first, -1) < num_tokens:
            yield choice_of_first, note(choice_of_first, num_tokens, num_tokens)
        yield choice_of_first, delta
    finally:
        first.cancel()
    async for item in deltas:
        yield item
