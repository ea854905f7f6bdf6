"""Why a token came about: the likeliest candidates before and after each stage of the way from logits to the draw.

    note("model") -> processor -> note(its name) -> processor -> note(its name) ... -> filter -> note(its name) ...

Notes change nothing, so an explained answer is the answer that it would be without.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from spolia.generation.processors.candidates import Candidates, Scratch, Softmax, largest

__all__ = ["Choice", "DecisionLog", "FormState", "Option", "Stage"]

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class FormState(NamedTuple):
    """Where an answer is in the form that it must have.

    Attributes:
        may_end: it has the form already.
        num_forced: tokens that must follow now, whatever the model says.
    """

    may_end: bool
    num_forced: int


class Stage(NamedTuple):
    """The likeliest tokens after a stage.

    Attributes:
        name: "model", or what has just been applied, by the name of its parameter.
        num_left: tokens that may still be drawn.
        top: (id, probability) among those that are left, likeliest first.
        form: of the stage that holds the answer to its form, before the token; None of others.
        told: what else it has to say: DoLa, which layer it contrasted the last one with, for instance. As JSON has it.
    """

    name: str
    num_left: int
    top: tuple[tuple[int, float], ...]
    form: FormState | None = None
    told: Mapping[str, Any] = _NOTHING


class Option(NamedTuple):
    """What a search could go on with.

    Attributes:
        score: what the search compares: the highest is best.
        parts: what the score is made of, by name.
        is_kept: the search did go on with it, or took it as an answer.
    """

    token_id: int
    score: float
    parts: Mapping[str, float]
    is_kept: bool


class Choice(NamedTuple):
    """How a search came to a token.

    Attributes:
        options: best first, as many as were asked for; of beams, those of all beams that compete.
        rank: of the token, from 0; it may be beyond the options.
        score: of the token, or of the beam that ends with it.
    """

    options: tuple[Option, ...]
    rank: int
    score: float


class DecisionLog:
    """Notes of one request, an entry a token.

    Args:
        num_candidates: how many of the likeliest tokens to keep of each stage.

    Attributes:
        num_candidates: the same.
    """

    def __init__(self, num_candidates: int, vocab_size: int) -> None:
        self.num_candidates = num_candidates
        self._scratch = Scratch(vocab_size)
        self._decisions: list[list[Stage]] = []

    @property
    def decisions(self) -> tuple[tuple[Stage, ...], ...]:
        return tuple(map(tuple, self._decisions))

    def fork(self) -> DecisionLog:
        """Another, for a text that goes on in its own way from what is noted here."""
        forked = copy(self)
        forked._decisions = list(self._decisions)  # what is noted of a token that was taken stays as it is
        return forked

    def note(
        self,
        name: str,
        candidates: Candidates,
        form: FormState | None = None,
        told: Mapping[str, Any] = _NOTHING,
    ) -> None:
        """After a stage, or, as "model", before the first one of a token."""
        if name == "model":
            self._decisions.append([])
        ids, scores = candidates
        top: list[tuple[int, float]] = []
        if len(scores):
            softmax = Softmax(scores, self._scratch)
            best = largest(scores, self.num_candidates)
            best = best[np.argsort(-scores[best], kind="stable")][: self.num_candidates]
            top = [
                (int(index if ids is None else ids[index]), float(softmax.weights[index]) / softmax.total)
                for index in best
            ]
        self._decisions[-1].append(Stage(name, len(scores), tuple(top), form, told))
