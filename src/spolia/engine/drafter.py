"""Which tokens the next step should check ahead of their time."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from spolia.engine.request import Sequence
from spolia.generation import prompt_lookup
from spolia.kvcache import KVCache

__all__ = ["Drafter", "make_drafter"]


class Drafter:
    """Writes guesses behind the known tokens of running sequences. See `Sequence.num_drafts`.

    What a form forces is guessed first: a schema's names and punctuation take a step together.

    Args:
        cache: asked for what followed the same tokens before, in the same namespace; None: do not.
        looks_back: guess what followed the same words earlier in the text.
    """

    def __init__(self, cache: KVCache | None, *, looks_back: bool) -> None:
        self._cache = cache
        self._looks_back = looks_back

    def draft(self, running: Seq[Sequence]) -> None:
        for sequence in running:
            sequence.num_drafts = 0
            if sequence.num_pending_tokens == 1 and sequence.pace is not None:
                # The last token of an answer is never computed, so it needs no draft before it.
                room = len(sequence.token_ids) - sequence.num_tokens - 1
                wanted = min(sequence.pace.next_length(), room)
                if wanted > 0:
                    self._draft_for(sequence, wanted)

    def _draft_for(self, sequence: Sequence, wanted: int) -> None:
        known = sequence.known_ids
        guess = known[:0]
        pipeline = sequence.request.pipeline
        if pipeline is not None and sequence.num_generated_tokens:
            guess = np.array(pipeline.forced_ids()[:wanted], np.int32)
        if not len(guess) and self._cache is not None:
            guess = self._cache.continuation(sequence.request.namespace, known, wanted)
        if not len(guess) and self._looks_back:
            guess = prompt_lookup(known, wanted)
        start = sequence.num_tokens
        sequence.token_ids[start : start + len(guess)] = guess
        sequence.num_drafts = len(guess)


def make_drafter(speculation: str, cache: KVCache) -> Drafter | None:
    """The drafter that a setting of `EngineConfig.speculation` names."""
    if speculation == "off":
        return None
    return Drafter(cache if speculation in ("tree", "auto") else None, looks_back=speculation in ("prompt", "auto"))
