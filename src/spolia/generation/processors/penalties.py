"""Against saying things again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spolia.generation.history import History
from spolia.generation.processors.base import Logits

__all__ = [
    "Dry",
    "NoRepeatNgram",
    "PresenceFrequencyPenalty",
    "PromptNoRepeatNgram",
    "PromptRepetitionPenalty",
    "RepetitionPenalty",
]

Ids = NDArray[np.int32]
_LONGEST = 256  # repetitions of DRY that are longer count as this long: their penalty has long decided


def _divide_or_multiply(row: Logits, ids: Ids, penalty: float) -> None:
    """Make `ids` less likely by a factor of their logit, whose sign decides which way that is."""
    values = row[ids]
    row[ids] = np.where(values < 0, values * np.float32(penalty), values / np.float32(penalty))


class RepetitionPenalty:
    """Tokens that occur in the prompt or the answer have positive logits divided, negative ones multiplied.

    Args:
        last_n: look at this many tokens; None: all.

    Source: Keskar et al. 2019, CTRL.
    """

    def __init__(self, penalty: float, last_n: int | None = None) -> None:
        self.penalty = penalty
        self.last_n = last_n

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        for row, history in zip(logits, rows, strict=True):
            last_n = self.last_n
            ids = history.all_counts().ids if last_n is None else np.unique(_last(history.ids, last_n))
            _divide_or_multiply(row, ids, self.penalty)


class PromptRepetitionPenalty:
    """Tokens of the prompt are made more likely, for answers that stay close to it.

    What transformers calls `encoder_repetition_penalty`: above 1 favours the prompt's tokens.
    """

    def __init__(self, penalty: float) -> None:
        self.penalty = penalty
        self._ids: Ids | None = None

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        for row, history in zip(logits, rows, strict=True):
            if self._ids is None:
                self._ids = np.unique(history.prompt_ids)
            _divide_or_multiply(row, self._ids, 1 / self.penalty)


class PresenceFrequencyPenalty:
    """Subtract `presence` from tokens of the answer, and `frequency` for each time that they occur, as OpenAI does.

    Args:
        last_n: look at this many tokens, prompt included, as llama.cpp does; None: all of the answer.
    """

    def __init__(self, presence: float, frequency: float, last_n: int | None = None) -> None:
        self.presence = np.float32(presence)
        self.frequency = np.float32(frequency)
        self.last_n = last_n

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        for row, history in zip(logits, rows, strict=True):
            if self.last_n is None:
                known = history.generated_counts()
                ids, counts = known.ids, known.counts[known.ids]
            else:
                ids, wide = np.unique(_last(history.ids, self.last_n), return_counts=True)
                counts = wide.astype(np.int32)
            row[ids] -= self.presence + self.frequency * counts.astype(np.float32)


class NoRepeatNgram:
    """No sequence of `size` tokens occurs twice, the prompt counted."""

    def __init__(self, size: int) -> None:
        self.size = size

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        for row, history in zip(logits, rows, strict=True):
            row[_completions(history.ids, history.ids, self.size)] = -np.inf


class PromptNoRepeatNgram:
    """No sequence of `size` tokens of the prompt occurs in the answer."""

    def __init__(self, size: int) -> None:
        self.size = size

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        for row, history in zip(logits, rows, strict=True):
            row[_completions(history.prompt_ids, history.ids, self.size)] = -np.inf


class Dry:
    """Don't Repeat Yourself: the longer the passage that a token would go on repeating, the less likely it becomes.

    A token that would make a repetition of n tokens one longer loses `multiplier * base ** (n - allowed_length)`.
    Passages do not reach across breakers, so that names and list markers may recur.

    Args:
        allowed_length: shorter repetitions are free.
        last_n: look at this many tokens, prompt included; None: all.
        breakers: bool `[vocab_size]`, whether a token ends a passage.
        breaker_sequences: sequences of several tokens that do.

    Source: p-e-w's proposal in text-generation-webui (pull request 5677), and its form in llama.cpp.
    """

    def __init__(
        self,
        multiplier: float,
        base: float,
        allowed_length: int,
        last_n: int | None,
        breakers: NDArray[np.bool_],
        breaker_sequences: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self.multiplier = multiplier
        self.base = base
        self.allowed_length = allowed_length
        self.last_n = last_n
        self.breakers = breakers
        self.breaker_sequences = breaker_sequences
        self._largest_exponent = int(np.log(1e30) / np.log(base)) if base > 1 else 10**6

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        for row, history in zip(logits, rows, strict=True):
            ids = history.ids if self.last_n is None else _last(history.ids, self.last_n)
            next_ids, lengths = self._repetitions(ids)
            if len(next_ids):
                exponents = np.minimum(lengths - self.allowed_length, self._largest_exponent)
                row[next_ids] -= (self.multiplier * np.power(self.base, exponents.astype(np.float64))).astype(
                    np.float32
                )

    def _repetitions(self, ids: Ids) -> tuple[Ids, NDArray[np.int64]]:
        """Tokens that would go on with a repetition, and the longest that each would."""
        most = self._num_since_breaker(ids)
        nothing = np.empty(0, np.int32), np.empty(0, np.int64)
        if most < max(self.allowed_length, 1):
            return nothing
        last = len(ids) - 1
        ends = np.flatnonzero(ids[:-1] == ids[-1])  # where an earlier copy of the last tokens ends
        lengths = np.ones(len(ends), np.int64)
        growing = np.arange(len(ends))
        for length in range(1, min(most, _LONGEST)):
            growing = growing[ends[growing] >= length]
            growing = growing[ids[ends[growing] - length] == ids[last - length]]
            if not len(growing):
                break
            lengths[growing] += 1
        long_enough = lengths >= self.allowed_length
        next_ids, lengths = ids[ends[long_enough] + 1], lengths[long_enough]
        ordinary = ~self.breakers[next_ids]
        next_ids, lengths = next_ids[ordinary], lengths[ordinary]
        if not len(next_ids):
            return nothing
        different, where = np.unique(next_ids, return_inverse=True)
        longest = np.zeros(len(different), np.int64)
        np.maximum.at(longest, where, lengths)
        return different, longest

    def _num_since_breaker(self, ids: Ids) -> int:
        """How many tokens at the end hold no breaker."""
        since = len(ids)
        found = np.flatnonzero(self.breakers[ids])
        if len(found):
            since = len(ids) - 1 - int(found[-1])
        for sequence in self.breaker_sequences:
            starts = _occurrences(ids, np.array(sequence, np.int32))
            if len(starts):
                since = min(since, len(ids) - len(sequence) - int(starts[-1]))
        return since


def _last(ids: Ids, count: int) -> Ids:
    return ids[max(0, len(ids) - count) :]


def _occurrences(ids: Ids, sequence: Ids) -> NDArray[np.intp]:
    """Where `sequence` begins in `ids`."""
    num_starts = len(ids) - len(sequence) + 1
    if num_starts <= 0:
        return np.empty(0, np.intp)
    starts = np.flatnonzero(ids[:num_starts] == sequence[0])
    for offset in range(1, len(sequence)):
        starts = starts[ids[starts + offset] == sequence[offset]]
    return starts


def _completions(corpus: Ids, ids: Ids, size: int) -> Ids:
    """Tokens that follow, in `corpus`, the last `size - 1` of `ids`."""
    if len(corpus) < size or len(ids) < size - 1:
        return np.empty(0, np.int32)
    if size == 1:
        return corpus
    return corpus[_occurrences(corpus[:-1], ids[len(ids) - size + 1 :]) + size - 1]
