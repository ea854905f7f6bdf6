"""Guessing what comes next without a model, and how likely each guess is to be right.

A guess goes on where something like the present was before. Whether it was right is seen one token later *whether it
was drafted or not*: a guess that is only kept in mind costs no row of a step. So how often guesses of a source are
right, after so many tokens that agreed, is known of each request before anything is risked.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spolia.generation.suffixes import MAX_COMPARED, Match, SuffixIndex, Text

__all__ = ["MAX_DRAFTS", "NO_GUESS", "Acceptance", "DraftCount", "Guess", "Guesser"]

MAX_DRAFTS = 16
"""Most tokens drafted for one sequence in one step."""

_MIN_CHANCE = 0.05  # what is less likely is not even considered

# Lengths of agreement that are told apart, by their lowest, and the share that is right before anything is known.
_STEPS = (0, 1, 2, 3, 4, 6, 9, 13, 17, 33)
_CAUTIOUS = (0.2, 0.3, 0.12, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
_TRUSTING = (0.6, 0.65, 0.7, 0.75, 0.8, 0.8, 0.85, 0.85, 0.9, 0.9)
_BY_CERTAINTY = (0.1, 0.15, 0.25, 0.35, 0.4, 0.5, 0.6, 0.65, 0.75, 0.9)
_PRIORS = {
    "tree": _TRUSTING,
    "form": _TRUSTING,
    "prediction": _TRUSTING,
    "model": _BY_CERTAINTY,
    "any of model": _TRUSTING,
}
_BUCKETS = [sum(step <= length for step in _STEPS) - 1 for length in range(_STEPS[-1] + 1)]

_PRIOR_WEIGHT = 4.0  # so many observations is a prior worth
_MEMORY = 0.97  # of each observation at the next of its kind

_MAX_MATCHES = 3
_MAX_REST = 8  # steps from guess to guess
_RESUMES = 8  # tokens that must have agreed for a guess to be taken up behind a token that did not

Ids = NDArray[np.int32]


class Acceptance:
    """How often guesses are right, by source and by how many tokens before them agreed. Old observations fade.

    Args:
        known: of everybody, which stands in for what is not known yet of this one; it learns from this one.
    """

    def __init__(self, known: Acceptance | None = None) -> None:
        self._known = known
        self._seen: dict[str, list[tuple[float, float]]] = {}  # by source, and by step: hits and trials

    def chance(self, source: str, length: int) -> float:
        bucket = _BUCKETS[length] if length < len(_BUCKETS) else _BUCKETS[-1]
        seen = self._seen.get(source)
        known = self._known
        prior = known.chance(source, length) if known is not None else _PRIORS.get(source, _CAUTIOUS)[bucket]
        if seen is None:
            return prior
        hits, trials = seen[bucket]
        return (hits + _PRIOR_WEIGHT * prior) / (trials + _PRIOR_WEIGHT)

    def learn(self, source: str, length: int, *, is_right: bool) -> None:
        bucket = _BUCKETS[length] if length < len(_BUCKETS) else _BUCKETS[-1]
        seen = self._seen.get(source)
        if seen is None:
            seen = self._seen[source] = [(0.0, 0.0)] * len(_STEPS)
        hits, trials = seen[bucket]
        seen[bucket] = hits * _MEMORY + is_right, trials * _MEMORY + 1.0
        if self._known is not None:
            self._known.learn(source, length, is_right=is_right)


class DraftCount(NamedTuple):
    """Tokens that were drafted; of those, right."""

    num_drafted: int = 0
    num_accepted: int = 0

    def plus(self, num_drafted: int, num_accepted: int) -> DraftCount:
        return DraftCount(self.num_drafted + num_drafted, self.num_accepted + num_accepted)


class Guess(NamedTuple):
    """Tokens that may come next.

    Attributes:
        chances: of each, that it and all before it are right; not increasing.
        source: where they are from.
    """

    ids: list[int]
    chances: list[float]
    source: str


NO_GUESS = Guess([], [], "")


class Guesser:
    """What one sequence may go on with. Follows its buffer of ids; the engine's thread owns it.

    Args:
        index: where texts are looked up, and where this one is entered.
        owner: whose texts may be found.
        ids: int32 buffer that the sequence grows in; the first `num_prompt_tokens` are there.
        known: what is known of everybody's guesses.
        looks_back: guess by what followed the same tokens in the owner's texts.
        prediction: what its client says that it will say.

    Attributes:
        acceptance: what is known of its guesses.
        counts: what was drafted, by source.
        foreseen: the position of each draft that was right, and its source.
        num_idle: steps since something was drafted; its owner counts.
    """

    def __init__(
        self,
        index: SuffixIndex,
        owner: bytes,
        ids: Ids,
        num_prompt_tokens: int,
        *,
        known: Acceptance,
        looks_back: bool = True,
        prediction: Ids | None = None,
    ) -> None:
        self.acceptance = Acceptance(known)
        self.counts: dict[str, DraftCount] = {}
        self.foreseen: dict[int, str] = {}
        self.num_idle = 0
        self._index = index
        self._looks_back = looks_back or prediction is not None
        self._ids = ids
        self._owner = owner
        self._num_prompt_tokens = num_prompt_tokens
        self._prediction_ids = prediction
        self._text: Text | None = None
        self._prediction: Text | None = None
        self._matches: list[Match] = []  # the best; then what was taken up again, and what others know

    @property
    def is_due(self) -> bool:
        """Whether to ask it now. A guess takes some 0.1 ms: the longer none was drafted, the fewer are made."""
        return self.num_idle % min(1 << self.num_idle // 16, _MAX_REST) == 0

    def note(self, num_tokens: int) -> None:
        """The sequence has so many tokens now: see who was right."""
        text = self._text
        if text is None:
            text = self._text = self._index.open(self._owner, self._ids, "text")
            self._index.extend(text, self._num_prompt_tokens)
            if self._prediction_ids is not None:
                self._prediction = self._index.open(self._owner, self._prediction_ids, "prediction")
                self._index.extend(self._prediction, len(self._prediction_ids))
                self._matches = [Match(self._prediction, 0, 0)]
        if self._matches:
            for token_id in self._ids[text.num_tokens : num_tokens].tolist():
                self._follow(token_id)
        if num_tokens > text.num_tokens:
            self._index.extend(text, num_tokens)

    def _follow(self, token_id: int) -> None:
        """A token came: matches that foresaw it go on, others end; a long one is taken up behind the token."""
        following = []
        for match in self._matches:
            text, position = match.text, match.position
            if text is not self._text and position >= text.num_tokens:
                continue
            is_right = text.ids.item(position) == token_id
            self.acceptance.learn(_source(match, self._text), match.length, is_right=is_right)
            match.position += 1
            if is_right:
                match.length += 1
                following.append(match)
            elif match.length >= _RESUMES and text.number:
                match.length = 0
                following.append(match)
        self._matches = following

    def offer(self, ids: Ids, source: str, length: int) -> None:
        """Somebody else's guess, beginning at the next token, `length` tokens before which agree."""
        text = Text(0, self._owner, ids, source)
        text.num_tokens = len(ids)
        self._matches = [match for match in self._matches if match.text.kind != source]
        self._matches.append(Match(text, 0, length))

    def knows(self, source: str) -> bool:
        """Whether a guess of this source is being followed."""
        return any(match.text.kind == source for match in self._matches)

    def guess(self, most: int) -> Guess:
        """The likeliest way on, up to `most` tokens of it; often none."""
        text = self._text
        if text is None:
            return NO_GUESS
        if self._looks_back and all(match.length < MAX_COMPARED for match in self._matches):
            found = self._index.find(text)
            if found is not None:
                self._take(found)
        best, best_chance = None, _MIN_CHANCE
        for match in self._matches:
            chance = self.acceptance.chance(_source(match, text), match.length)
            if chance > best_chance:
                best, best_chance = match, chance
        return NO_GUESS if best is None else self._way(best, most)

    def _take(self, found: Match) -> None:
        """Follow what the index found, in place of what agrees less, but for what it could not have found."""
        kept = []
        for match in self._matches:
            if match.text is found.text and match.position == found.position:
                found.length = max(found.length, match.length)
            elif match.length >= found.length or match.length < 2 or not match.text.number:
                kept.append(match)
        self._matches = [*kept[-_MAX_MATCHES:], found]

    def _way(self, match: Match, most: int) -> Guess:
        ids: list[int] = []
        chances: list[float] = []
        source = _source(match, self._text)
        chance, length = 1.0, match.length
        while len(ids) < most and (token_id := self._token(match, len(ids))) is not None:
            chance *= self.acceptance.chance(source, length)
            if chance < _MIN_CHANCE:
                break
            ids.append(token_id)
            chances.append(chance)
            length += 1
        return Guess(ids, chances, source)

    def _token(self, match: Match, offset: int) -> int | None:
        """What a match says of the token `offset` after the next; a text that repeats its own end goes on repeating."""
        text, position = match.text, match.position
        if text is self._text:
            offset %= text.num_tokens - position
        position += offset
        return text.ids.item(position) if position < text.num_tokens else None

    def note_drafted(self, source: str, num_drafted: int) -> None:
        """So many tokens were drafted."""
        self.counts[source] = self.counts.get(source, DraftCount()).plus(num_drafted, 0)

    def note_foreseen(self, source: str, position: int) -> None:
        """The draft at this position was right."""
        self.counts[source] = self.counts.get(source, DraftCount()).plus(0, 1)
        self.foreseen[position] = source

    def close(self, num_tokens: int) -> None:
        """The sequence has ended with so many tokens."""
        if self._text is not None:
            self.note(num_tokens)
            self._index.close(self._text)
        if self._prediction is not None:
            self._index.drop(self._prediction)


def _source(match: Match, own: Text | None) -> str:
    """The text's kind; another's own text is the cache's."""
    kind = match.text.kind
    return "cache" if kind == "text" and match.text is not own else kind
