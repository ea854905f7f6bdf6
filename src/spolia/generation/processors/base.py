"""What a logits processor is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from spolia.generation.history import History

__all__ = ["Filter", "Logits", "Processor", "probabilities"]

Logits = NDArray[np.float32]


@runtime_checkable
class Processor(Protocol):
    """Changes logits before a token is drawn. One object serves one request, so it may keep state.

    Promise: a row's result depends on that row and its history alone, to the bit. Rows of one call belong to one
    request (its beams, say); what each row's neighbours in the batch do is never seen.
    """

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        """Change `logits` in place.

        Args:
            logits: float32 `[len(rows), vocab_size]`; -inf: must not be drawn.
            rows: the tokens before the one to draw.
        """


class Filter:
    """A processor that removes tokens which have become too unlikely, or rescales the others.

    A subclass sees only the tokens that are left: after the first filter these are few, whatever the vocabulary.
    """

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        for row, history in zip(logits, rows, strict=True):
            alive = row > -np.inf
            if alive.all():
                np.copyto(row, -np.inf, where=~self.keep(row, history))
                continue
            ids = np.flatnonzero(alive)
            if len(ids):
                row[ids[~self.keep(row[ids], history)]] = -np.inf

    def keep(self, scores: Logits, history: History) -> NDArray[np.bool_]:
        """Which of the tokens that are left stay; at least one.

        Args:
            scores: finite, `[num_left]`, in the order of their ids. Not to be written to.
        """
        raise NotImplementedError


def probabilities(scores: Logits) -> NDArray[np.float32]:
    """Softmax. Exponentials in single precision, which is several times faster; their sum in double."""
    weights: NDArray[np.float32] = np.exp(scores - scores.max())
    weights /= np.float32(weights.sum(dtype=np.float64))
    return weights
