"""What can be asked of the server itself: `/health`, `/livez`, `/readyz`, `/metrics`, `/v1/models`, `/version`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

import spolia
from spolia.engine import available_bytes
from spolia.server.replies import ModelCard, ModelList, ModelMemory
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
            Route("GET", "/readyz", self.health),
            Route("GET", "/livez", self.alive),
            Route("GET", "/metrics", self.metrics),
            Route("GET", "/version", self.version),
            Route("GET", "/v1/health", self.health),
            Route("GET", "/ping", self.health),
            Route("POST", "/ping", self.health),
            Route("GET", "/load", self.load),
            Route("GET", "/models", self.models),
            Route("GET", "/v1/models", self.models),
            Route("GET", "/v1/models/{name:path}", self.model),
        ]

    async def health(self) -> Response:
        """200 once requests are answered; 503 with the reason as long as no model is there, and if one has failed.

        A model that is not in memory is no trouble: its next request loads it.
        """
        states = {served: served.state for served in self._models.all()}
        bad = {"failed"} if "ready" in states.values() else {"failed", "loading"}
        troubles = [served.trouble or "" for served, state in states.items() if state in bad]
        if troubles:
            return _json({"status": "unavailable", "reason": "; ".join(troubles)}, status=503)
        return _json({"status": "ok"})

    async def load(self) -> Response:
        """vLLM's: requests that are being answered, or wait."""
        return _json({"server_load": sum(served.num_holds for served in self._models.all())})

    async def alive(self) -> Response:
        """200 unless a restart would help: also while models load, when `/readyz` and `/health` are 503 still."""
        failed = [served.trouble or "" for served in self._models.all() if served.state == "failed"]
        if failed:
            return _json({"status": "failed", "reason": "; ".join(failed)}, status=503)
        return _json({"status": "alive"})

    async def metrics(self) -> Response:
        """Prometheus' text."""
        return Response(self._models.metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def models(self) -> Response:
        """The models that can be asked for, in memory or not."""
        models = self._models.everything()
        cards = [_card(served) for served in models]
        first_id, last_id = (cards[0].id, cards[-1].id) if cards else (None, None)
        shelf = self._models.shelf
        memory = ModelMemory(*shelf.memory_of(self._models.all()), available_bytes(), shelf.memory_bytes)
        return _json(ModelList(cards, first_id, last_id, memory))

    async def model(self, name: str) -> Response:
        """One of them."""
        return _json(_card(self._models.get(name)))

    async def version(self) -> Response:
        """Spolia's version."""
        return _json({"version": spolia.__version__})


def _card(served: ServedModel) -> ModelCard:
    created_at = datetime.fromtimestamp(int(served.since_s), UTC).isoformat()
    card = ModelCard(served.name, int(served.since_s), served.name, created_at, served.state, served.trouble)
    card.root = served.name if served.recipe is None else served.recipe.base
    card.num_requests = served.num_holds
    card.num_queued = served.num_queued
    card.is_pinned = served.is_pinned
    card.expires_at = served.expires_s
    if served.state == "ready":
        engine = served.engine
        card.max_model_len = engine.context_tokens
        card.vocab_size = engine.model.tokenizer.vocab_size
        card.weights_bytes = engine.weights_bytes
        card.kv_bytes = engine.kv_bytes
        card.max_input_tokens = card.max_tokens = engine.context_tokens
        card.meta = {
            "n_vocab": engine.model.tokenizer.vocab_size,
            "n_ctx": engine.context_tokens,
            "n_ctx_train": engine.model.context_length,
            "n_embd": engine.hidden_size,
            "n_params": engine.model.num_parameters,
            "size": engine.model.file_bytes,
        }
    return card


def _json(content: Any, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
