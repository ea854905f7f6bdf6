"""The file of MCP servers, in the form that other clients of theirs have it:

{"mcpServers": {"weather": {"command": "python", "args": ["weather.py"], "env": {"KEY": "..."}, "timeout": 30},
                "tickets": {"url": "https://tickets.example/mcp", "headers": {"Authorization": "Bearer ${TOKEN}"}}}}

`${NAME}` in a header is the variable of this process's environment, so that no secret has to stand in the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from spolia.errors import InvalidRequest

__all__ = ["McpSettings", "read_mcp_file"]

_VARIABLE = re.compile(r"\$\{(\w+)\}")


class McpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How one server is started, or where it is, and how long a call of one of its tools may take, in seconds.

    Attributes:
        command: of a process that is spoken to over its standard input and output, with `args` and `env`.
        url: of one that runs already.
        type: how it is spoken to there; "http" is MCP's streamable HTTP, "sse" what came before it.
        headers: go with every request to it.
    """

    command: str | None = None
    args: list[str] = []
    env: dict[str, str] = {}
    url: str | None = None
    type: Literal["stdio", "http", "streamable-http", "sse"] | None = None
    headers: dict[str, str] = {}
    timeout: float = 60.0


class _File(msgspec.Struct, forbid_unknown_fields=True):
    mcpServers: dict[str, McpSettings]  # noqa: N815 - as it is in the file


def read_mcp_file(path: Path, environment: Mapping[str, str] = os.environ) -> dict[str, McpSettings]:
    """
    Raises:
        InvalidRequest: it cannot be read, or is of another form; says where.
    """
    try:
        servers = msgspec.json.decode(path.read_bytes(), type=_File).mcpServers
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}", param="mcp") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(
            f'{path}: {error}; it must be {{"mcpServers": {{NAME: {{"command": ..., "args": [...]}} or '
            '{"url": ..., "headers": {...}}}}',
            param="mcp",
        ) from None
    checked: dict[str, McpSettings] = {}
    for name, settings in servers.items():
        try:
            checked[name] = _checked(settings, environment)
        except ValueError as error:
            raise InvalidRequest(f"{path}: server {name!r} {error}", param="mcp") from None
    return checked


def _checked(settings: McpSettings, environment: Mapping[str, str]) -> McpSettings:
    """With what its headers take from the environment.

    Raises:
        ValueError: says what is wrong with it.
    """
    if bool(settings.command) == bool(settings.url):
        raise ValueError("needs either a command or a url")
    if not 0 < settings.timeout <= 3600:
        raise ValueError(f"has a timeout of {settings.timeout:g}; it must be positive and at most 3600 s")
    if settings.url and not settings.url.startswith(("http://", "https://")):
        raise ValueError(f"has the url {settings.url!r}; it must begin with http:// or https://")
    if settings.type is not None and (settings.type == "stdio") == bool(settings.url):
        raise ValueError(f"has the type {settings.type!r}; with a command it is stdio, with a url http or sse")

    def value_of(found: re.Match[str]) -> str:
        if found[1] not in environment:
            raise ValueError(f"has a header with ${{{found[1]}}}, which is not in the environment; set it")
        return environment[found[1]]

    headers = {name: _VARIABLE.sub(value_of, text) for name, text in settings.headers.items()}
    return msgspec.structs.replace(settings, headers=headers)
