"""Bodies and replies of the Messages API. Fields that nothing here names are ignored and told, as everywhere."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

__all__ = ["CountRequest", "MessagesReply", "MessagesRequest", "Tool", "ToolChoice", "Usage"]


class Tool(msgspec.Struct):
    """`input_schema` is a JSON schema. Tools of a `type` that Anthropic's servers run themselves are refused."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    cache_control: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """`/v1/messages/count_tokens`: all that is in the prompt.

    Attributes:
        system: text, or text blocks.
        messages: of roles `user`, `assistant` and `system`; content is text, or blocks.
    """

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """`/v1/messages`. `cache_salt` and `seed` are ours."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: str | None = None
    seed: int | None = None


class Usage(msgspec.Struct):
    """Prompt tokens are the sum of three: read from the cache, written up to the last breakpoint, and the others."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessagesReply(msgspec.Struct):
    id: str
    model: str
    content: list[dict[str, Any]]
    usage: Usage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    type: str = "message"
    role: str = "assistant"
    spolia: dict[str, Any] | UnsetType = UNSET
