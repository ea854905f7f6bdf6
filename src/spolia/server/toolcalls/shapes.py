"""How a call is written whose name stands outside its arguments.

    before  name  after  arguments  end
                         a JSON object, or parameters one by one:  opening  key  middle  value  closing

The shape is read by `written.py` and made a grammar of by `rules.py`, so that both mean the same. White space in these
texts is what a model writes; readers take any, or none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Parameters", "Shape", "is_text", "kinds_of", "resolved", "value_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Arguments without quotes: what a value is, only the tool's schema can tell.

    Attributes:
        has_lines: a value stands on lines of its own: one line break before it and one after are not of it.
    """

    opening: str
    middle: str
    closing: str
    has_lines: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """
    Attributes:
        parameters: None where the arguments are an object.
        quote: what stands around strings in the arguments' object, whose keys are bare then; None: it is JSON.
        ends_outside: `end` is the closing mark of the calls, which is left for whoever reads on.
        prefix: stands before each name and is not of it.
        is_numbered: each name has a number after a colon; with both, it is the call's id.
    """

    before: str = ""
    after: str = ""
    end: str = ""
    parameters: Parameters | None = None
    quote: str | None = None
    ends_outside: bool = False
    prefix: str = ""
    is_numbered: bool = False

    def name_in(self, written: str) -> str:
        """The tool's name as it is known elsewhere."""
        name = written.removeprefix(self.prefix)
        if self.is_numbered:
            before, colon, number = name.rpartition(":")
            name = before if colon and number.isdigit() else name
        return name


_KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
_MAX_REFERENCES = 16  # one that comes back to itself says nothing
_PYTHONS = {"True": "true", "False": "false", "None": "null"}


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or what it refers to within `root`; empty where that is nothing."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping) or not isinstance(reference := schema.get("$ref"), str):
            break
        target: Any = root
        for step in reference.removeprefix("#").strip("/").split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        schema = target
    return schema if isinstance(schema, Mapping) and "$ref" not in schema else {}


def kinds_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema allows; empty where it does not say."""
    schema = resolved(schema, root)
    stated = schema.get("type")
    if isinstance(stated, str | list):
        return frozenset([stated] if isinstance(stated, str) else map(str, stated))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(_KINDS.get(type(value), "null") for value in values)
    for key in ("anyOf", "oneOf"):
        parts = schema.get(key)
        kinds = [kinds_of(part, root) for part in parts] if isinstance(parts, list) else []
        if kinds and all(kinds):
            return frozenset[str]().union(*kinds)
    return frozenset()


def is_text(kinds: frozenset[str]) -> bool:
    """Whether a value can only be text, which then is what stands there."""
    return kinds == {"string"}


def value_of(text: str, kinds: frozenset[str]) -> str:
    """The JSON of a value that was written without quotes, or as JSON; text where it is nothing else of these kinds."""
    stripped = text.strip()
    stripped = _PYTHONS.get(stripped, stripped)
    try:
        value = json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = _KINDS.get(type(value), "null")
    if not kinds or kind in kinds or (kind == "integer" and "number" in kinds):
        return stripped
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        return stripped
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(constant)
