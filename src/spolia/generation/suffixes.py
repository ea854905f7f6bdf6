"""What followed the same tokens before: the last place, in any text of the same owner, whose past looks like ours.

    text 7   ... the  price  of  the  house  is ...            text 9   ... at  the  price  of | ?
                  ^---------------^  4 tokens that end alike                    ^-------------^
                                     -> go on at `the` of text 7

Five tables, one for each of 1, 2, 4, 8 and 16 tokens, tell where these tokens were last seen. A table is an array that
a hash points into: what is newer overwrites, so memory is fixed, and nothing is trusted before its tokens were
compared. A text of 4,000 tokens is entered in a third of a millisecond, a token and a look-up take a few microseconds.
"""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from operator import eq, mul

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_COMPARED", "Match", "SuffixIndex", "Text"]

_SIZES = (1, 2, 4, 8, 16)
MAX_COMPARED = _SIZES[-1]
"""Tokens of the past that are compared; longer repetitions are told apart no better."""

_WORD = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15
_POWERS = [pow(_MULTIPLIER, exponent, 1 << 64) for exponent in range(1, MAX_COMPARED + 1)]
_POSITION_BITS = 32
_POSITION = (1 << _POSITION_BITS) - 1

Ids = NDArray[np.int32]


class Text:
    """A sequence's tokens, which may still grow.

    Attributes:
        owner: only texts of one owner are found for each other.
        ids: int32 buffer, written by whoever opened it; the first `num_tokens` count.
        kind: what it is, for whoever finds it.
    """

    __slots__ = ("ids", "kind", "num_entered", "num_hashed", "num_tokens", "number", "owner", "tail_hashes")

    def __init__(self, number: int, owner: bytes, ids: Ids, kind: str) -> None:
        self.number = number
        self.owner = owner
        self.ids = ids
        self.kind = kind
        self.num_tokens = 0
        self.num_entered = 0
        self.num_hashed = 0  # tokens that there were when `tail_hashes` were of the last ones
        self.tail_hashes: list[int] = []


class Match:
    """A guess at what comes next: `text` from `position` on, since the `length` tokens before it are like ours.

    `length` counts no further than `MAX_COMPARED` at first; whoever follows a match counts on.
    """

    __slots__ = ("length", "position", "text")

    def __init__(self, text: Text, position: int, length: int) -> None:
        self.text = text
        self.position = position
        self.length = length


class SuffixIndex:
    """Texts, and where in them each few tokens were last seen. One thread.

    Args:
        num_slots: of each table, a power of two.
        max_tokens: of texts that have ended; beyond it the oldest are forgotten.
    """

    def __init__(self, num_slots: int = 1 << 18, max_tokens: int = 1 << 20) -> None:
        self._shift = 65 - num_slots.bit_length()
        self._num_slots = num_slots
        self._max_tokens = max_tokens
        self._next_number = 1
        self._texts: dict[int, Text] = {}
        self._ended: deque[Text] = deque()
        self.forget()

    def forget(self) -> None:
        """Forget all texts that have ended. Those that are open are entered anew as they go on."""
        self._tables = [np.zeros(self._num_slots, np.int64) for _ in _SIZES]
        for text in self._ended:
            del self._texts[text.number]
        for text in self._texts.values():
            text.num_entered = 0
        self._ended.clear()
        self._num_ended_tokens = 0

    def open(self, owner: bytes, ids: Ids, kind: str = "") -> Text:
        """A text that will grow in `ids`."""
        text = Text(self._next_number, owner, ids, kind)
        self._next_number += 1
        self._texts[text.number] = text
        return text

    def extend(self, text: Text, num_tokens: int) -> None:
        """The first `num_tokens` of the text are there now. The last one is entered when its successor is known."""
        text.num_tokens = num_tokens
        first, last = text.num_entered, num_tokens - 1
        if last - first == 1 and text.num_hashed == last:  # the usual: one token came since it was looked up
            entry = text.number << _POSITION_BITS | last
            for table, hash_ in zip(self._tables, text.tail_hashes, strict=False):
                table[hash_ >> self._shift] = entry
        elif last > first:
            start = max(0, first - MAX_COMPARED + 1)
            ids = text.ids[start:last].astype(np.uint64)
            hashes = _all_hashes(ids)
            for table, size, of_size in zip(self._tables, _SIZES, hashes, strict=True):
                skipped = max(0, first - start - size + 1)
                slots = (of_size[skipped:] >> np.uint64(self._shift)).astype(np.intp)
                positions = np.arange(start + size + skipped, last + 1, dtype=np.int64)
                table[slots] = positions + (text.number << _POSITION_BITS)
        text.num_entered = max(first, last)

    def close(self, text: Text) -> None:
        """The text has ended. It is kept, without what its buffer had room for beyond."""
        text.ids = text.ids[: text.num_tokens].copy()
        self._ended.append(text)
        self._num_ended_tokens += text.num_tokens
        while self._num_ended_tokens > self._max_tokens:
            oldest = self._ended.popleft()
            del self._texts[oldest.number]
            self._num_ended_tokens -= oldest.num_tokens

    def drop(self, text: Text) -> None:
        """Forget a text that has not ended."""
        self._texts.pop(text.number, None)

    def find(self, text: Text) -> Match | None:
        """Where the tokens at the text's end were last seen: the longest of the five sizes that were, and how many."""
        tail = text.ids[max(0, text.num_tokens - MAX_COMPARED) : text.num_tokens].tolist()
        tail.reverse()
        text.tail_hashes, text.num_hashed = _tail_hashes(tail), text.num_tokens
        for level in range(len(text.tail_hashes) - 1, -1, -1):
            entry = self._tables[level].item(text.tail_hashes[level] >> self._shift)
            other = self._texts.get(entry >> _POSITION_BITS)
            if other is None or other.owner != text.owner:
                continue
            position = entry & _POSITION
            past = other.ids[max(0, position - MAX_COMPARED) : position].tolist()
            past.reverse()
            length = sum(takewhile(bool, map(eq, past, tail)))
            if length >= _SIZES[level]:
                return Match(other, position, length)
        return None


def _tail_hashes(reversed_tail: list[int]) -> list[int]:
    """Hashes of the last 1, 2, 4, 8 and 16 tokens, as far as there are so many."""
    hashes = []
    hash_ = start = 0
    for size in _SIZES:
        if len(reversed_tail) < size:
            break
        hash_ = hash_ + sum(map(mul, reversed_tail[start:size], _POWERS[start:size])) & _WORD
        hashes.append(hash_ * _MULTIPLIER & _WORD)
        start = size
    return hashes


def _all_hashes(ids: NDArray[np.uint64]) -> list[NDArray[np.uint64]]:
    """For each size, the hashes of all runs of so many tokens, by their last token; equal to `_tail_hashes`."""
    hashes = []
    current, size = ids * np.uint64(_POWERS[0]), 1
    for wanted in _SIZES:
        if wanted > size:
            # A run of 2n tokens is one of n tokens, and the n before it, n powers further up.
            before = current[:-size] * np.uint64(_POWERS[size - 1])
            current = current[size:] + before if len(current) > size else current[:0]
            size = wanted
        hashes.append(current * np.uint64(_MULTIPLIER))
    return hashes
