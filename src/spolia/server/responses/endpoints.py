"""The endpoints, and the reply as one object or as events."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from spolia.engine import TokenLogprobs
from spolia.errors import InvalidRequest, PromptTooLong, SpoliaError
from spolia.models import Model
from spolia.server.access import current_caller
from spolia.server.body import read_body
from spolia.server.config import ServerConfig
from spolia.server.errors import UnknownResponse, UnknownThing, error_body
from spolia.server.prompting import Conversation, effort_variables
from spolia.server.responses.schema import ResponsesRequest, messages_of, tool_use_of, with_ids
from spolia.server.resuming import ResumableStreams, stream
from spolia.server.routes import Route
from spolia.server.served import ServedModel, ServedModels
from spolia.server.sse import watch_for_disconnect
from spolia.server.toolcalls import CallArguments, CallBegan, Part, Text, Thought, ToolCall
from spolia.server.turn import Turn

__all__ = ["ResponsesEndpoints"]

_MAX_STORED = 1024
_MAX_STORED_BYTES = 256 << 20
_MAX_LISTED = 100  # OpenAI's
_ROOM = 1024  # tokens for an answer of which nobody says how long it may be


@dataclass(frozen=True, slots=True)
class _Stored:
    """A response to go on from. Its instructions are not part of it: they hold for one response.

    Attributes:
        input: the items that it answers, those of the responses before it among them.
        num_bytes: of all that, though responses that follow each other share it.
    """

    tenant: str | None
    input: list[dict[str, Any]]
    reply: dict[str, Any]
    num_bytes: int

    @property
    def items(self) -> list[dict[str, Any]]:
        return [*self.input, *self.reply["output"]]


class ResponsesEndpoints:
    """Bound to the models and limits of one app. Keeps the last responses, for those that go on from them."""

    def __init__(self, models: ServedModels, config: ServerConfig) -> None:
        self._models = models
        self._config = config
        self._stored: dict[str, _Stored] = {}  # the oldest first
        self._running: dict[str, _Reply] = {}  # whose events are kept: in the background, or resumable
        self._num_bytes = 0

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/responses", self.create, ResponsesRequest),
            Route("POST", "/v1/responses/input_tokens", self.count, ResponsesRequest),
            Route("GET", "/v1/responses/{response_id}", self.retrieve),
            Route("DELETE", "/v1/responses/{response_id}", self.delete),
            Route("GET", "/v1/responses/{response_id}/input_items", self.list_input),
            Route("POST", "/v1/responses/{response_id}/cancel", self.cancel),
        ]

    async def create(self, request: Request) -> Response:
        """OpenAI's Responses API: answer, and keep the answer for `previous_response_id`."""
        body = await read_body(request, ResponsesRequest, max_bytes=self._config.max_body_bytes)
        served = await self._models.ready(body.model)
        conversation, items = self._conversation(body, served.model)
        if body.truncation == "auto":
            conversation = await _fitting(conversation, served, body.max_output_tokens)
        try:
            turn = await Turn.begin(
                "resp",
                served,
                conversation,
                body.sampling_params(),
                cache_salt=body.cache_salt or "",
                max_waiting=self._config.max_waiting,
                is_limit_soft=True,
                form_field="text.format",
            )
        except PromptTooLong as error:
            told = str(error).replace('"truncate": "head" or "middle"', '"truncation": "auto"')
            raise InvalidRequest(told, param="input", code=error.code) from None
        reply = _Reply(turn, body)
        abort, headers = reply.abort, {"x-request-id": reply.id}
        if body.stream:
            events = self._events(reply, items)
            leave = partial(self._abort_unless_running, reply) if body.background else abort
            return stream(request, reply.id, events, abort=leave, headers=headers, is_resumable=reply.is_kept)
        if body.background:
            begun = reply.now()
            reply.task = asyncio.ensure_future(self._run(reply, items))
            return _json(begun, headers)
        with watch_for_disconnect(request.receive, abort):
            async for _ in reply.read():
                pass
        self._store(reply, items)
        return _json(reply.last, headers)

    async def count(self, request: Request) -> Response:
        """How many tokens the prompt of a response has."""
        body = await read_body(request, ResponsesRequest, max_bytes=self._config.max_body_bytes)
        served = await self._models.ready(body.model)
        conversation, _ = self._conversation(body, served.model)
        return _json({"object": "response.input_tokens", "input_tokens": len(await conversation.encode(served.model))})

    async def retrieve(self, request: Request, response_id: str) -> Response:
        """A response that is kept; with `?stream=true&starting_after=` the rest of a stream that was `resumable`."""
        if request.query_params.get("stream", "false") != "false":
            streams: ResumableStreams = request.app.state.resumable_streams
            if response_id not in streams:
                self._find(response_id)
                raise InvalidRequest(
                    f"stream is set, and {response_id} is not kept as a stream; create it with resumable",
                    param="stream",
                )
            return streams.read_on(response_id, request.query_params.get("starting_after", "-1"))
        if (running := self._find_running(response_id)) is not None:
            return _json(running.now())
        return _json(self._find(response_id).reply)

    async def delete(self, request: Request, response_id: str) -> Response:
        """Forget it and its stream, also one that is not stored; one that is `resumable` or in the background ends."""
        if (running := self._find_kept(response_id)) is not None:
            await running.cancel()
        streams: ResumableStreams = request.app.state.resumable_streams
        if not streams.end(response_id) or self._is_stored(response_id):
            self._find(response_id)
            self._forget(response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})

    async def list_input(self, request: Request, response_id: str) -> Response:
        """What it answers, the latest item first: `?order`, `limit` and `after` as OpenAI has them."""
        query = request.query_params
        items = self._find(response_id).input[:: 1 if query.get("order") == "asc" else -1]
        limit = query.get("limit", "20")
        if not limit.isdecimal() or not 1 <= int(limit) <= _MAX_LISTED:
            raise InvalidRequest(f"limit is {limit!r}; it must be from 1 to {_MAX_LISTED}", param="limit")
        ids = [item["id"] for item in items]
        if (after := query.get("after")) is not None and after not in ids:
            raise InvalidRequest(f"after is {after!r}, which is none of its items' ids", param="after")
        begin = 0 if after is None else ids.index(after) + 1
        data = items[begin : begin + int(limit)]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return _json({"object": "list", "data": data, **ends, "has_more": begin + len(data) < len(items)})

    async def cancel(self, response_id: str) -> Response:
        """End a response that runs in the background; one that has ended stays as it is."""
        if (running := self._find_running(response_id)) is not None:
            await running.cancel()
        stored = self._find(response_id)
        if not stored.reply["background"]:
            raise InvalidRequest(f"{response_id} does not run in the background; leave its stream to end it")
        return _json(stored.reply)

    def _conversation(self, body: ResponsesRequest, model: Model) -> tuple[Conversation, list[dict[str, Any]]]:
        """What `body` asks to go on with, and as items.

        Raises:
            InvalidRequest: an item or a tool that is not well-formed.
            UnknownThing, UnknownResponse: it refers to what is not kept here.
        """
        body.check()
        before = [] if body.previous_response_id is None else self._previous(body.previous_response_id).items
        new = with_ids(body.input)
        new = [self._find_item(item) if item.get("type") == "item_reference" else item for item in new]
        messages = [*messages_of(before), *messages_of(new)]
        if body.instructions:
            messages.insert(0, {"role": "system", "content": body.instructions})
        variables: dict[str, Any] = {}
        if body.reasoning is not None and body.reasoning.effort is not None:
            source = "" if model.chat_template is None else model.chat_template.source
            variables = effort_variables(body.reasoning.effort, source)
        conversation = Conversation(messages=messages, tool_use=tool_use_of(body), template_kwargs=variables)
        return conversation, [*before, *new]

    def _find(self, response_id: str) -> _Stored:
        if not self._is_stored(response_id):
            raise UnknownThing(f"no response {response_id!r} is kept here; the last {_MAX_STORED} are")
        return self._stored[response_id]

    def _is_stored(self, response_id: str) -> bool:
        stored = self._stored.get(response_id)
        return stored is not None and stored.tenant == current_caller().tenant

    def _previous(self, response_id: str) -> _Stored:
        try:
            return self._find(response_id)
        except UnknownThing as error:
            raise UnknownResponse(
                f"{error}: send the conversation itself as input", param="previous_response_id"
            ) from None

    def _find_item(self, reference: dict[str, Any]) -> dict[str, Any]:
        tenant = current_caller().tenant
        for stored in reversed(self._stored.values()):
            if stored.tenant == tenant:
                for item in stored.items:
                    if item["id"] == reference["id"]:
                        return item
        raise UnknownThing(
            f"no item {reference['id']!r} is kept here; those of the last {_MAX_STORED} responses are", param="input"
        )

    def _find_running(self, response_id: str) -> _Reply | None:
        """Of those in the background."""
        reply = self._find_kept(response_id)
        return None if reply is None or not reply.is_background else reply

    def _find_kept(self, response_id: str) -> _Reply | None:
        reply = self._running.get(response_id)
        return None if reply is None or reply.tenant != current_caller().tenant else reply

    async def _events(self, reply: _Reply, items: list[dict[str, Any]]) -> AsyncIterator[bytes]:
        if reply.is_kept:
            self._running[reply.id] = reply
        try:
            async for events in reply.events():
                yield events
        finally:
            self._running.pop(reply.id, None)
            if reply.is_complete or (reply.is_background and reply.last):
                self._store(reply, items)
            reply.has_ended.set()

    def _abort_unless_running(self, reply: _Reply) -> None:
        """What has begun in the background goes on though nobody has read its stream for long."""
        if reply.id not in self._running:
            reply.abort()

    async def _run(self, reply: _Reply, items: list[dict[str, Any]]) -> None:
        """In the background: the events have no reader."""
        async for _ in self._events(reply, items):
            pass

    def _store(self, reply: _Reply, items: list[dict[str, Any]]) -> None:
        if not reply.is_stored:
            return
        shown = reply.last
        num_bytes = len(msgspec.json.encode([items, shown]))
        self._stored[reply.id] = _Stored(reply.tenant, items, shown, num_bytes)
        self._num_bytes += num_bytes
        while len(self._stored) > _MAX_STORED or self._num_bytes > _MAX_STORED_BYTES:
            self._forget(self._next_to_go(reply.tenant))

    def _next_to_go(self, adding: str | None) -> str:
        """The oldest of the tenant that has most of what there is too much of: nobody pushes out who has no more.

        Args:
            adding: the tenant whose response is one too many; of those that have as much, it gives way.
        """
        held = Counter[str | None]()
        are_too_many = len(self._stored) > _MAX_STORED
        for stored in self._stored.values():
            held[stored.tenant] += 1 if are_too_many else stored.num_bytes
        most = max(held, key=lambda tenant: (held[tenant], tenant == adding))
        return next(id_ for id_, stored in self._stored.items() if stored.tenant == most)

    def _forget(self, response_id: str) -> None:
        self._num_bytes -= self._stored.pop(response_id).num_bytes


class _Reply:
    """One response in OpenAI's shapes.

    Attributes:
        is_kept: what it tells goes on without a reader.
        last: the whole object, once it has ended; `is_complete`: and did not fail.
        task: reads it, where it is in the background and no stream.
    """

    def __init__(self, turn: Turn, body: ResponsesRequest) -> None:
        self.id = turn.answer.id
        self.is_stored = body.store is not False
        self.is_background = bool(body.background)
        self.is_kept = self.is_background or (bool(body.stream) and bool(body.resumable))
        self.tenant = current_caller().tenant
        self.is_complete = False
        self.has_ended = asyncio.Event()
        self.last: dict[str, Any] = {}
        self.task: asyncio.Future[None] | None = None
        self._is_cancelled = False
        self._has_begun = False
        self._turn = turn
        self._body = body
        self._number = 0
        self._done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the item that grows
        self._logprobs: deque[TokenLogprobs] = deque()  # of tokens whose text has not come yet
        self._begun = b""  # of a token whose text has come in part: the rest of it

    def now(self) -> dict[str, Any]:
        """What there is of it so far."""
        return self._object("in_progress" if self._has_begun else "queued", output=self._done)

    def abort(self) -> None:
        self._turn.answer.abort()

    async def cancel(self) -> None:
        """End it where it is, and wait until it is stored."""
        self._is_cancelled = True
        self.abort()
        await self.has_ended.wait()

    def ended(self, output: list[dict[str, Any]]) -> dict[str, Any]:
        result = self._turn.output
        is_cut = result.finish_reason != "stop"
        reason = "max_output_tokens" if result.finish_reason == "length" else "aborted"
        num_in, num_out = len(result.prompt_token_ids), len(result.token_ids)
        if self._is_cancelled:
            return self._object("cancelled", output=output)
        return self._object(
            "incomplete" if is_cut else "completed",
            output=output,
            incomplete_details={"reason": reason} if is_cut else None,
            usage={
                "input_tokens": num_in,
                "input_tokens_details": {
                    "cached_tokens": result.num_cached_tokens,
                    "cache_write_tokens": num_in - result.num_cached_tokens,
                },
                "output_tokens": num_out,
                "output_tokens_details": {"reasoning_tokens": self._turn.num_thought_tokens},
                "total_tokens": num_in + num_out,
            },
        )

    async def events(self) -> AsyncIterator[bytes]:
        """As `read`; what fails is told by the last one."""
        try:
            async for events in self.read():
                yield events
        except SpoliaError as error:
            told = msgspec.json.decode(error_body(error))["error"]
            trouble = {"code": "server_error", "message": told["message"]}
            self.last = self._object("failed", output=self._done, error=trouble)
            yield self._event("response.failed", response=self.last)

    async def read(self) -> AsyncIterator[bytes]:
        """Events; then `is_complete`.

        Raises:
            SpoliaError: as `Answer.deltas`.
        """
        begun = self._object("in_progress", output=[])
        yield self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)
        async for parts in self._turn.parts():
            self._has_begun = True
            if events := b"".join(event for part in parts for event in self._events_of(part)):
                yield events
        closing = b"".join(self._end_item())
        if all(item["type"] == "reasoning" for item in self._done):
            closing += b"".join([*self._begin(_message_item), *self._end_item()])
        self.last = self.ended(self._done)
        self.is_complete = True
        kind = "response.incomplete" if self.last["status"] == "incomplete" else "response.completed"
        yield closing + self._event(kind, response=self.last)

    def _events_of(self, part: Part) -> list[bytes]:
        match part:
            case Text(text):
                begun, logprobs = self._begin(_message_item), self._logprobs_of(text)
                self._item["content"][0]["logprobs"] += logprobs
                return [*begun, self._add(text, "response.output_text.delta", logprobs=logprobs)]
            case Thought(text):
                self._logprobs_of(text)  # which are not told
                return [*self._begin(_reasoning_item), self._add(text, "response.reasoning_text.delta")]
            case CallBegan(_, id_, name):
                self._skip_logprobs()
                ended = self._end_item()
                self._open = _call_item(ToolCall(id_, name, ""), "in_progress")
                added = self._event("response.output_item.added", output_index=len(self._done), item=self._open)
                return [*ended, added]
            case CallArguments(_, text):
                self._skip_logprobs()
                item = self._item
                item["arguments"] += text
                at = {"item_id": item["id"], "output_index": len(self._done)}
                return [self._event("response.function_call_arguments.delta", **at, delta=text)]

    def _logprobs_of(self, text: str) -> list[dict[str, Any]]:
        """Those of the tokens of a piece of text, where they were asked for; tokens before them, marks, are skipped."""
        tokenizer = self._turn.answer.engine.model.tokenizer

        def named(token_id: int, logprob: float) -> dict[str, Any]:
            spelt = tokenizer.token_bytes(token_id)
            return {"token": tokenizer.token_text(token_id), "bytes": list(spelt), "logprob": logprob}

        self._logprobs += self._turn.take_logprobs()
        rest, shown = text.encode().removeprefix(self._begun), []
        self._begun = b""
        while rest and self._logprobs:
            token = self._logprobs.popleft()
            spelt = tokenizer.token_bytes(token.token_id)
            if spelt and (rest.startswith(spelt) or spelt.startswith(rest)):
                top = [named(*each) for each in token.top]
                shown.append({**named(token.token_id, token.logprob), "top_logprobs": top})
                rest, self._begun = rest[len(spelt) :], spelt[len(rest) :]
        return shown

    def _skip_logprobs(self) -> None:
        """Calls have none."""
        self._turn.take_logprobs()
        self._logprobs.clear()

    @property
    def _item(self) -> dict[str, Any]:
        return self._open or {}

    def _add(self, text: str, kind: str, **more: Any) -> bytes:
        item = self._item
        item["content"][0]["text"] += text
        at = {"item_id": item["id"], "output_index": len(self._done), "content_index": 0}
        return self._event(kind, **at, delta=text, **more)

    def _begin(self, item_of: Callable[[str, str], dict[str, Any]]) -> list[bytes]:
        """Begin such an item, unless one is open."""
        begun = item_of("", "in_progress")
        if self._open is not None and self._open["type"] == begun["type"]:
            return []
        ended = self._end_item()
        self._open = begun
        at = {"output_index": len(self._done)}
        added = self._event("response.output_item.added", **at, item={**self._open, "content": []})
        part = self._open["content"][0]
        at |= {"item_id": self._open["id"], "content_index": 0}
        return [*ended, added, self._event("response.content_part.added", **at, part=part)]

    def _end_item(self) -> list[bytes]:
        item, self._open = self._open, None
        if item is None:
            return []
        item["status"] = "completed"
        at: dict[str, Any] = {"item_id": item["id"], "output_index": len(self._done)}
        if item["type"] != "function_call":
            part = item["content"][0]
            at["content_index"] = 0
            kind = "response.reasoning_text.done"
            more: dict[str, Any] = {}
            if item["type"] == "message":
                kind, more = "response.output_text.done", {"logprobs": part["logprobs"]}
            events = [
                self._event(kind, **at, text=part["text"], **more),
                self._event("response.content_part.done", **at, part=part),
            ]
        else:
            item["arguments"] = item["arguments"] or "{}"
            done = self._event(
                "response.function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"]
            )
            events = [done]
        events.append(self._event("response.output_item.done", output_index=len(self._done), item=item))
        self._done.append(item)
        return events

    def _object(self, status: str, **fields: Any) -> dict[str, Any]:
        body, answer = self._body, self._turn.answer
        return {
            "id": answer.id,
            "object": "response",
            "created_at": answer.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": answer.model,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "store": self.is_stored,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "background": self.is_background,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "top_logprobs": body.top_logprobs or 0,
            "usage": None,
            **fields,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(event))


def _json(content: Any, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), headers=headers, media_type="application/json")


def _message_item(text: str, status: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    id_ = f"msg_{uuid.uuid4().hex}"
    return {"type": "message", "id": id_, "status": status, "role": "assistant", "content": content}


def _reasoning_item(text: str, status: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{uuid.uuid4().hex}", "status": status, "summary": [], "content": content}


async def _fitting(conversation: Conversation, served: ServedModel, max_tokens: int | None) -> Conversation:
    """Without as many of the oldest turns as it takes to leave room for an answer: the instructions stay."""
    room = served.engine.context_tokens - min(max_tokens or _ROOM, served.engine.context_tokens // 2)
    messages = list(conversation.messages)
    while len(await (shown := replace(conversation, messages=messages)).encode(served.model)) > room:
        first = next((i for i, each in enumerate(messages) if each["role"] != "system"), len(messages))
        after = [i for i, each in enumerate(messages) if i > first and each["role"] == "user"]
        if not after:
            break  # one turn: what is too long is refused
        del messages[first : after[0]]
    return shown


def _call_item(call: ToolCall, status: str) -> dict[str, Any]:
    id_ = f"fc_{uuid.uuid4().hex}"
    named = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
    return {"type": "function_call", "id": id_, "status": status, **named}
