"""The opt-in canonicaliser: what changes from request to request goes from the head of the prompt to its end.

Some clients put a date, an id or a checksum of the request into the system message, and nothing after it is reused.
With `"canonicalise": true`, the lines of system messages that are known to be of that kind are moved, as they are, to
the end of the last user message. The prompt changes by that, and so may the answer: `usage` says how many were moved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["canonical"]

_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_PER_REQUEST = re.compile(
    r"(?:^|\b)(?:"
    r"cch=[0-9a-f]+"
    r"|x-[\w-]*(?:billing|request|trace|session)[\w-]*\s*:"
    r"|(?:request|trace|session|conversation|run)[ _-]?id\s*[:=]"
    r"|(?:current|today'?s?|local)\s+(?:date|time|date and time|datetime)\b[^.\n]*[:=]"
    r"|the (?:current )?(?:date|time) is\b"
    rf"|{_UUID}"
    r")",
    re.IGNORECASE,
)


def canonical(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """The messages with such lines moved, and how many there were; without a user message, nothing is moved."""
    changed = [dict(message) for message in messages]
    users = [index for index, message in enumerate(changed) if message.get("role") == "user"]
    if not users or not isinstance(changed[users[-1]].get("content"), str):
        return changed, 0
    moved: list[str] = []
    for message in changed:
        content = message.get("content")
        if message.get("role") in ("system", "developer") and isinstance(content, str):
            lines = content.splitlines()
            found = [line for line in lines if _PER_REQUEST.search(line)]
            if found and len(found) < len(lines):  # a message that is nothing else stays
                message["content"] = "\n".join(line for line in lines if line not in found)
                moved += found
    if moved:
        changed[users[-1]]["content"] += "\n\n" + "\n".join(moved)
    return changed, len(moved)
