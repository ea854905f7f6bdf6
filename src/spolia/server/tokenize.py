"""`POST /tokenize` and `POST /detokenize`, as vLLM has them."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from spolia.errors import InvalidRequest
from spolia.server.body import read_body
from spolia.server.chat import encode_chat
from spolia.server.config import ServerConfig
from spolia.server.encoding import encode
from spolia.server.replies import TokenizeReply
from spolia.server.routes import Route
from spolia.server.schema import DetokenizeRequest, TokenizeRequest
from spolia.server.served import ServedModels
from spolia.server.toolcalls import ToolUse
from spolia.server.tools import check_tools

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
        check_tools(body.tools)
        engine = (await self._models.ready(body.model)).engine
        tokenizer = engine.model.tokenizer
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("send either prompt or messages", param="prompt")
        if body.prompt is not None:
            ids = await encode(tokenizer, body.prompt, add_special=body.add_special_tokens)
        else:
            ids = await encode_chat(
                engine.model,
                body.messages or [],
                tool_use=ToolUse.of(body.tools, None, None),
                add_generation_prompt=body.add_generation_prompt,
            )
        reply = TokenizeReply(
            count=len(ids),
            max_model_len=engine.context_tokens,
            tokens=ids,
            token_strs=[tokenizer.token_text(id_) for id_ in ids] if body.return_token_strs else None,
        )
        return Response(msgspec.json.encode(reply), media_type="application/json")

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
        return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")
