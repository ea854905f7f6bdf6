"""`POST /v1/chat/completions`: messages through the model's chat template, and the reply as a message."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from spolia.engine import Delta, RequestOutput, TokenLogprobs, Wish
from spolia.errors import InvalidRequest
from spolia.generation import ReasoningSplitter
from spolia.models import Model, Tokenizer
from spolia.server.access import note_request_id
from spolia.server.answer import Answer
from spolia.server.beams import beam_search
from spolia.server.body import read_body
from spolia.server.cache_control import last_mark, wish_up_to
from spolia.server.canonical import canonical
from spolia.server.config import ServerConfig
from spolia.server.contrastive import contrastive_search
from spolia.server.conversations import history
from spolia.server.encoding import encode, params_of_choices
from spolia.server.prompting import encode_chat, prompt_options, render_chat
from spolia.server.rendering import Extras, prompt_ids, prompt_logprobs, rendered_prompt, respond
from spolia.server.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    ChatTokenLogprob,
    FunctionCall,
    ToolCallDelta,
    ToolCallReply,
    TopLogprob,
)
from spolia.server.schema import ChatRequest, chat_messages
from spolia.server.search import respond_with_search
from spolia.server.served import ServedModel, ServedModels
from spolia.server.sessions import chat_turn, find_session
from spolia.server.toolcalls import CallArguments, CallBegan, Text, ToolCallParser, ToolUse, gather

__all__ = ["ChatEndpoint"]


McpResponder: TypeAlias = Callable[[Request, ChatRequest, ServedModel], Awaitable[Response]]


class ChatEndpoint:
    """Bound to the models and limits of one app; `mcp` answers requests for tools of MCP servers."""

    def __init__(self, models: ServedModels, config: ServerConfig, mcp: McpResponder) -> None:
        self._models = models
        self._config = config
        self._mcp = mcp

    async def respond(self, request: Request) -> Response:
        """Answer a conversation."""
        body = await read_body(request, ChatRequest, max_bytes=self._config.max_body_bytes)
        served = await self._models.ready(body.model)
        body.check()
        note_request_id(body.request_id)
        if body.mcp:
            return await self._mcp(request, body, served)
        num_moved_lines = None
        if body.canonicalise:
            body.messages, num_moved_lines = canonical(body.messages)
        model = served.model
        options = prompt_options(body, model)
        tool_use: ToolUse | None = options["tool_use"]
        turn = None
        said: Sequence[Mapping[str, Any]] = body.messages
        if body.session is None:
            ids = await encode_chat(model, body.messages, add_special=bool(body.add_special_tokens), **options)
        else:
            if body.continue_final_message:
                raise InvalidRequest(
                    "a session goes on after its last answer; continue_final_message has no place in it",
                    param="continue_final_message",
                )
            turn = await chat_turn(
                await find_session(served, body.session, body.cache_salt),
                model.tokenizer,
                chat_messages(body.messages),
                lambda messages, generate: render_chat(
                    model,
                    messages,
                    **{**options, "add_generation_prompt": generate and options["add_generation_prompt"]},
                ),
            )
            ids, said = turn.prompt_ids, turn.messages
        messages = history(said, tools=body.tools, template=body.chat_template_kwargs)
        thoughts = _thoughts(body, model, ids)
        splitter = None if thoughts is None else thoughts[0]
        parsers = None if tool_use is None else [tool_use.parser(model) for _ in range(body.num_choices)]
        search = await beam_search(body, served.engine, model, splitter, tool_use)
        search = search or await contrastive_search(body, served.engine, model, splitter, tool_use)
        if search is not None:
            return await respond_with_search(
                request,
                body,
                "chatcmpl",
                served,
                [ids],
                search,
                lambda answer: _ChatRendering(body, answer, model.tokenizer, parsers, thoughts),
                max_waiting=self._config.max_waiting,
                messages=messages,
                turn=turn,
            )
        params = await params_of_choices(body, served.engine, None if tool_use is not None else splitter)
        if tool_use is not None:
            params = [await tool_use.prepare(each, served.engine, model, splitter) for each in params]
        answer = Answer.submit(
            "chatcmpl",
            served,
            [ids],
            params,
            cache_salt=body.cache_salt or "",
            max_waiting=self._config.max_waiting,
            wishes=[*body.wishes(), *(await _marked(model, body, ids, options))],
            messages=messages,
            turn=turn,
        )
        answer.num_moved_lines = num_moved_lines
        return await respond(request, body, answer, _ChatRendering(body, answer, model.tokenizer, parsers, thoughts))

    async def render(self, request: Request) -> Response:
        """The prompt that a conversation becomes, as token ids and as text, without an answer."""
        body = await read_body(request, ChatRequest, max_bytes=self._config.max_body_bytes)
        served = await self._models.ready(body.model)
        body.check()
        if body.session is not None or body.mcp:
            name = "mcp" if body.mcp else "session"
            raise InvalidRequest(f"{name} is only known when there is an answer; leave it out", param=name)
        if body.canonicalise:
            body.messages, _ = canonical(body.messages)
        model = served.model
        options = prompt_options(body, model)
        ids = await encode_chat(model, body.messages, add_special=bool(body.add_special_tokens), **options)
        rendered = rendered_prompt("chatcmpl", served, body, ids, body.sampling_params(0))
        return Response(msgspec.json.encode(rendered), media_type="application/json")


def _thoughts(body: ChatRequest, model: Model, prompt_ids: list[int]) -> list[ReasoningSplitter] | None:
    """What tells each choice's thoughts from its answer; None for a model that does not think in tags."""
    opening, closing = body.reasoning_tags or ("<think>", "</think>")
    template = getattr(model.chat_template, "source", "")
    is_asked_for = body.reasoning_format == "deepseek" or body.reasoning_tags is not None
    if body.reasoning_format == "none" or not (is_asked_for or opening in template):
        return None
    end = model.tokenizer.decode(prompt_ids[-(len(opening) + 4) :], skip_special=False).rstrip()
    return [ReasoningSplitter(opening, closing, is_open=end.endswith(opening)) for _ in range(body.num_choices)]


async def _marked(model: Model, body: ChatRequest, ids: Sequence[int], options: Mapping[str, Any]) -> list[Wish]:
    """What `cache_control` in the messages asks for: the prompt up to the end of the last message with one."""
    mark = last_mark(body.messages)
    if mark is None or body.session is not None:  # a session's history is not in the request
        return []
    index, ttl_s = mark
    try:
        text = render_chat(
            model,
            body.messages[: index + 1],
            **{**options, "add_generation_prompt": False, "continue_final_message": False},
        )
    except InvalidRequest:  # a template that takes the whole and not this part of it
        return []
    beginning = await encode(model.tokenizer, text, add_special=False)
    pairs = enumerate(zip(beginning, ids, strict=False))
    num_tokens = next((i for i, (one, other) in pairs if one != other), min(len(beginning), len(ids)))
    return wish_up_to(num_tokens, ttl_s)


class _ChatRendering:
    """
    Args:
        parsers: of each choice's text; None where there are no tools to call.
        thoughts: of each choice's text, before the parsers; None where there are none to tell.
    """

    def __init__(
        self,
        body: ChatRequest,
        answer: Answer,
        tokenizer: Tokenizer,
        parsers: Sequence[ToolCallParser] | None,
        thoughts: Sequence[ReasoningSplitter] | None,
    ) -> None:
        self._answer = answer
        self._thoughts = thoughts
        self._parsers = parsers
        self._tokenizer = tokenizer
        self._with_ids = bool(body.return_token_ids)
        self._with_prompt_logprobs = body.prompt_logprobs is not None
        self._with_names = not body.return_tokens_as_token_ids
        self._echo = str(body.messages[-1].get("content") or "") if body.echo else ""
        self._begun: set[int] = set()

    def whole(self, outputs: Mapping[int, RequestOutput], extras: Extras) -> ChatReply:
        choices = [
            ChatChoice(
                index=index,
                message=self._echoing(self._thoughtful_message(index, output.text)),
                logprobs=None if output.logprobs is None else self._logprobs(output.logprobs),
                finish_reason=self._finish_reason(index, output),
                stop_reason=output.stop_reason,
                token_ids=list(output.token_ids) if self._with_ids else UNSET,
                prompt_token_ids=list(output.prompt_token_ids) if self._with_ids else UNSET,
            )
            for index, output in outputs.items()
        ]
        answer = self._answer
        reply = ChatReply(answer.id, answer.created, answer.model, choices, usage=extras.usage, spolia=extras.spolia)
        reply.system_fingerprint = answer.fingerprint
        reply.timings = extras.timings
        if self._with_prompt_logprobs:
            reply.prompt_logprobs = prompt_logprobs(next(iter(outputs.values())).prompt_logprobs, self._tokenizer)
        return reply

    def chunk(self, choice: int, delta: Delta) -> ChatChunk | None:
        part = ChatChunkChoice(choice, self._thoughtful_delta(choice, delta))
        if choice not in self._begun:
            self._begun.add(choice)
            part.delta.role = "assistant"
            if self._echo:
                part.delta.content = self._echo + (part.delta.content or "")
            if self._with_ids:
                part.prompt_token_ids = prompt_ids(self._answer, choice, delta)
        if delta.logprobs:
            part.logprobs = self._logprobs(delta.logprobs)
        if self._with_ids:
            part.token_ids = list(delta.token_ids)
        if delta.output is not None:
            part.finish_reason = self._finish_reason(choice, delta.output)
            part.stop_reason = delta.output.stop_reason
        if part == ChatChunkChoice(choice, ChatDelta()):
            return None
        chunk = self._chunk([part])
        if delta.prompt_logprobs is not None and choice == 0:  # all choices have one prompt
            chunk.prompt_logprobs = prompt_logprobs(delta.prompt_logprobs, self._tokenizer)
        return chunk

    def blank(self, choice: int) -> ChatChunk:
        return self._chunk([ChatChunkChoice(choice, ChatDelta())])

    def closing(self, extras: Extras) -> ChatChunk:
        return self._chunk([], extras)

    def _echoing(self, message: ChatMessage) -> ChatMessage:
        """With the message that was continued before it, if that was asked for."""
        if self._echo:
            message.content = self._echo + (message.content or "")
        return message

    def _thoughtful_message(self, choice: int, text: str) -> ChatMessage:
        """`_message`, with thoughts apart."""
        if self._thoughts is None:
            return self._message(choice, text)
        splitter = self._thoughts[choice]
        begun, ended = splitter.feed(text), splitter.finish()
        message = self._message(choice, begun.content + ended.content)
        if reasoning := begun.reasoning + ended.reasoning:
            message.reasoning_content = reasoning
        return message

    def _thoughtful_delta(self, choice: int, delta: Delta) -> ChatDelta:
        """`_delta`, with thoughts apart."""
        if self._thoughts is None:
            return self._delta(choice, delta.text, is_last=delta.output is not None)
        splitter = self._thoughts[choice]
        reasoning, content = splitter.feed(delta.text)
        if delta.output is not None:
            rest = splitter.finish()
            reasoning, content = reasoning + rest.reasoning, content + rest.content
        shown = self._delta(choice, content, is_last=delta.output is not None)
        if reasoning:
            shown.reasoning_content = reasoning
        if not content and shown.content == "":
            shown.content = UNSET
        return shown

    def _message(self, choice: int, text: str) -> ChatMessage:
        if self._parsers is None:
            return ChatMessage(text)
        parser = self._parsers[choice]
        content, calls = gather([*parser.feed(text), *parser.finish()])
        if not calls:
            return ChatMessage(content)
        replies = [ToolCallReply(call.id, FunctionCall(call.arguments, call.name)) for call in calls]
        return ChatMessage(content or None, tool_calls=replies)

    def _delta(self, choice: int, text: str, *, is_last: bool) -> ChatDelta:
        if self._parsers is None:
            return ChatDelta(text)
        parser = self._parsers[choice]
        parts = parser.feed(text)
        if is_last:
            parts += parser.finish()
        shown = ChatDelta()
        if content := "".join(part.text for part in parts if isinstance(part, Text)):
            shown.content = content
        if calls := [_call_delta(part) for part in parts if isinstance(part, CallBegan | CallArguments)]:
            shown.tool_calls = calls
        return shown

    def _finish_reason(self, choice: int, output: RequestOutput) -> str:
        """OpenAI's word; `stop` at a call's end is another one."""
        has_called = self._parsers is not None and self._parsers[choice].num_calls > 0
        return "tool_calls" if has_called and output.finish_reason == "stop" else output.finish_reason

    def _chunk(self, choices: list[ChatChunkChoice], extras: Extras = Extras()) -> ChatChunk:  # noqa: B008
        answer = self._answer
        chunk = ChatChunk(answer.id, answer.created, answer.model, choices, usage=extras.usage, spolia=extras.spolia)
        chunk.system_fingerprint = answer.fingerprint
        return chunk

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> ChatLogprobs:
        return ChatLogprobs(
            [
                ChatTokenLogprob(
                    *self._named(token.token_id, token.logprob),
                    top_logprobs=[TopLogprob(*self._named(id_, logprob)) for id_, logprob in token.top],
                )
                for token in tokens
            ]
        )

    def _named(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        """Text, logprob, bytes: a token may be part of a character, which only its bytes can tell."""
        name = self._tokenizer.token_text(token_id) if self._with_names else f"token_id:{token_id}"
        return name, logprob, list(self._tokenizer.token_bytes(token_id))


def _call_delta(part: CallBegan | CallArguments) -> ToolCallDelta:
    if isinstance(part, CallArguments):
        return ToolCallDelta(part.index, FunctionCall(part.text))
    return ToolCallDelta(part.index, FunctionCall("", part.name), part.id, "function")
