"""What a prompt changes, made more of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spolia.errors import Bug
from spolia.generation.history import History
from spolia.generation.processors.base import Logits
from spolia.generation.processors.candidates import largest

__all__ = ["Guidance"]


class Guidance:
    """Classifier-free guidance: away from what the model would say without the prompt, or after a negative one.

        log-probabilities = scale * (with the prompt - without) + without

    Whoever computes the other row hands it over before each token.

    Source: Sanchez et al. 2023, Stay on Topic with Classifier-Free Guidance; as in transformers
    (`UnbatchedClassifierFreeGuidanceLogitsProcessor`).
    """

    def __init__(self, scale: float) -> None:
        self._scale = np.float32(scale)
        self._other: Logits | None = None
        self._without: Logits = np.empty(0, np.float32)

    def take(self, other: Logits) -> None:
        """The logits `[vocab_size]` of the other prompt, for the next token."""
        self._other = other

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        other, self._other = self._other, None
        if other is None:
            raise Bug("guidance was asked for a token before it had the other prompt's logits")
        without = self._without = _log_softmax(other)
        for row in logits:
            forbidden = row == -np.inf
            row[:] = (_log_softmax(row) - without) * self._scale + without
            row[forbidden] = -np.inf

    def tell(self, num_candidates: int) -> Mapping[str, Any]:
        """What the other prompt alone would go on with."""
        without = self._without
        best = largest(without, num_candidates)
        best = best[np.argsort(-without[best], kind="stable")][:num_candidates]
        return {"without": [{"token_id": int(i), "probability": float(np.exp(without[i]))} for i in best]}


def _log_softmax(row: Logits) -> Logits:
    shifted = row - row.max()
    # A token that both prompts forbid is forbidden, and not the difference of two infinities.
    shifted = np.maximum(shifted, np.float32(-1e30))
    log_probs: Logits = shifted - np.float32(np.log(np.exp(shifted).sum(dtype=np.float64)))
    return log_probs
