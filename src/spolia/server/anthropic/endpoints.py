"""The two endpoints, and the reply as a message or as events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from spolia.engine import SamplingParams, Wish
from spolia.errors import InvalidRequest, SpoliaError
from spolia.server.anthropic.messages import conversation, marked_ttl_s, up_to_last_breakpoint
from spolia.server.anthropic.schema import CacheCreation, CountRequest, MessagesReply, MessagesRequest, Usage
from spolia.server.body import read_body
from spolia.server.cache_control import ttl_s_of, wish_up_to
from spolia.server.config import ServerConfig
from spolia.server.errors import anthropic_error_body
from spolia.server.resuming import stream
from spolia.server.routes import Route
from spolia.server.served import ServedModel, ServedModels
from spolia.server.sse import with_signs_of_life
from spolia.server.toolcalls import CallArguments, CallBegan, Part, Text, Thought, ToolCall, gather
from spolia.server.turn import Turn

__all__ = ["AnthropicEndpoints"]


class AnthropicEndpoints:
    """Bound to the models and limits of one app."""

    def __init__(self, models: ServedModels, config: ServerConfig) -> None:
        self._models = models
        self._config = config

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/messages", self.create, MessagesRequest),
            Route("POST", "/v1/messages/count_tokens", self.count_tokens, CountRequest),
        ]

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens a request's prompt has."""
        body = await read_body(request, CountRequest, max_bytes=self._config.max_body_bytes)
        body.check()
        model = (await self._models.ready(body.model)).model
        ids = await conversation(body, model).encode(model)
        return Response(msgspec.json.encode({"input_tokens": len(ids)}), media_type="application/json")

    async def create(self, request: Request) -> Response:
        """Anthropic's Messages API."""
        body = await read_body(request, MessagesRequest, max_bytes=self._config.max_body_bytes)
        body.check()
        served = await self._models.ready(body.model)
        marked = 0

        async def keep(prompt_ids: Sequence[int]) -> Sequence[Wish]:
            nonlocal marked
            marked = await _num_marked(body, served, prompt_ids)
            return wish_up_to(marked, marked_ttl_s(body))

        turn = await Turn.begin(
            "msg",
            served,
            conversation(body, served.model),
            _sampling_params(body),
            cache_salt=body.cache_salt or "",
            max_waiting=self._config.max_waiting,
            wishes=keep,
            is_limit_soft=True,
            form_field="output_config",
        )
        message = _Message(turn, body, marked)
        headers = {"x-request-id": turn.answer.id}
        if body.stream:
            events = with_signs_of_life(message.events(), _event("ping"))
            return stream(
                request,
                turn.answer.id,
                events,
                abort=turn.answer.abort,
                headers=headers,
                is_resumable=body.resumable,
            )
        reply = message.reply(await turn.whole(request))
        return Response(msgspec.json.encode(reply), headers=headers, media_type="application/json")


def _sampling_params(body: MessagesRequest) -> SamplingParams:
    given: dict[str, Any] = {
        "max_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "seed": body.seed,
        "truncate": body.truncate,
        "stop": None if body.stop_sequences is None else tuple(body.stop_sequences),
        "thinking_budget": None if body.thinking is None else body.thinking.budget_tokens,
        "structured_outputs": body.form(),
    }
    try:
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})
    except InvalidRequest as error:
        spelt = {"stop": "stop_sequences", "thinking_budget": "thinking", "structured_outputs": "output_config"}
        raise InvalidRequest(str(error), param=spelt.get(error.param or "", error.param), code=error.code) from None


async def _num_marked(body: MessagesRequest, served: ServedModel, prompt_ids: Sequence[int]) -> int:
    """Tokens of the prompt up to the last cache breakpoint; 0 without one."""
    marked = up_to_last_breakpoint(body, served.model)
    if marked is None:
        return 0
    try:
        beginning = await marked.encode(served.model, add_generation_prompt=False)
    except InvalidRequest:  # a template that takes the whole and not this part of it
        return 0
    pairs = enumerate(zip(beginning, prompt_ids, strict=False))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(beginning), len(prompt_ids)))


class _Message:
    """One reply in Anthropic's shapes.

    Args:
        num_marked: tokens of the prompt that the client asked to keep in the cache.
    """

    def __init__(self, turn: Turn, body: MessagesRequest, num_marked: int) -> None:
        self._turn = turn
        self._body = body
        self._num_marked = num_marked
        self._num_blocks = 0
        self._open: str | None = None  # kind of the block that is open
        self._has_answered = False  # by more than thoughts

    def reply(self, parts: Sequence[Part]) -> MessagesReply:
        text, calls = gather(parts)
        thought = "".join(part.text for part in parts if isinstance(part, Thought))
        content: list[dict[str, Any]] = [{"type": "thinking", "thinking": thought, "signature": ""}] if thought else []
        content += [{"type": "text", "text": text}] if text or not calls else []
        content += [_block_of(call) for call in calls]
        reason, sequence = self._stop()
        answer = self._turn.answer
        return MessagesReply(answer.id, answer.model, content, self._usage(), reason, sequence)

    async def events(self) -> AsyncIterator[bytes]:
        """What fails in mid-stream is told by an `error` event, and then there is no `message_stop`."""
        turn = self._turn
        start = MessagesReply(turn.answer.id, turn.answer.model, [], Usage(len(turn.prompt_ids), 0, 0, 0))
        yield _event("message_start", message=start)
        yield _event("ping")
        try:
            async for parts in turn.parts():
                yield b"".join(event for part in parts for event in self._events_of(part))
        except SpoliaError as error:
            yield b"event: error\ndata: %b\n\n" % anthropic_error_body(error, turn.answer.id)
            return
        if not self._has_answered:
            yield self._end_block() + self._begin_block({"type": "text", "text": ""})
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield self._end_block() + _event("message_delta", delta=delta, usage=self._usage())
        yield _event("message_stop")

    def _events_of(self, part: Part) -> list[bytes]:
        match part:
            case Text(text):
                block = {"type": "text", "text": ""}
                begun = [] if self._open == "text" else [self._end_block(), self._begin_block(block)]
                delta = {"type": "text_delta", "text": text}
                return [*begun, _event("content_block_delta", index=self._num_blocks - 1, delta=delta)]
            case Thought(text):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                begun = [] if self._open == "thinking" else [self._end_block(), self._begin_block(block)]
                delta = {"type": "thinking_delta", "thinking": text}
                return [*begun, _event("content_block_delta", index=self._num_blocks - 1, delta=delta)]
            case CallBegan(_, id_, name):
                call: dict[str, Any] = {"type": "tool_use", "id": id_, "name": name, "input": {}}
                return [self._end_block(), self._begin_block(call)]
            case CallArguments(_, text):
                delta = {"type": "input_json_delta", "partial_json": text}
                return [_event("content_block_delta", index=self._num_blocks - 1, delta=delta)]

    def _begin_block(self, block: dict[str, Any]) -> bytes:
        self._open = block["type"]
        self._has_answered |= self._open != "thinking"
        self._num_blocks += 1
        return _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _end_block(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", index=self._num_blocks - 1)

    def _stop(self) -> tuple[str, str | None]:
        output = self._turn.output
        if output.finish_reason == "length":
            is_full = len(output.token_ids) < self._body.max_tokens and output.stop_reason is None
            return "model_context_window_exceeded" if is_full else "max_tokens", None
        if self._turn.has_called:
            return "tool_use", None
        if isinstance(output.stop_reason, str):
            return "stop_sequence", output.stop_reason
        return "end_turn", None

    def _usage(self) -> Usage:
        output = self._turn.output
        num_prompt, num_read = len(output.prompt_token_ids), output.num_cached_tokens
        num_written = max(0, self._num_marked - num_read)
        is_long = marked_ttl_s(self._body) > ttl_s_of(None)
        written = CacheCreation(0, num_written) if is_long else CacheCreation(num_written, 0)
        return Usage(num_prompt - num_read - num_written, num_written, num_read, len(output.token_ids), written)


def _block_of(call: ToolCall) -> dict[str, Any]:
    """A call whose JSON was cut short, or is none, has its text under `unparsed`: `input` has to be an object."""
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        arguments = {"unparsed": call.arguments}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))
