"""Values of parameters, checked with their name, what they are and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from spolia.errors import InvalidRequest

__all__ = ["MAX_INT", "as_tuple", "bias_pairs", "check_bool", "check_integer", "check_number", "strings", "token_ids"]

T = TypeVar("T")
MAX_INT = 2**31 - 1


def _parameter(name: str) -> str:
    return name.partition(".")[0]


def check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} is {value!r}; it must be an integer from {low} to {high}", param=_parameter(name))
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; it must be from {low} to {high}", param=_parameter(name))


def check_number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    """
    Args:
        name: of a part of a parameter: the parameter's, a dot, its own.
        above: `low` itself is not allowed.
    """
    allowed = f"above {low:g}, up to {high:g}" if above else f"from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(f"{name} is {value!r}; it must be a number {allowed}", param=_parameter(name))
    if not low <= value <= high or (above and value == low):
        raise InvalidRequest(f"{name} is {value}; it must be {allowed}", param=_parameter(name))


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} is {value!r}; it must be true or false", param=_parameter(name))


def as_tuple(name: str, value: Iterable[T]) -> tuple[T, ...]:
    try:
        return tuple(value)
    except TypeError:
        raise InvalidRequest(f"{name} is {value!r}; it must be a list", param=name) from None


def strings(name: str, value: str | Sequence[str], what: str) -> tuple[str, ...]:
    """Texts, none of them empty; a single one may stand alone."""
    texts = (value,) if isinstance(value, str) else as_tuple(name, value)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidRequest(f"{name} holds {text!r}; {what} is text, and not empty", param=name)
    return texts


def token_ids(name: str, value: Sequence[int], *, required: bool = False) -> tuple[int, ...]:
    ids = as_tuple(name, value)
    if required and not ids:
        raise InvalidRequest(f"{name} is or holds an empty list; give at least one token id", param=name)
    for token_id in ids:
        check_integer(name, token_id, 0, MAX_INT)
    return ids


def bias_pairs(name: str, value: Any, limit: float) -> tuple[tuple[int, float], ...]:
    """A bias a token, from a mapping (whose keys may be digits, as JSON has it) or from pairs.

    In a pair, false means "never", as llama.cpp has it.
    """
    pairs = value.items() if isinstance(value, Mapping) else as_tuple(name, value)
    checked: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise InvalidRequest(f"{name} holds {pair!r}; it must map token ids to numbers", param=name)
        token_id, bias = pair
        if isinstance(token_id, str) and token_id.isdecimal():
            token_id = int(token_id)
        check_integer(name, token_id, 0, MAX_INT)
        if bias is False:
            bias = -math.inf
        if bias != -math.inf:
            check_number(name, bias, -limit, limit)
        checked[token_id] = float(bias)
    return tuple(checked.items())
