"""The request, and what becomes of its items. Replies are plain objects: their shapes vary by item."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from spolia.engine import SamplingParams
from spolia.errors import InvalidRequest
from spolia.server.toolcalls import ToolUse
from spolia.server.tools import check_tools

__all__ = ["ResponsesRequest", "messages_of", "tool_use_of", "with_ids"]

_TEXTS = ("input_text", "output_text", "text", "refusal")


class Reasoning(msgspec.Struct):
    """`effort` reaches templates that mind it. Thoughts are shown whole, so there is no summary."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """`/v1/responses`. `cache_salt`, `resumable` and `seed` are ours.

    Attributes:
        truncation: "auto" drops the oldest messages of a conversation that is too long; "disabled" refuses it.
    """

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stream: bool | None = None
    store: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    truncation: str | None = None
    reasoning: Reasoning | None = None
    resumable: bool | None = None
    cache_salt: str | None = None

    def check(self) -> None:
        """
        Raises:
            InvalidRequest: a field that is not supported and would change the answer.
        """
        instead = {
            "conversation": "go on with previous_response_id",
            "prompt": "send its text as input or instructions",
        }
        for name, remedy in instead.items():
            if getattr(self, name):
                raise InvalidRequest(f"`{name}` is not supported here; {remedy}", param=name)
        if self.background and self.store is False:
            raise InvalidRequest(
                "background is true and store false: nobody could come for the response; leave store out",
                param="background",
            )
        if self.top_logprobs and not self.wants_logprobs:
            raise InvalidRequest(
                'top_logprobs needs "include": ["message.output_text.logprobs"], which tells them', param="top_logprobs"
            )
        if self.truncation not in (None, "auto", "disabled"):
            raise InvalidRequest(f"truncation is {self.truncation!r}; it must be auto or disabled", param="truncation")

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())

    def sampling_params(self) -> SamplingParams:
        """
        Raises:
            InvalidRequest: a value that is not allowed, named as the client spelt it.
        """
        given: dict[str, Any] = {
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "logprobs": (self.top_logprobs or 0) if self.wants_logprobs else None,
            "structured_outputs": self._form(),
        }
        try:
            return SamplingParams(**{name: value for name, value in given.items() if value is not None})
        except InvalidRequest as error:
            spelt = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs", "structured_outputs": "text.format"}
            raise InvalidRequest(str(error), param=spelt.get(error.param or "", error.param)) from None

    def _form(self) -> dict[str, Any] | None:
        match (self.text or {}).get("format"):
            case None | {"type": "text"}:
                return None
            case {"type": "json_object"}:
                return {"json_object": True}
            case {"type": "json_schema", "schema": dict() as schema}:
                return {"json": schema}
            case other:
                raise InvalidRequest(
                    f"text.format is {other!r}; it must be text, json_object or json_schema", param="text"
                )


def tool_use_of(body: ResponsesRequest) -> ToolUse | None:
    """
    Raises:
        InvalidRequest: tools that OpenAI's servers run, or that are not well-formed.
    """
    tools = []
    for index, tool in enumerate(body.tools or ()):
        if (kind := tool.get("type")) != "function":
            why = (
                "whose input is free text, and models here are taught JSON; give a function with a text parameter"
                if kind == "custom"
                else "which runs on OpenAI's servers; only functions are supported"
            )
            raise InvalidRequest(f"tools[{index}].type is {kind!r}, {why}", param=f"tools[{index}].type")
        function = {
            key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None
        }
        tools.append({"type": "function", "function": function})
    check_tools(tools)
    choice = body.tool_choice
    match choice:  # as chat completions have it
        case {"type": "function", **named}:
            choice = {"type": "function", "function": named}
        case {"type": "allowed_tools", "tools": [*allowed], **others}:
            tools_named = [{"function": each} for each in allowed]
            choice = {"type": "allowed_tools", "allowed_tools": {**others, "tools": tools_named}}
    return ToolUse.of(tools, choice, body.parallel_tool_calls)


def with_ids(items: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Input as items that can be listed and referred to: each has an id, and its text is in parts."""
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    shown = []
    for given in items:
        item: dict[str, Any] = {"type": "message", "id": f"msg_{uuid.uuid4().hex}"}
        item |= {name: value for name, value in given.items() if value is not None}
        if isinstance(text := item.get("content"), str):
            kind = "output_text" if item.get("role") == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": text}]
        shown.append(item)
    return shown


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Input items as chat messages; calls that follow each other are one message's.

    Raises:
        InvalidRequest: an item that is not well-formed, or of a kind that text models cannot take.
    """
    messages: list[dict[str, Any]] = []
    thought = ""  # of the reply that comes next
    for index, item in enumerate(items):
        path = f"input[{index}]"
        kind = item["type"]
        if kind == "message":
            messages.append(_message(item, path))
            if thought and messages[-1]["role"] == "assistant":
                messages[-1]["reasoning_content"] = thought
            thought = ""
        elif kind == "function_call":
            function = {"name": _text(item, "name", path), "arguments": _text(item, "arguments", path)}
            call = {"id": _text(item, "call_id", path), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
                if thought:
                    messages[-1]["reasoning_content"] = thought
                thought = ""
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            said = item.get("output")
            content = said if isinstance(said, str) else _joined(said, f"{path}.output")
            messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", path), "content": content})
        elif kind == "reasoning":
            thought = _thought(item, path)
        else:
            raise InvalidRequest(f"{path}.type is {kind!r}; this model takes no such item", param=f"{path}.type")
    return messages


def _thought(item: Mapping[str, Any], path: str) -> str:
    """The thoughts of a reply, as they were told; what is encrypted is OpenAI's."""
    parts = item.get("content") or []
    if not isinstance(parts, list):
        raise InvalidRequest(f"{path}.content must be a list of parts", param=f"{path}.content")
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "reasoning_text"]
    return "".join(text for text in texts if isinstance(text, str))


def _message(item: Mapping[str, Any], path: str) -> dict[str, Any]:
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system", "developer"):
        raise InvalidRequest(f"{path}.role is {role!r}; it must be user, assistant, system or developer", param=path)
    text = content if isinstance(content, str) else _joined(content, f"{path}.content")
    return {"role": "system" if role == "developer" else role, "content": text}


def _joined(parts: object, path: str) -> str:
    if not isinstance(parts, list):
        raise InvalidRequest(f"{path} must be text or a list of text parts", param=path)
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXTS:
            raise InvalidRequest(f"{path}[{index}].type is {kind!r}; this model takes text parts only", param=path)
        texts.append(_text(part, "refusal" if kind == "refusal" else "text", f"{path}[{index}]"))
    return "\n".join(texts)


def _text(item: Mapping[str, Any], name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{path}.{name} is {value!r}; it must be text", param=f"{path}.{name}")
    return value
