"""Which tokens are likely enough to be drawn, and how boldly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spolia.generation.history import History
from spolia.generation.processors.base import Filter, Logits
from spolia.generation.processors.candidates import Candidates, Scratch, Softmax, largest

__all__ = [
    "DynamicTemperature",
    "Epsilon",
    "Eta",
    "MinP",
    "Mirostat",
    "RemoveInvalid",
    "Renormalise",
    "Temperature",
    "TopH",
    "TopK",
    "TopNSigma",
    "TopP",
    "Typical",
    "Xtc",
]

Kept = NDArray[np.intp]
Scores = NDArray[np.float32]
_TOP_H_TOKENS = 100
_XTC = 1  # the purpose of its draws
_LOG_2 = math.log(2)
_LOWEST = np.finfo(np.float32).min


class RemoveInvalid:
    """NaN becomes 0, and infinity the largest number there is. -inf stays: it says that a token must not be drawn."""

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        largest = float(np.finfo(np.float32).max)
        np.nan_to_num(logits, copy=False, nan=0.0, posinf=largest, neginf=-np.inf)


class Temperature(Filter):
    """Divide all logits: below 1 the likely become likelier."""

    def __init__(self, temperature: float) -> None:
        self._temperature = np.float32(temperature)

    def apply(self, candidates: Candidates, history: History, scratch: Scratch) -> Candidates:
        scores = _divided(candidates.scores, self._temperature, scratch)
        return candidates._replace(scores=np.maximum(scores, _LOWEST, out=scores))  # none overflows to "forbidden"


class DynamicTemperature(Filter):
    """A temperature between two, by how sure the model is: the surer, the lower.

    temperature = low + (high - low) * (entropy / largest possible entropy) ** exponent

    Source: kalomaze's dynamic temperature, as in llama.cpp (`dynatemp_range`, `dynatemp_exponent`).
    """

    def __init__(self, low: float, high: float, exponent: float) -> None:
        self._low = low
        self._high = high
        self._exponent = exponent
        self._last = high

    def tell(self, num_candidates: int) -> Mapping[str, Any]:
        return {"temperature": self._last}

    def apply(self, candidates: Candidates, history: History, scratch: Scratch) -> Candidates:
        scores = candidates.scores
        if len(scores) == 1:
            return candidates
        share = min(max(Softmax(scores, scratch).entropy / math.log(len(scores)), 0.0), 1.0)
        self._last = max(self._low + (self._high - self._low) * share**self._exponent, 1e-5)
        return candidates._replace(scores=_divided(scores, np.float32(self._last), scratch))


class TopK(Filter):
    """The k most likely tokens, ties included."""

    def __init__(self, k: int) -> None:
        self._k = k

    def keep(self, softmax: Softmax, history: History) -> Kept:
        return largest(softmax.scores, self._k)


class TopP(Filter):
    """The most likely tokens that together reach a probability."""

    def __init__(self, p: float) -> None:
        self._p = p

    def keep(self, softmax: Softmax, history: History) -> Kept:
        return softmax.likeliest(self._p)


class MinP(Filter):
    """Tokens at least this likely, relative to the most likely one."""

    def __init__(self, p: float) -> None:
        self._p = p

    def keep(self, softmax: Softmax, history: History) -> Kept:
        return softmax.at_least(math.log(self._p))


class TopNSigma(Filter):
    """Tokens whose logit is within n standard deviations of the largest; independent of the temperature.

    Source: Tang et al. 2024, Top-n-sigma: Not All Logits Are You Need.
    """

    def __init__(self, n: float) -> None:
        self._n = n

    def keep(self, softmax: Softmax, history: History) -> Kept:
        return softmax.at_least(-self._n * softmax.deviation)


class TopH(Filter):
    """The most likely tokens whose share of the entropy is at most h; of the best 100.

    Source: Baghaei Potraghloo et al. 2025, Top-H Decoding.
    """

    def __init__(self, h: float) -> None:
        self._h = h

    def keep(self, softmax: Softmax, history: History) -> Kept:
        best = largest(softmax.scores, _TOP_H_TOKENS)
        scores = softmax.scores[best].astype(np.float64)
        order = np.argsort(-scores, kind="stable")[:_TOP_H_TOKENS]
        shifted = scores[order] - scores[order[0]]
        weights = np.exp(shifted)
        total = weights.sum()
        terms = weights / total * (math.log(total) - shifted)
        chosen = np.cumsum(terms) <= self._h * terms.sum()
        chosen[0] = True
        return np.sort(best[order[chosen]])


class Typical(Filter):
    """Tokens whose surprise is closest to what is to be expected, until they reach a probability.

    Source: Meister et al. 2022, Locally Typical Sampling.
    """

    def __init__(self, p: float) -> None:
        self._p = p

    def keep(self, softmax: Softmax, history: History) -> Kept:
        return softmax.nearest(softmax.entropy, self._p)


class Epsilon(Filter):
    """Tokens of at least this probability.

    Source: Hewitt et al. 2022, Truncation Sampling as Language Model Desmoothing.
    """

    def __init__(self, epsilon: float) -> None:
        self._epsilon = epsilon

    def keep(self, softmax: Softmax, history: History) -> Kept:
        return softmax.at_least(math.log(self._epsilon * softmax.total))


class Eta(Filter):
    """As epsilon, with a threshold that sinks where the model is unsure.

    Source: Hewitt et al. 2022, Truncation Sampling as Language Model Desmoothing.
    """

    def __init__(self, epsilon: float) -> None:
        self._epsilon = epsilon

    def keep(self, softmax: Softmax, history: History) -> Kept:
        eta = min(self._epsilon, math.sqrt(self._epsilon) * math.exp(-softmax.entropy))
        return softmax.at_least(math.log(eta * softmax.total))


class Xtc(Filter):
    """Exclude Top Choices: sometimes, of several likely tokens, only the least likely stays.

    Args:
        probability: how often.
        threshold: tokens of at least this probability are the top choices; above 0.5 there is never a second.

    Source: p-e-w's proposal in text-generation-webui (pull request 6335).
    """

    def __init__(self, probability: float, threshold: float) -> None:
        self._probability = probability
        self._threshold = threshold

    def apply(self, candidates: Candidates, history: History, scratch: Scratch) -> Candidates:
        if history.uniform(_XTC) >= self._probability:
            return candidates
        return super().apply(candidates, history, scratch)

    def keep(self, softmax: Softmax, history: History) -> Kept:
        weights = softmax.weights
        top = np.flatnonzero(weights >= np.float32(self._threshold * softmax.total))
        kept = np.ones(len(weights), np.bool_)
        if len(top) > 1:
            kept[top] = False
            kept[top[np.argmin(weights[top])]] = True
        return np.flatnonzero(kept)


class Mirostat(Filter):
    """Hold the surprise of the text at `tau` bits a token: tokens above a limit go, and the limit follows the text.

    The limit is state: it learns what was drawn when it sees the next row.

    Source: Basu et al. 2021, Mirostat (version 2).
    """

    def __init__(self, tau: float, eta: float) -> None:
        self._tau = tau
        self._eta = eta
        self._limit = 2 * tau
        self._offered: tuple[int, Candidates] | None = None

    def tell(self, num_candidates: int) -> Mapping[str, Any]:
        """The most bits of surprise that a token may have."""
        return {"limit": self._limit}

    def apply(self, candidates: Candidates, history: History, scratch: Scratch) -> Candidates:
        self._learn(history, scratch)
        kept = super().apply(candidates, history, scratch)
        self._offered = history.num_tokens, kept
        return kept

    def keep(self, softmax: Softmax, history: History) -> Kept:
        return softmax.at_least(math.log(softmax.total) - self._limit * _LOG_2)

    def _learn(self, history: History, scratch: Scratch) -> None:
        if self._offered is None or self._offered[0] >= history.num_tokens:
            return
        position, (ids, scores) = self._offered
        drawn = np.flatnonzero(ids == history.buffer[position])
        if len(drawn):
            softmax = Softmax(scores, scratch)
            surprise = (math.log(softmax.total) - float(softmax.shifted[drawn[0]])) / _LOG_2
            self._limit -= self._eta * (surprise - self._tau)


class Renormalise:
    """Logits become log-probabilities: what is left sums to one."""

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        for row in logits:
            best = float(row.max())
            total = math.log(np.exp(row.astype(np.float64) - best).sum())
            row -= np.float32(best + total)


def _divided(scores: Scores, temperature: np.float32, scratch: Scratch) -> Scores:
    """A quotient, in scratch if it is of a whole row: that lasts until another temperature is applied."""
    out: Scores = scratch.scores[: len(scores)]
    return np.divide(scores, temperature, out=out)
