"""The live miss-ratio curve of one engine: ghosts fed from the event loop, on a thread of their own."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

from spolia.engine import AsyncEngine, RequestOutput, RetentionPolicy, Wish
from spolia.sim import CurvePoint, GhostCaches

__all__ = ["LiveCurve"]

_MAX_WAITING = 256
_GROWTH = 4
"""The ghosts follow a cache that grows so much; of a larger one they begin anew."""

_Setting: TypeAlias = tuple[int, type[RetentionPolicy]]
"""The cache's blocks and its policy."""

_GIB = 2**30


class LiveCurve:
    """Its thread begins with the first request. Where the cache's size or policy is changed, the ghosts' are, too.

    Args:
        engine: the model's; it may be another one each time. None: it is not in memory.
    """

    def __init__(self, engine: Callable[[], AsyncEngine | None]) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, "spolia-ghosts")  # it ends when the curve has gone, and keeps no engine
        self._waiting: deque[Future[None]] = deque()  # of the event loop
        self._ghosts: GhostCaches | None = None
        self._lock = threading.Lock()  # guards the ghosts
        self._num_left_out = 0
        self._num_cached_tokens = 0
        self._seen: tuple[_Setting, float] | None = None

    def take(self, output: RequestOutput, wishes: Sequence[Wish] = ()) -> None:
        """A request that has ended, and what it wished for its KV. Does not wait."""
        if output.explanation is None:
            return  # it was aborted before the cache was asked for anything
        engine = self._engine()
        if engine is None:
            return
        setting = self._look(engine)[0]
        if self._ghosts is None:
            self._ghosts = GhostCaches(*setting, most_blocks=min(engine.most_blocks, _GROWTH * setting[0]))
        while self._waiting and self._waiting[0].done() and self._waiting[0].exception() is None:
            self._waiting.popleft()
        if len(self._waiting) < _MAX_WAITING:
            self._waiting.append(self._thread.submit(self._feed, output, wishes, setting))
        else:
            self._num_left_out += 1

    def describe(self) -> dict[str, Any]:
        """The curve, and what more memory would have bought, in words. Without an engine: as of the last one."""
        if self._waiting and self._waiting[0].done():
            self._waiting[0].result()  # a bug of the ghosts is told here, where they are asked for
        engine = self._engine()
        seen = self._seen if engine is None else self._look(engine)
        policy, bytes_per_token = (None, 0.0) if seen is None else (seen[0][1].name, seen[1])
        with self._lock:
            if seen is not None:
                self._follow(seen[0])
            ghosts = self._ghosts
            points = [] if ghosts is None else ghosts.curve()
            num_requests, num_prompt = (0, 0) if ghosts is None else (ghosts.num_requests, ghosts.num_prompt_tokens)
            measured = self._num_cached_tokens / max(1, num_prompt)
        return {
            "policy": policy,
            "num_requests": num_requests,
            "num_requests_left_out": self._num_left_out,
            "num_prompt_tokens": num_prompt,
            "measured_hit_rate": measured,
            "points": [_point(point, bytes_per_token) for point in points],
            "advice": _advice(points, bytes_per_token),
        }

    def _look(self, engine: AsyncEngine) -> tuple[_Setting, float]:
        """The cache's setting now, and the bytes of a token's KV."""
        setting = engine.stats.ledger[0].total, engine.policy_type
        self._seen = setting, engine.kv_bytes / max(1, 16 * setting[0])
        return self._seen

    def _feed(self, output: RequestOutput, wishes: Sequence[Wish], setting: _Setting) -> None:
        with self._lock:
            if self._ghosts is None:
                return
            self._follow(setting)
            self._num_cached_tokens += output.num_cached_tokens
            self._ghosts.take(
                time.monotonic(), output.namespace, output.prompt_token_ids, output.token_ids, output.outcome, wishes
            )

    def _follow(self, setting: _Setting) -> None:
        ghosts = self._ghosts
        if ghosts is None:
            return
        if setting[0] > ghosts.most_blocks:
            self._ghosts = GhostCaches(*setting)
            self._num_cached_tokens = 0
        elif ghosts.follow(*setting):
            self._num_cached_tokens = 0


def _point(point: CurvePoint, bytes_per_token: float) -> dict[str, Any]:
    return {
        "factor": point.factor,
        "size_tokens": point.size_tokens,
        "size_bytes": int(point.size_tokens * bytes_per_token),
        "hit_rate": point.hit_rate,
    }


def _advice(points: list[CurvePoint], bytes_per_token: float) -> str:
    """The smallest size that hits nearly as much as the largest."""
    if not points:
        return "no requests yet"
    enough = next(point for point in points if point.hit_rate >= points[-1].hit_rate - 0.01)
    now = next(point for point in points if point.factor == 1.0)
    num_bytes = enough.size_tokens * bytes_per_token
    size = f"{num_bytes / _GIB:.3g} GiB" if num_bytes >= _GIB else f"{num_bytes / 2**20:.3g} MiB"
    if enough.factor <= 1.0:
        return f"with {size} you would have hit {enough.hit_rate:.0%}; more memory than that buys nothing"
    return f"with {size} you would have hit {enough.hit_rate:.0%}, with what there is {now.hit_rate:.0%}"
