"""`POST /v1/chat/completions`: messages through the model's chat template, and the reply as a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from spolia.engine import Delta, RequestOutput, TokenLogprobs
from spolia.errors import InvalidRequest
from spolia.models import Model, Tokenizer
from spolia.server.answer import Answer
from spolia.server.body import read_body
from spolia.server.config import ServerConfig
from spolia.server.conversations import history
from spolia.server.encoding import encode, params_of_choices
from spolia.server.rendering import Extras, respond
from spolia.server.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    ChatTokenLogprob,
    TopLogprob,
)
from spolia.server.schema import ChatRequest, chat_messages
from spolia.server.served import ServedModels

__all__ = ["ChatEndpoint", "encode_chat"]


async def encode_chat(
    model: Model,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool,
    template_kwargs: dict[str, Any],
) -> list[int]:
    """Token ids of a conversation as the model was trained to see it.

    Raises:
        InvalidRequest: messages that are not well-formed or that the template refuses, or a model without one.
    """
    if model.chat_template is None:
        raise InvalidRequest(
            f"{model.name} has no chat template: it is a base model; use /v1/completions", code="no_chat_template"
        )
    text = model.chat_template.render(
        chat_messages(messages), tools=tools, add_generation_prompt=add_generation_prompt, **template_kwargs
    )
    # The template writes the special tokens itself.
    return await encode(model.tokenizer, text, add_special=False)


class ChatEndpoint:
    """Bound to the models and limits of one app."""

    def __init__(self, models: ServedModels, config: ServerConfig) -> None:
        self._models = models
        self._config = config

    async def respond(self, request: Request) -> Response:
        body = await read_body(request, ChatRequest, max_bytes=self._config.max_body_bytes)
        served = self._models.get(body.model)
        body.check()
        model = served.engine.model
        ids = await encode_chat(
            model,
            body.messages,
            tools=None if body.tool_choice == "none" else body.tools,
            add_generation_prompt=body.add_generation_prompt is not False,
            template_kwargs=body.chat_template_kwargs or {},
        )
        answer = Answer.submit(
            "chatcmpl",
            served,
            [ids],
            await params_of_choices(body, served.engine),
            cache_salt=body.cache_salt or "",
            max_waiting=self._config.max_waiting,
            wishes=body.wishes(),
            messages=history(body.messages, tools=body.tools, template=body.chat_template_kwargs),
        )
        return await respond(request, body, answer, _ChatRendering(body, answer, model.tokenizer))


class _ChatRendering:
    def __init__(self, body: ChatRequest, answer: Answer, tokenizer: Tokenizer) -> None:
        self._answer = answer
        self._tokenizer = tokenizer
        self._with_ids = bool(body.return_token_ids)
        self._begun: set[int] = set()

    def whole(self, outputs: Sequence[RequestOutput], extras: Extras) -> ChatReply:
        choices = [
            ChatChoice(
                index=index,
                message=ChatMessage(output.text),
                logprobs=None if output.logprobs is None else self._logprobs(output.logprobs),
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                token_ids=list(output.token_ids) if self._with_ids else UNSET,
                prompt_token_ids=list(output.prompt_token_ids) if self._with_ids else UNSET,
            )
            for index, output in enumerate(outputs)
        ]
        answer = self._answer
        return ChatReply(answer.id, answer.created, answer.model, choices, usage=extras.usage, spolia=extras.spolia)

    def chunk(self, choice: int, delta: Delta) -> ChatChunk:
        part = ChatChunkChoice(choice, ChatDelta(delta.text))
        if choice not in self._begun:
            self._begun.add(choice)
            part.delta.role = "assistant"
            if self._with_ids:
                part.prompt_token_ids = self._answer.prompt_token_ids(choice)
        if delta.logprobs:
            part.logprobs = self._logprobs(delta.logprobs)
        if self._with_ids:
            part.token_ids = list(delta.token_ids)
        if delta.output is not None:
            part.finish_reason = delta.output.finish_reason
            part.stop_reason = delta.output.stop_reason
        return self._chunk([part])

    def closing(self, extras: Extras) -> ChatChunk:
        return self._chunk([], extras)

    def _chunk(self, choices: list[ChatChunkChoice], extras: Extras = Extras()) -> ChatChunk:  # noqa: B008
        answer = self._answer
        return ChatChunk(answer.id, answer.created, answer.model, choices, usage=extras.usage, spolia=extras.spolia)

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
        return self._tokenizer.token_text(token_id), logprob, list(self._tokenizer.token_bytes(token_id))
