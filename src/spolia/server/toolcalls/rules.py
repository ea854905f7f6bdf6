"""The grammar of one call, as a family writes it: what it allows is what the family's scanner reads, and no more."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spolia.errors import InvalidRequest
from spolia.generation import json_rule
from spolia.server.toolcalls.bare_rules import bare_rules
from spolia.server.toolcalls.formats import Format
from spolia.server.toolcalls.shapes import Parameters, Shape, is_text, kinds_of, resolved
from spolia.server.toolcalls.texts import HELD, HELD_OF_TEXT, NOTES, Marks, patterns_of, refusal, text_rule

__all__ = ["call_rules"]


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
        if shape.parameters is None and shape.quote is None:
            rules.append(f"arguments_{index}: {json_rule(schema or {'type': 'object'})}")
        else:
            try:
                rules += _unquoted_rules(index, schema, shape, marks)
            except InvalidRequest:
                if is_strict:
                    raise
                rules += _unquoted_rules(index, None, shape, marks)
        number = ' ":" /[0-9]{1,3}/' if shape.is_numbered else ""
        name = json.dumps(shape.prefix + function["name"], ensure_ascii=False) + number
        end = "" if shape.ends_outside else marks.rule(shape.end)
        parts = [marks.rule(shape.before), name, marks.rule(shape.after), "SPACE", f"arguments_{index}", "SPACE", end]
        rules.append(f"call_{index}: {' '.join(part for part in parts if part)}")
    return rules


def _unquoted_rules(index: int, schema: Any, shape: Shape, marks: Marks) -> list[str]:
    """`arguments_{index}`, in a shape that is not JSON."""
    try:
        if shape.parameters is not None:
            return _parameter_rules(index, schema, shape.parameters, marks)
        return bare_rules(f"arguments_{index}", schema, shape.quote or "", marks)
    except InvalidRequest:
        raise
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"structured_outputs: the parameters of a tool are no JSON schema, or nest too deeply: {error}",
            param="structured_outputs",
        ) from None


def _parameter_rules(index: int, schema: Any, parameters: Parameters, marks: Marks) -> list[str]:
    """`arguments_{index}`: in the schema's order, each at most once; any where there is no schema."""
    properties = (schema or {}).get("properties") or {}
    if not properties and (schema or {}).get("additionalProperties") is not False:
        names = [marks.rule(parameters.opening), r'/[^<>"\n]+/', marks.rule(parameters.middle)]
        value = text_rule(f"ANY_{index}", [], parameters, marks)
        return [f"arguments_{index}: (SPACE {' '.join(names)} any_{index})*", f"any_{index}: {value[0]}", *value[1:]]
    if unheld := sorted(set(schema) - HELD):
        raise refusal(unheld[0], "the parameters of a tool")
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
    if not kinds and not set(schema) - NOTES:
        return text_rule(f"VALUE_{one}", [], parameters, marks)
    if is_text(kinds):
        if unheld := sorted(set(schema) - HELD_OF_TEXT):
            raise refusal(unheld[0], f"{key!r}, which is text,")
        return text_rule(f"VALUE_{one}", patterns_of(schema), parameters, marks)
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return [
        f"SPACE json_{one} SPACE {marks.rule(parameters.closing)}",
        f"json_{one}: {json_rule({**definitions, **schema})}",
    ]
