"""Tokens to text, one at a time: whole characters only, and never past a stop string.

bytes of tokens ->  UTF-8 decoder           ->  stop strings               ->  text that may be shown
                    holds back a character      hold back a tail that may
                    that is not complete        yet become a stop string
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["TextStream", "TextUpdate"]

_new_decoder = codecs.getincrementaldecoder("utf-8")


class TextUpdate(NamedTuple):
    """Text to show now, and the stop string that was found, after which nothing more may be fed."""

    text: str
    stop: str | None


class TextStream:
    """The text of one token stream; what `feed` and `finish` return, joined, is that of all tokens decoded at once.

    Bytes that are no UTF-8 become U+FFFD, as in `bytes.decode(errors="replace")`.

    Args:
        token_bytes: the bytes of a token id; b"" for one that has no text, such as a special token.
        stop: strings that end the text; the one that begins first wins, the longest if several begin there.
        keep_stop: leave the stop string in the text.
    """

    __slots__ = ("_decoder", "_held", "_keep_stop", "_stop", "_token_bytes")

    def __init__(
        self, token_bytes: Callable[[int], bytes], *, stop: tuple[str, ...] = (), keep_stop: bool = False
    ) -> None:
        self._token_bytes = token_bytes
        self._decoder = _new_decoder(errors="replace")
        self._stop = stop
        self._keep_stop = keep_stop
        self._held = ""

    def feed(self, token_id: int, *, may_stop: bool = True) -> TextUpdate:
        """Add a token. With `may_stop` false, a stop string that is complete by now is ordinary text."""
        text = self._decoder.decode(self._token_bytes(token_id))
        if not self._stop:
            return TextUpdate(text, None)
        if not text:
            return TextUpdate("", None)
        text = self._held + text
        if may_stop:
            found = self._find_stop(text)
            if found is not None:
                start, stop = found
                self._held = ""
                return TextUpdate(text[: start + len(stop)] if self._keep_stop else text[:start], stop)
        split = len(text) - self._num_held(text)
        self._held = text[split:]
        return TextUpdate(text[:split], None)

    def finish(self) -> str:
        """The text that was held back, now that no more tokens come."""
        text = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        return text

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        found = [(start, -len(stop), stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if not found:
            return None
        start, _, stop = min(found)
        return start, stop

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(len(text), max(map(len, self._stop)) - 1)
        for length in range(longest, 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
