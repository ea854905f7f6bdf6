"""What a body has that its schema has not: see `ignored_fields`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, get_args

import msgspec

from spolia.errors import InvalidRequest

__all__ = ["ignored_fields", "nearest"]

_MAX_UNKNOWN = 64  # each is compared with every known name
_FIT_FOR_A_HEADER = re.compile(r"[\w.\[\]-]{1,80}", re.ASCII)
_NEAR = 0.8
_MAX_SHOWN = 64

# Of other servers, and spelt nearly like one of ours that means something else.
_OTHERS = frozenset(
    {
        "draft_num_predict",
        "generation_prompt",
        "n_keep",
        "parse_tool_calls",
        "reasoning_effort",
        "repetition_penalty_range",
        "speed",
    }
)


def ignored_fields(body: bytes, kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Names of fields in `body` that do nothing, those of objects inside with their path; fit for a header.

    Clients send what other servers understand, so that an unknown field is no error; but one that is spelt nearly like
    one of ours is meant to be that, and an answer without it would be a wrong answer. A body that is no JSON object
    has none.

    Raises:
        InvalidRequest: a field that is misspelt, or any unknown one where `kind` forbids them, or very many.
    """
    unknown: list[str] = []
    try:
        for path, name, known, is_strict in _unknown(body, kind, ""):
            shown = f"{path}{name if len(name) <= _MAX_SHOWN else name[:_MAX_SHOWN] + '...'}"
            if meant := nearest(name, known):
                raise InvalidRequest(
                    f"there is no field `{shown}`; did you mean `{path}{meant}`?", param=shown, code="unknown_field"
                )
            if is_strict:
                raise InvalidRequest(
                    f"there is no field `{shown}`; there are {', '.join(known)}", param=shown, code="unknown_field"
                )
            unknown.append(shown)
            if len(unknown) > _MAX_UNKNOWN:
                raise InvalidRequest(
                    f"more than {_MAX_UNKNOWN} fields are not known here, such as `{shown}`; leave them out",
                    param=shown,
                    code="unknown_field",
                )
    except (msgspec.DecodeError, RecursionError):
        return ()  # whoever decodes it says what is wrong with it
    return tuple(name if _FIT_FOR_A_HEADER.fullmatch(name) else "?" for name in unknown)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is a misspelling of; None if it seems to be another word."""
    from difflib import get_close_matches

    if name in _OTHERS or len(name) > _MAX_SHOWN:
        return None
    plain = {each.replace("_", ""): each for each in known}
    near = get_close_matches(name.lower().replace("-", "").replace("_", ""), plain, 1, _NEAR)
    return plain[near[0]] if near else None


def _unknown(
    body: bytes | msgspec.Raw, kind: type[msgspec.Struct], path: str
) -> Iterator[tuple[str, str, dict[str, type[msgspec.Struct] | None], bool]]:
    """Path, name, what is known in its place, and whether others are forbidden there."""
    known = _fields(kind)
    is_strict = kind.__struct_config__.forbid_unknown_fields
    for name, value in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items():
        if name not in known:
            yield path, name, known, is_strict
        elif (inner := known[name]) is not None:
            content = bytes(value)
            if content.startswith(b"{"):
                yield from _unknown(content, inner, f"{path}{name}.")
            elif content.startswith(b"["):
                for index, each in enumerate(msgspec.json.decode(content, type=list[msgspec.Raw])):
                    if bytes(each).startswith(b"{"):
                        yield from _unknown(each, inner, f"{path}{name}[{index}].")


@cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct] | None]:
    """By name, the kind of object that is in it; None for one without a schema."""
    return {field.encode_name: _struct_in(field.type) for field in msgspec.structs.fields(kind)}


def _struct_in(annotation: Any) -> type[msgspec.Struct] | None:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation
    return next((found for each in get_args(annotation) if (found := _struct_in(each)) is not None), None)
