"""The file of MCP servers, in the form that other clients of theirs have it:

{"mcpServers": {"weather": {"command": "python", "args": ["weather.py"], "env": {"KEY": "..."}, "timeout": 30}}}
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from spolia.errors import InvalidRequest

__all__ = ["McpSettings", "read_mcp_file"]


class McpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How one server is started, and how long a call of one of its tools may take, in seconds."""

    command: str
    args: list[str] = []
    env: dict[str, str] = {}
    timeout: float = 60.0


class _File(msgspec.Struct, forbid_unknown_fields=True):
    mcpServers: dict[str, McpSettings]  # noqa: N815 - as it is in the file


def read_mcp_file(path: Path) -> dict[str, McpSettings]:
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
            f'{path}: {error}; it must be {{"mcpServers": {{NAME: {{"command": ..., "args": [...]}}}}}}', param="mcp"
        ) from None
    for name, settings in servers.items():
        if not settings.command or not 0 < settings.timeout <= 3600:
            raise InvalidRequest(
                f"{path}: server {name!r} needs a command, and a timeout of at most 3600 s", param="mcp"
            )
    return servers
