"""A mark in the choice of words that a detector finds and a reader does not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from spolia.generation.history import History
from spolia.generation.processors.base import Logits
from spolia.generation.uniform import MIX_1, MIX_2, mix

__all__ = ["Watermark", "WatermarkDetector", "WatermarkResult"]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_CHUNK = 16_384


class Watermark:
    """Favours, after each context, a share of the vocabulary that only the key's owner can tell.

    Args:
        ratio: share of the vocabulary that is green.
        bias: added to green logits.
        key: any integer; keep it secret.
        context_width: how many tokens decide what is green.

    Source: Kirchenbauer et al. 2023, A Watermark for Large Language Models. The green list is a hash, not a shuffle: a
    token is green by itself, so a detector need not know the vocabulary.
    """

    def __init__(self, *, ratio: float = 0.25, bias: float = 2.0, key: int = 15485863, context_width: int = 1) -> None:
        self.ratio = ratio
        self.bias = np.float32(bias)
        self.key = key
        self.context_width = context_width
        self._limit = np.uint64(min(int(ratio * 2**64), _MASK))

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        spread = _spread(logits.shape[1])
        mask = np.empty(_CHUNK, np.bool_)
        scratch = np.empty((2, _CHUNK), np.uint64)
        bias = np.empty(_CHUNK, np.float32)
        for row, history in zip(logits, rows, strict=True):
            if history.num_tokens < self.context_width:
                continue
            state = self._state(history.ids[-self.context_width :])
            for start in range(0, len(row), _CHUNK):  # each pass over a piece that stays in the core's cache
                part = row[start : start + _CHUNK]
                size = len(part)
                green = _below(spread[start : start + size], state, self._limit, scratch[:, :size], mask[:size])
                part += np.multiply(green, self.bias, out=bias[:size])

    def is_green(self, context: Sequence[int] | NDArray[np.int32], token_id: int) -> bool:
        """Whether a token is favoured after a context, of which the last `context_width` count."""
        state = self._state(np.asarray(context)[-self.context_width :])
        return mix((token_id + 1) * _GOLDEN & _MASK ^ state) < int(self._limit)

    def _state(self, context: NDArray[np.int32]) -> int:
        """What the context and the key make of the hash."""
        state = self.key & _MASK
        for token_id in context.tolist():
            state = mix((state + (token_id + 1) * _GOLDEN) & _MASK)
        return state


@dataclass(frozen=True, slots=True)
class WatermarkResult:
    """
    Attributes:
        num_tokens: tokens that were looked at.
        num_green: of those, favoured.
        z_score: how many standard deviations more than chance would give.
        p_value: the probability that unmarked text scores as high.
    """

    num_tokens: int
    num_green: int
    z_score: float
    p_value: float


class WatermarkDetector:
    """Tells whether tokens carry a watermark, given its settings."""

    def __init__(self, watermark: Watermark) -> None:
        self._watermark = watermark

    def detect(self, token_ids: Sequence[int]) -> WatermarkResult:
        """Look at a text's tokens; some hundred are needed. Repeated contexts count once, or a refrain would decide.

        Raises:
            ValueError: fewer tokens than a context and one more.
        """
        width, ratio = self._watermark.context_width, self._watermark.ratio
        if len(token_ids) <= width:
            raise ValueError(f"{len(token_ids)} tokens are too few; a context of {width} and one more are needed")
        grams = {tuple(token_ids[i : i + width + 1]) for i in range(len(token_ids) - width)}
        num_green = sum(self._watermark.is_green(np.array(gram[:-1], np.int32), gram[-1]) for gram in grams)
        z = (num_green - ratio * len(grams)) / math.sqrt(len(grams) * ratio * (1 - ratio))
        return WatermarkResult(len(grams), num_green, z, math.erfc(z / math.sqrt(2)) / 2)


@lru_cache(maxsize=4)
def _spread(vocab_size: int) -> NDArray[np.uint64]:
    """What the hash of each token begins with, whatever the context: the mix's first shift is linear."""
    ids = (np.arange(vocab_size, dtype=np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    return ids ^ (ids >> np.uint64(30))


def _below(
    spread: NDArray[np.uint64], state: int, limit: np.uint64, scratch: NDArray[np.uint64], out: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """`mix(hash ^ state) < limit` of each token, on arrays."""
    z, shifted = scratch
    np.bitwise_xor(spread, np.uint64(state ^ (state >> 30)), out=z)
    np.multiply(z, np.uint64(MIX_1), out=z)
    np.bitwise_xor(z, np.right_shift(z, np.uint64(27), out=shifted), out=z)
    np.multiply(z, np.uint64(MIX_2), out=z)
    if int(limit) % 2**33:  # else the upper 31 bits decide, which the last shift leaves as they are
        np.bitwise_xor(z, np.right_shift(z, np.uint64(31), out=shifted), out=z)
    np.less(z, limit, out=out)
    return out
