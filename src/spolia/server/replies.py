"""What the endpoints answer, as OpenAI's clients and vLLM's read it.

A field that is `UNSET` is left out: what a client did not ask for costs no bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

__all__ = [
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatDelta",
    "ChatLogprobs",
    "ChatMessage",
    "ChatReply",
    "ChatTokenLogprob",
    "CompletionChoice",
    "CompletionLogprobs",
    "CompletionReply",
    "CompletionTokensDetails",
    "FunctionCall",
    "ModelCard",
    "ModelList",
    "ModelMemory",
    "Progress",
    "PromptLogprob",
    "PromptTokensDetails",
    "TokenizeReply",
    "ToolCallDelta",
    "ToolCallReply",
    "TopLogprob",
    "Usage",
]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """`cached_tokens`: prompt tokens whose KV was reused, never those recomputed after a preemption.

    `truncated_tokens`: dropped from a prompt that was too long, as was asked for. `rounded_tokens`: of the cached ones,
    by type, those whose KV had been kept in fewer bits (`kv_offload_dtype`). Both are left out where there are none.
    """

    cached_tokens: int
    truncated_tokens: int | UnsetType = UNSET
    rounded_tokens: Mapping[str, int] | UnsetType = UNSET


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """What speculation drafted: of the request's `prediction`, as OpenAI counts it, and of all sources."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    drafted_tokens: int
    accepted_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """`shifted_tokens`: dropped from full contexts, as was asked for (`context_shift`); left out where none were."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    moved_lines: int | UnsetType = UNSET
    shifted_tokens: int | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @classmethod
    def of(
        cls,
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: int,
        truncated_tokens: int = 0,
        shifted_tokens: int = 0,
        moved_lines: int | None = None,
        rounded_tokens: Mapping[str, int] | None = None,
        drafts: CompletionTokensDetails | None = None,
    ) -> Usage:
        total_tokens = prompt_tokens + completion_tokens
        details = PromptTokensDetails(cached_tokens, truncated_tokens or UNSET, rounded_tokens or UNSET)
        return cls(
            prompt_tokens,
            completion_tokens,
            total_tokens,
            details,
            UNSET if moved_lines is None else moved_lines,
            shifted_tokens or UNSET,
            UNSET if drafts is None else drafts,
        )


class CompletionLogprobs(msgspec.Struct):
    """Columns of equal length, a row a token; `text_offset` counts characters of the choice's text.

    The first token of an echoed prompt has no log-probability: nothing comes before it.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    def __add__(self, later: CompletionLogprobs) -> CompletionLogprobs:
        """Both, one after the other."""
        return CompletionLogprobs(
            self.tokens + later.tokens,
            self.token_logprobs + later.token_logprobs,
            self.top_logprobs + later.top_logprobs,
            self.text_offset + later.text_offset,
        )


class Progress(msgspec.Struct, frozen=True):
    """How far a choice's prompt has come, as llama.cpp has it: of `total` tokens, `processed`; `cache` were reused."""

    total: int
    cache: int
    processed: int
    time_ms: int


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    decoded_token: str


class CompletionChoice(msgspec.Struct):
    """A whole choice, and a chunk of one: `/v1/completions` streams the same shape."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class CompletionReply(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    spolia: dict[str, Any] | UnsetType = UNSET
    timings: dict[str, float] | UnsetType = UNSET
    prompt_progress: Progress | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]


class FunctionCall(msgspec.Struct, omit_defaults=True):
    """`arguments` is JSON text; in a stream, a piece of it."""

    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET


class ToolCallReply(msgspec.Struct):
    id: str
    function: FunctionCall
    type: str = "function"


class ToolCallDelta(msgspec.Struct):
    """`id`, `type` and the name come once, with the call's first delta."""

    index: int
    function: FunctionCall
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(msgspec.Struct):
    """`content` is null where the reply has calls only."""

    content: str | None
    role: str = "assistant"
    tool_calls: list[ToolCallReply] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    mcp_calls: list[dict[str, Any]] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatReply(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    object: str = "chat.completion"
    usage: Usage | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    spolia: dict[str, Any] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    timings: dict[str, float] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    content: str | UnsetType = UNSET
    role: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    mcp_calls: list[dict[str, Any]] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    spolia: dict[str, Any] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    timings: dict[str, float] | UnsetType = UNSET
    prompt_progress: Progress | UnsetType = UNSET


class ModelCard(msgspec.Struct):
    """As OpenAI's clients and Anthropic's read it.

    `meta` is llama.cpp's, `max_model_len` vLLM's; `vocab_size` lets a benchmark make token ids. All are unknown unless
    it is in memory. `status` is "ready", "loading", "unloaded" (its next request loads it) or "failed"; `reason` says
    why not ready. Bytes are those in memory; times are Unix times.
    """

    id: str
    created: int
    display_name: str
    created_at: str
    status: str
    reason: str | None = None
    max_model_len: int | None = None
    max_input_tokens: int | None = None
    max_tokens: int | None = None
    vocab_size: int | None = None
    meta: dict[str, int] | None = None
    weights_bytes: int = 0
    kv_bytes: int = 0
    num_requests: int = 0
    num_queued: int = 0
    is_pinned: bool = False
    expires_at: float | None = None
    object: str = "model"
    type: str = "model"
    owned_by: str = "spolia"
    root: str | None = None
    parent: str | None = None
    lifecycle: str = "active"


class ModelMemory(msgspec.Struct):
    """Bytes. `limit_bytes` is --memory; `available_bytes` what this process may still take."""

    weights_bytes: int
    kv_bytes: int
    available_bytes: int
    limit_bytes: int | None


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    first_id: str | None
    last_id: str | None
    memory: ModelMemory
    has_more: bool = False
    object: str = "list"


class TokenizeReply(msgspec.Struct):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None
