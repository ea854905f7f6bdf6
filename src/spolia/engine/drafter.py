"""Which tokens the next step should check ahead of their time."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from spolia.engine.costs import MAX_DRAFT_ROWS, MIN_GAIN, StepCosts
from spolia.engine.draft_model import DraftModel
from spolia.engine.request import Request, Sequence
from spolia.generation import MAX_DRAFTS, NO_GUESS, Acceptance, Guess, Guesser, SuffixIndex
from spolia.kernels import BLOCK_SIZE
from spolia.kvcache import KVCache

__all__ = ["Drafter", "make_drafter"]

_FORM_AGREES = 4  # what a form forces is as sure as a guess after so many tokens that agreed, until it is known better
_TREE_AGREES = 33
# Of the smaller model.
_SURE = 0.7  # a guess that is so likely to begin right is not asked for again
_MAX_ROUNDS = 8
_ROUND_COST = 0.3  # of a step, before it was measured
_ROUND_RATE = 0.1
_PROBE_AFTER = 128  # steps for which it was not worth while
_READS_A_TOKEN = 16  # tokens that it may have to read first for each one that may still come
_NOTHING: NDArray[np.int32] = np.empty(0, np.int32)


class Drafter:
    """Writes guesses behind the known tokens of running sequences. See `Sequence.num_drafts`.

    Each sequence's `Guesser` says what may come next and how likely it is; `StepCosts` what it costs to check; together
    they decide, for the step as a whole, which guesses are drafted. A step that computes prompts has no drafts: its
    rows are dear.

    Where no guess is good, a smaller model writes ahead, if there is one, for as many tokens as its measured time and
    its measured luck with this request make worth while.

    Args:
        cache: whose tokens are guessed from.
        sources: "text": what followed the same words earlier in the text; "cache": in other texts of the same
            namespace; "tree": what followed exactly this text. Without any, only what forms force is drafted.
        model: the smaller model; None: there is none.
        clock: seconds; only differences matter.
    """

    def __init__(
        self,
        cache: KVCache,
        sources: frozenset[str],
        *,
        model: DraftModel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._sources = sources
        self._index = SuffixIndex() if sources else SuffixIndex(num_slots=2, max_tokens=0)
        self._known = Acceptance()
        self._costs = StepCosts()
        self._num_cleared_tokens = cache.stats.num_cleared_tokens
        self._base = 0
        self._model = model
        self._clock = clock
        self._model_s = 0.0  # that the smaller model took for this step
        self._round_s: dict[int, float] = {}  # a round of it, by number of sequences
        self._num_rounds_idle = 0

    def guesser(self, request: Request, token_ids: NDArray[np.int32]) -> Guesser | None:
        """For a new sequence, whose buffer `token_ids` is; None if it does without."""
        if not request.params.speculation:
            return None
        if not self._sources and (request.pipeline is None or not request.pipeline.has_form):
            return None
        owner = request.namespace if "cache" in self._sources else request.request_id.encode()
        return Guesser(
            self._index,
            owner,
            token_ids,
            len(request.prompt_token_ids),
            known=self._known,
            looks_back="text" in self._sources,
            prediction=request.prediction_ids if self._sources else None,
        )

    def draft(self, running: Seq[Sequence]) -> None:
        """Draft for the next step."""
        if self._cache.stats.num_cleared_tokens != self._num_cleared_tokens:
            self._num_cleared_tokens = self._cache.stats.num_cleared_tokens
            self._index.forget()
            if self._model is not None:
                self._model.cache.clear()
        self._model_s = 0.0
        for sequence in running:
            sequence.num_drafts = 0
        has_guesses = bool(self._sources) or any(sequence.guesser is not None for sequence in running)
        if not running or not has_guesses or any(sequence.num_pending_tokens != 1 for sequence in running):
            self._base = 0
            return
        self._base = len(running)
        guesses = [self._guess(sequence) for sequence in running]
        if self._model is not None:
            self._ask_model(self._model, running, guesses)
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

    def _ask_model(self, model: DraftModel, running: Seq[Sequence], guesses: list[Guess]) -> None:
        """Put the smaller model's guesses in place of those that promise less."""
        step_s = self._costs.step_s(self._base)
        asked: list[int] = []
        acceptances: list[Acceptance] = []
        for index, (sequence, guess) in enumerate(zip(running, guesses, strict=True)):
            guesser = sequence.guesser
            if guesser is None:
                continue
            model.note(sequence, guesser.acceptance)
            room = len(sequence.token_ids) - sequence.num_tokens - 1
            is_sure = bool(guess.chances) and guess.chances[0] >= _SURE
            if room > 0 and not is_sure and model.num_unread(sequence) <= _READS_A_TOKEN * room:
                asked.append(index)
                acceptances.append(guesser.acceptance)
        if not asked or step_s is None:
            return
        round_s = self._round_s.get(len(asked))
        cost = _ROUND_COST if round_s is None else round_s / step_s
        depth = self._depth([each.chance("any of model", 0) for each in acceptances], cost)
        if not depth:
            self._num_rounds_idle += 1
            if self._num_rounds_idle % _PROBE_AFTER:
                return
            depth = 1
        sequences = [running[index] for index in asked]
        is_reading = any(model.num_unread(sequence) > BLOCK_SIZE for sequence in sequences)
        begun_s = self._clock()
        written = model.draft(sequences, acceptances, depth, worth=cost)
        self._model_s = self._clock() - begun_s
        num_rounds = max(len(guess.ids) for guess in written)
        if num_rounds and not is_reading:
            took_s = self._model_s / num_rounds
            self._round_s[len(asked)] = took_s if round_s is None else round_s + _ROUND_RATE * (took_s - round_s)
        for index, guess in zip(asked, written, strict=True):
            if sum(guess.chances) > sum(guesses[index].chances):
                guesses[index] = guess

    def _depth(self, rates: Seq[float], cost: float) -> int:
        """How many tokens the smaller model should write; 0: it does not pay.

        Args:
            rates: per sequence, the share of its drafts that is right.
            cost: of a round, in steps.
        """
        best, depth = self._base * MIN_GAIN, 0
        expected = float(self._base)
        for rounds in range(1, _MAX_ROUNDS + 1):
            num_rows = rounds * len(rates)
            if num_rows > MAX_DRAFT_ROWS:
                break
            expected += sum(rate**rounds for rate in rates)
            rate = expected / (self._costs.ratio(self._base, num_rows) + rounds * cost)
            if rate > best:
                best, depth = rate, rounds
        return depth

    def release(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        if sequence.guesser is not None:
            sequence.guesser.close(sequence.num_tokens)
        if self._model is not None:
            self._model.release(sequence)

    def check(self) -> None:
        """Assert the invariants of the smaller model's cache."""
        if self._model is not None:
            self._model.cache.check()

    def note_step(self, num_sequences: int, num_rows: int, duration_s: float) -> None:
        """The step that was drafted for took that long."""
        if self._base and num_sequences == self._base:
            self._costs.note(self._base, num_rows - num_sequences, duration_s - self._model_s)


_SOURCES: dict[str, frozenset[str]] = {
    "off": frozenset(),
    "prompt": frozenset({"text"}),
    "tree": frozenset({"tree"}),
    "auto": frozenset({"text", "tree", "cache"}),
}


def make_drafter(
    speculation: str,
    cache: KVCache,
    *,
    model: DraftModel | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Drafter:
    """The drafter that a setting of `EngineConfig.speculation` names."""
    return Drafter(cache, _SOURCES[speculation], model=model, clock=clock)
