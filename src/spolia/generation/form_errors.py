"""What is wrong with a form that cannot be compiled, and where in the client's own text: a schema has its own way."""

from __future__ import annotations

import re

__all__ = ["between_slashes", "explain_gbnf", "explain_lark", "explain_regex"]

_UNSLASHED = re.compile(r"\\.|[/\n]", re.DOTALL)
_REGEX_ERROR = re.compile(r"regex parse error:\n    .*\n(?P<caret> *)\^+\nerror: (?P<reason>.*)")
_IN_LARK = re.compile(r"at (?P<line>\d+)\(\d+\): (?P<reason>.*)")
_GBNF_RULE = re.compile(r"^[ \t]*([A-Za-z][\w-]*)[ \t]*::=", re.MULTILINE)
_CONVERTED = "Failed to convert the grammar from GBNF to Lark: "
_MISSING = re.compile(r"Rule '(?P<name>[^']+)' not found")
_SHOWN = 30  # characters of the text from the place on


def between_slashes(pattern: str) -> str:
    """A regular expression as it is written in a Lark grammar, without the slashes around it."""
    told = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return _UNSLASHED.sub(lambda part: told.get(part[0], part[0]), pattern)


def explain_regex(pattern: str, error: str) -> str:
    """The character, counted from 1, and what is there."""
    found = _REGEX_ERROR.search(error)
    if found is None:
        return _said(error)
    place = len(found["caret"]) - 4  # in the pattern as it stands between slashes
    num_more = 0  # characters that stand there only
    for part in _UNSLASHED.finditer(pattern):
        if part.start() + num_more >= place:
            break
        num_more += len(part[0]) == 1
    index = min(max(place - num_more, 0), len(pattern))
    rest = pattern[index : index + _SHOWN]
    return f"at character {index + 1}, {rest!r}: {found['reason']}"


def explain_lark(error: str) -> str:
    """llguidance says line(column) by itself, and shows the lines."""
    return _said(error)


def explain_gbnf(grammar: str, error: str) -> str:
    """The line of the client's grammar; the converter has its own, and what was converted has other lines."""
    missing = _MISSING.search(error)
    if missing is not None:
        named = re.search(rf"(?<![\w-]){re.escape(missing['name'])}(?![\w-])", grammar)
        line = 1 if named is None else 1 + grammar.count("\n", 0, named.start())
        return f"at line {line}: rule {missing['name']!r} is not there"
    found = _IN_LARK.search(error)
    if found is None:
        return _said(error).removeprefix(_CONVERTED)
    reason = regex["reason"] if (regex := _REGEX_ERROR.search(error)) else found["reason"]
    lark = re.search(rf"^ *{found['line']} \| (\w+)", error, re.MULTILINE)
    for rule in _GBNF_RULE.finditer(grammar):
        if lark is not None and _lark_name(rule[1]) == lark[1].lower():
            return f"at line {1 + grammar.count(chr(10), 0, rule.start(1))}, in rule {rule[1]!r}: {reason}"
    return reason


def _lark_name(name: str) -> str:
    return "start" if name == "root" else name.replace("-", "_").lower()


def _said(error: str) -> str:
    """Without what tells of the parser."""
    said = error.partition("<state>")[0].strip()
    return "it allows no text at all" if said == "NoExtensionBias" else said
