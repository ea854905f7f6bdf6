"""What comes through a pipe is text in UTF-8, whatever the locale, or is refused in words."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import TextIO

from spolia.errors import InvalidRequest

__all__ = ["read_all", "read_line"]

_SHOWN_BYTES = 20


def read_all() -> str:
    """Standard input to its end.

    Raises:
        InvalidRequest: it is not UTF-8.
    """
    return _in_words(_stdin().read)


def read_line() -> str:
    """Its next line with what ends it; "" at the end.

    Raises:
        InvalidRequest: it is not UTF-8.
    """
    return _in_words(_stdin().readline)


def _stdin() -> TextIO:
    # In the C locale it would take any byte, as half of a character. Once something was read it cannot be changed.
    if isinstance(sys.stdin, io.TextIOWrapper) and (sys.stdin.encoding, sys.stdin.errors) != ("utf-8", "strict"):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    return sys.stdin


def _in_words(read: Callable[[], str]) -> str:
    try:
        return read()
    except UnicodeDecodeError as error:
        before = error.object[max(0, error.start - _SHOWN_BYTES) : error.start].decode(errors="ignore")
        raise InvalidRequest(
            f"standard input is not UTF-8: byte 0x{error.object[error.start]:02x} after {before!r}; "
            "convert it, for example with `iconv -f LATIN1 -t UTF-8`"
        ) from None
