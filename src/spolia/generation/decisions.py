"""Why a token came about: the likeliest candidates before and after each stage of the way from logits to the draw.

    note("model") -> processor -> note(its name) -> processor -> note(its name) ... -> shadow of the built-in filters

The notes are processors that change nothing, so an explained answer is the answer that it would be without.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from spolia.generation.history import History
from spolia.generation.processors.base import Logits, Processor, probabilities

__all__ = ["DecisionLog", "Stage"]


class Stage(NamedTuple):
    """The likeliest tokens after a stage.

    Attributes:
        name: "model", or what has just been applied, by the name of its parameter.
        num_left: tokens that may still be drawn.
        top: (id, probability) among those that are left, likeliest first.
    """

    name: str
    num_left: int
    top: tuple[tuple[int, float], ...]


class DecisionLog:
    """Notes of one request, an entry a token.

    Args:
        num_candidates: how many of the likeliest tokens to keep of each stage.
    """

    def __init__(self, num_candidates: int) -> None:
        self._num_candidates = num_candidates
        self._decisions: list[list[Stage]] = []

    @property
    def decisions(self) -> tuple[tuple[Stage, ...], ...]:
        return tuple(map(tuple, self._decisions))

    def interleave(
        self, processors: Iterable[tuple[str, Processor]], filters: Iterable[tuple[str, Processor]]
    ) -> list[Processor]:
        """The processors, with notes between them.

        Args:
            filters: those that the draw applies itself: what they would do is noted, and not done.
        """
        noted: list[Processor] = [_Note(self, "model")]
        for name, processor in processors:
            noted += [processor, _Note(self, name)]
        return [*noted, _Shadow(self, list(filters))]

    def note(self, name: str, row: Logits) -> None:
        if name == "model":
            self._decisions.append([])
        ids = np.flatnonzero(row > -np.inf)
        top: list[tuple[int, float]] = []
        if len(ids):
            p = probabilities(row[ids])
            best = np.argsort(-p, kind="stable")[: self._num_candidates]
            top = [(int(ids[index]), float(p[index])) for index in best]
        self._decisions[-1].append(Stage(name, len(ids), tuple(top)))


class _Note:
    def __init__(self, log: DecisionLog, name: str) -> None:
        self._log = log
        self._name = name

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        self._log.note(self._name, logits[-1])


class _Shadow:
    """Notes what filters would do to a row, on a copy of it."""

    def __init__(self, log: DecisionLog, filters: list[tuple[str, Processor]]) -> None:
        self._log = log
        self._filters = filters

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        copy = logits.copy()
        for name, filter_ in self._filters:
            filter_.process(copy, rows)
            self._log.note(name, copy[-1])
