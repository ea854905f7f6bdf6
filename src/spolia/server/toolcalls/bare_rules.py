"""The grammar of an object as Gemma writes it: bare keys, in the schema's order, and strings between marks.

What it allows is what `bare.py` reads. Each schema of an object, an array or a choice is a rule of its own, which is
made once: so one that refers to itself has an end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from spolia.errors import InvalidRequest
from spolia.generation import json_rule
from spolia.server.toolcalls.shapes import Parameters, kinds_of, resolved
from spolia.server.toolcalls.texts import HELD, HELD_OF_TEXT, NOTES, Marks, patterns_of, refusal, text_rule

__all__ = ["bare_rules"]

_KEY = re.compile(r"[\w.$-]+")
_ANYTHING = {"any": "any", "object": "any_object", "array": "any_array", "string": "any_text"}
_HELD_OF_ARRAY = NOTES | {"items", "minItems", "maxItems"}
_HELD_OF_CHOICE = NOTES | {"anyOf", "oneOf"}


def bare_rules(name: str, schema: Any, quote: str, marks: Marks) -> list[str]:
    """Lark: the rule `name` and those that it needs, whose names begin with it; any object where there is no schema.

    Raises:
        InvalidRequest: a keyword that cannot be held to.
    """
    writer = _Writer(name, schema or {}, quote, marks)
    whole = writer.value(schema or {}, "the parameters of a tool", kinds=frozenset({"object"}))
    return [f"{name}: {whole}", *writer.rules]


class _Writer:
    """
    Attributes:
        rules: that have been made so far.
    """

    def __init__(self, name: str, root: Mapping[str, Any], quote: str, marks: Marks) -> None:
        self._name = name
        self._root = root
        self._marks = marks
        self._quote = marks.rule(quote)
        self._text = Parameters(opening="", middle="", closing=quote)
        self._made: dict[str, str] = {}  # by schema
        any_text = text_rule(f"{name.upper()}_TEXT", [], self._text, marks)
        key, here = "/[^:{}\\[\\],\\s]+/", self._any
        self.rules = [
            f"{here('any')}: {here('any_text')} | {here('any_object')} | {here('any_array')} | {here('any_other')}",
            f"{here('any_other')}: {json_rule({'type': ['number', 'boolean', 'null']})}",
            f"{here('any_text')}: {self._quote} {any_text[0]}",
            f'{here("any_pair")}: {key} ":" {here("any")}',
            f'{here("any_object")}: "{{" ({here("any_pair")} ("," {here("any_pair")})*)? "}}"',
            f'{here("any_array")}: "[" ({here("any")} ("," {here("any")})*)? "]"',
            *any_text[1:],
        ]

    def value(self, schema: Any, of: str, kinds: frozenset[str] = frozenset()) -> str:
        """The name of a rule for what this schema allows.

        Args:
            of: what it is the schema of, for refusals.
            kinds: JSON types, where the schema need not say them.
        """
        schema = resolved(schema, self._root)
        known = json.dumps(schema, sort_keys=True, default=str)
        if (rule := self._made.get(known)) is None:
            rule = self._made[known] = f"{self._name}_{len(self._made)}"
            at = len(self.rules)
            self.rules.insert(at, f"{rule}: {self._ways(rule, schema, of, kinds)}")
        return rule

    def _ways(self, rule: str, schema: Mapping[str, Any], of: str, kinds: frozenset[str]) -> str:
        for key in ("anyOf", "oneOf"):
            if key in schema:
                self._check(schema, _HELD_OF_CHOICE, of)
                return " | ".join(self.value(part, of) for part in schema[key])
        if "const" in schema or "enum" in schema:
            return self._written(schema, of)
        kinds = kinds_of(schema, self._root) or kinds
        if not kinds:
            self._check(schema, NOTES, of)
            return self._any("any")
        return " | ".join(self._of_kind(kind, rule, schema, of, is_only=len(kinds) == 1) for kind in sorted(kinds))

    def _of_kind(self, kind: str, rule: str, schema: Mapping[str, Any], of: str, *, is_only: bool) -> str:
        if kind == "object":
            self._check(schema, HELD if is_only else NOTES, of)
            properties = schema.get("properties") or {}
            if not properties and schema.get("additionalProperties") is not False:
                return self._any("any_object")
            return self._object(rule, schema, properties)
        if kind == "array":
            self._check(schema, _HELD_OF_ARRAY if is_only else NOTES, of)
            item = self.value(schema.get("items") or {}, f"an item of {of}")
            return self._array(item, int(schema.get("minItems", 0)), schema.get("maxItems"))
        if kind == "string":
            self._check(schema, HELD_OF_TEXT, f"{of}, which is text,")
            text = text_rule(f"{rule.upper()}_TEXT", patterns_of(schema), self._text, self._marks)
            self.rules += text[1:]
            return f"{self._quote} {text[0]}"
        others = {} if not is_only else schema
        self.rules.append(f"{rule}_{kind}: {json_rule({**others, 'type': kind})}")
        return f"{rule}_{kind}"

    def _object(self, rule: str, schema: Mapping[str, Any], properties: Mapping[str, Any]) -> str:
        """In the schema's order: for each place in it a rule for what may follow, before and after a first pair."""
        required = schema.get("required") or []
        keys = list(dict.fromkeys([*properties, *required]))
        last = len(keys)
        self.rules += [f'{rule}_first_{last}: "}}"', f'{rule}_next_{last}: "}}"']
        for at, key in enumerate(keys):
            if not _KEY.fullmatch(key):
                raise InvalidRequest(
                    f"structured_outputs: the property {key!r} cannot be held to: this model's family writes keys "
                    "without quotes; rename it, or send strict false",
                    param="structured_outputs",
                )
            value = self.value(properties.get(key) or {}, repr(key))
            pair = f"{json.dumps(key + ':', ensure_ascii=False)} {value} {rule}_next_{at + 1}"
            others = ("", "") if key in required else (f" | {rule}_first_{at + 1}", f" | {rule}_next_{at + 1}")
            self.rules += [f"{rule}_first_{at}: {pair}{others[0]}", f'{rule}_next_{at}: "," {pair}{others[1]}']
        return f'"{{" {rule}_first_0'

    @staticmethod
    def _array(item: str, least: int, most: int | None) -> str:
        if most == 0:
            return '"[" "]"'
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else int(most) - 1}}}'
        items = f"{item} {more}"
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _written(self, schema: Mapping[str, Any], of: str) -> str:
        """One of several values."""
        kinds = kinds_of({"type": schema["type"]}, self._root) if "type" in schema else None
        self._check(schema, NOTES | {"const", "enum"}, of)
        ways = []
        for value in [schema["const"]] if "const" in schema else schema["enum"]:
            if isinstance(value, dict | list):
                raise refusal("enum", of)
            kind = next(iter(kinds_of({"const": value}, {})))
            if kinds is not None and kind not in kinds and not (kind == "integer" and "number" in kinds):
                continue
            text = json.dumps(value if isinstance(value, str) else json.dumps(value), ensure_ascii=False)
            ways.append(f"{self._quote} {text} {self._quote}" if isinstance(value, str) else text)
        if not ways:
            raise refusal("enum", of)
        return " | ".join(ways)

    @staticmethod
    def _check(schema: Mapping[str, Any], held: set[str], of: str) -> None:
        if unheld := sorted(set(schema) - held):
            raise refusal(unheld[0], of)

    def _any(self, what: str) -> str:
        return f"{self._name}_{what}"
