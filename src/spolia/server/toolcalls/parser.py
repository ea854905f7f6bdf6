"""From a reply's text to its parts, while it comes.

    text -- opening mark -->  gap  -- { -->  call  -- } -->  gap  -- closing mark, or what is no call -->  text

A reply that begins with JSON, fenced or not, is tried as a call too, since small models forget the marks: it is one if
it names a tool that was offered, and text otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from spolia.server.toolcalls.formats import Format
from spolia.server.toolcalls.parts import CallArguments, CallBegan, Part, Text
from spolia.server.toolcalls.scanner import CallScanner
from spolia.server.toolcalls.strict import bare_beginning
from spolia.server.toolcalls.written import WrittenScanner

__all__ = ["ToolCallParser"]

_FENCES = ("```json", "```")
_ARGUMENTS_MARK = "[ARGS]"  # Mistral's, between a name and its arguments
_BETWEEN_CALLS = frozenset("[],; \t\r\n")
_IN_NAMES = frozenset("_-.")


class ToolCallParser:
    """One reply's. What it holds back is at most a mark's beginning, spaces before one, or a call without a name yet.

    Args:
        tool_names: those that were offered.
        schemas: their parameters, by name, for families that write values without their types.
        denied: of those, what may not be called for now: such a call is text.
        strict: of those, what is held to its schema, which without marks it is only where it begins as `bare_beginning`
            has it: another call without marks is text.
        begun_with: text that the prompt ended with and that belongs to the reply.
        one_call: the client wants one call at most; what comes after the first is dropped.
    """

    def __init__(
        self,
        format_: Format,
        tool_names: Collection[str],
        *,
        schemas: Mapping[str, Any] = MappingProxyType({}),
        denied: Collection[str] = (),
        strict: Collection[str] = (),
        one_call: bool = False,
        begun_with: str = "",
    ) -> None:
        self._format = format_
        self._tool_names = tool_names
        self._schemas = schemas
        self._denied = denied
        self._strict = strict
        self._one_call = one_call
        self._text = begun_with  # not yet understood
        self._held = ""  # a bare call so far, with what is around it: text, if it turns out to be none
        self._scanner: CallScanner | WrittenScanner | None = None
        self._is_announced = False
        self._in_marks = False
        self._num_in_marks = 0
        self._may_be_bare = True  # nothing but calls has come
        self._is_held = True  # and none of a tool that is not strict: no grammar looks beyond those
        self._parts: list[Part] = []
        self.num_calls = 0
        while self._advance():
            pass

    def feed(self, text: str) -> list[Part]:
        """What `text` adds, with what was held back."""
        self._text += text
        while self._advance():
            pass
        return self._take_parts()

    def finish(self) -> list[Part]:
        """What was held back, now that nothing more comes."""
        if self._scanner is not None and self._is_announced:
            self._scanner.finish()
            self._tell_arguments(self._scanner)
        else:
            rest = self._opened_with + self._held + self._text
            if not self.num_calls or not _is_noise(rest):
                self._emit(rest)
        self._text = self._held = ""
        return self._take_parts()

    @property
    def _opened_with(self) -> str:
        """The opening mark, while nothing has come of it."""
        return self._format.opening if self._in_marks and not self._num_in_marks else ""

    def _take_parts(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _advance(self) -> bool:
        """Understand a little more of the text; whether to go on."""
        if not self._text:
            return False
        if self._scanner is not None:
            return self._advance_call(self._scanner)
        if self._in_marks:
            return self._advance_gap()
        if self._may_be_bare:
            return self._advance_bare_gap()
        return self._advance_text()

    def _advance_text(self) -> bool:
        opening = self._format.opening
        before, mark, after = self._text.partition(opening)
        if mark:
            self._may_be_bare = False
            self._emit(before.rstrip())
            self._text = after
            self._in_marks = True
            self._num_in_marks = 0
            return True
        shown = before[: len(before) - _num_held(before, opening)].rstrip()
        self._emit(shown)
        self._text = self._text[len(shown) :]
        return False

    def _advance_gap(self) -> bool:
        """Between an opening mark and a call, or between calls."""
        text = self._text.lstrip("[],; \t\r\n" if self._num_in_marks else "[ \t\r\n")
        closing, again = self._format.closing, self._format.opening
        if not text:
            return False
        if text.startswith("{"):
            self._begin(CallScanner(), text)
            return True
        for mark in (closing, again):
            if mark and text.startswith(mark):
                self._text = text[len(mark) :]
                self._in_marks = mark == again
                self._num_in_marks = 0
                return True
            if mark and mark.startswith(text):
                return False
        if self._format.shape is not None:
            self._begin(WrittenScanner(self._format.shape, self._schemas), text)
            return True
        name, rest = _split_name(text)
        if name and not rest:
            return False  # more of it may come
        if name:
            rest = rest.lstrip()
            if rest.startswith((_ARGUMENTS_MARK, "{")):
                self._begin(CallScanner(name), rest.removeprefix(_ARGUMENTS_MARK))
                return True
            if _ARGUMENTS_MARK.startswith(rest):
                return False
        self._emit(self._opened_with)  # not a call after all
        self._in_marks = False
        return True

    def _advance_bare_gap(self) -> bool:
        """At the reply's beginning, or after a bare call: more JSON, or text."""
        text = self._text
        if text[0] in _BETWEEN_CALLS:
            self._held += text[0]
            self._text = text[1:]
            return True
        for fence in _FENCES:
            if text.startswith(fence):
                self._held += fence
                self._text = text[len(fence) :]
                return True
            if fence.startswith(text):
                return False
        if text.startswith("{"):
            self._begin(CallScanner(), text)
            return True
        self._may_be_bare = False
        self._text = ("" if self.num_calls and _is_noise(self._held) else self._held) + text
        self._held = ""
        return True

    def _begin(self, scanner: CallScanner | WrittenScanner, text: str) -> None:
        """Read a call from `text`, the rest of what is not understood; what is passed over is kept for now."""
        if not self._num_in_marks:
            self._held += self._text[: len(self._text) - len(text)]
        self._scanner = scanner
        self._is_announced = False
        self._text = text

    def _advance_call(self, scanner: CallScanner | WrittenScanner) -> bool:
        num_read = scanner.feed(self._text)
        read, self._text = self._text[:num_read], scanner.unread + self._text[num_read:]
        if not self._is_announced:
            self._held += read
            if scanner.name is not None and self._may_call(scanner.name):
                self._announce(scanner.name, scanner.id)
            elif scanner.name is not None or scanner.is_done or scanner.is_broken:
                self._give_up()
                return True
        if self._is_announced:
            self._tell_arguments(scanner)
        if scanner.is_done or scanner.is_broken:
            self._scanner = None
        return bool(self._text)

    def _may_call(self, name: str) -> bool:
        if name in self._denied:
            return False
        if self._in_marks:
            return True
        if name not in self._strict:
            self._is_held = False
            return name in self._tool_names
        return self._is_held and re.match(bare_beginning(name), self._held) is not None

    def _tell_arguments(self, scanner: CallScanner | WrittenScanner) -> None:
        if arguments := scanner.take_arguments():
            self._emit_call(CallArguments(self.num_calls - 1, arguments))

    def _announce(self, name: str, id_: str | None) -> None:
        self._is_announced = True
        self._held = ""
        self.num_calls += 1
        self._num_in_marks += 1
        self._emit_call(CallBegan(self.num_calls - 1, id_ or self._format.new_id(), name))

    def _give_up(self) -> None:
        """What looked like a call is text."""
        self._emit(self._opened_with + self._held)
        self._held = ""
        self._scanner = None
        self._in_marks = self._may_be_bare = False

    def _emit(self, text: str) -> None:
        if text and not (self._one_call and self.num_calls):
            self._parts.append(Text(text))

    def _emit_call(self, part: CallBegan | CallArguments) -> None:
        if not (self._one_call and self.num_calls > 1):
            self._parts.append(part)


def _num_held(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


def _is_noise(text: str) -> bool:
    """Whether there is nothing in it but what stands between calls."""
    for fence in _FENCES:
        text = text.replace(fence, "")
    return all(char in _BETWEEN_CALLS for char in text)


def _split_name(text: str) -> tuple[str, str]:
    length = next((i for i, char in enumerate(text) if not (char.isalnum() or char in _IN_NAMES)), len(text))
    return text[:length], text[length:]
