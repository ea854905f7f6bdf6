"""A watermark that makes no token likelier on average: a tournament that only the keys' owner can replay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from spolia.generation.history import History
from spolia.generation.processors.base import Filter, Logits
from spolia.generation.processors.candidates import Candidates, Scratch, Softmax, total_of

__all__ = ["SynthId", "SynthIdDetector", "SynthIdResult"]

Hashes = NDArray[np.int64]

_MULTIPLIER = np.int64(6364136223846793005)
_LOWEST = np.finfo(np.float32).min


class SynthId(Filter):
    """SynthID-Text: tokens win a tournament of one round a key, each round a coin that depends on key and context.

    It follows all filters, and a context that has occurred before in the answer is left alone, so that a refrain stays
    what it is. The prompt is no part of any context: before the answer are zeros.

    Args:
        keys: one a round; keep them secret.
        ngram_len: a token's coins depend on it and the `ngram_len - 1` before it.
        context_history_size: how many contexts back a repetition is noticed.
        sampling_table_size, sampling_table_seed: of the coins.
        skip_first_ngram_calls: leave the first `ngram_len - 1` tokens alone.

    Source: Dathathri et al. 2024, Scalable watermarking for identifying large language model outputs; scores, hashes
    and coins as in transformers (`SynthIDTextWatermarkLogitsProcessor`).
    """

    def __init__(
        self,
        *,
        keys: Sequence[int],
        ngram_len: int = 5,
        context_history_size: int = 1024,
        sampling_table_size: int = 2**16,
        sampling_table_seed: int = 0,
        skip_first_ngram_calls: bool = False,
    ) -> None:
        self.keys = np.array(keys, np.int64)
        self.ngram_len = ngram_len
        self.context_history_size = context_history_size
        self._skips_first = skip_first_ngram_calls
        self._coins = _coins(sampling_table_size, sampling_table_seed)
        self._scratch: Scratch | None = None

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        """For answers that take the best token: the same on all that may be taken."""
        if self._scratch is None:
            self._scratch = Scratch(logits.shape[1])
        for row, history in zip(logits, rows, strict=True):
            ids, scores = self.apply(Candidates.of(row), history, self._scratch)
            row[slice(None) if ids is None else ids] = scores

    def apply(self, candidates: Candidates, history: History, scratch: Scratch) -> Candidates:
        context_hash = self._fresh_context(history.generated_ids)
        if context_hash is None or not len(candidates.scores):
            return candidates
        ids, scores = candidates
        softmax = Softmax(scores, scratch)
        probabilities = softmax.weights / np.float32(softmax.total)
        hashes = _more(context_hash, _every(len(scores)) if ids is None else ids)
        for key in self.keys:
            coins = self._coins_of(hashes, key).astype(np.float32)
            mass = np.float32(total_of(coins * probabilities))
            probabilities *= np.float32(1) + coins - mass
        with np.errstate(divide="ignore", invalid="ignore"):
            changed = np.log(probabilities)
        changed[~np.isfinite(changed)] = _LOWEST
        return candidates._replace(scores=changed)

    def g_values(self, token_ids: Sequence[int]) -> NDArray[np.uint8]:
        """The coins of a text, uint8 `[len(token_ids) - ngram_len + 1, len(keys)]`: 1 is what the mark favours."""
        ngrams = np.lib.stride_tricks.sliding_window_view(np.asarray(token_ids, np.int64), self.ngram_len)
        hashes = _hashed(ngrams)
        return np.stack([self._coins_of(hashes, key) for key in self.keys], axis=1)

    def is_fresh(self, token_ids: Sequence[int]) -> NDArray[np.bool_]:
        """Of each n-gram of a text, whether its context had not occurred lately."""
        ids = np.asarray(token_ids, np.int64)
        hashes = _hashed(np.lib.stride_tricks.sliding_window_view(ids[:-1], self.ngram_len - 1))
        fresh = [not self._is_known(hash_, hashes[:index]) for index, hash_ in enumerate(hashes)]
        return np.array(fresh, np.bool_)

    def _fresh_context(self, generated_ids: NDArray[np.int32]) -> np.int64 | None:
        """The hash of the next token's context; None if that token is left alone."""
        width, count = self.ngram_len - 1, len(generated_ids)
        first = width if self._skips_first else 0
        if count < first:
            return None
        # Each context that a token had: the current one is the last.
        start = max(first, count - self.context_history_size)
        padded = np.concatenate([np.zeros(max(0, width - start), np.int64), generated_ids[max(0, start - width) :]])
        hashes = _hashed(np.lib.stride_tricks.sliding_window_view(padded.astype(np.int64), width))
        return None if self._is_known(hashes[-1], hashes[:-1]) else hashes[-1]

    def _is_known(self, hash_: np.int64, earlier: Hashes) -> bool:
        recent = earlier[max(0, len(earlier) - self.context_history_size) :]
        # A memory that is not full is full of zeros.
        return bool((recent == hash_).any()) or (hash_ == 0 and len(recent) < self.context_history_size)

    def _coins_of(self, hashes: Hashes, key: np.int64) -> NDArray[np.uint8]:
        return self._coins[_more(hashes, key) % len(self._coins)]


@dataclass(frozen=True, slots=True)
class SynthIdResult:
    """
    Attributes:
        num_tokens: tokens that were looked at.
        mean: of their coins; 0.5 in text without the mark.
        weighted_mean: the same, the first rounds counting more, where the mark is strongest.
        z_score: how many standard deviations the weighted mean is above 0.5.
        p_value: the probability that unmarked text scores as high.
    """

    num_tokens: int
    mean: float
    weighted_mean: float
    z_score: float
    p_value: float


class SynthIdDetector:
    """Tells whether tokens carry the mark, given its settings.

    Source: the mean and weighted mean scores of Dathathri et al. 2024. Their third, a model that is trained on marked
    and unmarked text, is not here: `SynthId.g_values` and `is_fresh` are what it reads.
    """

    def __init__(self, synthid: SynthId) -> None:
        self._synthid = synthid

    def detect(self, token_ids: Sequence[int]) -> SynthIdResult:
        """Look at an answer's tokens, without those that end it; some hundred are needed.

        Raises:
            ValueError: fewer tokens than an n-gram.
        """
        needed = self._synthid.ngram_len
        if len(token_ids) < needed:
            raise ValueError(f"{len(token_ids)} tokens are too few; an n-gram of {needed} is needed")
        coins = self._synthid.g_values(token_ids)[self._synthid.is_fresh(token_ids)].astype(np.float64)
        num_tokens, depth = coins.shape
        weights = np.linspace(10, 1, depth)
        weights *= depth / weights.sum()
        by_round = coins.mean(axis=0)
        weighted_mean = float((by_round * weights).mean())
        z = (weighted_mean - 0.5) / math.sqrt(float((weights**2).sum()) / (4 * num_tokens * depth**2))
        return SynthIdResult(num_tokens, float(by_round.mean()), weighted_mean, z, math.erfc(z / math.sqrt(2)) / 2)


def _more(hashes: Hashes | np.int64, data: Hashes | NDArray[np.intp] | np.int64) -> Hashes:
    """One step of the hash, a linear congruential generator modulo 2**64."""
    with np.errstate(over="ignore"):
        return np.asarray((hashes + data) * _MULTIPLIER + np.int64(1), np.int64)


def _hashed(ngrams: Hashes) -> Hashes:
    """The hash of each row."""
    hashes = np.ones(len(ngrams), np.int64)
    for column in ngrams.T:
        hashes = _more(hashes, column)
    return hashes


@lru_cache(maxsize=4)
def _coins(size: int, seed: int) -> NDArray[np.uint8]:
    """As torch draws them: the lowest bits of a Mersenne twister's numbers."""
    twister = np.random.RandomState(seed)
    coins: NDArray[np.uint8] = (twister.randint(0, 2**32, size, np.uint32) & 1).astype(np.uint8)
    return coins


@lru_cache(maxsize=4)
def _every(vocab_size: int) -> NDArray[np.int64]:
    return np.arange(vocab_size, dtype=np.int64)
