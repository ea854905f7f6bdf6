"""What a reply is made of: text, and calls that begin and grow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["CallArguments", "CallBegan", "Part", "Text", "Thought", "ToolCall", "gather"]


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """What the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegan:
    """Call number `index` of the reply, from 0; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of call `index`'s arguments."""

    index: int
    text: str


Part: TypeAlias = Text | Thought | CallBegan | CallArguments


@dataclass(slots=True)
class ToolCall:
    """A whole call; `arguments` is JSON text as the model wrote it, "{}" where it wrote none."""

    id: str
    name: str
    arguments: str


def gather(parts: Iterable[Part]) -> tuple[str, list[ToolCall]]:
    """The text and the calls of a whole reply."""
    texts: list[str] = []
    calls: list[ToolCall] = []
    for part in parts:
        match part:
            case Text(text):
                texts.append(text)
            case CallBegan(_, id_, name):
                calls.append(ToolCall(id_, name, ""))
            case CallArguments(index, text):
                calls[index].arguments += text
    for call in calls:
        call.arguments = call.arguments or "{}"
    return "".join(texts), calls
