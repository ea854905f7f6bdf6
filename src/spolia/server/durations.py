"""How long something is to stay, as people and Ollama's clients write it."""

from __future__ import annotations

import math
import re

__all__ = ["parse_duration"]

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")


def parse_duration(value: str | float) -> float:
    """Seconds of "5m", "1h30m", "300" or 300; infinity for anything negative, which means for ever.

    Raises:
        ValueError: it is none of these.
    """
    text = str(value).strip()
    unsigned = text.removeprefix("-")
    try:
        seconds = float(unsigned)
    except ValueError:
        parts = _PART.findall(unsigned)
        if not parts or "".join(number + unit for number, unit in parts) != unsigned:
            raise ValueError(
                f"{value!r} is no duration; write it like 5m, 1h30m, 300 (seconds), or -1 for ever"
            ) from None
        seconds = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    if math.isnan(seconds):
        raise ValueError(f"{value!r} is no duration")
    return math.inf if text.startswith("-") and seconds else seconds
