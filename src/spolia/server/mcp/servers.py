"""MCP servers, processes beside this one or at an address: opened by the first request that wants them, kept open."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from spolia.errors import InvalidRequest, NotReady
from spolia.server.mcp.config import McpSettings

__all__ = ["McpCall", "McpServers", "McpTool"]

_START_S = 30.0
_MAX_RESULT_CHARACTERS = 65_536


@dataclass(frozen=True, slots=True)
class McpTool:
    """A tool under the name that the model is to call it by."""

    server: str
    name: str
    description: str
    schema: dict[str, Any]

    def described(self, name: str) -> dict[str, Any]:
        """As OpenAI describes tools."""
        function = {"name": name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class McpCall:
    """What became of a call: `text` is what the model is told."""

    text: str
    is_error: bool
    duration_s: float


class McpServers:
    """All that the file names. Event loop only.

    Args:
        settings: by name.
    """

    def __init__(self, settings: Mapping[str, McpSettings]) -> None:
        self._servers = {name: _Server(name, each) for name, each in settings.items()}

    @property
    def names(self) -> list[str]:
        return list(self._servers)

    async def tools(self, names: Iterable[str]) -> list[McpTool]:
        """Those of some servers, which are started if they do not run.

        Raises:
            InvalidRequest: there is no such server.
            NotReady: one cannot be started.
        """
        found: list[McpTool] = []
        for name in names:
            if name not in self._servers:
                raise InvalidRequest(f"mcp names {name!r}; there are: {', '.join(self.names) or 'none'}", param="mcp")
            found += await self._servers[name].tools()
        return found

    async def call(self, tool: McpTool, arguments: str) -> McpCall:
        """Call a tool. What goes wrong is told to the model, which may do something about it."""
        begun_s = time.perf_counter()
        try:
            parsed = json.loads(arguments or "{}")
        except ValueError as error:
            return McpCall(f"error: the arguments are no JSON: {error}", True, 0.0)
        if not isinstance(parsed, dict):
            return McpCall("error: the arguments must be a JSON object", True, 0.0)
        text, is_error = await self._servers[tool.server].call(tool.name, parsed)
        if len(text) > _MAX_RESULT_CHARACTERS:
            text = f"{text[:_MAX_RESULT_CHARACTERS]}\n[cut: {len(text)} characters in all]"
        return McpCall(f"error: {text}" if is_error else text, is_error, time.perf_counter() - begun_s)

    async def close(self) -> None:
        """End the processes."""
        await asyncio.gather(*(server.close() for server in self._servers.values()))


class _Server:
    """One of them. Its session is opened and closed by one task, as the SDK wants it."""

    def __init__(self, name: str, settings: McpSettings) -> None:
        self._name = name
        self._settings = settings
        self._starting = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._session: Any = None
        self._tools: list[McpTool] = []
        self._closing = asyncio.Event()

    async def tools(self) -> list[McpTool]:
        async with self._starting:
            if self._session is None:
                await self._start()
        return self._tools

    async def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """Text, and whether it tells of an error."""
        session, timeout_s = self._session, self._settings.timeout
        if session is None:
            return f"the server {self._name} has ended", True
        try:
            async with asyncio.timeout(timeout_s):
                result = await session.call_tool(name, arguments)
        except TimeoutError:
            return f"{name} took longer than {timeout_s:g} s", True
        except Exception as error:  # the SDK's, the transport's, or the server's own: all the same to the model
            if self._settings.url is not None:  # it may know the session no more: the next request opens another
                self._closing.set()
            if self._settings.url is not None or (self._task is not None and self._task.done()):
                self._session = None
            return f"{name} failed: {type(error).__name__}: {error}", True
        return _text_of(result), bool(result.is_error)

    async def close(self) -> None:
        self._closing.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=10)

    async def _start(self) -> None:
        self._closing.clear()
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(ready))
        try:
            async with asyncio.timeout(_START_S):
                await ready
        except Exception as error:
            self._task.cancel()
            why = f"it did not answer within {_START_S:g} s" if isinstance(error, TimeoutError) else str(error)
            raise NotReady(f"the MCP server {self._name} cannot be used: {why}") from None

    async def _run(self, ready: asyncio.Future[None]) -> None:
        try:
            from mcp import ClientSession

            async with _transport(self._settings) as (read, write), ClientSession(read, write) as session:
                await session.initialize()
                listed = await session.list_tools()
                self._tools = [
                    McpTool(self._name, tool.name, tool.description or "", dict(tool.input_schema))
                    for tool in listed.tools
                ]
                self._session = session
                ready.set_result(None)
                await self._closing.wait()
        except BaseException as error:
            _fail(ready, error)
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            if self._task is asyncio.current_task():  # and not one that was opened since
                self._session = None


@contextlib.asynccontextmanager
async def _transport(settings: McpSettings) -> AsyncIterator[Any]:
    """The two streams that a session reads and writes."""
    if settings.url is None:
        from mcp import StdioServerParameters, stdio_client

        parameters = StdioServerParameters(
            command=settings.command or "", args=list(settings.args), env=dict(settings.env) or None
        )
        async with stdio_client(parameters) as streams:
            yield streams
    elif settings.type == "sse":
        from mcp.client.sse import sse_client

        async with sse_client(settings.url, headers=dict(settings.headers)) as streams:
            yield streams
    else:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        # A call ends when its own time is over; what waits between calls may wait as long as it likes.
        timeout = httpx2.Timeout(_START_S, read=None)
        async with (
            httpx2.AsyncClient(headers=dict(settings.headers), timeout=timeout) as http,
            streamable_http_client(settings.url, http_client=http) as streams,
        ):
            yield streams


def _fail(ready: asyncio.Future[None], error: BaseException) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):
        ready.set_exception(NotReady(f"{type(error).__name__}: {error}"))


def _text_of(result: Any) -> str:
    """The text of a result; what is no text is named."""
    parts = [getattr(block, "text", None) or f"[{block.type}]" for block in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)
