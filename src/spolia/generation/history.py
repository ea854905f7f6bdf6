"""What a sequence has said so far, as processors see it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spolia.generation.uniform import uniform

__all__ = ["History", "TokenCounts"]

Ids = NDArray[np.int32]


class History:
    """A view of one sequence's tokens; its owner moves `num_tokens`.

        buffer   |  prompt_ids  |  generated_ids  |  room  |
                 0       num_prompt_tokens    num_tokens

    Attributes:
        buffer: int32; the first `num_tokens` count. Not to be written to.
        num_dropped_tokens: before the buffer's, as the context was full; `num_dropped_of_answer` of them were said.
        seed: of the request: what a processor draws must depend on it and the position alone; see `uniform`.
    """

    __slots__ = (
        *("_all", "_generated", "buffer", "num_dropped_of_answer", "num_dropped_tokens"),
        *("num_prompt_tokens", "num_tokens", "seed", "vocab_size"),
    )

    def __init__(self, buffer: Ids, num_prompt_tokens: int, *, vocab_size: int, seed: int = 0) -> None:
        self.buffer = buffer
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = num_prompt_tokens
        self.vocab_size = vocab_size
        self.seed = seed
        self.num_dropped_tokens = self.num_dropped_of_answer = 0
        self._all: TokenCounts | None = None
        self._generated: TokenCounts | None = None

    @classmethod
    def of(cls, prompt_ids: list[int], generated_ids: list[int], *, vocab_size: int, seed: int = 0) -> History:
        """A history that stands still."""
        made = cls(np.array([*prompt_ids, *generated_ids], np.int32), len(prompt_ids), vocab_size=vocab_size, seed=seed)
        made.num_tokens = len(made.buffer)
        return made

    @property
    def ids(self) -> Ids:
        return self.buffer[: self.num_tokens]

    @property
    def prompt_ids(self) -> Ids:
        return self.buffer[: self.num_prompt_tokens]

    @property
    def generated_ids(self) -> Ids:
        return self.buffer[self.num_prompt_tokens : self.num_tokens]

    @property
    def num_generated_tokens(self) -> int:
        return self.num_dropped_of_answer + self.num_tokens - self.num_prompt_tokens

    def all_counts(self) -> TokenCounts:
        """How often each token occurs in prompt and answer."""
        if self._all is None:
            self._all = TokenCounts(self.vocab_size, 0)
        return self._all.at(self.buffer, self.num_tokens)

    def generated_counts(self) -> TokenCounts:
        """How often each token occurs in the answer."""
        if self._generated is None:
            self._generated = TokenCounts(self.vocab_size, self.num_prompt_tokens)
        return self._generated.at(self.buffer, self.num_tokens)

    def uniform(self, purpose: int) -> float:
        """A number in [0, 1) for the next token's position. Processors that draw use different purposes."""
        return uniform(self.seed ^ (purpose * 0xD1B54A32D192ED03), self.num_dropped_tokens + self.num_tokens)


class TokenCounts:
    """Counts that follow a growing sequence: a token costs constant time, and the prompt is counted once.

    Attributes:
        counts: int32 `[vocab_size]`.
    """

    __slots__ = ("_ids", "_num_ids", "_start", "_stop", "counts")

    def __init__(self, vocab_size: int, start: int) -> None:
        self._start = self._stop = start
        self._reset(vocab_size)

    @property
    def ids(self) -> Ids:
        """Each token that occurs, once."""
        return self._ids[: self._num_ids]

    def at(self, buffer: Ids, stop: int) -> TokenCounts:
        """Count `buffer[start:stop]`. A shorter sequence than before has been rolled back, and is counted anew."""
        if stop < self._stop:
            self._stop = self._start
            self._reset(len(self.counts))
        if stop - self._stop == 1:
            self._add(buffer[stop - 1 : stop], 1)
        elif stop > self._stop:
            self._add(*np.unique(buffer[self._stop : stop], return_counts=True))
        self._stop = stop
        return self

    def _reset(self, vocab_size: int) -> None:
        self.counts = np.zeros(vocab_size, np.int32)
        self._ids = np.empty(64, np.int32)
        self._num_ids = 0

    def _add(self, different_ids: Ids, counts: NDArray[np.intp] | int) -> None:
        new = different_ids[self.counts[different_ids] == 0]
        end = self._num_ids + len(new)
        if end > len(self._ids):
            self._ids = np.resize(self._ids, max(end, 2 * len(self._ids)))
        self._ids[self._num_ids : end] = new
        self._num_ids = end
        self.counts[different_ids] += np.asarray(counts, np.int32)
