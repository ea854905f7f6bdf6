"""Restore, recompute, or both ends meeting in the middle: whichever is sooner, by what both have cost so far.

    restore        |<------------ read ------------->|            reading takes a third of computing, or less
    both ends      |--- computed --->|<---- read ----|            the front needs nothing of what comes after
                                    meet                          it; what was read only has to be in its place
    recompute      |----------- computed ----------->|            reading takes so long that it would not be felt

See `Planner`.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Planner"]

_SMOOTHING = 0.3
_MIN_STEP_TOKENS = 32
"""Steps with fewer tokens tell how fast answers are generated, not how fast prompts are computed."""

_MIN_WAIT_S = 0.1
_FIRST_WAIT_S = 2.0
"""Waiting for a run as long as nobody knows what computing it would take."""

_FIRST_SHARE = 0.1
"""Of computing all of it: so long may a tier that was never read keep a prompt waiting for its first run."""

_MIN_FIRST_WAIT_S = 0.03

_ALONE_SHARE = 0.3
"""Of computing's time, reading takes so much at most where it is only read: then both ends would save little, and
computing costs others their turn."""

_MEET_FACTOR = 20.0
"""Reading that takes so many times longer than computing saves less than a twentieth from the far end."""

_PROBE_S = 30.0
"""A tier that was found too slow is tried again after that."""


class Planner:
    """Measures prompts computed per second and compares with bytes read per second.

    Expectations may be wrong, so each run that is read while nothing is computed may take as long as computing its
    tokens would, and no longer: then both ends are tried, and little more than one run's time was lost. Where nothing
    is known of a tier, the first run may take a tenth of computing all. One thread notes steps; any may ask.

    Args:
        clock: seconds; only differences matter.

    Attributes:
        step_tokens: most tokens that a step computes. Both ends can meet no sooner than the first step is over.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.step_tokens = 0
        self._tokens_per_s: float | None = None
        self._probed_s: dict[str, float] = {}

    def note_step(self, num_tokens: int, duration_s: float) -> None:
        if num_tokens >= _MIN_STEP_TOKENS and duration_s > 0:
            rate, before = num_tokens / duration_s, self._tokens_per_s
            self._tokens_per_s = rate if before is None else (1 - _SMOOTHING) * before + _SMOOTHING * rate

    def is_worth(self, tier: str, num_tokens: int, num_bytes: int, bytes_per_s: float | None) -> bool:
        """Whether to only read so many tokens' KV from a tier that has been read at that rate (None: never yet)."""
        if bytes_per_s is None or self._tokens_per_s is None:
            return True
        soonest_tokens = max(_ALONE_SHARE * num_tokens, min(self.step_tokens, num_tokens))
        if num_bytes / bytes_per_s <= soonest_tokens / self._tokens_per_s:
            self._probed_s.pop(tier, None)
            return True
        now_s = self._clock()
        if now_s - self._probed_s.setdefault(tier, now_s) >= _PROBE_S:
            self._probed_s[tier] = now_s
            return True
        return False

    def is_worth_meeting(self, num_tokens: int, num_bytes: int, bytes_per_s: float | None) -> bool:
        """Whether to read from the far end while the near one is computed."""
        if bytes_per_s is None or self._tokens_per_s is None:
            return True
        return num_bytes / bytes_per_s <= _MEET_FACTOR * num_tokens / self._tokens_per_s

    def wait_s(self, num_tokens: int) -> float:
        """How long to wait for a run of so many tokens."""
        if self._tokens_per_s is None:
            return _FIRST_WAIT_S
        return max(_MIN_WAIT_S, num_tokens / self._tokens_per_s)

    def first_wait_s(self, num_tokens: int) -> float:
        """How long to wait for anything at all of so many tokens from a tier that was never read."""
        if self._tokens_per_s is None:
            return _FIRST_WAIT_S
        return max(_MIN_FIRST_WAIT_S, _FIRST_SHARE * num_tokens / self._tokens_per_s)
