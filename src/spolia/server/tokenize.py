"""`POST /tokenize` and `POST /detokenize`, as vLLM and llama.cpp have them."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from spolia.errors import InvalidRequest
from spolia.models import Tokenizer
from spolia.server.body import read_body
from spolia.server.config import ServerConfig
from spolia.server.encoding import encode
from spolia.server.prompting import PromptBody, encode_chat, prompt_options
from spolia.server.replies import TokenizeReply
from spolia.server.routes import Route
from spolia.server.schema import DetokenizeRequest, TokenizeRequest, refuse_unless
from spolia.server.served import ServedModels

__all__ = ["TokenizeEndpoints"]


class TokenizeEndpoints:
    """Bound to the models and limits of one app."""

    def __init__(self, models: ServedModels, config: ServerConfig) -> None:
        self._models = models
        self._config = config

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/tokenize", self.tokenize, TokenizeRequest),
            Route("POST", "/detokenize", self.detokenize, DetokenizeRequest),
        ]

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or of a chat's prompt."""
        body = await read_body(request, TokenizeRequest, max_bytes=self._config.max_body_bytes)
        refuse_unless(body, {"chat_template": ()})
        served = await self._models.ready(body.model)
        engine, tokenizer = served.engine, served.model.tokenizer
        if sum(way is not None for way in (body.prompt, body.messages, body.content)) != 1:
            raise InvalidRequest("send one of prompt, messages and content", param="prompt")
        if body.content is not None:
            ids = await asyncio.to_thread(
                tokenizer.encode, body.content, add_special=body.add_special, parse_special=body.parse_special
            )
            return _json({"tokens": [_with_piece(tokenizer, id_) for id_ in ids] if body.with_pieces else ids})
        if body.prompt is not None:
            ids = await encode(tokenizer, body.prompt, add_special=body.add_special_tokens is not False)
        else:
            options = prompt_options(cast("PromptBody", body), served.model)
            ids = await encode_chat(
                served.model, body.messages or [], add_special=bool(body.add_special_tokens), **options
            )
        return _json(
            TokenizeReply(
                count=len(ids),
                max_model_len=engine.context_tokens,
                tokens=ids,
                token_strs=[tokenizer.token_text(id_) for id_ in ids] if body.return_token_strs else None,
            )
        )

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        body = await read_body(request, DetokenizeRequest, max_bytes=self._config.max_body_bytes)
        tokenizer = (await self._models.ready(body.model)).engine.model.tokenizer
        for i, id_ in enumerate(body.tokens):
            if not 0 <= id_ < tokenizer.vocab_size:
                raise InvalidRequest(
                    f"tokens[{i}] is {id_}; the vocabulary has ids from 0 to {tokenizer.vocab_size - 1}", param="tokens"
                )
        text = tokenizer.decode(body.tokens, skip_special=False)
        return _json({"prompt": text, "content": text})


def _with_piece(tokenizer: Tokenizer, token_id: int) -> dict[str, Any]:
    """With its text, or its bytes where they are none by themselves."""
    spelt = tokenizer.token_bytes(token_id)
    try:
        return {"id": token_id, "piece": spelt.decode()}
    except UnicodeDecodeError:
        return {"id": token_id, "piece": list(spelt)}


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
