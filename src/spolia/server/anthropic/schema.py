"""Bodies and replies of the Messages API. Fields that nothing here names are ignored and told, as everywhere."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from spolia.errors import InvalidRequest
from spolia.server.schema import refuse_unless

__all__ = ["CacheCreation", "CountRequest", "MessagesReply", "MessagesRequest", "Tool", "ToolChoice", "Usage"]


class Tool(msgspec.Struct):
    """`input_schema` is a JSON schema, to which calls are held if `strict`.

    Tools of a `type` that Anthropic's servers run themselves are refused.
    """

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    cache_control: dict[str, Any] | None = None
    strict: bool = False


class ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """`type` is "enabled", "adaptive" or "disabled"; `budget_tokens` is the most that is thought."""

    type: str
    budget_tokens: int | None = None


class OutputConfig(msgspec.Struct):
    """`effort` reaches templates that mind it; `format` is `{"type": "json_schema", "schema": ...}`."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """`/v1/messages/count_tokens`: all that is in the prompt.

    Attributes:
        cache_control: marks the end of the conversation, as if its last block had it.
        container, mcp_servers: refused: nothing runs here.
        system: text, or text blocks.
        messages: of roles `user`, `assistant` and `system`; content is text, or blocks.
    """

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    container: Any = None
    mcp_servers: Any = None

    def check(self) -> None:
        """
        Raises:
            InvalidRequest: a field that is not supported and would change the answer, or is not well-formed.
        """
        refuse_unless(self, {"container": (), "mcp_servers": ([],)})
        if self.thinking is not None and self.thinking.type not in ("enabled", "adaptive", "disabled"):
            raise InvalidRequest(
                f"thinking.type is {self.thinking.type!r}; it must be enabled, adaptive or disabled", param="thinking"
            )

    def form(self) -> dict[str, Any] | None:
        """The form that the answer must have; None: any.

        Raises:
            InvalidRequest: it is not well-formed.
        """
        match self.output_format or (self.output_config.format if self.output_config is not None else None):
            case None:
                return None
            case {"type": "json_schema", "schema": dict() as schema}:
                return {"json": schema}
            case other:
                raise InvalidRequest(
                    f'output_config.format is {other!r}; it must be {{"type": "json_schema", "schema": {{...}}}}',
                    param="output_config",
                )


class MessagesRequest(CountRequest, kw_only=True):
    """`/v1/messages`. `cache_salt`, `resumable`, `seed` and `truncate` are ours."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: str | None = None
    resumable: bool | None = None
    seed: int | None = None
    truncate: str | None = None


class CacheCreation(msgspec.Struct):
    """What was written, by how long it was asked to be kept."""

    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class Usage(msgspec.Struct):
    """Prompt tokens are the sum of three: read from the cache, written up to the last breakpoint, and the others."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation: CacheCreation | UnsetType = UNSET


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
