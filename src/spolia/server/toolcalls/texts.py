"""What the grammars of all shapes share: marks, text up to a mark, and which keywords of a schema can be held to."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from spolia.errors import InvalidRequest
from spolia.generation import between_slashes
from spolia.models import Tokenizer
from spolia.server.toolcalls.formats import Format
from spolia.server.toolcalls.shapes import Parameters

__all__ = ["HELD", "HELD_OF_TEXT", "NOTES", "SPACE", "Marks", "pattern_of", "patterns_of", "refusal", "text_rule"]

SPACE = r"[ \t\r\n]{0,32}"
_ANY = r"(.|\n)"
NOTES = {"title", "description", "default", "examples", "$schema", "$defs", "definitions", "deprecated", "type"}
HELD = NOTES | {"properties", "required", "additionalProperties"}  # of a tool's parameters
HELD_OF_TEXT = NOTES | {"enum", "const", "minLength", "maxLength", "pattern"}


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


def patterns_of(schema: Mapping[str, Any]) -> list[str]:
    """Regular expressions, all of which a text of this schema matches as a whole."""
    patterns = []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        patterns.append("|".join(pattern_of(str(value)) for value in values))
    if "minLength" in schema or "maxLength" in schema:
        patterns.append(f"{_ANY}{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}")
    if (pattern := schema.get("pattern")) is not None:
        if "|" in pattern and "^" in pattern + pattern[-1:].replace("$", "^"):
            raise refusal("pattern", f"text, by {pattern!r},")
        inside = pattern.removesuffix("$")
        has_end = inside != pattern and (len(inside) - len(inside.rstrip("\\"))) % 2 == 0  # `\$` is a dollar
        inside = (inside if has_end else pattern).removeprefix("^")
        begin, end = ("" if pattern.startswith("^") else f"{_ANY}*"), ("" if has_end else f"{_ANY}*")
        patterns.append(f"{begin}({between_slashes(inside)}){end}")
    return patterns


def text_rule(name: str, patterns: Sequence[str], parameters: Parameters, marks: Marks) -> list[str]:
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


def refusal(keyword: str, of: str) -> InvalidRequest:
    return InvalidRequest(
        f"structured_outputs: {of} cannot be held to {keyword!r}: this model's family writes parameters one by one and "
        f"text without quotes; leave it out, or send strict false",
        param="structured_outputs",
    )
