"""Tools as OpenAI's clients describe them, checked before the chat template sees them."""

from __future__ import annotations

from typing import Any

from spolia.errors import InvalidRequest

__all__ = ["check_tool_calls", "check_tools"]


def check_tools(tools: list[dict[str, Any]] | None) -> None:
    """
    Raises:
        InvalidRequest: one is not a function with a name; `param` is the field at fault.
    """
    for index, tool in enumerate(tools or ()):
        path = f"tools[{index}]"
        if (kind := tool.get("type", "function")) != "function":
            raise InvalidRequest(f"{path}.type is {kind!r}; only functions are supported", param=f"{path}.type")
        function = _function_of(tool, path)
        for name, kinds in ("description", (str, type(None))), ("parameters", (dict, type(None))):
            value = function.get(name)
            if not isinstance(value, kinds):
                wanted = "text" if name == "description" else "a JSON schema"
                at = f"{path}.function.{name}"
                raise InvalidRequest(f"{at} is {value!r}; it must be {wanted}", param=at)


def check_tool_calls(calls: object, path: str) -> None:
    """
    Args:
        calls: what a message has under `tool_calls`; None is right.
        path: of the list, as in `messages[1].tool_calls`.

    Raises:
        InvalidRequest: not a list of calls of functions; `param` is the field at fault.
    """
    if calls is None:
        return
    if not isinstance(calls, list):
        raise InvalidRequest(f"{path} is {calls!r}; it must be a list", param=path)
    for index, call in enumerate(calls):
        at = f"{path}[{index}]"
        arguments = _function_of(call, at).get("arguments")
        if not isinstance(arguments, str | dict | None):
            at = f"{at}.function.arguments"
            raise InvalidRequest(f"{at} is {arguments!r}; it must be the text of a JSON object", param=at)


def _function_of(holder: object, path: str) -> dict[str, Any]:
    """The `function` part, which has a name."""
    if not isinstance(holder, dict):
        raise InvalidRequest(f"{path} is {holder!r}; it must be an object", param=path)
    function = holder.get("function")
    if not isinstance(function, dict):
        at = f"{path}.function"
        raise InvalidRequest(f"{at} is {function!r}; it must be an object with a name", param=at)
    if not isinstance(name := function.get("name"), str) or not name:
        at = f"{path}.function.name"
        raise InvalidRequest(f"{at} is {name!r}; it must be text", param=at)
    return function
