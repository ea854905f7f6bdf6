"""One call of a `Shape`, as it comes: its name once its arguments begin, and of these what is certain."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum, auto
from itertools import accumulate
from typing import Any

from spolia.server.toolcalls.bare import BareScanner
from spolia.server.toolcalls.scanner import CallScanner
from spolia.server.toolcalls.shapes import Parameters, Shape, is_text, kinds_of, value_of

__all__ = ["WrittenScanner"]

_IN_NAMES = frozenset("_-.:/")


class _Literal:
    """A text that must come; white space may stand before it, before its marks, and where it has some."""

    def __init__(self, text: str) -> None:
        words = text.split()
        self._text = "".join(words)
        self._begins = {0, *accumulate(map(len, words))}
        self._num = 0
        self.read = ""  # what was taken, white space included

    @property
    def is_done(self) -> bool:
        return self._num == len(self._text)

    def take(self, char: str) -> bool:
        """Whether it may go on like this."""
        wanted = self._text[self._num]
        if char.isspace() and (self._num in self._begins or wanted in "<`"):
            self.read += char
            return True
        if char != wanted:
            return False
        self._num += 1
        self.read += char
        return True


class _At(Enum):
    BEFORE = auto()
    NAME = auto()
    AFTER = auto()
    ARGUMENTS = auto()  # an object
    END = auto()  # after it
    PARAMETER = auto()  # before one, or before the end
    KEY = auto()
    MIDDLE = auto()
    VALUE = auto()
    DONE = auto()
    BROKEN = auto()


class WrittenScanner:
    """As `CallScanner`.

    Args:
        schemas: the parameters of tools, by name.

    Attributes:
        name: of the tool, once it is certain that this is a call.
        id: of the call, where the model writes one.
        unread: at the end, what was taken and is not of the call.
    """

    def __init__(self, shape: Shape, schemas: Mapping[str, Any]) -> None:
        self._shape = shape
        self._schemas = schemas
        self._at = _At.BEFORE
        self._literal = _Literal(shape.before)
        self._ending = _Literal(shape.end)
        self._written = ""  # the name as it stands there
        self._object = CallScanner("") if shape.quote is None else BareScanner(shape.quote)
        self._key = ""
        self._value = _Value("", frozenset(), has_lines=False)
        self._arguments: list[str] = []
        self._num_parameters = 0
        self._opens = self._ends = False
        self._since = ""  # what came after the last value
        self.name: str | None = None
        self.id: str | None = None
        self.unread = ""
        self._pass_done_literals()

    @property
    def is_done(self) -> bool:
        return self._at is _At.DONE

    @property
    def is_broken(self) -> bool:
        return self._at is _At.BROKEN

    def take_arguments(self) -> str:
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def feed(self, text: str) -> int:
        """Read on until the call's end; how many characters were read, `unread` included."""
        for count, char in enumerate(text):
            if self.is_done or self.is_broken:
                return count
            self._take(char)
            self._pass_done_literals()
        return len(text)

    def finish(self) -> None:
        """The reply ends here: what was held back of a value is all that came of it."""
        if self._at is _At.VALUE:
            self._arguments.append(self._value.cut())
        elif self._at is _At.ARGUMENTS:
            self._object.finish()
            self._arguments.append(self._object.take_arguments())

    def _take(self, char: str) -> None:
        match self._at:
            case _At.BEFORE | _At.AFTER | _At.MIDDLE:
                self._since += char
                if not self._literal.take(char):
                    self._break()
            case _At.NAME:
                self._take_in_name(char)
            case _At.ARGUMENTS:
                self._take_in_object(char)
            case _At.END:
                if not self._ending.take(char):
                    self._finish_with(self._ending.read + char)
            case _At.PARAMETER:
                self._take_between(char)
            case _At.KEY:
                self._since += char
                if char == self._parameters.middle[0]:
                    self._literal, self._at = _Literal(self._parameters.middle), _At.MIDDLE
                    self._literal.take(char)
                else:
                    self._key += char
            case _At.VALUE:
                self._arguments += self._value.take(char)
                if self._value.is_done:
                    self._at = _At.PARAMETER
                    self._begin_parameter()

    @property
    def _parameters(self) -> Parameters:
        assert self._shape.parameters is not None
        return self._shape.parameters

    def _pass_done_literals(self) -> None:
        """Go on from texts that have come, or that are empty."""
        if self._at is _At.BEFORE and self._literal.is_done:
            self._at = _At.NAME
        elif self._at is _At.AFTER and self._literal.is_done:
            self._at = _At.ARGUMENTS if self._shape.parameters is None else _At.PARAMETER
            if self._at is _At.PARAMETER:
                self._begin_parameter()
        elif self._at is _At.MIDDLE and self._literal.is_done:
            self._begin_value()
        elif self._at is _At.END and self._ending.is_done:
            self._finish_with(self._ending.read if self._shape.ends_outside else "")

    def _take_in_name(self, char: str) -> None:
        if char.isalnum() or char in _IN_NAMES:
            self._written += char
        elif not self._written:
            self._at = _At.NAME if char.isspace() else _At.BROKEN
        else:
            self._literal, self._at = _Literal(self._shape.after), _At.AFTER
            self._pass_done_literals()
            self._take(char)

    def _announce(self) -> None:
        if self.name is None:
            self.name = self._shape.name_in(self._written)
            self.id = self._written if self._shape.is_numbered else None

    def _take_in_object(self, char: str) -> None:
        if self.name is None:
            if char.isspace():
                return
            if char != "{":
                self._at = _At.BROKEN
                return
            self._announce()
        self._object.feed(char)
        self._arguments.append(self._object.take_arguments())
        if self._object.is_done:
            self._at = _At.END

    def _begin_parameter(self) -> None:
        self._literal, self._ending = _Literal(self._parameters.opening), _Literal(self._shape.end)
        self._opens = self._ends = True  # both may still come
        self._since = ""

    def _take_between(self, char: str) -> None:
        self._since += char
        self._opens = self._opens and self._literal.take(char)
        self._ends = self._ends and self._ending.take(char)
        if self._opens and self._literal.is_done:
            self._announce()
            self._key, self._at = "", _At.KEY
        elif self._ends and self._ending.is_done:
            self._announce()
            self._close()
            self._finish_with(self._ending.read if self._shape.ends_outside else "")
        elif not (self._opens or self._ends):
            self._break()

    def _break(self) -> None:
        """This is no call, or if its name was told, its arguments end with the last value."""
        self._at = _At.BROKEN
        if self.name is not None:
            self.unread = self._since
            self._close()

    def _begin_value(self) -> None:
        key = self._key.strip()
        schema = self._schemas.get(self.name or "") or {}
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        one = properties.get(key) if isinstance(properties, Mapping) else None
        kinds = kinds_of(one, schema)
        self._value = _Value(self._parameters.closing, kinds, has_lines=self._parameters.has_lines)
        comma = ", " if self._num_parameters else "{"
        self._num_parameters += 1
        self._arguments.append(f"{comma}{json.dumps(key, ensure_ascii=False)}: " + ('"' if is_text(kinds) else ""))
        self._at = _At.VALUE

    def _close(self) -> None:
        """The arguments' object ends, if parameters have made one."""
        self._arguments.append("}" if self._num_parameters else "{}")

    def _finish_with(self, unread: str) -> None:
        self._at = _At.DONE
        self.unread = unread


class _Value:
    """A value up to its closing text. Text is told as it comes; what must be looked at whole, at its end."""

    def __init__(self, closing: str, kinds: frozenset[str], *, has_lines: bool) -> None:
        self._closing = closing
        self._kinds = kinds
        self._has_lines = has_lines
        self._is_text = is_text(kinds)
        self._held = ""
        self._is_new = True
        self.is_done = False

    def take(self, char: str) -> list[str]:
        """What is certain now."""
        if self._is_new:
            self._is_new = False
            if self._has_lines and char == "\n":
                return []
        self._held += char
        if self._held.endswith(self._closing) and not self._is_quoted():
            self.is_done = True
            value = self._held.removesuffix(self._closing)
            value = value.removesuffix("\n") if self._has_lines else value
            return [_escaped(value) + '"'] if self._is_text else [value_of(value, self._kinds)]
        if not self._is_text:
            return []
        num_held = next(n for n in range(min(len(self._held), len(self._closing)), -1, -1) if self._may_close(n))
        shown, self._held = self._held[: len(self._held) - num_held], self._held[len(self._held) - num_held :]
        return [_escaped(shown)]

    def _is_quoted(self) -> bool:
        """Whether the end stands within a string of JSON."""
        if self._is_text or not self._kinds or self._held.lstrip()[:1] not in ("{", "[", '"'):
            return False
        is_inside = is_escaped = False
        for char in self._held:
            is_inside ^= char == '"' and not is_escaped
            is_escaped = char == "\\" and not is_escaped
        return is_inside

    def cut(self) -> str:
        """What is left, of a value whose end never came."""
        return _escaped(self._held) if self._is_text else self._held

    def _may_close(self, num: int) -> bool:
        """Whether what ends the value may have begun so many characters ago."""
        end = self._held[len(self._held) - num :]
        return self._closing.startswith(end) or (self._has_lines and f"\n{self._closing}".startswith(end))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
