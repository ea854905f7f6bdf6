"""What one key has used of what it may use."""

from __future__ import annotations

import math
from collections.abc import Callable

from spolia.server.access.keys import KeySettings
from spolia.server.errors import RateLimited

__all__ = ["Account"]


class _Allowance:
    """So many a period, accrued evenly; a debt, from answers that turned out longer, is paid back first."""

    def __init__(self, most: int, period_s: float, clock: Callable[[], float]) -> None:
        self._most = most
        self._per_second = most / period_s
        self._clock = clock
        self._left = float(most)
        self._seen_s = clock()

    def wait_s(self, needed: float) -> float:
        """How long until `needed` are there; 0 if they are."""
        now_s = self._clock()
        self._left = min(self._most, self._left + (now_s - self._seen_s) * self._per_second)
        self._seen_s = now_s
        return max(0.0, (min(needed, self._most) - self._left) / self._per_second)

    def take(self, count: float) -> None:
        self._left -= count


class Account:
    """One key's. Event loop only.

    Args:
        clock: seconds; only differences matter.
    """

    def __init__(self, settings: KeySettings, clock: Callable[[], float]) -> None:
        self.settings = settings
        self.num_running = 0
        self._requests = _allowance(settings.requests_per_minute, 60, clock)
        self._tokens = [
            (each, allowance)
            for each, most, period_s in (
                ("tokens_per_minute", settings.tokens_per_minute, 60),
                ("tokens_per_day", settings.tokens_per_day, 86_400),
            )
            if (allowance := _allowance(most, period_s, clock)) is not None
        ]

    def admit(self, num_prompt_tokens: int) -> None:
        """Take a request into account.

        Raises:
            RateLimited: it has to wait; nothing was taken.
        """
        settings = self.settings
        if settings.max_concurrent is not None and self.num_running >= settings.max_concurrent:
            raise RateLimited(
                f"the key {settings.name!r} has {self.num_running} requests running, as many as it may; "
                "wait for one to end",
                retry_after_s=1,
            )
        waits = [(name, allowance.wait_s(num_prompt_tokens)) for name, allowance in self._tokens]
        if self._requests is not None:
            waits.append(("requests_per_minute", self._requests.wait_s(1)))
        name, wait_s = max(waits, key=lambda wait: wait[1], default=("", 0.0))
        if wait_s > 0:
            limit = getattr(settings, name)
            raise RateLimited(
                f"the key {settings.name!r} has used up its {name}, {limit}; try again in {math.ceil(wait_s)} s",
                retry_after_s=wait_s,
            )
        if self._requests is not None:
            self._requests.take(1)
        self.num_running += 1

    def settle(self, num_tokens: int) -> None:
        """A request that was admitted has ended, with so many tokens of prompt and answer."""
        self.num_running -= 1
        for _, allowance in self._tokens:
            allowance.take(num_tokens)


def _allowance(most: int | None, period_s: float, clock: Callable[[], float]) -> _Allowance | None:
    return None if most is None else _Allowance(most, period_s, clock)
