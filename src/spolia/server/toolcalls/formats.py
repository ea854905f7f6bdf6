"""How model families write the calls that they were trained to make."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["FORMATS", "Format", "format_of"]

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
        argument_key: what the family calls the arguments.
        is_special: the marks are special tokens, which text leaves out unless asked to show them.
        hint: text in a chat template that gives the family away.
        new_id: makes the id of a call.
    """

    opening: str
    closing: str = ""
    in_list: bool = False
    argument_key: str = "arguments"
    is_special: bool = False
    hint: str
    new_id: Callable[[], str] = _openai_id

    @property
    def beginning(self) -> str:
        """How a reply begins that must call a tool: a call's JSON object follows."""
        if self.in_list:
            return self.opening.removesuffix("[") + "["
        return self.opening + ("\n" if self.closing else "")

    def call_schema(self, tools: Sequence[Mapping[str, Any]], *, strict_only: bool = False) -> dict[str, Any]:
        """The JSON schema of a call of one of `tools`, which are OpenAI's descriptions.

        Args:
            strict_only: the arguments of those that are not strict are any object.
        """
        return {"anyOf": [self._schema_of(tool["function"], strict_only) for tool in tools]}

    def _schema_of(self, function: Mapping[str, Any], strict_only: bool) -> dict[str, Any]:
        parameters = function.get("parameters") if function.get("strict") or not strict_only else None
        return {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                self.argument_key: parameters or {"type": "object"},
            },
            "required": ["name", self.argument_key],
            "additionalProperties": False,
        }


FORMATS: dict[str, Format] = {
    # Qwen 2.5 and 3, Hermes, and most that came after.
    "hermes": Format(opening="<tool_call>", closing="</tool_call>", hint="<tool_call>"),
    "mistral": Format(opening="[TOOL_CALLS]", in_list=True, is_special=True, hint="[TOOL_CALLS]", new_id=_short_id),
    "phi4": Format(
        opening="<|tool_call|>", closing="<|/tool_call|>", in_list=True, is_special=True, hint="<|tool_call|>"
    ),
    "llama3": Format(opening="<|python_tag|>", argument_key="parameters", is_special=True, hint="<|python_tag|>"),
    "functools": Format(opening="functools[", in_list=True, hint="functools["),
}
"""By name, in the order in which templates are searched for them."""


def format_of(template: str) -> Format:
    """The format that a chat template's text shows its model to use; Hermes' where it shows none.

    Llama's newer templates have no mark, and ask for `parameters`.
    """
    for format_ in FORMATS.values():
        if format_.hint in template:
            return format_
    return FORMATS["llama3"] if '"parameters"' in template and "ipython" in template else FORMATS["hermes"]
