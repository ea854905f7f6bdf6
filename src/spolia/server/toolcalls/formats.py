"""How model families write the calls that they were trained to make."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spolia.server.toolcalls.shapes import Parameters, Shape

__all__ = ["FORMATS", "Format", "format_of"]

_VALUES = frozenset({"const", "enum", "default", "examples"})  # keys of a schema under which there is none
_ALPHANUMERIC = string.ascii_letters + string.digits


def _openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Nine letters or digits: Mistral's templates refuse any other."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One family's way.

    Attributes:
        opening: what comes before a call, or before a list of them.
        closing: what comes after; "" where nothing does.
        in_list: the calls of one opening are a JSON list.
        name_key, argument_key: what the family calls the tool's name and the arguments.
        is_special: the marks are special tokens, which text leaves out unless asked to show them.
        shape: how a call is written between the marks; None: as a JSON object with its name.
        stop: what the model goes on with, after its calls, where an answer to them is to be put in.
        hints: texts which, all in a chat template, give the family away.
        new_id: makes the id of a call.
    """

    opening: str
    closing: str = ""
    in_list: bool = False
    name_key: str = "name"
    argument_key: str = "arguments"
    is_special: bool = False
    shape: Shape | None = None
    stop: tuple[str, ...] = ()
    hints: tuple[str, ...]
    new_id: Callable[[], str] = _openai_id

    @property
    def beginning(self) -> str:
        """How a reply begins that must call a tool: a call follows."""
        if self.shape is not None:
            return self.opening + ("\n" if self.shape.before.startswith("\n") else "")
        if self.in_list:
            return self.opening.removesuffix("[") + "["
        return self.opening + ("\n" if self.closing else "")

    def call_schema(self, tools: Sequence[Mapping[str, Any]], *, strict_only: bool = False) -> dict[str, Any]:
        """The JSON schema of a call of one of `tools`, which are OpenAI's descriptions.

        Args:
            strict_only: the arguments of those that are not strict are any object.
        """
        return {"anyOf": [self._schema_of(tool["function"], i, strict_only) for i, tool in enumerate(tools)]}

    def _schema_of(self, function: Mapping[str, Any], index: int, strict_only: bool) -> dict[str, Any]:
        parameters = function.get("parameters") if function.get("strict") or not strict_only else None
        parameters = _moved(parameters, f"#/anyOf/{index}/properties/{self.argument_key}")
        return {
            "type": "object",
            "properties": {
                self.name_key: {"const": function["name"]},
                self.argument_key: parameters or {"type": "object"},
            },
            "required": [self.name_key, self.argument_key],
            "additionalProperties": False,
        }


def _moved(schema: Any, place: str) -> Any:
    """A schema that becomes a part of another, whose references are to what is at `place` then."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: part if key in _VALUES else _moved(part, place) for key, part in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = place + reference.removeprefix("#")
    return moved


_TAGGED = Shape(
    before="\n<function=",
    after=">\n",
    end="</function>",
    parameters=Parameters(opening="<parameter=", middle=">", closing="</parameter>", has_lines=True),
)
_GLM = Parameters(opening="<arg_key>", middle="</arg_key>\n<arg_value>", closing="</arg_value>")
_CALLS, _ENDED = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

FORMATS: dict[str, Format] = {
    # Those whose marks contain others', or are as others', come first.
    "glm": Format(
        opening="<tool_call>",
        closing="</tool_call>",
        shape=Shape(after="\n", end="</tool_call>", ends_outside=True, parameters=_GLM),
        hints=("<arg_key>",),
    ),
    "seed": Format(opening="<seed:tool_call>", closing="</seed:tool_call>", shape=_TAGGED, hints=("<seed:tool_call>",)),
    "minimax": Format(
        opening="<minimax:tool_call>",
        closing="</minimax:tool_call>",
        shape=Shape(
            before='\n<invoke name="',
            after='">\n',
            end="</invoke>",
            parameters=Parameters(opening='<parameter name="', middle='">', closing="</parameter>"),
        ),
        hints=("<minimax:tool_call>",),
    ),
    "qwen3_coder": Format(
        opening="<tool_call>", closing="</tool_call>", shape=_TAGGED, hints=("<tool_call>", "<function=")
    ),
    "deepseek": Format(  # V3 and R1
        opening=_CALLS,
        closing=_ENDED,
        is_special=True,
        shape=Shape(before=f"{_CALL}function{_SEP}", after="\n```json\n", end=f"\n```{_END}"),
        hints=(_SEP, "```json"),
    ),
    "deepseek_v31": Format(
        opening=_CALLS,
        closing=_ENDED,
        is_special=True,
        shape=Shape(before=_CALL, after=_SEP, end=_END),
        hints=(_SEP,),
    ),
    "functiongemma": Format(
        opening="<start_function_call>",
        closing="<end_function_call>",
        is_special=True,
        shape=Shape(before="call:", quote="<escape>"),
        stop=("<start_function_response>",),
        hints=("<start_function_call>",),
    ),
    "gemma4": Format(
        opening="<|tool_call>",
        closing="<tool_call|>",
        is_special=True,
        shape=Shape(before="call:", quote='<|"|>'),
        stop=("<|tool_response>",),
        hints=("<|tool_call>",),
    ),
    "kimi": Format(
        opening="<|tool_calls_section_begin|>",
        closing="<|tool_calls_section_end|>",
        is_special=True,
        shape=Shape(
            before="<|tool_call_begin|>",
            after="<|tool_call_argument_begin|>",
            end="<|tool_call_end|>",
            prefix="functions.",
            is_numbered=True,
        ),
        hints=("<|tool_calls_section_begin|>",),
    ),
    # Granite 3; 4 is as Hermes.
    "granite": Format(
        opening="<|tool_call|>", in_list=True, is_special=True, hints=("<|start_of_role|>", "<|tool_call|>")
    ),
    # Qwen 2.5 and 3, Hermes, and most that came after.
    "hermes": Format(opening="<tool_call>", closing="</tool_call>", hints=("<tool_call>",)),
    "mistral": Format(opening="[TOOL_CALLS]", in_list=True, is_special=True, hints=("[TOOL_CALLS]",), new_id=_short_id),
    "phi4": Format(
        opening="<|tool_call|>", closing="<|/tool_call|>", in_list=True, is_special=True, hints=("<|tool_call|>",)
    ),
    "command": Format(
        opening="<|START_ACTION|>",
        closing="<|END_ACTION|>",
        in_list=True,
        name_key="tool_name",
        argument_key="parameters",
        is_special=True,
        hints=("<|START_ACTION|>",),
    ),
    "llama3": Format(opening="<|python_tag|>", argument_key="parameters", is_special=True, hints=("<|python_tag|>",)),
    "functools": Format(opening="functools[", in_list=True, hints=("functools[",)),
}
"""By name, in the order in which templates are searched for them."""


def format_of(template: str) -> Format:
    """The format that a chat template's text shows its model to use; Hermes' where it shows none.

    Llama's newer templates have no mark, and ask for `parameters`.
    """
    for format_ in FORMATS.values():
        if all(hint in template for hint in format_.hints):
            return format_
    return FORMATS["llama3"] if '"parameters"' in template and "ipython" in template else FORMATS["hermes"]
