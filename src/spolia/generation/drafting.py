"""Guessing what comes next without a model: a text that quotes itself goes on as it did before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_DRAFTS", "DraftPace", "prompt_lookup"]

MAX_DRAFTS = 16
"""Most tokens drafted for one step."""

_LONGEST = 8  # tokens of the end that are compared; longer repetitions are told apart no better
_LOOK_BACK = 8_192

Ids = NDArray[np.int32]


def prompt_lookup(ids: Ids, num_wanted: int, *, min_match: int = 3) -> Ids:
    """What followed the longest earlier copy of the text's end; of several copies, the last. Often nothing.

    Args:
        min_match: shortest end that counts.

    Source: Saxena 2023, Prompt Lookup Decoding.
    """
    ids = ids[-_LOOK_BACK:]
    last = len(ids) - 1
    ends = np.flatnonzero(ids[:-1] == ids[-1]) if last > 0 else np.empty(0, np.intp)
    length = 1
    while len(ends) and length < _LONGEST:
        longer = ends[ends >= length]
        longer = longer[ids[longer - length] == ids[last - length]]
        if not len(longer):
            break
        ends = longer
        length += 1
    if not len(ends) or length < min_match:
        return np.empty(0, np.int32)
    start = int(ends[-1]) + 1
    return ids[start : start + num_wanted]


class DraftPace:
    """How much to draft for one sequence, by how the last drafts fared.

    A draft that was accepted whole is followed by one twice as long; one that was mostly rejected by a shorter one; and
    if hardly anything is accepted, by none for a while, which doubles each time.
    """

    __slots__ = ("_length", "_pause", "_rate", "_wait", "num_accepted", "num_drafted")

    def __init__(self) -> None:
        self._length = 4
        self._rate = 0.5
        self._wait = 0
        self._pause = 16
        self.num_drafted = 0
        self.num_accepted = 0

    def next_length(self) -> int:
        """Tokens to draft for the next step; 0 during a pause."""
        if self._wait:
            self._wait -= 1
            return 0
        return self._length

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self._rate = 0.75 * self._rate + 0.25 * num_accepted / num_drafted
        if num_accepted == num_drafted:
            self._length = min(2 * max(self._length, num_drafted), MAX_DRAFTS)
            self._pause = 16
        elif 2 * num_accepted < num_drafted:
            self._length = max(2, num_accepted + 1)
        if self._rate < 0.25:
            self._wait = self._pause
            self._pause = min(2 * self._pause, 512)
            self._rate = 0.35  # the next one counts
