"""The watermark of transformers, to the token: what one marks, the other's detector finds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from spolia.generation.history import History
from spolia.generation.processors.base import Filter, Logits
from spolia.generation.processors.candidates import Candidates, Scratch, largest

__all__ = ["GreenList"]

_TABLE_SIZE = 1_000_003
_NUM_TRIED = 40  # with "selfhash" only so many of the likeliest tokens may be green

Steps = NDArray[np.int64]


class GreenList(Filter):
    """Favours, after each token, a share of the vocabulary: the first of a permutation that the key seeds.

    It follows all filters, as in transformers. "lefthash" costs the beginning of one permutation a token, "selfhash",
    whose seed depends on the token that is to be drawn too, of 40.

    With "selfhash" a key has a table that takes a fifth of a second to make: it is made here, where a request is
    admitted, never between two steps. What was made lately is kept.

    Args:
        greenlist_ratio: share of the vocabulary that is green.
        bias: added to green logits.
        hashing_key: keep it secret.
        seeding_scheme: "lefthash" or "selfhash".
        context_width: how many tokens, the drawn one among them, decide with "selfhash". With fewer tokens, nothing is
            marked.

    Source: Kirchenbauer et al. 2023, A Watermark for Large Language Models; seeds, permutations and order as in
    transformers (`WatermarkLogitsProcessor`) on a CPU.
    """

    def __init__(
        self,
        *,
        greenlist_ratio: float = 0.25,
        bias: float = 2.0,
        hashing_key: int = 15485863,
        seeding_scheme: str = "lefthash",
        context_width: int = 1,
    ) -> None:
        self._ratio = greenlist_ratio
        self._bias = np.float32(bias)
        self._key = hashing_key
        # Its own, too: with many keys at a time each would push out what another is about to look up.
        self._table = _table(hashing_key) if seeding_scheme == "selfhash" else None
        self._context_width = context_width

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        """For answers that take the best token."""
        for row, history in zip(logits, rows, strict=True):
            ids, scores = self._marked(Candidates.of(row), history)
            row[slice(None) if ids is None else ids] = scores

    def apply(self, candidates: Candidates, history: History, scratch: Scratch) -> Candidates:
        return self._marked(candidates, history)

    def _marked(self, candidates: Candidates, history: History) -> Candidates:
        if history.num_tokens < self._context_width:
            return candidates
        ids, scores = candidates
        size = history.vocab_size
        count = int(size * self._ratio)
        if self._table is not None:
            favoured = self._own_greens(self._table, candidates, history.ids, size, count)
        else:
            green = _green_list(size, count, self._key * int(history.ids[-1]) % (2**64 - 1))
            favoured = np.flatnonzero(green if ids is None else green[ids])
        marked = scores.copy()
        marked[favoured] += self._bias
        return candidates._replace(scores=marked)

    def _own_greens(
        self, table: Steps, candidates: Candidates, context: NDArray[np.int32], size: int, count: int
    ) -> NDArray[np.intp]:
        """Indices of the likeliest candidates that are green after a context which they end themselves."""
        ids, scores = candidates
        near = largest(scores, min(_NUM_TRIED, len(scores)))
        likeliest = near[np.argsort(-scores[near], kind="stable")][:_NUM_TRIED]
        found = []
        for index in likeliest:
            token_id = int(index if ids is None else ids[index])
            window = np.append(context, token_id)[-self._context_width :]
            hashed = table[window % _TABLE_SIZE] + 1
            with np.errstate(over="ignore"):
                seed = int((np.int64(self._key) * hashed * hashed[-1]).min())
            if _is_moved_to_the_front(token_id, _swaps(size, count, seed % (2**64 - 1))):
                found.append(index)
        return np.array(found, np.intp)


def _swaps(size: int, count: int, seed: int) -> Steps:
    """The place that each of the first `count` steps of torch's `randperm(size)` swaps its own place with."""
    steps = np.arange(min(count, size - 1))
    draws = np.random.RandomState(seed % 2**32).randint(0, 2**32, len(steps), np.uint32)
    return steps + draws % (size - steps)


def _is_moved_to_the_front(token_id: int, swaps: Steps) -> bool:
    """Whether one element is among the first `len(swaps)` of a permutation: it is followed through the swaps."""
    place, step = token_id, 0
    while not (swaps[step : min(place, len(swaps))] == place).any():  # else a step has fetched it, for good
        if place >= len(swaps):
            return False
        if swaps[place] == place:
            return True
        step, place = place + 1, int(swaps[place])
    return True


def _front(swaps: Steps) -> Steps:
    """The first `len(swaps)` of the permutation of 0, 1, ... that swaps make, without making them one by one.

    Step i fetches what lies at place swaps[i]: what the last earlier step with the same place left there, which is what
    lay at that step's own place, and so on back to a place that no step had touched.
    """
    steps = np.arange(len(swaps))
    order = np.argsort(swaps, kind="stable")
    ordered = swaps[order]
    again = np.flatnonzero(ordered[1:] == ordered[:-1])
    before = np.full(len(swaps), -1)  # the last earlier step with the same place
    before[order[again + 1]] = order[again]
    last = order[np.maximum(np.searchsorted(ordered, steps, side="right") - 1, 0)] if len(swaps) else steps
    left = np.where(swaps[last] == steps, np.where(last == steps, before, last), -1)  # who wrote to step i's place
    origin = np.where(left < 0, steps, left)
    while ((further := origin[origin]) != origin).any():
        origin = further
    return np.where(before < 0, swaps, origin[before])


@lru_cache(maxsize=32)
def _green_list(size: int, count: int, seed: int) -> NDArray[np.bool_]:
    green = np.zeros(size, np.bool_)
    green[_front(_swaps(size, count, seed))] = True
    return green


@lru_cache(maxsize=4)
def _table(key: int) -> Steps:
    """A permutation of the table's places, by the key. 8 MB."""
    swaps = _swaps(_TABLE_SIZE, _TABLE_SIZE, key)
    first = _front(swaps)
    table = np.full(_TABLE_SIZE, -1)
    table[: len(first)] = first
    table[-1] = _TABLE_SIZE * (_TABLE_SIZE - 1) // 2 - int(first.sum())  # what is left
    return table
