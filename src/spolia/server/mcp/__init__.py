"""Tools of MCP servers, offered to the model and called for it while it answers. Off unless there is a file of them.

    chat request with "mcp" -> tools of the servers + the client's -> reply
        calls of MCP tools   -> called here, results go to the model -> next round
        calls of the client's, or no calls -> the answer

The MCP SDK is an extra, `spolia[mcp]`, and is imported by the first request that wants it.
"""

from __future__ import annotations

from spolia.server.mcp.chat import McpChat
from spolia.server.mcp.config import McpSettings, read_mcp_file
from spolia.server.mcp.servers import McpServers

__all__ = ["McpChat", "McpServers", "McpSettings", "read_mcp_file"]
