"""Which tokens the next step should check ahead of their time."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from spolia.engine.costs import StepCosts
from spolia.engine.request import Request, Sequence
from spolia.generation import MAX_DRAFTS, NO_GUESS, Acceptance, Guess, Guesser, SuffixIndex
from spolia.kvcache import KVCache

__all__ = ["Drafter", "make_drafter"]

_FORM_AGREES = 4  # what a form forces is as sure as a guess after so many tokens that agreed, until it is known better
_TREE_AGREES = 33
_NOTHING: NDArray[np.int32] = np.empty(0, np.int32)


class Drafter:
    """Writes guesses behind the known tokens of running sequences. See `Sequence.num_drafts`.

    Each sequence's `Guesser` says what may come next and how likely it is; `StepCosts` what it costs to check; together
    they decide, for the step as a whole, which guesses are drafted. A step that computes prompts has no drafts: its
    rows are dear.

    Args:
        cache: whose tokens are guessed from.
        sources: "text": what followed the same words earlier in the text; "cache": in other texts of the same
            namespace; "tree": what followed exactly this text.
    """

    def __init__(self, cache: KVCache, sources: frozenset[str]) -> None:
        self._cache = cache
        self._sources = sources
        self._index = SuffixIndex()
        self._known = Acceptance()
        self._costs = StepCosts()
        self._num_cleared_tokens = cache.stats.num_cleared_tokens
        self._base = 0

    def guesser(self, request: Request, token_ids: NDArray[np.int32]) -> Guesser | None:
        """For a new sequence, whose buffer `token_ids` is; None if it does without."""
        if not request.params.speculation:
            return None
        owner = request.namespace if "cache" in self._sources else request.request_id.encode()
        return Guesser(
            self._index,
            owner,
            token_ids,
            len(request.prompt_token_ids),
            known=self._known,
            looks_back="text" in self._sources,
            prediction=request.prediction_ids,
        )

    def draft(self, running: Seq[Sequence]) -> None:
        """Draft for the next step."""
        if self._cache.stats.num_cleared_tokens != self._num_cleared_tokens:
            self._num_cleared_tokens = self._cache.stats.num_cleared_tokens
            self._index.forget()
        for sequence in running:
            sequence.num_drafts = 0
        if any(sequence.num_pending_tokens != 1 for sequence in running):
            self._base = 0
            return
        self._base = len(running)
        guesses = [self._guess(sequence) for sequence in running]
        lengths = self._costs.lengths(self._base, [guess.chances for guess in guesses])
        for sequence, guess, length in zip(running, guesses, lengths, strict=True):
            if sequence.guesser is not None:
                sequence.guesser.num_idle = 0 if length else sequence.guesser.num_idle + 1
            if length:
                start = sequence.num_tokens
                sequence.token_ids[start : start + length] = guess.ids[:length]
                sequence.num_drafts = length
                sequence.draft_source = guess.source

    def _guess(self, sequence: Sequence) -> Guess:
        guesser = sequence.guesser
        # The last token of an answer is never computed, so it needs no draft before it.
        room = len(sequence.token_ids) - sequence.num_tokens - 1
        if guesser is None or room < 1:
            return NO_GUESS
        following = forced = _NOTHING
        pipeline = sequence.request.pipeline
        if pipeline is not None and (ids := pipeline.forced_ids()):
            forced = np.array(ids[:MAX_DRAFTS], np.int32)
        if "tree" in self._sources and not guesser.knows("tree"):
            lease = sequence.held_lease
            tail = sequence.token_ids[lease.num_computed_tokens : sequence.num_tokens]
            following = self._cache.continuation(lease, tail, 2 * MAX_DRAFTS)
        if not (guesser.is_due or len(forced) or len(following)):
            return NO_GUESS
        guesser.note(sequence.num_tokens)
        if len(forced):
            guesser.offer(forced, "form", _FORM_AGREES)
        if len(following):
            guesser.offer(following, "tree", _TREE_AGREES)
        return guesser.guess(min(MAX_DRAFTS, room))

    def note_step(self, num_sequences: int, num_rows: int, duration_s: float) -> None:
        """The step that was drafted for took that long."""
        if self._base and num_sequences == self._base:
            self._costs.note(self._base, num_rows - num_sequences, duration_s)


_SOURCES = {
    "prompt": frozenset({"text"}),
    "tree": frozenset({"tree"}),
    "auto": frozenset({"text", "tree", "cache"}),
}


def make_drafter(speculation: str, cache: KVCache) -> Drafter | None:
    """The drafter that a setting of `EngineConfig.speculation` names."""
    return None if speculation == "off" else Drafter(cache, _SOURCES[speculation])
