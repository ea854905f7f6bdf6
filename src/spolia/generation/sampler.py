"""Logits to tokens, row by row, each independent of all others.

    log-probabilities, if asked for -> banned ids -> processors -> filters -> one draw with `uniform`

The filters that most requests use (temperature -> top-k -> top-p -> min-p) are built in; the others are processors.

Greedy rows of a batch are one argmax over the whole array, which is row-independent too: comparing has no rounding.
Filters need the largest few of some 100,000 values, which are found without sorting, and without a pass over the rest
but for the largest of each column; see `candidates`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spolia.generation.params import SamplingParams
from spolia.generation.pipeline import Pipeline
from spolia.generation.processors.candidates import (
    Candidates,
    Scratch,
    at_least,
    largest,
    most_likely,
    total_of,
    within_mass,
)
from spolia.generation.uniform import uniform

__all__ = ["RowSampling", "Sampler", "Samples", "TokenLogprobs", "score_token"]

_BUCKET = 256


class RowSampling(NamedTuple):
    """What a row's draw depends on, besides its logits.

    Attributes:
        position: absolute position of the token to draw, the prompt counted.
        num_dropped_tokens: before the first position, because the context was full.
        banned_ids: int32, ids that must not be drawn; mostly empty.
        pipeline: processors to run before the draw; mostly none.
    """

    params: SamplingParams
    seed: int
    position: int
    banned_ids: NDArray[np.int32]
    pipeline: Pipeline | None = None
    num_dropped_tokens: int = 0

    @property
    def uniform(self) -> float:
        """The number in [0, 1) that its draw depends on."""
        return uniform(self.seed, self.position + self.num_dropped_tokens)


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities under the model's distribution at temperature 1, before any filter.

    Attributes:
        top: (id, log-probability) of the most likely tokens, most likely first, lower id first where equal.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Samples(NamedTuple):
    """One entry a row; `logprobs` is None where the row did not ask.

    A token id is None where the row's best logit is not a finite number: no token would be right, or all are forbidden.
    """

    token_ids: list[int | None]
    logprobs: list[TokenLogprobs | None]


class Sampler:
    """Draws tokens for rows of `vocab_size` logits. Owns scratch, so one thread at a time.

    Args:
        argmax: of each row of a matrix; the backend may have a quicker one than numpy's.
    """

    def __init__(
        self, vocab_size: int, argmax: Callable[[NDArray[np.float32]], NDArray[np.int64]] | None = None
    ) -> None:
        self._argmax = argmax or _argmax
        # A row is worked on in this copy: the same alignment and length for each row, so the same rounding.
        self._vocab_size = vocab_size
        self._row = np.empty(vocab_size, np.float32)
        self._scratch = Scratch(vocab_size)
        self._weights = np.zeros(-(-vocab_size // _BUCKET) * _BUCKET, np.float32)

    def sample(self, logits: NDArray[np.float32], rows: Sequence[RowSampling]) -> Samples:
        """Draw one token a row.

        Args:
            logits: float32 `[len(rows), vocab_size]`; overwritten where a row has banned ids or processors.
            rows: in the order of `logits`.
        """
        before = {
            index: self._distribution(logits[index], row.params.logprobs)
            for index, row in enumerate(rows)
            if row.params.logprobs is not None and np.isfinite(logits[index].max())
        }
        raw = {index: logits[index].copy() for index in before if rows[index].pipeline is not None}
        for index, row in enumerate(rows):
            if row.pipeline is not None:
                row.pipeline.process(logits[index : index + 1], row.position, row.banned_ids)
            elif len(row.banned_ids):
                logits[index, row.banned_ids] = -np.inf
        best_ids: list[int] = self._argmax(logits).tolist()
        best_logits = [logits.item(index, best_id) for index, best_id in enumerate(best_ids)]
        token_ids: list[int | None] = [None] * len(rows)
        for index, (row, best_id) in enumerate(zip(rows, best_ids, strict=True)):
            if math.isfinite(best_logits[index]):
                token_ids[index] = self._choose(logits[index], best_id, row)
            elif row.pipeline is not None and best_logits[index] == -math.inf:  # a broken model's are no numbers
                row.pipeline.note_nothing_left()
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        for index, (log_normaliser, top) in before.items():
            token_id = token_ids[index]
            if token_id is not None:
                logprobs[index] = TokenLogprobs(
                    token_id, float(raw.get(index, logits[index])[token_id]) - log_normaliser, top
                )
        return Samples(token_ids, logprobs)

    def score(self, logits: NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprobs:
        """The log-probability that a row gives to a token, and its `num_top` most likely ones."""
        log_normaliser, top = self._distribution(logits, num_top)
        return TokenLogprobs(token_id, float(logits[token_id]) - log_normaliser, top)

    def _distribution(self, logits: NDArray[np.float32], num_top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
        """Of one row: what to subtract from a logit for its log-probability, and the `num_top` most likely tokens."""
        np.copyto(self._row, logits)
        maximum = self._row.max()
        np.subtract(self._row, maximum, out=self._row)
        log_normaliser = float(maximum) + math.log(self._exp_row().sum())
        if not num_top:
            return log_normaliser, ()
        ids = largest(logits, num_top)
        values = logits[ids]
        order = np.argsort(-values, kind="stable")[:num_top]
        top = tuple((int(ids[i]), float(values[i]) - log_normaliser) for i in order)
        return log_normaliser, top

    def _choose(self, logits: NDArray[np.float32], best_id: int, row: RowSampling) -> int:
        if row.params.is_greedy:
            return best_id
        pipeline = row.pipeline
        if pipeline is None or not (pipeline.has_filters or pipeline.log is not None):
            return self._draw(logits, best_id, row)
        candidates = pipeline.candidates(logits, self._scratch)
        if not pipeline.has_filters:  # it was asked so that it could take its notes
            return self._draw(logits, best_id, row)
        return self._draw_candidate(candidates, row.uniform)

    def _draw_candidate(self, candidates: Candidates, u: float) -> int:
        ids, scores = candidates
        if ids is None:
            np.subtract(scores, scores.max(), out=self._row)
            return self._draw_from_all(u)
        cumulative = np.cumsum(np.exp(scores - scores.max()), dtype=np.float64)
        index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
        return int(ids[min(index, len(ids) - 1)])

    def _draw(self, logits: NDArray[np.float32], best_id: int, row: RowSampling) -> int:
        params = row.params
        best, temperature = logits[best_id], np.float32(params.temperature)
        if params.top_k > 0:
            ids = largest(logits, params.top_k)
        elif params.top_p < 1.0:
            self._scale(logits, best, temperature)
            ids = self._nucleus(params.top_p)
        elif params.min_p > 0.0:
            reach = float(temperature) * math.log(params.min_p)
            margin = 1e-3 + 1e-6 * abs(float(best))  # some that are less likely are sorted out below
            ids = at_least(logits, np.float32(float(best) + 1.0001 * reach - margin))
        else:
            self._scale(logits, best, temperature)
            return self._draw_from_all(row.uniform)
        scaled = (logits[ids] - best) / temperature
        weights = np.exp(scaled, dtype=np.float64)
        if params.top_p < 1.0 and params.top_k > 0:
            likely = most_likely(scaled, params.top_p * float(weights.sum()))
            ids, weights = ids[likely], weights[likely]
        if params.min_p > 0.0:
            kept = weights >= params.min_p
            ids, weights = ids[kept], weights[kept]
        cumulative = np.cumsum(weights)
        index = int(np.searchsorted(cumulative, row.uniform * cumulative[-1], side="right"))
        return int(ids[min(index, len(ids) - 1)])

    def _scale(self, logits: NDArray[np.float32], best: np.float32, temperature: np.float32) -> None:
        np.subtract(logits, best, out=self._row)  # the best token has weight exp(0) = 1, so nothing overflows
        if temperature != 1:
            np.divide(self._row, temperature, out=self._row)

    def _nucleus(self, top_p: float) -> NDArray[np.intp]:
        """Ids, ascending, of the likeliest tokens of the scaled row that have this probability together."""
        row, scratch = self._row, self._scratch
        weights = np.exp(row, out=scratch.weights)
        total = total_of(weights)
        distance = np.negative(row, out=scratch.terms)
        ids = within_mass(distance, weights, total, top_p * total, scratch.mask)
        nucleus: NDArray[np.intp] = ids[most_likely(row[ids], top_p * total)]
        return nucleus

    def _draw_from_all(self, u: float) -> int:
        """One draw with the weights exp(row): first a bucket, then a token in it, which saves a long running sum."""
        cumulative = np.cumsum(self._exp_row())
        buckets = self._weights.reshape(-1, _BUCKET)
        target = u * cumulative[-1]
        last = np.flatnonzero(cumulative < cumulative[-1]).size  # the last bucket that has any weight
        bucket = min(int(np.searchsorted(cumulative, target, side="right")), last)
        inside = np.cumsum(buckets[bucket], dtype=np.float64)
        if bucket:
            target -= cumulative[bucket - 1]
        index = int(np.searchsorted(inside, target, side="right"))
        return bucket * _BUCKET + min(index, int(np.flatnonzero(buckets[bucket])[-1]))

    def _exp_row(self) -> NDArray[np.float64]:
        """Put exp(row) into the weights; their sums by bucket."""
        np.exp(self._row, out=self._weights[: self._vocab_size])
        sums: NDArray[np.float64] = self._weights.reshape(-1, _BUCKET).sum(axis=1).astype(np.float64)
        return sums


def score_token(log_probs: NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprobs:
    """What a row of log-probabilities, `[vocab_size]`, says of a token."""
    ids = largest(log_probs, num_top) if num_top else np.empty(0, np.intp)
    ids = ids[np.argsort(-log_probs[ids], kind="stable")][:num_top]
    return TokenLogprobs(token_id, float(log_probs[token_id]), tuple((int(i), float(log_probs[i])) for i in ids))


def _argmax(rows: NDArray[np.float32]) -> NDArray[np.int64]:
    best: NDArray[np.int64] = rows.argmax(axis=1)
    return best
