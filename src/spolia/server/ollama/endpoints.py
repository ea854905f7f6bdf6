"""`/api/generate` and `/api/chat`: a reply as one object, or as lines of JSON; `/api/embed` and `/api/embeddings`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from spolia.engine import Embedding, RequestOutput
from spolia.errors import InvalidRequest, SpoliaError
from spolia.server.answer import Answer
from spolia.server.body import read_body
from spolia.server.config import ServerConfig
from spolia.server.embeddings import check_dimensions, embed, encoded, normalised
from spolia.server.encoding import after_thoughts, encode, prepare_form_of
from spolia.server.errors import ollama_error_body
from spolia.server.fill_in import infill_ids
from spolia.server.ollama.schema import ChatRequest, EmbeddingRequest, EmbedRequest, GenerateRequest
from spolia.server.prompting import Conversation
from spolia.server.resuming import LineStream, stream
from spolia.server.routes import Route
from spolia.server.served import ServedModel, ServedModels
from spolia.server.toolcalls import CallArguments, CallBegan, Part, Text, Thought, ToolCall, ToolUse, gather
from spolia.server.tools import check_tools
from spolia.server.turn import Turn, splitter_of

__all__ = ["OllamaEndpoints", "now"]


_Show: TypeAlias = Callable[[str, Sequence[ToolCall], str], dict[str, Any]]


class OllamaEndpoints:
    """Bound to the models and limits of one app."""

    def __init__(self, models: ServedModels, config: ServerConfig) -> None:
        self._models = models
        self._config = config

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/api/generate", self.generate, GenerateRequest),
            Route("POST", "/api/chat", self.chat, ChatRequest),
            Route("POST", "/api/embed", self.embed, EmbedRequest),
            Route("POST", "/api/embeddings", self.embeddings, EmbeddingRequest),
        ]

    async def embed(self, request: Request) -> Response:
        """Ollama's vectors."""
        body = await read_body(request, EmbedRequest, max_bytes=self._config.max_body_bytes)
        begun_s = time.perf_counter()
        served = await self._models.ready(body.asked, keep_alive_s=body.keep_alive_s)
        load_s = time.perf_counter() - begun_s
        check_dimensions(served, body.dimensions or None)
        inputs = [body.input] if isinstance(body.input, str) else body.input
        embeddings: list[Embedding] = []
        if any(inputs):
            _, embeddings = await embed(served, inputs, truncate=body.truncate, max_waiting=self._config.max_waiting)

        def reply() -> dict[str, Any]:
            return {
                "model": served.name,
                "embeddings": [normalised(each.vector).tolist() for each in embeddings],
                "total_duration": _ns(time.perf_counter() - begun_s),
                "load_duration": _ns(load_s),
                "prompt_eval_count": sum(each.num_tokens for each in embeddings),
                "cached_prompt_count": sum(each.num_cached_tokens for each in embeddings),
            }

        return Response(await encoded(reply), media_type="application/json")

    async def embeddings(self, request: Request) -> Response:
        """The same in its older form, for one prompt."""
        body = await read_body(request, EmbeddingRequest, max_bytes=self._config.max_body_bytes)
        served = await self._models.ready(body.asked, keep_alive_s=body.keep_alive_s)
        shown: list[float] = []
        if body.prompt:
            _, (embedding,) = await embed(served, [body.prompt], truncate=True, max_waiting=self._config.max_waiting)
            shown = embedding.vector.tolist()
        return Response(msgspec.json.encode({"embedding": shown}), media_type="application/json")

    async def generate(self, request: Request) -> Response:
        """Ollama's completion; an empty prompt loads or unloads the model."""
        body = await read_body(request, GenerateRequest, max_bytes=self._config.max_body_bytes)
        body.check()
        begun_s = time.perf_counter()
        served = await self._models.ready(body.asked, keep_alive_s=body.keep_alive_s)
        load_s = time.perf_counter() - begun_s
        if not body.prompt and not body.suffix:
            return _loaded(served, body.keep_alive_s, response="")
        ids = await _prompt_ids(served, body)
        splitter = None if body.raw else splitter_of(served.model, ids)
        params = after_thoughts(body.sampling_params(served), splitter)
        await prepare_form_of("format", served.engine, params)
        answer = Answer.submit(
            "gen", served, [ids], [params], cache_salt="", max_waiting=self._config.max_waiting, is_limit_soft=True
        )
        turn = Turn(answer, ids, splitter=splitter)

        def show(text: str, _: Sequence[ToolCall], thought: str) -> dict[str, Any]:
            return {"response": text, **({"thinking": thought} if thought else {})}

        def ending() -> dict[str, Any]:
            return {"context": [*turn.prompt_ids, *turn.output.token_ids]}

        return await _respond(request, turn, show, ending, body, load_s)

    async def chat(self, request: Request) -> Response:
        """Ollama's chat."""
        body = await read_body(request, ChatRequest, max_bytes=self._config.max_body_bytes)
        begun_s = time.perf_counter()
        served = await self._models.ready(body.asked, keep_alive_s=body.keep_alive_s)
        load_s = time.perf_counter() - begun_s
        if not body.messages:
            return _loaded(served, body.keep_alive_s, message={"role": "assistant", "content": ""})
        check_tools(body.tools)
        turn = await Turn.begin(
            "chat",
            served,
            Conversation(
                messages=[_message(message, index) for index, message in enumerate(body.messages)],
                tool_use=ToolUse.of(body.tools, None, None),
                template_kwargs=body.template_kwargs(served.model),
            ),
            body.sampling_params(served),
            cache_salt="",
            max_waiting=self._config.max_waiting,
            is_limit_soft=True,
            form_field="format",
        )

        def show(text: str, calls: Sequence[ToolCall], thought: str) -> dict[str, Any]:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if thought:
                message["thinking"] = thought
            if calls:
                message["tool_calls"] = [_call(call) for call in calls]
            return {"message": message}

        return await _respond(request, turn, show, dict, body, load_s)


async def _prompt_ids(served: ServedModel, body: GenerateRequest) -> list[int]:
    model = served.model
    if body.suffix:
        return await asyncio.to_thread(infill_ids, model.tokenizer, body.prompt, body.suffix)
    context = body.context or []
    for id_ in context:
        if not 0 <= id_ < model.tokenizer.vocab_size:
            raise InvalidRequest(f"context holds {id_}, which is no token of this model", param="context")
    if body.raw or model.chat_template is None:
        return [*context, *await encode(model.tokenizer, body.prompt, add_special=not context)]
    messages = [{"role": "user", "content": body.prompt}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    conversation = Conversation(messages=messages, template_kwargs=body.template_kwargs(model))
    return [*context, *await conversation.encode(served.model)]


def _message(message: dict[str, Any], index: int) -> dict[str, Any]:
    """Ollama's message as OpenAI has it; calls need no ids here, so they get their number."""
    if message.get("images"):
        path = f"messages[{index}].images"
        raise InvalidRequest(f"{path}: this model takes text only", param=path)
    if thought := message.get("thinking"):
        message = {**message, "reasoning_content": thought}
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    numbered = [{"id": f"call_{n}", "type": "function", **call} if isinstance(call, dict) else call
                for n, call in enumerate(calls)]  # fmt: skip
    return {**message, "tool_calls": numbered}


async def _respond(
    request: Request,
    turn: Turn,
    show: _Show,
    ending: Callable[[], dict[str, Any]],
    body: GenerateRequest | ChatRequest,
    load_s: float,
) -> Response:
    """
    Args:
        show: what a piece of the reply looks like.
        ending: what the last object has besides the figures.
        load_s: how long the request waited for its model.
    """
    answer = turn.answer
    headers = {"x-request-id": answer.id}

    def last() -> dict[str, Any]:
        return {**_figures(turn.output, load_s), **ending()}

    if body.stream:
        return stream(
            request,
            answer.id,
            _lines(turn, show, last),
            abort=answer.abort,
            headers=headers,
            is_resumable=body.resumable,
            kind=LineStream,
        )
    parts = await turn.whole(request)
    shown = {**show(*gather(parts), _thought(parts)), **_logprobs(turn)}
    reply = {**_head(turn), **shown, **last()}
    return Response(msgspec.json.encode(reply), headers=headers, media_type="application/json")


def _logprobs(turn: Turn) -> dict[str, Any]:
    """Those of the tokens since the last line, as OpenAI has them; nothing where none were asked for."""
    tokenizer = turn.answer.engine.model.tokenizer

    def named(token_id: int, logprob: float) -> dict[str, Any]:
        spelt = list(tokenizer.token_bytes(token_id))
        return {"token": tokenizer.token_text(token_id), "logprob": logprob, "bytes": spelt}

    shown = [
        {**named(token.token_id, token.logprob), "top_logprobs": [named(*each) for each in token.top]}
        for token in turn.take_logprobs()
    ]
    return {"logprobs": shown} if shown else {}


def _thought(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Thought))


async def _lines(turn: Turn, show: _Show, last: Callable[[], dict[str, Any]]) -> AsyncIterator[bytes]:
    """Text as it comes; a call once it is whole, for so Ollama's clients expect it."""
    open_call: ToolCall | None = None
    try:
        async for parts in turn.parts():
            text, done, open_call = _sort(parts, open_call)
            thought = _thought(parts)
            if text or done or thought:
                yield _line({**_head(turn), **show(text, done, thought), **_logprobs(turn), "done": False})
    except SpoliaError as error:
        yield ollama_error_body(error) + b"\n"
        return
    if open_call is not None:
        yield _line({**_head(turn), **show("", [open_call], ""), "done": False})
    yield _line({**_head(turn), **show("", [], ""), **_logprobs(turn), **last()})


def _sort(parts: Sequence[Part], open_call: ToolCall | None) -> tuple[str, list[ToolCall], ToolCall | None]:
    """Text, the calls that these parts ended, and the one that is open after them."""
    text, done = "", []
    for part in parts:
        match part:
            case Text(more):
                text += more
            case CallBegan(_, id_, name):
                done += [open_call] if open_call is not None else []
                open_call = ToolCall(id_, name, "")
            case CallArguments(_, more) if open_call is not None:
                open_call.arguments += more
    return text, done, open_call


def _call(call: ToolCall) -> dict[str, Any]:
    """Arguments that are no JSON object stay text."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        arguments = call.arguments
    return {"function": {"name": call.name, "arguments": arguments}}


def _loaded(served: ServedModel, keep_alive_s: float | None, **shown: Any) -> Response:
    """What a request without a prompt is told. With a `keep_alive` of 0 the model goes when this has been sent."""
    reason = "unload" if keep_alive_s == 0 else "load"
    reply = {"model": served.name, "created_at": now(), **shown, "done": True, "done_reason": reason}
    return Response(msgspec.json.encode(reply), media_type="application/json")


def _head(turn: Turn) -> dict[str, Any]:
    return {"model": turn.answer.model, "created_at": now()}


def _figures(output: RequestOutput, load_s: float) -> dict[str, Any]:
    """Ollama counts the prompt tokens that it computed; how many were reused is beside it."""
    timings = output.timings
    queued_s, first_s = timings.queue_s or 0.0, timings.first_token_s or timings.total_s
    return {
        "done": True,
        "done_reason": "length" if output.finish_reason == "length" else "stop",
        "total_duration": _ns(load_s + timings.total_s),
        "load_duration": _ns(load_s),
        "prompt_eval_count": len(output.prompt_token_ids),
        "prompt_eval_duration": _ns(first_s - queued_s),
        "cached_prompt_count": output.num_cached_tokens,
        "eval_count": len(output.token_ids),
        "eval_duration": _ns(timings.total_s - first_s),
    }


def _ns(seconds: float) -> int:
    return max(0, round(1e9 * seconds))


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _line(content: dict[str, Any]) -> bytes:
    return msgspec.json.encode(content) + b"\n"
