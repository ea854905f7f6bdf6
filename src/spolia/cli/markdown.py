"""Markdown for a terminal while it is being written: bold, code, headings, lists and fenced code, and no more.

Text goes out as soon as it cannot mean something else: a `*` waits for what follows it, and nothing waits longer.
"""

from __future__ import annotations

__all__ = ["MarkdownStream"]

_BOLD, _CODE, _HEADING, _FENCE, _PLAIN = "\x1b[1m", "\x1b[36m", "\x1b[1;4m", "\x1b[2m", "\x1b[0m"


class MarkdownStream:
    """Feed it text; it returns what to print.

        style: bold and code inside a line   line: heading, or between fences: until the line ends, or the fence

    A style that the model forgets to close ends with its line.
    """

    def __init__(self) -> None:
        self._held = ""  # what may still be the beginning of a mark
        self._is_line_start = True
        self._is_bold = self._is_code = self._is_heading = self._is_fenced = False

    def feed(self, text: str) -> str:
        text, self._held = self._held + text, ""
        shown: list[str] = []
        at = 0
        while at < len(text):
            rest = text[at:]
            if self._may_be_mark(rest):
                self._held = rest
                break
            taken, said = self._next(rest)
            shown.append(said)
            at += taken
        return "".join(shown)

    def finish(self) -> str:
        """What was held back, and the end of all styles."""
        held, self._held = self._held, ""
        styled = self._is_bold or self._is_code or self._is_heading or self._is_fenced
        self._is_bold = self._is_code = self._is_heading = self._is_fenced = False
        return held + (_PLAIN if styled else "")

    def _may_be_mark(self, rest: str) -> bool:
        """Whether `rest` is the beginning of a mark, and too short to say which."""
        if self._is_line_start and (rest in ("`", "``") or (set(rest) == {"#"} and len(rest) < 7)):
            return True
        return not self._is_fenced and rest == "*"

    def _next(self, rest: str) -> tuple[int, str]:
        """How much of `rest` is taken, and what is shown for it."""
        if rest[0] == "\n":
            return 1, self._end_line()
        if self._is_line_start:
            self._is_line_start = False
            if rest.startswith("```"):
                self._is_fenced = not self._is_fenced
                return 3, (_FENCE + "```" if self._is_fenced else "```" + _PLAIN)
            num_marks = len(rest) - len(rest.lstrip("#"))
            if not self._is_fenced and 1 <= num_marks <= 6 and rest[num_marks : num_marks + 1] == " ":
                self._is_heading = True
                return num_marks + 1, _HEADING
        if self._is_fenced:
            return 1, rest[0]
        if rest.startswith("**") and not self._is_code:
            self._is_bold = not self._is_bold
            return 2, self._style()
        if rest[0] == "`":
            self._is_code = not self._is_code
            return 1, self._style()
        return 1, rest[0]

    def _style(self) -> str:
        return _PLAIN + (_HEADING if self._is_heading else "") + (_BOLD if self._is_bold else "") + (
            _CODE if self._is_code else ""
        )  # fmt: skip

    def _end_line(self) -> str:
        styled = self._is_bold or self._is_code or self._is_heading
        self._is_line_start = True
        self._is_bold = self._is_code = self._is_heading = False
        return (_PLAIN if styled else "") + "\n"
