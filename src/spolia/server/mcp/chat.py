"""A chat reply in rounds: what the model calls of MCP servers is called, and it goes on with the results."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from spolia.errors import InvalidRequest, SpoliaError
from spolia.server.access import current_caller
from spolia.server.config import ServerConfig
from spolia.server.errors import Forbidden, error_body
from spolia.server.mcp.servers import McpServers, McpTool
from spolia.server.prompting import Conversation, prompt_options
from spolia.server.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    ChatReply,
    FunctionCall,
    ToolCallDelta,
    ToolCallReply,
    Usage,
)
from spolia.server.schema import ChatRequest
from spolia.server.served import ServedModel
from spolia.server.sse import DONE, EventStream, watch_for_disconnect
from spolia.server.toolcalls import Part, Text, Thought, ToolCall, ToolUse, gather
from spolia.server.turn import Turn

__all__ = ["McpChat"]

_MAX_ROUNDS = 8
_MOST_ROUNDS = 32


class McpChat:
    """Answers the chat requests that ask for tools of MCP servers.

    Args:
        servers: None: this server has none, and such requests are refused.
    """

    def __init__(self, servers: McpServers | None, config: ServerConfig) -> None:
        self._servers = servers
        self._config = config

    async def respond(self, request: Request, body: ChatRequest, served: ServedModel) -> Response:
        """
        Raises:
            InvalidRequest: there are no MCP servers, or not these; or a field that goes with one answer only.
            NotReady: one of the servers cannot be started.
        """
        servers = self._servers
        if servers is None:
            raise InvalidRequest("this server has no MCP servers; start it with --mcp FILE", param="mcp")
        account = current_caller().account
        if account is not None and not account.settings.mcp:
            raise Forbidden(f"tools of MCP servers are for keys with mcp = true; {account.settings.name!r} has not")
        for name in ("session", "resumable", "logprobs", "prompt_logprobs", "continue_final_message"):
            if getattr(body, name):
                raise InvalidRequest(f"{name} does not go with mcp; leave out one of them", param=name)
        if body.num_candidates != 1:
            raise InvalidRequest(f"n is {body.n}; with mcp there is one answer", param="n")
        max_rounds = _MAX_ROUNDS if body.mcp_max_rounds is None else body.mcp_max_rounds
        if not 1 <= max_rounds <= _MOST_ROUNDS:
            raise InvalidRequest(
                f"mcp_max_rounds is {max_rounds}; allowed are 1 to {_MOST_ROUNDS}", param="mcp_max_rounds"
            )
        options = prompt_options(body, served.model)
        tools = await servers.tools(body.mcp if isinstance(body.mcp, list) else servers.names)
        rounds = _Rounds(body, served, servers, tools, max_rounds, self._config.max_waiting, options["template_kwargs"])
        first = await rounds.begin()
        headers = {"x-request-id": first.answer.id}
        if body.stream:
            return EventStream(rounds.events(first), on_disconnect=rounds.abort, headers=headers)
        with watch_for_disconnect(request.receive, rounds.abort):
            reply = await rounds.whole(first)
        return Response(msgspec.json.encode(reply), headers=headers, media_type="application/json")


@dataclass(slots=True)
class _Round:
    """One turn of the model: what it said, and what it wants called."""

    texts: str = ""
    thoughts: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class _Rounds:
    def __init__(
        self,
        body: ChatRequest,
        served: ServedModel,
        servers: McpServers,
        tools: list[McpTool],
        max_rounds: int,
        max_waiting: int,
        template_kwargs: dict[str, Any],
    ) -> None:
        self._body = body
        self._template_kwargs = template_kwargs
        self._served = served
        self._servers = servers
        self._max_rounds = max_rounds
        self._max_waiting = max_waiting
        self._messages = list(body.messages)
        self._mine = _named(tools, {tool["function"]["name"] for tool in body.tools or ()})
        self._turn: Turn | None = None
        self._turns: list[Turn] = []
        self._has_left = False
        self._done: list[dict[str, Any]] = []

    def abort(self) -> None:
        """The client has gone: no more rounds."""
        self._has_left = True
        if self._turn is not None:
            self._turn.answer.abort()

    async def begin(self) -> Turn:
        """The next round. In the last one there are no tools of ours to call, so that it ends in an answer."""
        body = self._body
        is_last = len(self._turns) + 1 >= self._max_rounds
        ours = [] if is_last else [tool.described(name) for name, tool in self._mine.items()]
        choice = body.tool_choice if not self._turns else None  # "required" is about the first
        turn = await Turn.begin(
            "chatcmpl",
            self._served,
            Conversation(
                messages=self._messages,
                tool_use=ToolUse.of([*(body.tools or ()), *ours], choice, body.parallel_tool_calls),
                template_kwargs=self._template_kwargs,
            ),
            body.sampling_params(0),
            cache_salt=body.cache_salt or "",
            max_waiting=self._max_waiting,
        )
        self._turn = turn
        self._turns.append(turn)
        if self._has_left:
            turn.answer.abort()
        return turn

    async def whole(self, first: Turn) -> ChatReply:
        turn = first
        while True:
            parts = [part async for some in turn.parts() for part in some]
            round_ = _round_of(parts)
            if not self._goes_on(turn, round_):
                break
            async for _ in self._call(round_):
                pass
            turn = await self.begin()
        theirs = [call for call in round_.calls if call.name not in self._mine]
        message = ChatMessage(round_.texts or (None if theirs else ""))
        if theirs:
            message.tool_calls = [ToolCallReply(call.id, FunctionCall(call.arguments, call.name)) for call in theirs]
        if round_.thoughts:
            message.reasoning_content = round_.thoughts
        if self._done:
            message.mcp_calls = self._done
        answer = first.answer
        choice = ChatChoice(0, message, finish_reason=self._reason(turn, bool(theirs)))
        reply = ChatReply(answer.id, answer.created, answer.model, [choice], usage=self._usage())
        reply.system_fingerprint = answer.fingerprint
        return reply

    async def events(self, first: Turn) -> AsyncIterator[bytes]:
        """Text of each round as it comes, each call of ours when it is done, the client's calls at the end."""
        answer, turn = first.answer, first

        def chunk(delta: ChatDelta, reason: str | None = None) -> bytes:
            choice = ChatChunkChoice(0, delta, finish_reason=reason)
            return b"data: %b\n\n" % msgspec.json.encode(ChatChunk(answer.id, answer.created, answer.model, [choice]))

        try:
            yield chunk(ChatDelta(role="assistant", content=""))
            while True:
                parts: list[Part] = []
                async for some in turn.parts():
                    parts += some
                    if text := "".join(part.text for part in some if isinstance(part, Text)):
                        yield chunk(ChatDelta(content=text))
                    if thought := "".join(part.text for part in some if isinstance(part, Thought)):
                        yield chunk(ChatDelta(reasoning_content=thought))
                round_ = _round_of(parts)
                if not self._goes_on(turn, round_):
                    break
                async for done in self._call(round_):
                    yield chunk(ChatDelta(mcp_calls=[done]))
                turn = await self.begin()
            theirs = [call for call in round_.calls if call.name not in self._mine]
            for index, call in enumerate(theirs):
                function = FunctionCall(call.arguments, call.name)
                yield chunk(ChatDelta(tool_calls=[ToolCallDelta(index, function, call.id, "function")]))
            yield chunk(ChatDelta(), self._reason(turn, bool(theirs)))
        except SpoliaError as error:
            yield b"data: %b\n\n" % error_body(error)
            return
        if self._body.include_usage:
            last = ChatChunk(answer.id, answer.created, answer.model, [], usage=self._usage())
            yield b"data: %b\n\n" % msgspec.json.encode(last)
        yield DONE

    def _goes_on(self, turn: Turn, round_: _Round) -> bool:
        """Whether there is something of ours to call, and nothing of the client's: that goes to the client first."""
        return (
            bool(round_.calls)
            and all(call.name in self._mine for call in round_.calls)
            and turn.output.finish_reason == "stop"
            and not self._has_left
            and len(self._turns) < self._max_rounds
        )

    async def _call(self, round_: _Round) -> AsyncIterator[dict[str, Any]]:
        """Make the calls, one after the other, and add them and their results to the conversation."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in round_.calls
        ]
        self._messages.append({"role": "assistant", "content": round_.texts, "tool_calls": calls})
        for call in round_.calls:
            tool = self._mine[call.name]
            result = await self._servers.call(tool, call.arguments)
            self._messages.append({"role": "tool", "tool_call_id": call.id, "content": result.text})
            done = {
                "id": call.id,
                "server": tool.server,
                "name": tool.name,
                "arguments": _parsed(call.arguments),
                "result": result.text,
                "is_error": result.is_error,
                "duration_s": round(result.duration_s, 3),
            }
            self._done.append(done)
            yield done

    def _reason(self, turn: Turn, has_theirs: bool) -> str:
        reason = turn.output.finish_reason
        return "tool_calls" if has_theirs and reason == "stop" else reason

    def _usage(self) -> Usage:
        """Of all rounds: each reads the conversation so far, most of it from the cache."""
        outputs = [turn.output for turn in self._turns]
        return Usage.of(
            sum(len(output.prompt_token_ids) for output in outputs),
            sum(len(output.token_ids) for output in outputs),
            sum(output.num_cached_tokens for output in outputs),
        )


def _named(tools: list[McpTool], taken: set[str]) -> dict[str, McpTool]:
    """By the names that the model sees: a tool's own, with its server's before it where another has that name."""
    named: dict[str, McpTool] = {}
    for tool in tools:
        name = tool.name if tool.name not in taken and tool.name not in named else f"{tool.server}_{tool.name}"
        if name not in taken:
            named[name] = tool
    return named


def _round_of(parts: list[Part]) -> _Round:
    text, calls = gather(parts)
    return _Round(text, "".join(part.text for part in parts if isinstance(part, Thought)), calls)


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
