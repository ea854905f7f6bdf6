"""An object as Gemma writes it, to JSON as it comes: bare keys, and strings between marks.

{city:<escape>Rome<escape>,days:5}      {"city": "Rome", "days": 5}
"""

from __future__ import annotations

import json

from spolia.server.toolcalls.shapes import value_of

__all__ = ["BareScanner"]


class BareScanner:
    """Reads the arguments of a call, as `CallScanner` does.

    Args:
        quote: what stands before and after a string.
    """

    is_broken = False

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._open: list[str] = []  # brackets that wait for their ends
        self._held = ""  # a key or a value that is being read, or what may be the end of a string
        self._in_text = False
        self._at_key = False
        self._told: list[str] = []
        self.is_done = False

    def take_arguments(self) -> str:
        text = "".join(self._told)
        self._told.clear()
        return text

    def feed(self, text: str) -> int:
        for count, char in enumerate(text):
            if self.is_done:
                return count
            if self._in_text:
                self._take_in_text(char)
            else:
                self._take(char)
        return len(text)

    def finish(self) -> None:
        """What was held back is all that came."""
        self._told.append(json.dumps(self._held, ensure_ascii=False)[1:-1] if self._in_text else self._held)

    def _take_in_text(self, char: str) -> None:
        self._held += char
        if self._held.endswith(self._quote):
            self._tell(self._held.removesuffix(self._quote), '"')
            self._held, self._in_text = "", False
            return
        num_held = next(n for n in range(len(self._quote), -1, -1) if self._held.endswith(self._quote[:n]))
        shown = len(self._held) - num_held
        self._tell(self._held[:shown], "")
        self._held = self._held[shown:]

    def _tell(self, text: str, end: str) -> None:
        self._told.append(json.dumps(text, ensure_ascii=False)[1:-1] + end)

    def _take(self, char: str) -> None:
        held = self._held.strip()
        if self._at_key and char == ":":
            self._told.append(json.dumps(held.removeprefix(self._quote).removesuffix(self._quote).strip('"')) + ": ")
            self._held, self._at_key = "", False
        elif not self._at_key and held[:1] == '"' and not _is_whole(held):
            self._held += char  # a string as JSON has it
        elif not held and char in "{[":
            self._told.append(char)
            self._open.append(char)
            self._at_key = char == "{"
            self._held = ""
        elif char in ",}]" and self._open:
            if held:
                self._told.append(value_of(held, frozenset()))
            self._held = ""
            if char == ",":
                self._told.append(", ")
            else:
                self._told.append("}" if self._open.pop() == "{" else "]")
                self.is_done = not self._open
            self._at_key = bool(self._open) and self._open[-1] == "{"
        else:
            self._held += char
            if not self._at_key and self._held.strip() == self._quote:
                self._told.append('"')
                self._held, self._in_text = "", True


def _is_whole(text: str) -> bool:
    if not text.endswith('"'):  # it is asked at each character
        return False
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
