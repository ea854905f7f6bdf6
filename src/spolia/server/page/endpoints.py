"""`/`, `/static/*`, and `/v1/cache/live`."""

from __future__ import annotations

import mimetypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from spolia.engine import CacheStats, CacheView, EngineCore, LaneView, lanes
from spolia.models import Tokenizer
from spolia.server.errors import UnknownThing
from spolia.server.routes import Route
from spolia.server.served import ServedModel, ServedModels

__all__ = ["PageEndpoints"]

_STATIC = Path(__file__).parent / "static"
_FILES = {path.name: path for path in _STATIC.iterdir() if path.is_file()}
_MAX_CELLS = 1024
_MAX_NODES = 160
# Nothing from elsewhere, nothing inline: a model's text can neither run nor fetch anything.
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"
_HEADERS = {
    "content-security-policy": f"{_POLICY}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class PageEndpoints:
    """Bound to the models of one app."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/", self.page),
            Route("GET", "/static/{name}", self.static),
            Route("GET", "/v1/cache/live", self.live),
        ]

    async def page(self) -> Response:
        """The page."""
        return _file("index.html")

    async def static(self, name: str) -> Response:
        """Its files."""
        return _file(name)

    async def live(self, request: Request) -> Response:
        """What the cache of a model (`?model=`, else the first) and its requests look like now."""
        name = request.query_params.get("model")
        served = self._models.owner(name) if name else self._models.all()[0]
        view, stats, running = await served.engine.call(_look)
        return Response(msgspec.json.encode(_shown(served, view, stats, running)), media_type="application/json")


def _file(name: str) -> Response:
    path = _FILES.get(name)  # a name, looked up: no path is made of what a client says
    if path is None:
        raise UnknownThing(f"there is no file {name!r} here")
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return Response(path.read_bytes(), headers=_HEADERS, media_type=kind)


def _look(core: EngineCore) -> tuple[CacheView, CacheStats, list[LaneView]]:
    """Between two steps."""
    return core.cache.view(_MAX_NODES), core.cache.stats, lanes(core)


def _shown(served: ServedModel, view: CacheView, stats: CacheStats, running: Sequence[LaneView]) -> dict[str, Any]:
    engine = served.engine
    tokenizer = engine.model.tokenizer
    snapshot = engine.stats
    return {
        "model": served.name,
        "groups": [
            {
                "cells": _cells(blocks),
                "free": ledger.free,
                "cached": ledger.cached,
                "leased": ledger.leased,
                "total": ledger.total,
            }
            for blocks, ledger in zip(view.blocks, snapshot.ledger, strict=True)
        ],
        "tree": {"num_nodes": view.num_nodes, "nodes": _nodes(view, tokenizer)},
        "tokens": {
            "asked": stats.num_asked_tokens,
            "reused": stats.num_reused_tokens,
            "missed": {reason.value: count for reason, count in stats.num_missed_tokens.items() if count},
            "generated": snapshot.counters.num_generated_tokens,
            "by_source": dict(snapshot.counters.num_tokens_by_source),
        },
        "evicted_blocks": stats.num_evicted_blocks,
        "tiers": [
            {
                "name": tier.name,
                "state": tier.state.value,
                "reason": tier.reason,
                "num_bytes": tier.health.num_bytes,
                "capacity_bytes": tier.health.capacity_bytes,
                "num_hits": tier.num_hits,
                "num_misses": tier.num_misses,
                "num_failures": tier.num_failures,
            }
            for tier in snapshot.tiers
        ],
        "running": snapshot.num_running,
        "waiting": max(0, served.num_waiting),
        "lanes": [
            {
                "lane": lane.lane,
                "request": lane.request_id,
                "num_prompt_tokens": lane.num_prompt_tokens,
                "num_cached_tokens": lane.num_cached_tokens,
                "num_computed_tokens": lane.num_computed_tokens,
                "num_generated_tokens": lane.num_generated_tokens,
            }
            for lane in running
            if lane.request_id is not None
        ],
        "recent": list(served.recent),
    }


def _nodes(view: CacheView, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    namespaces = sorted({node.namespace for node in view.nodes})
    number = {namespace: index for index, namespace in enumerate(namespaces)}
    return [
        {
            "parent": node.parent,
            "namespace": number[node.namespace],
            "start": node.start,
            "num_tokens": node.num_tokens,
            "text": tokenizer.decode(node.first_ids, skip_special=False),
            "num_hits": node.num_hits,
            "num_leases": node.num_leases,
            "pinned": node.is_pinned,
        }
        for node in view.nodes
    ]


def _cells(blocks: NDArray[np.uint8]) -> list[list[int]]:
    """[cached, leased, total] for each of at most `_MAX_CELLS` runs of neighbouring blocks."""
    run = -(-len(blocks) // _MAX_CELLS)
    starts = np.arange(0, len(blocks), run)
    cached = np.add.reduceat((blocks == 1).astype(np.int64), starts)
    leased = np.add.reduceat((blocks == 2).astype(np.int64), starts)
    totals = np.minimum(run, len(blocks) - starts)
    cells: list[list[int]] = np.stack([cached, leased, totals], axis=1).tolist()
    return cells
