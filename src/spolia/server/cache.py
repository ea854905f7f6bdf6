"""`/v1/cache`: what the cache did for whom, what it should keep, and what more of it would bring.

GET    /v1/cache/explain/{request}   where the KV of each prompt token came from, and why the rest was computed
GET    /v1/cache/curve               hit rates at other sizes than this, on this traffic
POST   /v1/cache/pins                keep what is cached of a prompt, within a quota
GET    /v1/cache/pins                what is kept so
DELETE /v1/cache/pins/{id}           no longer
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from spolia.errors import InvalidRequest
from spolia.server.access import current_caller
from spolia.server.body import read_body
from spolia.server.config import ServerConfig
from spolia.server.encoding import encode
from spolia.server.errors import UnknownThing
from spolia.server.pins import PinCard, Pins
from spolia.server.prompting import encode_chat
from spolia.server.routes import Route
from spolia.server.served import ServedModel, ServedModels

__all__ = ["CacheEndpoints"]


class PinRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A prompt, as text, token ids or messages; `ttl` in seconds, or until it is lifted.

    `exact_kv`: what requests with `exact_kv` have of it, where tiers round.
    """

    model: str | None = None
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    ttl: float | None = None
    cache_salt: str | None = None
    exact_kv: bool = False


class CacheEndpoints:
    """Bound to the models of one app."""

    def __init__(self, models: ServedModels, config: ServerConfig, pins: Pins) -> None:
        self._models = models
        self._pins = pins
        self._config = config

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/v1/cache/explain/{request_id}", self.explain),
            Route("GET", "/v1/cache/curve", self.curve),
            Route("POST", "/v1/cache/pins", self.pin, PinRequest),
            Route("GET", "/v1/cache/pins", self.pins),
            Route("DELETE", "/v1/cache/pins/{pin_id}", self.unpin),
        ]

    async def explain(self, request_id: str) -> Response:
        """Where the KV of each prompt token of a request that has ended came from, and why the rest was computed."""
        for served in self._models.all():
            choices = served.explained.get(request_id, current_caller().tenant)
            if choices is not None:
                return _json(
                    {"id": request_id, "object": "cache.explanation", "model": served.name, "choices": choices}
                )
        raise UnknownThing(
            f"no request {request_id!r} has ended here lately; give the id of an answer, as in its x-request-id"
        )

    async def curve(self, request: Request) -> Response:
        """What the requests so far would have hit at other sizes."""
        served = self._models.get(request.query_params.get("model"))
        if served.state != "unloaded":
            served.engine  # noqa: B018 - raises while it loads
        return _json({"object": "cache.curve", "model": served.name, **served.curve.describe()})

    async def pin(self, request: Request) -> Response:
        """Keep what is cached of a prompt while anything else can go."""
        body = await read_body(request, PinRequest, max_bytes=self._config.max_body_bytes)
        served = await self._models.ready(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("send either prompt or messages", param="prompt")
        if body.ttl is not None and not 0 < body.ttl < float("inf"):
            raise InvalidRequest(f"ttl is {body.ttl}; it must be a positive number of seconds", param="ttl")
        model = served.model
        if body.messages is not None:
            ids = await encode_chat(model, body.messages, add_generation_prompt=False)
        else:
            prompt = body.prompt or ""
            ids = await encode(model.tokenizer, prompt) if isinstance(prompt, str) else prompt
        if not all(0 <= id_ < model.tokenizer.vocab_size for id_ in ids):
            raise InvalidRequest("prompt has token ids that are not in the vocabulary", param="prompt")
        salt = current_caller().cache_salt(body.cache_salt or "")
        return _json(_card(await self._pins.put(served, ids, salt, body.ttl, exact_kv=body.exact_kv)))

    async def pins(self, request: Request) -> Response:
        """What is pinned; of a model that is not in memory, what will be when it is back."""
        served = await self._asked(request)
        return _json({"object": "list", "data": [_card(pin) for pin in await self._pins.of(served, _salt(request))]})

    async def unpin(self, request: Request, pin_id: int) -> Response:
        """Lift a pin."""
        served = await self._asked(request)
        if pin_id not in [pin.id for pin in await self._pins.of(served, _salt(request))]:
            raise UnknownThing(f"there is no pin {pin_id}; it may have run out")
        await self._pins.lift(served, pin_id)
        return _json({"id": pin_id, "object": "cache.pin", "deleted": True})

    async def _asked(self, request: Request) -> ServedModel:
        """The model whose pins are meant. That is no reason to load it; if it is being loaded, that is waited for."""
        name = request.query_params.get("model")
        served = self._models.owner(name)
        if served.state != "unloaded":
            await self._models.ready(name)
        return served


def _salt(request: Request) -> str:
    return current_caller().cache_salt(request.query_params.get("cache_salt") or "")


def _card(pin: PinCard) -> dict[str, Any]:
    return {"object": "cache.pin", **pin._asdict()}


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
