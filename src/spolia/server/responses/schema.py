"""The request, and what becomes of its items. Replies are plain objects: their shapes vary by item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from spolia.engine import SamplingParams
from spolia.errors import InvalidRequest
from spolia.server.toolcalls import ToolUse
from spolia.server.tools import check_tools

__all__ = ["ResponsesRequest", "messages_of", "tool_use_of"]

_TEXTS = ("input_text", "output_text", "text")


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """`/v1/responses`. `cache_salt` and `seed` are ours."""

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
    cache_salt: str | None = None

    def sampling_params(self) -> SamplingParams:
        """
        Raises:
            InvalidRequest: a value that is not allowed, named as the client spelt it.
        """
        if self.background:
            raise InvalidRequest("`background` is not supported; leave it out", param="background")
        given: dict[str, Any] = {
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "structured_outputs": self._form(),
        }
        try:
            return SamplingParams(**{name: value for name, value in given.items() if value is not None})
        except InvalidRequest as error:
            spelt = {"max_tokens": "max_output_tokens", "structured_outputs": "text.format"}
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
            raise InvalidRequest(
                f"tools[{index}].type is {kind!r}, which runs on OpenAI's servers; only functions are supported",
                param=f"tools[{index}].type",
            )
        function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
        tools.append({"type": "function", "function": function})
    check_tools(tools)
    choice = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return ToolUse.of(tools, choice, body.parallel_tool_calls)


def messages_of(items: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Input items as chat messages; calls that follow each other are one message's.

    Raises:
        InvalidRequest: an item that is not well-formed, or of a kind that text models cannot take.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        path = f"input[{index}]"
        kind = item.get("type", "message")
        if kind == "message":
            messages.append(_message(item, path))
        elif kind == "function_call":
            function = {"name": _text(item, "name", path), "arguments": _text(item, "arguments", path)}
            call = {"id": _text(item, "call_id", path), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            said = item.get("output")
            content = said if isinstance(said, str) else _joined(said, f"{path}.output")
            messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", path), "content": content})
        elif kind != "reasoning":
            raise InvalidRequest(f"{path}.type is {kind!r}; this model takes no such item", param=f"{path}.type")
    return messages


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
        texts.append(_text(part, "text", f"{path}[{index}]"))
    return "\n".join(texts)


def _text(item: Mapping[str, Any], name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{path}.{name} is {value!r}; it must be text", param=f"{path}.{name}")
    return value
