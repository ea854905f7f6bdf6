"""From Anthropic's blocks to the messages that chat templates take, and where its cache breakpoints are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spolia.errors import InvalidRequest
from spolia.server.anthropic.schema import CountRequest, Tool
from spolia.server.cache_control import ttl_s_of
from spolia.server.prompting import Conversation
from spolia.server.toolcalls import ToolUse

__all__ = ["conversation", "marked_ttl_s", "up_to_last_breakpoint"]

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def conversation(body: CountRequest) -> Conversation:
    """
    Raises:
        InvalidRequest: blocks that are not well-formed, or of a kind that text models cannot take.
    """
    messages: list[dict[str, Any]] = []
    if body.system is not None:
        messages.append({"role": "system", "content": _texts(body.system, "system")})
    for index, message in enumerate(body.messages):
        messages += _messages_of(message, f"messages[{index}]")
    prefill = ""
    if messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        prefill = messages.pop()["content"]  # the reply goes on from there
    return Conversation(messages=messages, tool_use=_tool_use(body), prefill=prefill)


def up_to_last_breakpoint(body: CountRequest) -> Conversation | None:
    """The part of the conversation that ends with the last block marked by `cache_control`; None without a mark."""
    for index in range(len(body.messages) - 1, -1, -1):
        content = body.messages[index].get("content")
        if not isinstance(content, list):
            continue
        for block in range(len(content) - 1, -1, -1):
            if _is_marked(content[block]):
                cut = {**body.messages[index], "content": content[: block + 1]}
                return conversation(_of(body, [*body.messages[:index], cut]))
    blocks = body.system if isinstance(body.system, list) else []
    if any(map(_is_marked, blocks)) or any(tool.cache_control for tool in body.tools or ()):
        return conversation(_of(body, [{"role": "user", "content": ""}]))
    return None


def marked_ttl_s(body: CountRequest) -> float:
    """How long what is marked is to be kept: the longest that any mark says."""
    blocks: list[object] = [*body.system] if isinstance(body.system, list) else []
    for message in body.messages:
        content = message.get("content")
        blocks += content if isinstance(content, list) else []
    marks = [block["cache_control"] for block in blocks if isinstance(block, Mapping) and _is_marked(block)]
    marks += [tool.cache_control for tool in body.tools or () if tool.cache_control]
    return max(map(ttl_s_of, marks), default=0.0)


def _of(body: CountRequest, messages: list[dict[str, Any]]) -> CountRequest:
    return CountRequest(messages=messages, system=body.system, tools=body.tools)


def _is_marked(block: object) -> bool:
    return isinstance(block, Mapping) and bool(block.get("cache_control"))


def _tool_use(body: CountRequest) -> ToolUse | None:
    choice = body.tool_choice
    wanted: str | dict[str, Any] | None = None
    if choice is not None and choice.type == "tool":
        wanted = {"type": "function", "function": {"name": choice.name or ""}}
    elif choice is not None:
        if choice.type not in _CHOICES:
            raise InvalidRequest(
                f"tool_choice.type is {choice.type!r}; it must be auto, any, tool or none", param="tool_choice"
            )
        wanted = _CHOICES[choice.type]
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())]
    return ToolUse.of(tools, wanted, not (choice is not None and choice.disable_parallel_tool_use))


def _tool(tool: Tool, path: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(
            f"{path}.type is {tool.type!r}, a tool that Anthropic's servers run; offer one of your own", param=path
        )
    if not tool.name:
        raise InvalidRequest(f"{path}.name is empty", param=f"{path}.name")
    schema = tool.input_schema if tool.input_schema is not None else {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description or "", "parameters": schema}
    return {"type": "function", "function": function}


def _messages_of(message: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
    """One of Anthropic's messages as ours: results of tools are messages of their own, in the order of the blocks."""
    role, content = message.get("role"), message.get("content")
    if role == "system":  # Claude Code has some among the others
        return [{"role": role, "content": _texts(content, f"{path}.content")}]
    if role not in ("user", "assistant"):
        raise InvalidRequest(
            f'{path}.role is {role!r}; it must be "user", "assistant" or "system"', param=f"{path}.role"
        )
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise InvalidRequest(f"{path}.content must be text or a list of blocks", param=f"{path}.content")
    made: list[dict[str, Any]] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        at = f"{path}.content[{index}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            texts.append(_text(block, "text", at))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(_text(block, "thinking", at))
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(block, at))
        elif kind == "tool_result" and role == "user":
            if texts:
                made.append({"role": role, "content": "\n".join(texts)})
                texts = []
            made.append(_result(block, at))
        elif kind != "redacted_thinking":
            raise InvalidRequest(f"{at}.type is {kind!r}; this model takes no such block from {role}", param=at)
    if texts or calls or not made:
        last: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
        if calls:
            last["tool_calls"] = calls
        if thoughts:
            last["reasoning_content"] = "\n".join(thoughts)
        made.append(last)
    return made


def _call(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(f"{path}.input is {arguments!r}; it must be an object", param=f"{path}.input")
    function = {"name": _text(block, "name", path), "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": _text(block, "id", path), "type": "function", "function": function}


def _result(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    content = block.get("content")
    text = "" if content is None else _texts(content, f"{path}.content")
    return {"role": "tool", "tool_call_id": _text(block, "tool_use_id", path), "content": text}


def _texts(content: object, path: str) -> str:
    """Text, or text blocks joined by line breaks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"{path} must be text or a list of text blocks", param=path)
    texts = []
    for index, block in enumerate(content):
        at = f"{path}[{index}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind != "text":
            raise InvalidRequest(f"{at}.type is {kind!r}; only text is supported here", param=at)
        texts.append(_text(block, "text", at))
    return "\n".join(texts)


def _text(block: Mapping[str, Any], name: str, path: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{path}.{name} is {value!r}; it must be text", param=f"{path}.{name}")
    return value
