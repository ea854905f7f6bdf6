"""How an answer begins and ends."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from spolia.generation.history import History
from spolia.generation.processors.base import Logits

__all__ = ["ExponentialDecay", "ForcedFirst", "ForcedLast", "MinLength"]


class MinLength:
    """No end-of-text token before prompt and answer have `num_tokens`."""

    def __init__(self, num_tokens: int, eos_token_ids: Sequence[int]) -> None:
        self._num_tokens = num_tokens
        self._eos = np.array(eos_token_ids, np.int32)

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        for row, history in zip(logits, rows, strict=True):
            if history.num_tokens < self._num_tokens:
                row[self._eos] = -np.inf


class ForcedFirst:
    """The answer begins with a given token."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        for row, history in zip(logits, rows, strict=True):
            if not history.num_generated_tokens:
                _force(row, (self._token_id,))


class ForcedLast:
    """If the answer reaches its greatest length, its last token is one of some."""

    def __init__(self, token_ids: Sequence[int], max_tokens: int) -> None:
        self._token_ids = token_ids
        self._max_tokens = max_tokens

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        for row, history in zip(logits, rows, strict=True):
            if history.num_generated_tokens == self._max_tokens - 1:
                _force(row, self._token_ids)


class ExponentialDecay:
    """From the `start`-th generated token on, ending becomes more likely: its logit grows by a power of `factor`."""

    def __init__(self, start: int, factor: float, eos_token_ids: Sequence[int]) -> None:
        self._start = start
        self._factor = factor
        self._eos = np.array(eos_token_ids, np.int32)

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        for row, history in zip(logits, rows, strict=True):
            num_late = history.num_generated_tokens - self._start
            if num_late > 0:
                # Beyond some size float32 would overflow; a factor like that has long decided.
                gain = self._factor**num_late - 1 if num_late * math.log(self._factor) < 69 else 1e30
                eos = self._eos[np.isfinite(row[self._eos])]
                values = row[eos].astype(np.float64)
                row[eos] = np.minimum(values + np.abs(values) * gain, 1e38)


def _force(row: Logits, token_ids: Sequence[int]) -> None:
    row[:] = -np.inf
    row[list(token_ids)] = 0
