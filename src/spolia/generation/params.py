"""What a client may ask of generation, checked once, at birth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from spolia.errors import InvalidRequest

__all__ = ["MAX_LOGPROBS", "SamplingParams"]

MAX_LOGPROBS = 20
"""Most alternatives that `logprobs` reports, as in OpenAI's API."""

T = TypeVar("T")
_MAX_INT = 2**31 - 1
_MIN_TEMPERATURE = 1e-5  # below it, dividing float32 logits would overflow, and the best token has all the weight


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to turn logits into tokens, and when to stop.

    Filters apply in this order: temperature, `top_k`, `top_p`, `min_p`. One seed, prompt and set of parameters gives
    one answer, in any batch.

    Attributes:
        max_tokens: most tokens to generate; None: as many as the context has room for.
        min_tokens: until this many are generated, no end-of-text token, stop id or stop string ends the answer.
        temperature: 0 (or less than 1e-5) takes the most likely token, the lowest id where several are.
        top_k: only the k most likely tokens, ties included; 0 or -1: all; 1: as temperature 0.
        top_p: only the most likely tokens that together reach this probability; 1: all.
        min_p: only tokens at least this likely relative to the most likely one; 0: all.
        seed: None draws one, which the answer reports.
        stop: strings that end the answer, which is cut before them. A single string is accepted.
        stop_token_ids: ids that end the answer.
        ignore_eos: generate past the model's own end-of-text tokens.
        logprobs: report each token's log-probability and this many most likely alternatives (0 to 20). They are those
            of the model's distribution, before temperature and filters. None: do not.
        include_stop_str_in_output: keep the stop string, or the stop id's text, at the end of the text.

    Raises:
        InvalidRequest: naming the parameter, the value and what is allowed.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1, _MAX_INT)
        _check_integer("min_tokens", self.min_tokens, 0, _MAX_INT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, more than max_tokens ({self.max_tokens}); it may be equal at most",
                param="min_tokens",
            )
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_integer("top_k", self.top_k, -1, _MAX_INT)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_integer("seed", self.seed, -(2**63), 2**64 - 1)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}; it must be true or false", param=name)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, so that neither filters nor the seed matter."""
        return self.temperature < _MIN_TEMPERATURE or self.top_k == 1


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} is {value!r}; it must be an integer from {low} to {high}", param=name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; it must be from {low} to {high}", param=name)


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(f"{name} is {value!r}; it must be a number from {low:g} to {high:g}", param=name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; it must be from {low:g} to {high:g}", param=name)


def _stop_strings(value: str | Sequence[str]) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else _as_tuple("stop", value)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidRequest(f"stop holds {string!r}; a stop string is text, and not empty", param="stop")
    return strings


def _stop_ids(value: Sequence[int]) -> tuple[int, ...]:
    ids = _as_tuple("stop_token_ids", value)
    for token_id in ids:
        _check_integer("stop_token_ids", token_id, 0, _MAX_INT)
    return ids


def _as_tuple(name: str, value: Sequence[T]) -> tuple[T, ...]:
    try:
        return tuple(value)
    except TypeError:
        raise InvalidRequest(f"{name} is {value!r}; it must be a list", param=name) from None
