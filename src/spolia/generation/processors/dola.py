"""What the model's last layer knows beyond an earlier one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from spolia.errors import Bug, InvalidRequest
from spolia.generation.history import History
from spolia.generation.processors.base import Logits

__all__ = ["Depth", "Dola"]

_MANY_LAYERS, _REACH = 40, 20  # of deep models, only the first or the last so many layers are looked at
_RELATIVE_TOP = 0.1
_OTHERS = np.float32(-1e-3)


class Depth(NamedTuple):
    """
    Attributes:
        num_layers: of the model.
        has_tied_head: the head is the embedding table, so that the first layers tell of the last token only.
    """

    num_layers: int
    has_tied_head: bool


class Dola:
    """Decoding by contrasting layers: tokens whose probability grew the most on the way through the layers.

        logits = log-probabilities of the last layer - those of an earlier one

    Of several earlier layers, the one whose distribution differs most from the last one's (Jensen and Shannon). Tokens
    less than a tenth as likely as the best are not drawn. Whoever computes earlier rows hands them over before each
    token; they are the head's of what the layers begin with, without a norm.

    Args:
        layers: "low", "high", or which ones, from 0, what the first layer begins with.

    Raises:
        InvalidRequest: the model has no such layer.

    Source: Chuang et al. 2023, DoLa: Decoding by Contrasting Layers; layers and the order of the divergence as in
    transformers (`dola_layers`).
    """

    def __init__(self, layers: str | tuple[int, ...], depth: Depth) -> None:
        if not isinstance(layers, str) and max(layers) >= depth.num_layers:
            raise InvalidRequest(
                f"dola_layers holds {max(layers)}; this model's earlier layers are 0 to {depth.num_layers - 1}",
                param="dola_layers",
            )
        self.layers = _named(layers, depth) if isinstance(layers, str) else layers
        self._early: Logits | None = None
        self._divergences: list[float] = []

    def take(self, early: Logits) -> None:
        """The logits `[len(layers), vocab_size]` of the earlier layers, for the next token."""
        self._early = early

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        early, self._early = self._early, None
        if early is None:
            raise Bug("layers were to be contrasted before there were any")
        (row,) = logits
        last = _log_softmax(row)
        earlier = [_log_softmax(one) for one in early]
        self._divergences = []
        if len(earlier) > 1:
            known = np.isfinite(row)  # what is forbidden already tells nothing of the layers
            self._divergences = [_divergence(last[known], one[known]) for one in earlier]
        chosen = earlier[self._chosen]
        is_likely = last >= last.max() + np.float32(math.log(_RELATIVE_TOP))
        np.subtract(last, np.where(is_likely, chosen, _OTHERS), out=row)
        row[~is_likely] = -np.inf

    @property
    def _chosen(self) -> int:
        return int(np.argmax(self._divergences)) if self._divergences else 0

    def tell(self, num_candidates: int) -> Mapping[str, Any]:
        """The layer that the last one was contrasted with, and how much each differed, where there was a choice."""
        divergences = [
            {"layer": layer, "divergence": divergence}
            for layer, divergence in zip(self.layers, self._divergences, strict=False)
        ]
        return {"layer": self.layers[self._chosen], "divergences": divergences}


def _named(name: str, depth: Depth) -> tuple[int, ...]:
    num_layers, is_tied = depth
    middle = num_layers // 2
    if name == "high":
        return tuple(range(middle if num_layers <= _MANY_LAYERS else num_layers - _REACH, num_layers, 2))
    start = {1: 0, 2: 1}.get(num_layers, 2) if is_tied else 0
    return tuple(range(start, middle if num_layers <= _MANY_LAYERS else _REACH, 2)) or (min(start, num_layers - 1),)


def _log_softmax(row: Logits) -> Logits:
    shifted = row - row.max()
    log_probs: Logits = shifted - np.float32(np.log(np.exp(shifted).sum(dtype=np.float64)))
    return log_probs


def _divergence(one: Logits, other: Logits) -> float:
    average = np.float32(0.5) * (np.exp(one) + np.exp(other))
    log_average = np.log(np.maximum(average, np.finfo(np.float32).tiny))
    return float((average * (log_average - one) + average * (log_average - other)).sum(dtype=np.float64))
