"""What can be asked of the server itself: `/health`, `/metrics`, `/v1/models`, `/version`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

import spolia
from spolia.server.replies import ModelCard, ModelList
from spolia.server.routes import Route
from spolia.server.served import ServedModel, ServedModels

__all__ = ["StatusEndpoints"]


class StatusEndpoints:
    """Bound to the models of one app."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/health", self.health),
            Route("GET", "/metrics", self.metrics),
            Route("GET", "/version", self.version),
            Route("GET", "/v1/models", self.models),
            Route("GET", "/v1/models/{name:path}", self.model),
        ]

    async def health(self) -> Response:
        """200 once every model can answer; 503 with the reason until then, and after an engine has failed."""
        troubles = [served.trouble for served in self._models.all() if served.trouble is not None]
        if troubles:
            return _json({"status": "unavailable", "reason": "; ".join(troubles)}, status=503)
        return _json({"status": "ok"})

    async def metrics(self) -> Response:
        return Response(self._models.metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def models(self) -> Response:
        cards = [_card(served) for served in self._models.all()]
        first_id, last_id = (cards[0].id, cards[-1].id) if cards else (None, None)
        return _json(ModelList(cards, first_id, last_id))

    async def model(self, name: str) -> Response:
        return _json(_card(self._models.get(name)))

    async def version(self) -> Response:
        return _json({"version": spolia.__version__})


def _card(served: ServedModel) -> ModelCard:
    created_at = datetime.fromtimestamp(int(served.since_s), UTC).isoformat()
    card = ModelCard(served.name, int(served.since_s), served.name, created_at)
    if served.trouble is None:
        card.max_model_len = served.engine.config.max_context
        card.vocab_size = served.engine.model.tokenizer.vocab_size
    return card


def _json(content: Any, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
