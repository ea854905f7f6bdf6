"""Which tokens are likely enough to be drawn, and how boldly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spolia.generation.history import History
from spolia.generation.processors.base import Filter, Logits, probabilities

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

Kept = NDArray[np.bool_]
_TOP_H_TOKENS = 100
_XTC = 1  # the purpose of its draws
_BITS = 1 / math.log(2)
_NUM_BINS, _BINS_PER_UNIT = 4_096, 64


class RemoveInvalid:
    """NaN becomes 0, and infinity the largest number there is. -inf stays: it says that a token must not be drawn."""

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        largest = float(np.finfo(np.float32).max)
        np.nan_to_num(logits, copy=False, nan=0.0, posinf=largest, neginf=-np.inf)


class Temperature:
    """Divide all logits: below 1 the likely become likelier."""

    def __init__(self, temperature: float) -> None:
        self._temperature = np.float32(temperature)

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        np.divide(logits, self._temperature, out=logits)


class DynamicTemperature:
    """A temperature between two, by how sure the model is: the surer, the lower.

    temperature = low + (high - low) * (entropy / largest possible entropy) ** exponent

    Source: kalomaze's dynamic temperature, as in llama.cpp (`dynatemp_range`, `dynatemp_exponent`).
    """

    def __init__(self, low: float, high: float, exponent: float) -> None:
        self._low = low
        self._high = high
        self._exponent = exponent

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        for row in logits:
            scores = row[row > -np.inf]
            if len(scores) > 1:
                share = min(max(_entropy(probabilities(scores), scores) / math.log(len(scores)), 0.0), 1.0)
                temperature = self._low + (self._high - self._low) * share**self._exponent
                np.divide(row, np.float32(max(temperature, 1e-5)), out=row)


class TopK(Filter):
    """The k most likely tokens, ties included."""

    def __init__(self, k: int) -> None:
        self._k = k

    def keep(self, scores: Logits, history: History) -> Kept:
        if self._k >= len(scores):
            return np.ones(len(scores), np.bool_)
        kept: Kept = scores >= np.partition(scores, -self._k)[-self._k]
        return kept


class TopP(Filter):
    """The most likely tokens that together reach a probability."""

    def __init__(self, p: float) -> None:
        self._p = p

    def keep(self, scores: Logits, history: History) -> Kept:
        kept = np.zeros(len(scores), np.bool_)
        kept[_first_with_mass(-scores, probabilities(scores), self._p)] = True
        return kept


class MinP(Filter):
    """Tokens at least this likely, relative to the most likely one."""

    def __init__(self, p: float) -> None:
        self._p = p

    def keep(self, scores: Logits, history: History) -> Kept:
        kept: Kept = scores >= scores.max() + np.float32(math.log(self._p))
        return kept


class TopNSigma(Filter):
    """Tokens whose logit is within n standard deviations of the largest; independent of the temperature.

    Source: Tang et al. 2024, Top-n-sigma: Not All Logits Are You Need.
    """

    def __init__(self, n: float) -> None:
        self._n = n

    def keep(self, scores: Logits, history: History) -> Kept:
        kept: Kept = scores >= scores.max() - np.float32(self._n * scores.std(dtype=np.float64))
        return kept


class TopH(Filter):
    """The most likely tokens whose share of the entropy is at most h; of the best 100.

    Source: Baghaei Potraghloo et al. 2025, Top-H Decoding.
    """

    def __init__(self, h: float) -> None:
        self._h = h

    def keep(self, scores: Logits, history: History) -> Kept:
        best = np.arange(len(scores))
        if len(scores) > _TOP_H_TOKENS:
            best = np.sort(np.argpartition(scores, -_TOP_H_TOKENS)[-_TOP_H_TOKENS:])
        order = best[np.argsort(-scores[best], kind="stable")]
        p = probabilities(scores[order]).astype(np.float64)
        terms = -p * _log(p, scores[order])
        chosen = np.cumsum(terms) <= self._h * terms.sum()
        chosen[0] = True
        kept = np.zeros(len(scores), np.bool_)
        kept[order[chosen]] = True
        return kept


class Typical(Filter):
    """Tokens whose surprise is closest to what is to be expected, until they reach a probability.

    Source: Meister et al. 2022, Locally Typical Sampling.
    """

    def __init__(self, p: float) -> None:
        self._p = p

    def keep(self, scores: Logits, history: History) -> Kept:
        p = probabilities(scores)
        surprise = -_log(p, scores)
        shift = np.abs(surprise - np.float32(_entropy(p, scores)))
        chosen = _first_with_mass(shift, p, self._p)
        kept: Kept = shift <= shift[chosen[-1]]
        return kept


class Epsilon(Filter):
    """Tokens of at least this probability.

    Source: Hewitt et al. 2022, Truncation Sampling as Language Model Desmoothing.
    """

    def __init__(self, epsilon: float) -> None:
        self._epsilon = epsilon

    def keep(self, scores: Logits, history: History) -> Kept:
        kept: Kept = (probabilities(scores) >= self._epsilon) | (scores == scores.max())
        return kept


class Eta(Filter):
    """As epsilon, with a threshold that sinks where the model is unsure.

    Source: Hewitt et al. 2022, Truncation Sampling as Language Model Desmoothing.
    """

    def __init__(self, epsilon: float) -> None:
        self._epsilon = epsilon

    def keep(self, scores: Logits, history: History) -> Kept:
        p = probabilities(scores)
        eta = min(self._epsilon, math.sqrt(self._epsilon) * math.exp(-_entropy(p, scores)))
        kept: Kept = (p >= eta) | (scores == scores.max())
        return kept


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

    def keep(self, scores: Logits, history: History) -> Kept:
        kept = np.ones(len(scores), np.bool_)
        if history.uniform(_XTC) < self._probability:
            p = probabilities(scores)
            top = np.flatnonzero(p >= self._threshold)
            if len(top) > 1:
                kept[top] = False
                kept[top[np.argmin(p[top])]] = True
        return kept


class Mirostat(Filter):
    """Hold the surprise of the text at `tau` bits a token: tokens above a limit go, and the limit follows the text.

    The limit is state: it learns what was drawn when it sees the next row.

    Source: Basu et al. 2021, Mirostat (version 2).
    """

    def __init__(self, tau: float, eta: float) -> None:
        self._tau = tau
        self._eta = eta
        self._limit = 2 * tau
        self._offered: tuple[int, NDArray[np.intp], NDArray[np.float32]] | None = None

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        (row,), (history,) = logits, rows
        self._learn(history)
        ids = np.flatnonzero(row > -np.inf)
        scores = row[ids]
        kept = self.keep(scores, history)
        row[ids[~kept]] = -np.inf
        self._offered = history.num_tokens, ids[kept], probabilities(scores[kept])

    def keep(self, scores: Logits, history: History) -> Kept:
        p = probabilities(scores)
        kept: Kept = (-_log(p, scores) * _BITS <= self._limit) | (scores == scores.max())
        return kept

    def _learn(self, history: History) -> None:
        if self._offered is None or self._offered[0] >= history.num_tokens:
            return
        position, ids, p = self._offered
        drawn = np.flatnonzero(ids == history.buffer[position])
        if len(drawn):
            surprise = -math.log2(max(float(p[drawn[0]]), 1e-30))
            self._limit -= self._eta * (surprise - self._tau)


class Renormalise:
    """Logits become log-probabilities: what is left sums to one."""

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        for row in logits:
            best = float(row.max())
            total = math.log(np.exp(row.astype(np.float64) - best).sum())
            row -= np.float32(best + total)


def _log(p: NDArray[Any], scores: Logits) -> Logits:
    """log(p), by the scores, which do not underflow."""
    best = int(scores.argmax())
    logarithm: Logits = scores - (scores[best] - np.float32(math.log(p[best])))
    return logarithm


def _entropy(p: NDArray[np.float32], scores: Logits) -> float:
    return -float((p * _log(p, scores)).sum(dtype=np.float64))


def _first_with_mass(keys: Logits, weights: NDArray[np.float32], mass: float) -> NDArray[np.intp]:
    """The fewest indices, in ascending order of key, whose weights reach `mass`; at least one.

    Sorting a whole vocabulary would take longer than the model does. So keys are put into narrow bins, and only the bin
    in which the mass is reached is sorted. The last index has the largest key.
    """
    bins = np.minimum((keys - keys.min()) * np.float32(_BINS_PER_UNIT), _NUM_BINS - 1).astype(np.intp)
    masses = np.bincount(bins, weights=weights)
    edge = min(int(np.searchsorted(np.cumsum(masses), mass)), len(masses) - 1)
    below, within = np.flatnonzero(bins < edge), np.flatnonzero(bins == edge)
    within = within[np.argsort(keys[within], kind="stable")]
    reached = masses[:edge].sum() + np.cumsum(weights[within], dtype=np.float64)
    num_kept = int(np.searchsorted(reached, mass)) + 1
    return np.concatenate([below, within[:num_kept]])
