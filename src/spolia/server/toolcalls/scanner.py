"""One call's JSON, character by character: its name, and its arguments before their end is seen.

    {"name": "weather", "arguments": {"city": "Rome"}}
             ---------               ----------------- streamed as it comes
             told once it is closed

Keys come in any order, others are passed over, and an object under `function` is looked into. Arguments that are a
string are taken to be the JSON text itself, as OpenAI writes them.
"""

from __future__ import annotations

import json
from enum import Enum, auto

__all__ = ["CallScanner"]

_NAME_KEYS = frozenset({"name", "function", "tool_name"})
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_OPENERS, _CLOSERS = frozenset("{["), frozenset("}]")


class _At(Enum):
    OBJECT = auto()  # before {
    KEY = auto()  # before a key, a comma or }
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()  # before a value
    IN_STRING = auto()
    IN_CONTAINER = auto()
    IN_SCALAR = auto()
    END = auto()
    BROKEN = auto()  # no JSON


class CallScanner:
    """
    Args:
        name: where it is known beforehand, and only the arguments' object is to be read.

    Attributes:
        name: of the tool, once it is known.
        id: of the call; JSON has none.
        unread: nothing: it is known at once what is of the call.
    """

    id: str | None = None
    unread = ""

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self._at = _At.OBJECT if name is None else _At.VALUE
        self._nesting = 0  # objects entered
        self._key = "" if name is None else "arguments"
        self._pending: list[str] = []  # of the key or value that is being read
        self._depth = 0
        self._in_inner_string = self._is_escaped = False
        self._arguments: list[str] = []

    @property
    def is_done(self) -> bool:
        return self._at is _At.END

    @property
    def is_broken(self) -> bool:
        return self._at is _At.BROKEN

    def finish(self) -> None:
        """The reply ends here; nothing was held back."""

    def take_arguments(self) -> str:
        """The arguments' text that has come since the last time; "" until the name is known."""
        if self.name is None:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def feed(self, text: str) -> int:
        """Read on until the call's end; how many characters were the call's."""
        for count, char in enumerate(text):
            if self._at is _At.END or self._at is _At.BROKEN:
                return count
            self._take(char)
        return len(text)

    def _take(self, char: str) -> None:
        match self._at:
            case _At.IN_STRING | _At.IN_KEY:
                self._take_in_string(char)
            case _At.IN_CONTAINER:
                self._take_in_container(char)
            case _At.IN_SCALAR:
                self._take_in_scalar(char)
            case _ if char.isspace():
                pass
            case _At.OBJECT:
                self._at = _At.KEY if char == "{" else _At.BROKEN
                self._nesting += 1
            case _At.KEY:
                self._take_before_key(char)
            case _At.COLON:
                self._at = _At.VALUE if char == ":" else _At.BROKEN
            case _At.VALUE:
                self._take_before_value(char)

    def _take_before_key(self, char: str) -> None:
        if char == '"':
            self._pending = [char]
            self._at = _At.IN_KEY
        elif char == "}":
            self._nesting -= 1
            self._at = _At.KEY if self._nesting else _At.END
        elif char != ",":
            self._at = _At.BROKEN

    def _take_before_value(self, char: str) -> None:
        if char == "{" and self._key == "function":
            self._nesting += 1
            self._at = _At.KEY
            return
        self._pending = [char]
        if char == '"':
            self._at = _At.IN_STRING
        elif char in _OPENERS:
            self._at = _At.IN_CONTAINER
            self._depth = 1
            self._note_argument(char)
        elif char in _CLOSERS or char in ",:":
            self._at = _At.BROKEN
        else:
            self._at = _At.IN_SCALAR

    def _take_in_string(self, char: str) -> None:
        self._pending.append(char)
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            text = _unquoted("".join(self._pending))
            if self._at is _At.IN_KEY:
                self._key = text
                self._at = _At.COLON
                return
            if self._key in _NAME_KEYS and text:
                self.name = text
            elif self._key in _ARGUMENT_KEYS:
                self._arguments.append(text)
            self._end_value()

    def _take_in_container(self, char: str) -> None:
        self._note_argument(char)
        if self._in_inner_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_inner_string = False
        elif char == '"':
            self._in_inner_string = True
        elif char in _OPENERS:
            self._depth += 1
        elif char in _CLOSERS:
            self._depth -= 1
            if not self._depth:
                self._end_value()

    def _take_in_scalar(self, char: str) -> None:
        """null, true, a number: nothing that a call needs."""
        if char in ",}" or char.isspace():
            self._end_value()
            if not char.isspace() and self._at is _At.KEY:
                self._take_before_key(char)

    def _note_argument(self, char: str) -> None:
        if self._key in _ARGUMENT_KEYS:
            self._arguments.append(char)

    def _end_value(self) -> None:
        self._at = _At.KEY if self._nesting else _At.END


def _unquoted(text: str) -> str:
    try:
        return str(json.loads(text, strict=False))
    except ValueError:  # an escape that JSON has not: the model meant the characters
        return text[1:-1]
