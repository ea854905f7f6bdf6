"""What one key has used of what it may use."""

from __future__ import annotations

import math
from collections.abc import Callable

from spolia.server.access.keys import KeySettings
from spolia.server.errors import QuotaExceeded, RateLimited

__all__ = ["Account"]


class _Allowance:
    """So many a period, accrued evenly; a debt, from answers that turned out longer, is paid back first."""

    def __init__(self, most: int, period_s: float, clock: Callable[[], float]) -> None:
        self._most = most
        self._period_s = period_s
        self._clock = clock
        self._left = float(most)
        self._seen_s = clock()

    def wait_s(self, needed: float) -> float:
        """How long until `needed` are there; 0 if they are."""
        self._accrue()
        return max(0.0, (min(needed, self._most) - self._left) * self._period_s / self._most)

    def take(self, count: float) -> None:
        """Negative gives back."""
        self._left -= count

    def limit(self, most: int) -> None:
        """From now on it is so many; what is used stays used."""
        self._accrue()
        self._left += most - self._most
        self._most = most

    def _accrue(self) -> None:
        now_s = self._clock()
        self._left = min(self._most, self._left + (now_s - self._seen_s) * self._most / self._period_s)
        self._seen_s = now_s


_PERIODS_S = {"requests_per_minute": 60, "tokens_per_minute": 60, "tokens_per_day": 86_400}


class _Use:
    """What a key has used, whatever its settings were meanwhile."""

    def __init__(self) -> None:
        self.num_running = 0
        self.allowances: dict[str, _Allowance] = {}

    def limit(self, settings: KeySettings, clock: Callable[[], float]) -> None:
        for name, period_s in _PERIODS_S.items():
            most = getattr(settings, name)
            if most is None:
                self.allowances.pop(name, None)
            elif name in self.allowances:
                self.allowances[name].limit(most)
            else:
                self.allowances[name] = _Allowance(most, period_s, clock)


class Account:
    """One key's. Event loop only.

    Args:
        clock: seconds; only differences matter.
        before: the same key's with other settings: what it has used counts here, and what runs on it ends here.
    """

    def __init__(self, settings: KeySettings, clock: Callable[[], float], before: Account | None = None) -> None:
        self.settings = settings
        self._use: _Use = _Use() if before is None else before._use
        self._use.limit(settings, clock)

    def admit(self, num_prompt_tokens: int) -> None:
        """Take a request and its prompts into account.

        Raises:
            RateLimited: it has to wait; nothing was taken.
        """
        settings, use = self.settings, self._use
        if settings.max_concurrent is not None and use.num_running >= settings.max_concurrent:
            raise RateLimited(
                f"the key {settings.name!r} has {use.num_running} requests running, as many as it may; "
                "wait for one to end",
                retry_after_s=1,
            )
        needed = {name: 1 if name == "requests_per_minute" else num_prompt_tokens for name in use.allowances}
        waits = {name: allowance.wait_s(needed[name]) for name, allowance in use.allowances.items()}
        name = max(waits, key=lambda name: waits[name], default="")
        if waits.get(name, 0) > 0:
            limit = getattr(settings, name)
            kind = QuotaExceeded if name == "tokens_per_day" else RateLimited
            raise kind(
                f"the key {settings.name!r} has used up its {name}, {limit}; try again in {math.ceil(waits[name])} s",
                retry_after_s=waits[name],
            )
        for name, allowance in use.allowances.items():
            allowance.take(needed[name])
        use.num_running += 1

    def settle(self, num_more_tokens: int) -> None:
        """A request that was admitted has ended, with so many tokens beyond those it was admitted with; negative: it
        came to fewer."""
        self._use.num_running -= 1
        for name, allowance in self._use.allowances.items():
            if name != "requests_per_minute":
                allowance.take(num_more_tokens)
