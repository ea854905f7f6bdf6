"""Beam search: several continuations at once, the likeliest of all that they could become kept at each step.

    log-probabilities of each running beam  --advance-->  the next running beams, and those that have come to an end

Scores and ends are those of transformers (`GenerationMixin._beam_search`), its early stopping and its length penalty
included, and its drawing of beams. Diverse beams are groups that avoid each other's tokens; beams with phrases that
they must say are kept in banks by how much of these they have said. This module deals in ids and scores; whoever drives
it computes the log-probabilities.

Source: Vijayakumar et al. 2016, Diverse Beam Search; Post and Vilar 2018, Fast Lexically Constrained Decoding with
Dynamic Beam Allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spolia.errors import InvalidRequest
from spolia.generation.checks import MAX_INT, as_tuple, check_integer, check_number, token_ids
from spolia.generation.decisions import Choice, Option
from spolia.generation.history import History
from spolia.generation.params import SamplingParams
from spolia.generation.pipeline import filters_of
from spolia.generation.processors.candidates import Candidates, Scratch

__all__ = ["NOT_WITH_BEAMS", "Beam", "BeamParams", "BeamSearch"]

_NEVER = -1.0e9  # the score of what must not be chosen
_MAX_WORDS = 64
_DEFAULTS = SamplingParams()

NOT_WITH_BEAMS = (
    *(
        "mirostat",
        "xtc_probability",
        "watermarking_config",
        "synthid",
        "guidance_scale",
        "dola_layers",
        "token_healing",
        "context_shift",
    ),
    *("prompt_logprobs", "max_time", "stopping_criteria", "prediction"),
)
"""Parameters that follow one text, or tell of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """How to search.

    Attributes:
        num_beams: continuations that are kept.
        max_tokens: most tokens of an answer.
        num_return_sequences: best answers to return; None: all beams.
        length_penalty: a score is divided by its length to this power: above 0 favours long answers.
        early_stopping: True ends when there are as many answers as beams; False when none that runs is likely to become
            better; "never" when none can.
        stop_token_ids: end an answer, besides the model's own end-of-text tokens.
        ignore_eos: the model's own do not.
        sampling: beams are drawn, with the temperature, filters and seed of these, and not the best taken; None: not.
            All else of these applies too, as in `processing`.
        processing: processors, the form, stop strings, log-probabilities and `explain_candidates` of these apply, and
            neither temperature nor filters, for beams that are not drawn.
        num_beam_groups: so many groups of as many beams each, which avoid each other's tokens.
        diversity_penalty: what a token loses for each beam of the groups before that has it at the same place.
        force_words_ids: phrases that an answer must have, each a list of alternatives, each a sequence of token ids.

    Raises:
        InvalidRequest: naming the parameter, the value and what is allowed.
    """

    num_beams: int = 4
    max_tokens: int = 64
    num_return_sequences: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling: SamplingParams | None = None
    processing: SamplingParams | None = None
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    force_words_ids: tuple[tuple[tuple[int, ...], ...], ...] = ()

    def __post_init__(self) -> None:
        check_integer("num_beams", self.num_beams, 1, 64)
        check_integer("max_tokens", self.max_tokens, 1, MAX_INT)
        if self.num_return_sequences is not None:
            check_integer("num_return_sequences", self.num_return_sequences, 1, self.num_beams)
        check_number("length_penalty", self.length_penalty, -100.0, 100.0)
        if self.early_stopping not in (True, False, "never"):
            raise InvalidRequest(
                f"early_stopping is {self.early_stopping!r}; it must be true, false or 'never'", param="early_stopping"
            )
        self._check_groups()
        self._check_words()
        if self.sampling is not None and self.processing is not None:
            raise InvalidRequest("sampling has all that processing has; give one of them", param="processing")
        for name in NOT_WITH_BEAMS:
            if (value := getattr(self.scoring, name)) != getattr(_DEFAULTS, name):
                raise InvalidRequest(f"{name} is {value!r}: it does not go with beam search; leave it out", param=name)

    @property
    def scoring(self) -> SamplingParams:
        """What a beam's scores are made with, besides the model."""
        return self.sampling or self.processing or _DEFAULTS

    def _check_groups(self) -> None:
        check_integer("num_beam_groups", self.num_beam_groups, 1, self.num_beams)
        check_number("diversity_penalty", self.diversity_penalty, 0.0, 1e4)
        if self.num_beams % self.num_beam_groups:
            raise InvalidRequest(
                f"num_beam_groups is {self.num_beam_groups}; it must divide num_beams, {self.num_beams}",
                param="num_beam_groups",
            )
        if self.diversity_penalty and self.num_beam_groups == 1:
            raise InvalidRequest(
                "diversity_penalty does nothing in one group; set num_beam_groups", param="diversity_penalty"
            )
        if self.num_beam_groups > 1 and (self.sampling is not None or self.force_words_ids):
            name = "sampling" if self.sampling is not None else "force_words_ids"
            raise InvalidRequest(f"{name} does not go with num_beam_groups", param="num_beam_groups")

    def _check_words(self) -> None:
        name = "force_words_ids"
        words = tuple(
            tuple(token_ids(name, ids, required=True) for ids in as_tuple(name, alternatives))
            for alternatives in as_tuple(name, self.force_words_ids)
        )
        object.__setattr__(self, name, words)
        if not words:
            return
        if not all(words) or len(words) > _MAX_WORDS:
            raise InvalidRequest(
                f"{name} holds {len(words)} phrases; allowed are {_MAX_WORDS}, each with an alternative", param=name
            )
        needed = sum(min(map(len, alternatives)) for alternatives in words)
        if needed > self.max_tokens:
            raise InvalidRequest(
                f"{name} has at least {needed} tokens, more than max_tokens ({self.max_tokens}); raise that", param=name
            )
        if self.sampling is not None:
            raise InvalidRequest(f"{name} does not go with sampling", param=name)


class Beam(NamedTuple):
    """A continuation.

    Attributes:
        token_ids: generated; the one that ended it included.
        score: sum of log-probabilities; of an answer, divided by its length to the power of the length penalty.
        group: of diverse beams, which one it is of.
    """

    token_ids: tuple[int, ...]
    score: float
    group: int = 0


class BeamSearch:
    """One prompt's search.

    Args:
        final_ids: end an answer.
        seed: for beams that are drawn.
        has_ended: whether ids are a whole answer for another reason than the last of them.

    Attributes:
        running: the beams whose next token is due. The first time all are equal, and the first one of a group counts.
        is_over: nothing that runs can change the outcome any more.
    """

    def __init__(
        self,
        params: BeamParams,
        final_ids: Collection[int],
        *,
        seed: int = 0,
        has_ended: Callable[[tuple[int, ...]], bool] = lambda _: False,
    ) -> None:
        self._params = params
        num_beams = params.num_beams // params.num_beam_groups
        final = frozenset(final_ids)
        self._groups = [
            _Group(params, index, num_beams, final, _chooser(params, seed), has_ended)
            for index in range(params.num_beam_groups)
        ]

    @property
    def running(self) -> list[Beam]:
        return [beam for group in self._groups for beam in group.running]

    @property
    def is_over(self) -> bool:
        return all(group.is_over for group in self._groups)

    @property
    def answers(self) -> list[Beam]:
        """The best that have ended, best first."""
        answers = sorted((beam for group in self._groups for beam in group.answers), key=lambda beam: -beam.score)
        return answers[: self._params.num_return_sequences or self._params.num_beams]

    def choice(self, beam: Beam, num_options: int) -> Choice:
        """How the last `advance` came to a beam, which runs or is an answer: what competed with it, in its group."""
        return self._groups[beam.group].choice(beam.token_ids, num_options)

    def advance(self, log_probs: NDArray[np.float32]) -> None:
        """Take every running beam one token further.

        Args:
            log_probs: float32 `[num_beams, vocab_size]`, a row a beam of `running`.
        """
        penalty = np.zeros(log_probs.shape[1], np.float32)
        start = 0
        for group in self._groups:
            stop = start + len(group.running)
            if not group.is_over:
                group.advance(log_probs[start:stop], penalty)
                for beam in group.running:
                    penalty[beam.token_ids[-1]] += np.float32(self._params.diversity_penalty)
            start = stop


Chooser = Callable[["Sequence[Beam]", NDArray[np.float32], int], "list[Beam]"]
"""(running beams, log-probabilities `[num_beams, vocab_size]`, how many) -> candidates a token longer, in order."""


class _Group:
    """Beams that compete with each other."""

    def __init__(
        self,
        params: BeamParams,
        index: int,
        num_beams: int,
        final_ids: frozenset[int],
        choose: Chooser,
        has_ended: Callable[[tuple[int, ...]], bool],
    ) -> None:
        self._params = params
        self._index = index
        self._num_beams = num_beams
        self._final_ids = final_ids
        self._choose = choose
        self._has_ended = has_ended
        self._num_kept = max(2, 1 + len(final_ids)) * num_beams
        self._may_improve = True
        self._before: list[Beam] = []
        self._candidates: list[Beam] = []
        self._penalty: NDArray[np.float32] = np.empty(0, np.float32)
        self.answers: list[Beam] = []
        self.running = [Beam((), 0.0, index)] + [Beam((), _NEVER, index)] * (num_beams - 1)
        self.is_over = False

    def advance(self, log_probs: NDArray[np.float32], penalty: NDArray[np.float32]) -> None:
        """`penalty`, `[vocab_size]`: what the groups before take from tokens, by their beams."""
        num_beams = self._num_beams
        length = len(self.running[0].token_ids) + 1
        scores = log_probs - penalty if penalty.any() else log_probs
        beams = [beam._replace(group=self._index) for beam in self._choose(self.running, scores, self._num_kept)]
        self._before, self._candidates, self._penalty = self.running, beams, penalty.copy()
        ends = [
            beam.token_ids[-1] in self._final_ids
            or length >= self._params.max_tokens
            or (beam.score > _NEVER / 2 and self._has_ended(beam.token_ids))
            for beam in beams
        ]
        self._take_answers(
            [beam for beam, has_ended in zip(beams[:num_beams], ends[:num_beams], strict=True) if has_ended], length
        )
        going_on = [beam for beam, has_ended in zip(beams, ends, strict=True) if not has_ended]
        stopped = [beam._replace(score=beam.score + _NEVER) for beam, e in zip(beams, ends, strict=True) if e]
        self.running = (going_on + stopped)[:num_beams]
        self._look_ahead(length)
        goes_on = self.running[0].score > _NEVER / 2
        self.is_over = not self._may_improve or self._is_full or all(ends) or not goes_on

    def choice(self, token_ids: tuple[int, ...], num_options: int) -> Choice:
        kept = {beam.token_ids for beam in self.running if beam.score > _NEVER / 2}
        kept |= {beam.token_ids for beam in self.answers}
        rank = next(rank for rank, beam in enumerate(self._candidates) if beam.token_ids == token_ids)
        before = {beam.token_ids: (index, beam.score) for index, beam in reversed(list(enumerate(self._before)))}
        options = []
        for beam in self._candidates[:num_options]:
            index, score = before[beam.token_ids[:-1]]
            parts = {"beam": float(index), "before": score}
            if self._params.num_beam_groups > 1:
                parts["penalty"] = float(self._penalty[beam.token_ids[-1]])
            options.append(Option(beam.token_ids[-1], beam.score, parts, beam.token_ids in kept))
        return Choice(tuple(options), rank, self._candidates[rank].score)

    @property
    def _is_full(self) -> bool:
        return self._params.early_stopping is True and len(self.answers) == self._num_beams

    def _take_answers(self, ended: list[Beam], length: int) -> None:
        if self._is_full or not self._may_improve:
            return
        divisor = length**self._params.length_penalty
        words = self._params.force_words_ids
        answers = self.answers + [
            beam._replace(score=beam.score / divisor)
            for beam in ended
            if beam.score > _NEVER / 2 and (not words or _said(beam.token_ids, words).is_all)
        ]
        self.answers = sorted(answers, key=lambda beam: -beam.score)[: self._num_beams]

    def _look_ahead(self, length: int) -> None:
        """Whether the best that runs could still become better than the worst answer there is."""
        params = self._params
        if len(self.answers) < self._num_beams:
            return
        reach = params.max_tokens if params.early_stopping == "never" and params.length_penalty > 0 else length
        best_possible = max(beam.score for beam in self.running) / reach**params.length_penalty
        self._may_improve = self._may_improve and best_possible > self.answers[-1].score


def _chooser(params: BeamParams, seed: int) -> Chooser:
    if params.sampling is not None:
        return _Drawn(params.sampling, seed).choose
    if params.force_words_ids:
        return _Constrained(params.force_words_ids, params.num_beams, params.max_tokens).choose
    return _best


def _best(running: Sequence[Beam], log_probs: NDArray[np.float32], count: int) -> list[Beam]:
    """The likeliest of all."""
    total = _total(running, log_probs)
    return _longer(running, total, _largest(total.ravel(), min(count, total.size)))


class _Drawn:
    """Candidates are drawn without replacement by the probability of the whole beam, after the filters."""

    def __init__(self, params: SamplingParams, seed: int) -> None:
        self._params = params
        self._seed = seed % 2**64

    def choose(self, running: Sequence[Beam], log_probs: NDArray[np.float32], count: int) -> list[Beam]:
        vocab_size = log_probs.shape[1]
        scratch, nothing = Scratch(vocab_size), History.of([], [], vocab_size=vocab_size)
        filtered = np.full_like(log_probs, -np.inf)
        for row, left in zip(log_probs, filtered, strict=True):
            candidates = Candidates.of(row)
            for _, filter_ in filters_of(self._params):
                candidates = filter_.apply(candidates, nothing, scratch)
            left[slice(None) if candidates.ids is None else candidates.ids] = candidates.scores
        total = np.maximum(_total(running, filtered), np.float32(2 * _NEVER))
        rng = np.random.default_rng([self._seed, len(running[0].token_ids)])
        # The largest of log-probabilities with Gumbel noise are a draw without replacement.
        noisy = (total.ravel() + rng.gumbel(size=total.size)).astype(np.float32)
        drawn = _largest(noisy, min(count, total.size))
        return _longer(running, total, drawn[np.argsort(-total.flat[drawn], kind="stable")])


class _Constrained:
    """The best of each bank in turn, the bank with most of the phrases first, so that every bank keeps a beam.

    Beams that have no room left for what they must say come last.
    """

    def __init__(self, words: Words, num_beams: int, max_tokens: int) -> None:
        self._words = words
        self._num_beams = num_beams
        self._max_tokens = max_tokens

    def choose(self, running: Sequence[Beam], log_probs: NDArray[np.float32], count: int) -> list[Beam]:
        total = _total(running, log_probs)
        vocab_size = total.shape[1]
        chosen = dict.fromkeys(_largest(total.ravel(), min(count, total.size)).tolist())
        for index, beam in enumerate(running):  # and whatever takes a beam further in a phrase
            if beam.score > _NEVER / 2:
                chosen |= dict.fromkeys(index * vocab_size + id_ for id_ in _said(beam.token_ids, self._words).next_ids)
        beams = sorted(_longer(running, total, np.array(list(chosen))), key=lambda beam: -beam.score)
        banks: dict[int, list[Beam]] = {}
        late: list[Beam] = []
        for beam in beams:
            said = _said(beam.token_ids, self._words)
            has_room = len(beam.token_ids) + said.num_left <= self._max_tokens
            (banks.setdefault(said.num_tokens, []) if has_room else late).append(beam)
        ordered = [banks[num_tokens] for num_tokens in sorted(banks, reverse=True)]
        longest = max(map(len, ordered), default=0)
        return [bank[turn] for turn in range(longest) for bank in ordered if turn < len(bank)] + late


Words = tuple[tuple[tuple[int, ...], ...], ...]


class _Said(NamedTuple):
    """How much of some phrases a text has said.

    Attributes:
        num_tokens: of the phrases; a phrase that is broken off counts for nothing.
        next_ids: tokens that say more.
        num_left: tokens that it takes at least to say the rest.
    """

    num_tokens: int
    next_ids: tuple[int, ...]
    num_left: int

    @property
    def is_all(self) -> bool:
        return self.num_left == 0


def _said(ids: tuple[int, ...], words: Words) -> _Said:
    left = list(words)
    num_tokens = 0
    begun: tuple[int, ...] = ()  # of a phrase, at the end of the text
    for token_id in ids:
        begun = (*begun, token_id)
        while begun and not any(one[: len(begun)] == begun for phrase in left for one in phrase):
            begun = begun[1:]
        for phrase in left:
            if begun in phrase:
                left.remove(phrase)
                num_tokens += len(begun)
                begun = ()
                break
    ways = [(phrase, one) for phrase in left for one in phrase if one[: len(begun)] == begun]
    saved = max((min(map(len, phrase)) - len(one) + len(begun) for phrase, one in ways), default=0)
    return _Said(
        num_tokens + len(begun),
        tuple(dict.fromkeys(one[len(begun)] for _, one in ways)),
        sum(min(map(len, phrase)) for phrase in left) - max(0, saved),
    )


def _total(running: Sequence[Beam], log_probs: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scores of all that the beams could become, `[num_beams, vocab_size]`."""
    total: NDArray[np.float32] = log_probs + np.array([beam.score for beam in running], np.float32)[:, None]
    return total


def _longer(running: Sequence[Beam], total: NDArray[np.float32], indices: NDArray[np.intp]) -> list[Beam]:
    vocab_size = total.shape[1]
    return [
        Beam((*running[index // vocab_size].token_ids, index % vocab_size), float(total.flat[index]))
        for index in indices.tolist()
    ]


def _largest(values: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Indices of the largest values, largest first, the lower index first where equal."""
    threshold = np.partition(values, -count)[-count]
    indices = np.flatnonzero(values >= threshold)
    return indices[np.argsort(-values[indices], kind="stable")][:count]
