"""A grammar that waits: any text until a call begins, and from there on a call of one of the tools, held to its schema.

    thoughts   bare calls   text   opening mark   call   closing mark   text
    ----------------------------------------------                      ----
    as they come, until a lazy lexeme has found its end                 and so on

An answer that calls no tool meets no constraint but that it is UTF-8. Where a format has no closing mark, nothing but
more calls comes after a call. A bare call is one without marks, which small models make: see the parser.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spolia.generation import ReasoningSplitter, StructuredOutput, form_rule, json_rule
from spolia.models import Tokenizer
from spolia.server.toolcalls.formats import Format
from spolia.server.toolcalls.rules import call_rules
from spolia.server.toolcalls.texts import SPACE, Marks, pattern_of

__all__ = ["bare_beginning", "call_grammar", "form_or_calls_grammar", "one_call_grammar"]

_S = SPACE
_BETWEEN = r"([\[\],; \t\r\n]|```json|```)*"


def bare_beginning(name: str) -> str:
    """A regular expression for how a bare call of this tool begins; one that begins otherwise is none."""
    return rf'{_BETWEEN}\{{{_S}"name"{_S}:{_S}{pattern_of(json.dumps(name, ensure_ascii=False))}'


def one_call_grammar(format_: Format, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> str:
    """Lark, for what follows `Format.beginning` where there must be a call: one of these tools, held to its schema."""
    marks = Marks(tokenizer, format_)
    end = marks.rule(format_.shape.end) if format_.shape is not None and format_.shape.ends_outside else ""
    rules = call_rules(format_, tools, marks, strict_only=False)
    return "\n".join(["%llguidance {}", f"start: call {end}", f"SPACE: /{_S}/", *rules])


def call_grammar(
    format_: Format,
    tools: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    thoughts: ReasoningSplitter | None = None,
) -> str:
    """Lark, as llguidance has it.

    Args:
        tools: those that may be called, as OpenAI describes them. The arguments of strict ones are held to their
            schemas, those of others to be an object.
        thoughts: what tells the reply's thoughts, in which no call begins, from the rest; None where there are none.
    """
    marks = Marks(tokenizer, format_)
    strict = [tool["function"] for tool in tools if tool["function"].get("strict")]
    bare = " | ".join(f"bare_{index}" for index in range(len(strict)))
    rules = [
        "%llguidance {}",
        f"reply: ({bare})* rest",
        "rest: piece* end",
        *_pieces("", "TEXT", marks),
        r"TEXT: /(.|\n)*/",
        f"SPACE: /{_S}/",
        f"SEPARATOR: /{_S}[;,]?{_S}/",
        f"calls: {_calls(marks)}",
        *call_rules(format_, tools, marks, strict_only=True),
        *_start(bare, thoughts, marks),
    ]
    for index, function in enumerate(strict):
        arguments = json_rule(function.get("parameters") or {"type": "object"})
        rules += [
            f'bare_{index}: bare_begun_{index} /{_S},{_S}"{format_.argument_key}"{_S}:{_S}/ {arguments} /{_S}\\}}/',
            f"bare_begun_{index}[lazy]: /{bare_beginning(function['name'])}/",
        ]
    return "\n".join(rules)


def form_or_calls_grammar(
    format_: Format,
    tools: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    form: StructuredOutput,
    thoughts: ReasoningSplitter | None = None,
) -> str:
    """Lark, for a reply that is either of a form, or calls and nothing else; thoughts may come before.

    Args:
        tools, thoughts: as in `call_grammar`.
        form: of any kind but a grammar.
    """
    marks = Marks(tokenizer, format_)
    token = marks.token(format_.opening)
    opening = json.dumps(format_.opening) + (f" | {token}" if token else "")
    # Who writes calls as JSON often leaves the marks away; without them there is one.
    has_bare = format_.shape is None and not format_.in_list
    rules = [
        "%llguidance {}",
        f"answer: form | calls_only{' | call' if has_bare else ''}",
        f"calls_only: opened calls{' (SPACE opened calls)*' if format_.closing else ''}",
        f"form: {form_rule(form)}",
        f"opened: {opening}",
        f"SPACE: /{_S}/",
        f"SEPARATOR: /{_S}[;,]?{_S}/",
        f"calls: {_calls(marks)}",
        *call_rules(format_, tools, marks, strict_only=True),
    ]
    if thoughts is None:
        return "\n".join([*rules, "start: answer"])
    begun = "" if thoughts.is_inside else rf"[ \t\r\n]*{pattern_of(thoughts.opening)}"
    without = "" if thoughts.is_inside else " | answer"
    return "\n".join(
        [
            *rules,
            f"start: thoughts SPACE answer{without}",
            rf"thoughts[lazy]: /{begun}(.|\n)*{pattern_of(thoughts.closing)}/",
        ]
    )


def _pieces(suffix: str, text: str, marks: Marks) -> list[str]:
    """What replies are made of, and what they end with, where `text` is the lexeme of their text."""
    format_ = marks.format
    pieces = [f"{text} {marks.others}"] if marks.others else []
    ends = [text]
    (pieces if format_.closing else ends).append(f"opened{suffix} calls")
    token = marks.token(format_.opening)
    return [
        f"piece{suffix}: {' | '.join(pieces or [text + ' ' + text])}",
        f"end{suffix}: {' | '.join(ends)}",
        f"opened{suffix}: opened_text{suffix}" + (f" | {text} {token}" if token else ""),
        f"opened_text{suffix}[lazy]: {text} {json.dumps(format_.opening)}",
    ]


def _calls(marks: Marks) -> str:
    """From after an opening mark to after its closing one, or to the reply's end."""
    format_ = marks.format
    calls = "SPACE call" if format_.closing else "SPACE call (SEPARATOR call)*"
    if format_.shape is not None and not format_.shape.ends_outside:
        calls = "SPACE call (SPACE call)*"
    if format_.in_list:
        opening = "" if format_.opening.endswith("[") else 'SPACE "["'
        calls = f'{opening} SPACE call (SPACE "," SPACE call)* SPACE "]"'
    if not format_.closing:
        return f"{calls} SPACE"
    token = marks.token(format_.closing)
    return f"{calls} SPACE ({json.dumps(format_.closing)}{' | ' + token if token else ''})"


def _start(bare: str, thoughts: ReasoningSplitter | None, marks: Marks) -> list[str]:
    """What comes before the reply: thoughts up to their end, which may not come."""
    if thoughts is None:
        return ["start: reply"]
    closing = pattern_of(thoughts.closing)
    if thoughts.is_inside:
        return ["start: thoughts reply | TEXT", rf"thoughts[lazy]: /(.|\n)*{closing}/"]
    opening = rf"[ \t\r\n]*{pattern_of(thoughts.opening)}(.|\n)*"
    return [
        f"start: thoughts reply | THOUGHTS | ({bare})+ rest | piece_first rest | end_first",
        f"thoughts[lazy]: /{opening}{closing}/",
        f"THOUGHTS: /{opening}/",
        rf"FIRST: /(.|\n)*/ & ~/{opening}/",
        *_pieces("_first", "FIRST", marks),
    ]
