"""Calls of tools in a model's text, told as they come.

    text deltas -> ToolCallParser (one a reply, by the model family's `Format`) -> Text | CallBegan | CallArguments

The same parser reads whole replies and streams, so both say the same. What is no call stays text, to the letter.
"""

from __future__ import annotations

from spolia.server.toolcalls.formats import FORMATS, Format, format_of
from spolia.server.toolcalls.parser import ToolCallParser
from spolia.server.toolcalls.parts import CallArguments, CallBegan, Part, Text, Thought, ToolCall, gather
from spolia.server.toolcalls.use import ToolUse

__all__ = [
    "FORMATS",
    "CallArguments",
    "CallBegan",
    "Format",
    "Part",
    "Text",
    "Thought",
    "ToolCall",
    "ToolCallParser",
    "ToolUse",
    "format_of",
    "gather",
]
