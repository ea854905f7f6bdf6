"""Beam search: several continuations at once, the likeliest of all that they could become kept at each step.

    log-probabilities of each running beam  --advance-->  the next running beams, and those that have come to an end

Scores and ends are those of transformers (`GenerationMixin._beam_search`), its early stopping and its length penalty
included. This module deals in ids and scores; whoever drives it computes the log-probabilities.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spolia.errors import InvalidRequest
from spolia.generation.checks import MAX_INT, check_integer, check_number

__all__ = ["Beam", "BeamParams", "BeamSearch"]

_NEVER = -1.0e9  # the score of what must not be chosen


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


class Beam(NamedTuple):
    """A continuation.

    Attributes:
        token_ids: generated; the one that ended it included.
        score: sum of log-probabilities; of an answer, divided by its length to the power of the length penalty.
    """

    token_ids: tuple[int, ...]
    score: float


class BeamSearch:
    """One prompt's search.

    Attributes:
        running: the beams whose next token is due, best first. The first time all are equal, and the first one counts.
        is_over: nothing that runs can change the outcome any more.
    """

    def __init__(self, params: BeamParams, final_ids: Collection[int]) -> None:
        self._params = params
        self._final_ids = frozenset(final_ids)
        self._num_kept = max(2, 1 + len(self._final_ids)) * params.num_beams
        self._may_improve = True
        self._answers: list[Beam] = []
        self.running = [Beam((), 0.0)] + [Beam((), _NEVER)] * (params.num_beams - 1)
        self.is_over = False

    @property
    def answers(self) -> list[Beam]:
        """The best that have ended, best first."""
        return self._answers[: self._params.num_return_sequences or self._params.num_beams]

    def advance(self, log_probs: NDArray[np.float32]) -> None:
        """Take every running beam one token further.

        Args:
            log_probs: float32 `[num_beams, vocab_size]`, a row a beam of `running`.
        """
        num_beams, vocab_size = log_probs.shape
        scores = np.array([beam.score for beam in self.running], np.float32)
        total = (log_probs + scores[:, None]).ravel()
        candidates = _largest(total, min(self._num_kept, len(total)))
        length = len(self.running[0].token_ids) + 1
        beams = [
            Beam((*self.running[index // vocab_size].token_ids, index % vocab_size), float(total[index]))
            for index in candidates.tolist()
        ]
        ends = [beam.token_ids[-1] in self._final_ids or length >= self._params.max_tokens for beam in beams]
        self._take_answers(
            [beam for beam, has_ended in zip(beams[:num_beams], ends[:num_beams], strict=True) if has_ended], length
        )
        going_on = [beam for beam, has_ended in zip(beams, ends, strict=True) if not has_ended]
        stopped = [beam._replace(score=beam.score + _NEVER) for beam, e in zip(beams, ends, strict=True) if e]
        self.running = (going_on + stopped)[:num_beams]
        self._look_ahead(length)
        is_full = self._params.early_stopping is True and len(self._answers) == num_beams
        self.is_over = not self._may_improve or is_full or all(ends)

    def _take_answers(self, ended: list[Beam], length: int) -> None:
        is_full = self._params.early_stopping is True and len(self._answers) == self._params.num_beams
        if is_full or not self._may_improve:
            return
        divisor = length**self._params.length_penalty
        answers = self._answers + [beam._replace(score=beam.score / divisor) for beam in ended]
        self._answers = sorted(answers, key=lambda beam: -beam.score)[: self._params.num_beams]

    def _look_ahead(self, length: int) -> None:
        """Whether the best that runs could still become better than the worst answer there is."""
        params = self._params
        if len(self._answers) < params.num_beams:
            return
        reach = params.max_tokens if params.early_stopping == "never" and params.length_penalty > 0 else length
        best_possible = self.running[0].score / reach**params.length_penalty
        self._may_improve = self._may_improve and best_possible > self._answers[-1].score


def _largest(values: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Indices of the largest values, largest first, the lower index first where equal."""
    threshold = np.partition(values, -count)[-count]
    indices = np.flatnonzero(values >= threshold)
    return indices[np.argsort(-values[indices], kind="stable")][:count]
