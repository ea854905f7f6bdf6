"""The grammar of one call, as a family writes it: what it allows is what the family's scanner reads, and no more."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from spolia.errors import InvalidRequest
from spolia.generation import between_slashes, json_rule
from spolia.models import Tokenizer
from spolia.server.toolcalls.formats import Format
from spolia.server.toolcalls.shapes import Parameters, is_text, kinds_of, resolved

__all__ = ["SPACE", "Marks", "call_rules", "pattern_of"]

SPACE = r"[ \t\r\n]{0,32}"
_ANY = r"(.|\n)"
_NOTES = {"title", "description", "default", "examples", "$schema", "$defs", "definitions", "deprecated", "type"}
_HELD = _NOTES | {"properties", "required", "additionalProperties"}  # of a tool's parameters
_HELD_OF_TEXT = _NOTES | {"enum", "const", "minLength", "maxLength", "pattern"}


class Marks:
    """A format's marks as a vocabulary has them: special tokens, or text, or either."""

    def __init__(self, tokenizer: Tokenizer, format_: Format) -> None:
        self.format = format_
        outer = {mark.encode() for mark in (format_.opening, format_.closing) if mark}
        spelt = {id_: tokenizer.token_bytes(id_) for id_ in tokenizer.special_ids if id_ not in tokenizer.end_ids}
        self._tokens = {text.decode(errors="replace"): f"<[{id_}]>" for id_, text in spelt.items() if text}
        others = sorted(id_ for id_, text in spelt.items() if text not in outer)
        self.others = f"<[{','.join(map(str, others))}]>" if others else None

    def token(self, mark: str) -> str | None:
        return self._tokens.get(mark)

    def rule(self, text: str) -> str:
        """A rule's part for `text`, whose marks may be special tokens, and whose white space any, or none."""
        parts = []
        for word in re.findall(r"\s+|<[^<>\s]+>|[^<\s]+|<", text):
            token = self.token(word)
            parts.append(
                "SPACE" if word.isspace() else f"({json.dumps(word)} | {token})" if token else json.dumps(word)
            )
        return " ".join(parts)


def call_rules(format_: Format, tools: Sequence[Mapping[str, Any]], marks: Marks, *, strict_only: bool) -> list[str]:
    """Lark rules, of which `call` is a call of one of `tools`.

    Args:
        strict_only: the arguments of those that are not strict are any object.

    Raises:
        InvalidRequest: a strict tool's schema asks for what this way of writing cannot hold.
    """
    if (shape := format_.shape) is None:
        return [f"call: {json_rule(format_.call_schema(tools, strict_only=strict_only))}"]
    rules = [f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}"]
    for index, tool in enumerate(tools):
        function = tool["function"]
        is_strict = bool(function.get("strict"))
        schema = function.get("parameters") if is_strict or not strict_only else None
        if shape.parameters is None:
            rules.append(f"arguments_{index}: {json_rule(schema or {'type': 'object'})}")
        else:
            try:
                rules += _parameter_rules(index, schema, shape.parameters, marks)
            except InvalidRequest:
                if is_strict:
                    raise
                rules += _parameter_rules(index, None, shape.parameters, marks)
        number = ' ":" /[0-9]{1,3}/' if shape.is_numbered else ""
        name = json.dumps(shape.prefix + function["name"], ensure_ascii=False) + number
        end = "" if shape.ends_outside else marks.rule(shape.end)
        parts = [marks.rule(shape.before), name, marks.rule(shape.after), "SPACE", f"arguments_{index}", "SPACE", end]
        rules.append(f"call_{index}: {' '.join(part for part in parts if part)}")
    return rules


def _parameter_rules(index: int, schema: Any, parameters: Parameters, marks: Marks) -> list[str]:
    """`arguments_{index}`: in the schema's order, each at most once; any where there is no schema."""
    properties = (schema or {}).get("properties") or {}
    if not properties and (schema or {}).get("additionalProperties") is not False:
        names = [marks.rule(parameters.opening), r'/[^<>"\n]+/', marks.rule(parameters.middle)]
        value = _text_rule(f"ANY_{index}", [], parameters, marks)
        return [f"arguments_{index}: (SPACE {' '.join(names)} any_{index})*", f"any_{index}: {value[0]}", *value[1:]]
    if unheld := sorted(set(schema) - _HELD):
        raise _refusal(unheld[0], "the parameters of a tool")
    required = schema.get("required") or []
    parts, rules = [], []
    for number, key in enumerate(dict.fromkeys([*properties, *required])):
        one = f"{index}_{number}"
        value = _value_rule(one, key, properties.get(key) or {}, schema, parameters, marks)
        written = marks.rule(f"{parameters.opening}{key}{parameters.middle}")
        rules += [f"parameter_{one}: {written} {value[0]}", *value[1:]]
        parts.append(f"SPACE parameter_{one}" if key in required else f"(SPACE parameter_{one})?")
    return [f"arguments_{index}: {' '.join(parts) or 'SPACE'}", *rules]


def _value_rule(
    one: str, key: str, schema: Any, root: Mapping[str, Any], parameters: Parameters, marks: Marks
) -> list[str]:
    """A rule's part, and the rules that it needs."""
    kinds, schema = kinds_of(schema, root), resolved(schema, root)
    if not kinds and not set(schema) - _NOTES:
        return _text_rule(f"VALUE_{one}", [], parameters, marks)
    if is_text(kinds):
        if unheld := sorted(set(schema) - _HELD_OF_TEXT):
            raise _refusal(unheld[0], f"{key!r}, which is text,")
        return _text_rule(f"VALUE_{one}", _patterns_of(schema), parameters, marks)
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return [
        f"SPACE json_{one} SPACE {marks.rule(parameters.closing)}",
        f"json_{one}: {json_rule({**definitions, **schema})}",
    ]


def _patterns_of(schema: Mapping[str, Any]) -> list[str]:
    """Regular expressions, all of which a text of this schema matches as a whole."""
    patterns = []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        patterns.append("|".join(pattern_of(str(value)) for value in values))
    if "minLength" in schema or "maxLength" in schema:
        patterns.append(f"{_ANY}{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}")
    if (pattern := schema.get("pattern")) is not None:
        if "|" in pattern and "^" in pattern + pattern[-1:].replace("$", "^"):
            raise _refusal("pattern", f"text, by {pattern!r},")
        inside = pattern.removesuffix("$")
        has_end = inside != pattern and (len(inside) - len(inside.rstrip("\\"))) % 2 == 0  # `\$` is a dollar
        inside = (inside if has_end else pattern).removeprefix("^")
        begin, end = ("" if pattern.startswith("^") else f"{_ANY}*"), ("" if has_end else f"{_ANY}*")
        patterns.append(f"{begin}({between_slashes(inside)}){end}")
    return patterns


def _text_rule(name: str, patterns: Sequence[str], parameters: Parameters, marks: Marks) -> list[str]:
    """Text up to the closing mark, which is in it nowhere before."""
    closing, line = pattern_of(parameters.closing), r"\n" if parameters.has_lines else ""
    framed = [f"{line}({pattern}){line}" for pattern in patterns] or [f"{_ANY}*"]
    whole = " & ".join(f"/{frame}{closing}/" for frame in framed)
    rules = [f"{name}: {whole} & ~/{_ANY}*{closing}{_ANY}+/"]
    if (token := marks.token(parameters.closing)) is None:
        return [name, *rules]
    inside = " & ".join(f"/{frame}/" for frame in framed)
    return [f"({name} | {name}_T {token})", *rules, f"{name}_T: {inside} & ~/{_ANY}*{closing}{_ANY}*/"]


def pattern_of(text: str) -> str:
    """A regular expression for `text`, between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def _refusal(keyword: str, of: str) -> InvalidRequest:
    return InvalidRequest(
        f"structured_outputs: {of} cannot be held to {keyword!r}: this model's family writes parameters one by one and "
        f"text without quotes; leave it out, or send strict false",
        param="structured_outputs",
    )
