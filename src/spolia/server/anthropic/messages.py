"""From Anthropic's blocks to the messages that chat templates take, and where its cache breakpoints are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from spolia.errors import InvalidRequest
from spolia.models import Model
from spolia.server.anthropic.schema import CountRequest, Tool
from spolia.server.cache_control import ttl_s_of
from spolia.server.prompting import Conversation, effort_variables, thinking_variables
from spolia.server.toolcalls import ToolUse

__all__ = ["conversation", "marked_ttl_s", "up_to_last_breakpoint"]

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def conversation(body: CountRequest, model: Model) -> Conversation:
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
    return Conversation(
        messages=messages, tool_use=_tool_use(body), prefill=prefill, template_kwargs=_variables(body, model)
    )


def _variables(body: CountRequest, model: Model) -> dict[str, Any]:
    source = "" if model.chat_template is None else model.chat_template.source
    variables: dict[str, Any] = {}
    if body.output_config is not None and body.output_config.effort is not None:
        variables |= effort_variables(body.output_config.effort, source)
    if body.thinking is not None:
        variables |= thinking_variables(body.thinking.type != "disabled", source)
    return variables


def up_to_last_breakpoint(body: CountRequest, model: Model) -> Conversation | None:
    """The part of the conversation that ends with the last block marked by `cache_control`; None without a mark."""
    if body.cache_control:
        return conversation(body, model)
    for index in range(len(body.messages) - 1, -1, -1):
        content = body.messages[index].get("content")
        if not isinstance(content, list):
            continue
        for block in range(len(content) - 1, -1, -1):
            if _is_marked(content[block]):
                cut = {**body.messages[index], "content": content[: block + 1]}
                return conversation(_of(body, [*body.messages[:index], cut]), model)
    blocks = body.system if isinstance(body.system, list) else []
    if any(map(_is_marked, blocks)) or any(tool.cache_control for tool in body.tools or ()):
        return conversation(_of(body, [{"role": "user", "content": ""}]), model)
    return None


def marked_ttl_s(body: CountRequest) -> float:
    """How long what is marked is to be kept: the longest that any mark says."""
    blocks: list[object] = [*body.system] if isinstance(body.system, list) else []
    for message in body.messages:
        content = message.get("content")
        blocks += content if isinstance(content, list) else []
    marks = [block["cache_control"] for block in blocks if isinstance(block, Mapping) and _is_marked(block)]
    marks += [tool.cache_control for tool in body.tools or () if tool.cache_control]
    marks += [body.cache_control] if body.cache_control else []
    return max(map(ttl_s_of, marks), default=0.0)


def _of(body: CountRequest, messages: list[dict[str, Any]]) -> CountRequest:
    return msgspec.structs.replace(body, messages=messages, tool_choice=None)


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
    function: dict[str, Any] = {"name": tool.name, "description": tool.description or "", "parameters": schema}
    if tool.strict:
        function["strict"] = True
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
        if kind == "text" or (kind in ("document", "search_result") and role == "user"):
            texts.append(_plain(block, at))
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
        if kind not in ("text", "document", "search_result"):
            raise InvalidRequest(f"{at}.type is {kind!r}; only text is supported here", param=at)
        texts.append(_plain(block, at))
    return "\n".join(texts)


def _plain(block: Mapping[str, Any], path: str) -> str:
    """A text block's text; a document's or a search result's below its title and where it is from."""
    if block["type"] == "text":
        return _text(block, "text", path)
    heads = [block.get("title"), block.get("context")]
    if block["type"] == "search_result":
        heads[1] = block.get("source")
        text = _texts(block.get("content"), f"{path}.content")
    else:
        source = block.get("source")
        kind = source.get("type") if isinstance(source, Mapping) else None
        if not isinstance(source, Mapping) or kind not in ("text", "content"):
            at = f"{path}.source"
            raise InvalidRequest(f"{at}.type is {kind!r}; this model takes documents as text only", param=at)
        text = _text(source, "data", f"{path}.source") if kind == "text" else _texts(source.get("content"), path)
    return "\n".join([*(head for head in heads if isinstance(head, str) and head), text])


def _text(block: Mapping[str, Any], name: str, path: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{path}.{name} is {value!r}; it must be text", param=f"{path}.{name}")
    return value
