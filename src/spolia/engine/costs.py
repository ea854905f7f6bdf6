"""What a step costs that checks drafts, beside one that checks none, as measured while it runs.

    time of a step of `base` sequences and `extra` drafts  =  level(base) * curve(base, extra),   curve(base, 0) = 1

The level moves with the machine's load and the contexts' lengths; the curve is what the kernels make of more rows, and
hardly moves. So a busy neighbour that slows all steps changes no decision.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_DRAFT_ROWS", "MIN_GAIN", "StepCosts"]

MAX_DRAFT_ROWS = 64
"""Most drafts of one step."""

MIN_GAIN = 1.04
"""What promises less is not worth the risk."""

_KNOTS = (0, 1, 2, 3, 4, 6, 8, 11, 15, 20, 32, 48, MAX_DRAFT_ROWS)
_ROW_COST = 0.2  # of a step of one row, before anything was measured; more than most machines take
_CAUTION = 1.25  # of what the drafts that were measured cost, those beyond them are assumed to cost so much each
_MAX_SURPRISE = math.log(2.0)  # a step that was held up by something else teaches no more than this
_NUM_TRIALS = 2  # measurements before a rise above what was assumed is believed
_LEVEL_RATE = 0.1
_CURVE_RATE = 0.1
_TIMES_LAST = 8  # measurements, once each number of drafts was seen: putting the times together has its price
_DOUBT = 1e-4  # of what was measured long ago, forgotten at each step that checks no draft


class _Layout(NamedTuple):
    """How the time of each number of drafts is put together from those of the knots that were measured.

    Attributes:
        known: the knots, by index.
        last: drafts of the last of them.
        of_none: what the time without drafts weighs.
        of_known: what each knot's weighs, `[MAX_DRAFT_ROWS + 1, len(known)]`.
        beyond: drafts beyond the last knot.
    """

    known: NDArray[np.intp]
    last: int
    of_none: NDArray[np.float64]
    of_known: NDArray[np.float64]
    beyond: NDArray[np.int64]


class _Curve:
    """Steps of one number of sequences. All in logarithms: surprises are ratios."""

    def __init__(self, base: int) -> None:
        self._row_cost = _ROW_COST / math.sqrt(base)
        self._prior = np.log1p(self._row_cost * np.array(_KNOTS, float))
        self._values = self._prior.copy()
        self._counts = [0] * len(_KNOTS)
        self._first = [0.0] * len(_KNOTS)
        self.level: float | None = None
        self._times: list[float] | None = None
        self._num_unheeded = 0  # measurements since the times were put together
        self._known: _Layout | None = None

    def note(self, extra: int, duration_s: float) -> None:
        measured = math.log(max(duration_s, 1e-6))
        if self.level is None:
            if extra == 0:
                self.level = measured
            return
        surprise = measured - self.level - math.log(self.times()[extra])
        surprise = min(max(surprise, -_MAX_SURPRISE), _MAX_SURPRISE)
        knot = bisect_left(_KNOTS, extra)
        if extra == 0:
            self.level += _LEVEL_RATE * surprise
            self._values += _DOUBT * (self._prior - self._values)
        elif self._counts[knot] < _NUM_TRIALS:
            # What may have been held up by something else is not believed before it was seen twice.
            self._counts[knot] += 1
            relative = measured - self.level + math.log(self.times()[_KNOTS[knot]] / self.times()[extra])
            before = math.log(self.times()[_KNOTS[knot]]) if self._counts[knot] == 1 else self._first[knot]
            self._first[knot] = relative
            self._values[knot] = min(before, relative)
            self._times = None
        else:
            self.level += _LEVEL_RATE * surprise
            self._values[knot] += _CURVE_RATE * surprise
            self._num_unheeded += 1
            if self._num_unheeded >= _TIMES_LAST:
                self._times = None

    def times(self) -> list[float]:
        """By number of drafts, the time of a step relative to one without."""
        if self._times is None:
            layout = self._layout()
            # Fewer drafts never take longer than more.
            values = np.minimum.accumulate(self._values[layout.known][::-1])[::-1]
            measured = np.exp(np.maximum(values, 0.0))
            slope = self._row_cost
            if len(measured):
                slope = min(slope, max(slope / 2, _CAUTION * (float(measured[-1]) - 1.0) / layout.last))
            times = layout.of_none + layout.of_known @ measured + slope * layout.beyond
            self._times = times.tolist()
            self._num_unheeded = 0
        return self._times

    def _layout(self) -> _Layout:
        known = np.flatnonzero(self._counts)
        if self._known is None or len(self._known.known) != len(known):
            at = np.array([0, *np.array(_KNOTS)[known]])
            counts = np.arange(MAX_DRAFT_ROWS + 1)
            weights = np.stack([np.interp(counts, at, of_one) for of_one in np.eye(len(at))], axis=1)
            beyond = np.maximum(counts - at[-1], 0)
            self._known = _Layout(known, int(at[-1]), weights[:, 0], weights[:, 1:], beyond)
        return self._known


class StepCosts:
    """Measures steps, and says how many drafts are worth checking."""

    def __init__(self) -> None:
        self._curves: dict[int, _Curve] = {}

    def _curve(self, base: int) -> _Curve:
        curve = self._curves.get(base)
        if curve is None:
            curve = self._curves[base] = _Curve(base)
        return curve

    def note(self, base: int, extra: int, duration_s: float) -> None:
        """A step of `base` decoding sequences and `extra` drafts took that long."""
        self._curve(base).note(min(extra, MAX_DRAFT_ROWS), duration_s)

    def ratio(self, base: int, extra: int) -> float:
        """The time of a step with `extra` drafts relative to one without."""
        return self._curve(base).times()[extra]

    def step_s(self, base: int) -> float | None:
        """Seconds that a step of `base` decoding sequences takes without drafts; None before there was one."""
        level = self._curve(base).level
        return None if level is None else math.exp(level)

    def lengths(self, base: int, chances: Seq[Seq[float]]) -> list[int]:
        """How many drafts of each sequence to check, so that most tokens come out per second; all 0 if none pay.

        Args:
            base: decoding sequences of the step. The first step of any number has no drafts: it is what others are
                compared with.
            chances: per sequence, of each of its drafts, that it and those before it are right; not increasing.
        """
        if not any(chances) or self.step_s(base) is None:
            return [0] * len(chances)
        times = self._curve(base).times()
        ordered = sorted(
            ((chance, index) for index, of_one in enumerate(chances) for chance in of_one), key=lambda pair: -pair[0]
        )
        best, num_best = base * MIN_GAIN, 0
        expected = float(base)
        for count, (chance, _) in enumerate(ordered[:MAX_DRAFT_ROWS], 1):
            expected += chance
            rate = expected / times[count]
            if rate > best:
                best, num_best = rate, count
        lengths = [0] * len(chances)
        for _, index in ordered[:num_best]:
            lengths[index] += 1
        return lengths
