"""`/v1/cache`: what the cache did for whom, and what it should keep."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from spolia.server.access import current_caller
from spolia.server.errors import UnknownThing
from spolia.server.routes import Route
from spolia.server.served import ServedModels

__all__ = ["CacheEndpoints"]


class CacheEndpoints:
    """Bound to the models of one app."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def routes(self) -> list[Route]:
        return [Route("GET", "/v1/cache/explain/{request_id}", self.explain)]

    async def explain(self, request_id: str) -> Response:
        """Where the KV of each prompt token of a request that has ended came from, and why the rest was computed."""
        for served in self._models.all():
            choices = served.explained.get(request_id, current_caller().tenant)
            if choices is not None:
                reply = {"id": request_id, "object": "cache.explanation", "model": served.name, "choices": choices}
                return Response(msgspec.json.encode(reply), media_type="application/json")
        raise UnknownThing(
            f"no request {request_id!r} has ended here lately; give the id of an answer, as in its x-request-id"
        )
