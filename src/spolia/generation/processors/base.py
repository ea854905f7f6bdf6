"""What a logits processor is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from spolia.generation.history import History
from spolia.generation.processors.candidates import Candidates, Scratch, Softmax

__all__ = ["Filter", "Logits", "Processor", "Telling"]

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


@runtime_checkable
class Telling(Protocol):
    """A processor or filter with something to add where a decision is explained."""

    def tell(self, num_candidates: int) -> Mapping[str, Any]:
        """What it did to the last row, in values that JSON has; of lists of tokens, no more than so many."""


class Filter:
    """Removes tokens which have become too unlikely, or rescales the others.

    It sees only the tokens that are left: after the first filter these are few, whatever the vocabulary.
    """

    def apply(self, candidates: Candidates, history: History, scratch: Scratch) -> Candidates:
        """What is left of `candidates`, which is not written to; at least one."""
        return candidates.at(self.keep(Softmax(candidates.scores, scratch), history))

    def keep(self, softmax: Softmax, history: History) -> NDArray[np.intp]:
        """Ascending indices of those that stay; at least one."""
        raise NotImplementedError
