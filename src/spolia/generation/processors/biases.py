"""Tokens made more or less likely, or forbidden, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from spolia.generation.history import History
from spolia.generation.processors.base import Logits

__all__ = ["Allowed", "LogitBias", "PrefixConstrained", "SequenceBias", "Suppress", "SuppressAtBegin"]

Ids = NDArray[np.int32]


class LogitBias:
    """Add to some tokens' logits."""

    def __init__(self, bias: Sequence[tuple[int, float]]) -> None:
        self._ids = np.array([token_id for token_id, _ in bias], np.int32)
        self._values = np.array([value for _, value in bias], np.float32)

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        logits[:, self._ids] += self._values


class SequenceBias:
    """Add to the logit of the token that would complete a sequence; of a sequence of one token, always.

    With a bias of -inf the sequence never comes about: that is how bad words are kept out.
    """

    def __init__(self, bias: Sequence[tuple[tuple[int, ...], float]]) -> None:
        self._single = LogitBias([(ids[0], value) for ids, value in bias if len(ids) == 1])
        # By the last token of what comes before: of thousands of sequences, few are looked at in a step.
        self._longer: dict[int, list[tuple[Ids, int, np.float32]]] = {}
        for ids, value in bias:
            if len(ids) > 1:
                entry = np.array(ids[:-1], np.int32), ids[-1], np.float32(value)
                self._longer.setdefault(ids[-2], []).append(entry)

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        self._single.process(logits, rows)
        for row, history in zip(logits, rows, strict=True):
            ids = history.ids
            for start, last, value in self._longer.get(int(ids[-1]), ()):
                if len(ids) >= len(start) and np.array_equal(ids[len(ids) - len(start) :], start):
                    row[last] += value


class Suppress:
    """Some tokens are never drawn."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = np.array(ids, np.int32)

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        logits[:, self._ids] = -np.inf


class SuppressAtBegin:
    """Some tokens do not begin the answer."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = np.array(ids, np.int32)

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        for row, history in zip(logits, rows, strict=True):
            if not history.num_generated_tokens:
                row[self._ids] = -np.inf


class Allowed:
    """Only some tokens are drawn."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = np.unique(np.array(ids, np.int32))

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        _leave_only(logits, self._ids)


class PrefixConstrained:
    """Only the tokens that a function of the sequence so far returns are drawn.

    Args:
        function: of the row's index and its token ids (prompt included) as an int32 array; returns token ids.
    """

    def __init__(self, function: Callable[[int, Ids], Sequence[int]]) -> None:
        self._function = function

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        for index, history in enumerate(rows):
            _leave_only(logits[index : index + 1], np.array(self._function(index, history.ids), np.int32))


def _leave_only(logits: Logits, ids: Ids) -> None:
    left = logits[:, ids]
    logits[:] = -np.inf
    logits[:, ids] = left
