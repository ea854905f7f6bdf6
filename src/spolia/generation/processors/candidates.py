"""Tokens that may be drawn, and what filters ask about them, in a few passes over a vocabulary and without sorting it.

Whole rows are worked on in `Scratch`, which is allocated once: fresh megabytes at each token would cost more than the
arithmetic.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Candidates", "Scratch", "Softmax", "at_least", "largest", "most_likely", "total_of", "within_mass"]

_NUM_ROWS = 32  # of the columns that are summed: another number would round otherwise
_NUM_MAX_ROWS = 64  # of those whose maxima are taken, which do not round: as many as keep the maxima near
_MAXIMA_A_TOKEN = 8  # for each of the k largest, of which the k-th is found; fewer tell less sharply
_BUCKET = 256
_SAMPLE = 512
_NUM_BINS, _BINS_PER_UNIT = 4_096, 64

Indices = NDArray[np.intp]
Scores = NDArray[np.float32]


class Candidates(NamedTuple):
    """Tokens that may be drawn.

    Attributes:
        ids: ascending; None: the whole vocabulary.
        scores: their logits, all finite.
    """

    ids: Indices | None
    scores: Scores

    @classmethod
    def of(cls, row: Scores) -> Candidates:
        """Those of a row of logits that are not forbidden. Shares memory with it if none is."""
        if row.min() > -np.inf:
            return cls(None, row)
        ids = np.flatnonzero(row > -np.inf)
        return cls(ids, row[ids])

    def at(self, indices: Indices) -> Candidates:
        """Those at ascending `indices`."""
        return Candidates(indices if self.ids is None else self.ids[indices], self.scores[indices])


class Scratch:
    """Room for rows of a vocabulary. One thread at a time; what a `Softmax` keeps here ends with the next one."""

    def __init__(self, vocab_size: int) -> None:
        self.scores = np.empty(vocab_size, np.float32)
        self.shifted = np.empty(vocab_size, np.float32)
        self.weights = np.empty(vocab_size, np.float32)
        self.terms = np.empty(vocab_size, np.float32)
        self.mask = np.empty(vocab_size, np.bool_)


class Softmax:
    """The distribution of some scores, each part computed when it is asked for.

    Exponentials are in single precision, which is several times faster; sums in double from columns of 32 on.
    """

    def __init__(self, scores: Scores, scratch: Scratch) -> None:
        self.scores = scores
        self._scratch = scratch
        self._size = len(scores)

    @cached_property
    def shifted(self) -> Scores:
        """Scores less the largest."""
        shifted = self._scratch.shifted[: self._size]
        np.subtract(self.scores, self.scores.max(), out=shifted)
        return shifted

    @cached_property
    def weights(self) -> Scores:
        """exp(shifted): probabilities times `total`."""
        weights = self._scratch.weights[: self._size]
        np.exp(self.shifted, out=weights)
        return weights

    @cached_property
    def total(self) -> float:
        return total_of(self.weights)

    @cached_property
    def entropy(self) -> float:
        terms = np.multiply(self.weights, self.shifted, out=self._scratch.terms[: self._size])
        return math.log(self.total) - total_of(terms) / self.total

    @cached_property
    def deviation(self) -> float:
        """Standard deviation of the scores."""
        terms = np.subtract(self.shifted, np.float32(total_of(self.shifted) / self._size), out=self._terms)
        return math.sqrt(total_of(np.multiply(terms, terms, out=terms)) / self._size)

    @property
    def _terms(self) -> Scores:
        return self._scratch.terms[: self._size]

    def at_least(self, threshold: float) -> Indices:
        """Indices where `shifted` is no less than a threshold; of the largest, in any case."""
        return at_least(self.shifted, np.float32(min(threshold, 0.0)))

    def nearest(self, surprise: float, mass: float) -> Indices:
        """Indices of the scores whose surprise is nearest to one, as few as have so much of the probability.

        Equally near ones are in or out together.
        """
        # The surprise of a token is log(total) - shifted.
        distance = np.subtract(self.shifted, np.float32(math.log(self.total) - surprise), out=self._terms)
        np.abs(distance, out=distance)
        within = self._within(distance, mass * self.total)
        near = distance[within]
        chosen = _first_with_mass(near, self.weights[within], mass * self.total)
        nearest: Indices = within[near <= near[chosen[-1]]]
        return nearest

    def likeliest(self, mass: float) -> Indices:
        """Indices of the largest scores, as few as have so much of the probability; the lower index where equal."""
        distance = np.negative(self.shifted, out=self._terms)
        within = self._within(distance, mass * self.total)
        likeliest: Indices = within[most_likely(self.shifted[within], mass * self.total)]
        return likeliest

    def _within(self, distance: Scores, mass: float) -> Indices:
        return within_mass(distance, self.weights, self.total, mass, self._scratch.mask[: self._size])


def total_of(values: Scores) -> float:
    """The sum: in single precision down columns of 32, which is quicker than along rows, and then in double."""
    num_whole = len(values) // _NUM_ROWS * _NUM_ROWS
    columns = values[:num_whole].reshape(_NUM_ROWS, -1).sum(axis=0)
    return float(columns.sum(dtype=np.float64)) + float(values[num_whole:].sum(dtype=np.float64))


def at_least(scores: Scores, threshold: np.float32) -> Indices:
    """Indices, ascending, of all scores that are no less than a threshold."""
    num_whole = len(scores) // _NUM_MAX_ROWS * _NUM_MAX_ROWS
    columns = scores[:num_whole].reshape(_NUM_MAX_ROWS, -1)
    return _at_least(scores, columns, columns.max(axis=0) if num_whole else scores[:0], threshold)


def largest(scores: Scores, k: int) -> Indices:
    """Indices, ascending, of all scores that are no less than the k-th largest.

    The k-th largest of the maxima of columns, or of groups of columns, cannot exceed it: a threshold that few columns
    reach, and only these are looked at.
    """
    if k >= len(scores):
        return np.arange(len(scores))
    num_columns = len(scores) // _NUM_MAX_ROWS
    if k > num_columns:
        return np.flatnonzero(scores >= np.partition(scores, -k)[-k])
    columns = scores[: num_columns * _NUM_MAX_ROWS].reshape(_NUM_MAX_ROWS, num_columns)
    maxima = columns.max(axis=0)
    groups = maxima
    while (half := len(groups) // 2) >= _MAXIMA_A_TOKEN * k:
        groups = np.maximum(groups[:half], groups[half : 2 * half])
    indices = _at_least(scores, columns, maxima, np.partition(groups, -k)[-k])
    values = scores[indices]
    found: Indices = indices[values >= np.partition(values, -k)[-k]]
    return found


def _at_least(scores: Scores, columns: Scores, maxima: Scores, threshold: np.float32) -> Indices:
    """As `at_least`, given the scores as `[64, num_columns]` without the rest, and the columns' maxima."""
    num_columns = len(maxima)
    reached = np.flatnonzero(maxima >= threshold)
    if 8 * len(reached) > num_columns:
        return np.flatnonzero(scores >= threshold)
    row, column = np.nonzero(columns.take(reached, axis=1) >= threshold)
    found = row * num_columns + reached[column]
    num_whole = _NUM_MAX_ROWS * num_columns
    rest = scores[num_whole:]
    return np.concatenate([found, num_whole + np.flatnonzero(rest >= threshold)]) if len(rest) else found


def within_mass(distance: Scores, weights: Scores, total: float, mass: float, mask: NDArray[np.bool_]) -> Indices:
    """Indices of all that are no further than some distance, with weights of no less than `mass` together.

    Not many more than it takes: what lies beyond is many small weights, so a sample of them tells where to cut. It is
    the same for the same row, and what it leaves is added up, so a poor guess costs time and no token.

    Args:
        total: of all weights.
        mask: room, as long as `distance`.
    """
    step = len(distance) // _SAMPLE
    if step > 1:
        far_first = -distance[::step]
        order = np.argsort(far_first)
        beyond = np.cumsum(weights[::step][order], dtype=np.float64) * step
        for share in (0.8, 0.3):
            cut = min(int(np.searchsorted(beyond, share * (total - mass), side="right")), len(order) - 1)
            reach = -far_first[order[cut]]
            indices = np.flatnonzero(np.less_equal(distance, reach, out=mask))
            if len(indices) and total_of(weights[indices]) >= mass:
                return indices
    return np.arange(len(distance))


def most_likely(shifted: Scores, mass: float) -> Indices:
    """Indices, ascending, of the largest values, as few as have exponentials of `mass` together; at least one.

    Of equal ones the first. Values are sorted without their indices, which is several times faster than with them.
    """
    ordered = np.sort(shifted)[::-1]
    num_kept = min(_num_with_mass(np.exp(ordered), mass), len(ordered))
    edge = ordered[num_kept - 1]
    kept = shifted > edge
    kept[np.flatnonzero(shifted == edge)[: num_kept - np.count_nonzero(kept)]] = True
    return np.flatnonzero(kept)


def _num_with_mass(weights: Scores, mass: float) -> int:
    """How many of the first weights reach `mass`: first by buckets, which saves a long running sum."""
    if len(weights) <= _BUCKET:
        return int(np.searchsorted(np.cumsum(weights, dtype=np.float64), mass)) + 1
    num_buckets = len(weights) // _BUCKET
    sums = weights[: num_buckets * _BUCKET].reshape(num_buckets, _BUCKET).sum(axis=1)
    cumulative = np.cumsum(sums, dtype=np.float64)
    bucket = int(np.searchsorted(cumulative, mass))
    before = float(cumulative[bucket - 1]) if bucket else 0.0
    inside = before + np.cumsum(weights[bucket * _BUCKET : (bucket + 1) * _BUCKET], dtype=np.float64)
    return bucket * _BUCKET + int(np.searchsorted(inside, mass)) + 1


def _first_with_mass(keys: Scores, weights: Scores, mass: float) -> Indices:
    """The fewest indices, in ascending order of key, whose weights reach `mass`; at least one.

    Keys are put into narrow bins, and only the bin in which the mass is reached is sorted. The last index has the
    largest key.
    """
    bins = np.minimum((keys - keys.min()) * np.float32(_BINS_PER_UNIT), _NUM_BINS - 1).astype(np.intp)
    masses = np.bincount(bins, weights=weights)
    edge = min(int(np.searchsorted(np.cumsum(masses), mass)), len(masses) - 1)
    below, within = np.flatnonzero(bins < edge), np.flatnonzero(bins == edge)
    within = within[np.argsort(keys[within], kind="stable")]
    reached = masses[:edge].sum() + np.cumsum(weights[within], dtype=np.float64)
    num_kept = int(np.searchsorted(reached, mass)) + 1
    return np.concatenate([below, within[:num_kept]])
