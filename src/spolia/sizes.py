"""Sizes as people write them. Standard library only: every room may import this module."""

from __future__ import annotations

import re

__all__ = ["parse_bytes"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]i?|)b?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Bytes of "2GiB", "512m", "1.5 GB" or "65536".

    Raises:
        ValueError: anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write it like 2GiB, 512MiB or 65536")
    return int(float(match["number"]) * _UNITS[match["unit"].lower()])
