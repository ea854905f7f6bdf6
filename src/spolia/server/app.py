"""The ASGI app: which path leads where."""

from __future__ import annotations

import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from inspect import signature
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

import spolia
from spolia.engine import AsyncEngine
from spolia.errors import InvalidRequest, SpoliaError
from spolia.server.access import Gate, KeyRing
from spolia.server.anthropic import AnthropicEndpoints
from spolia.server.body import BodyDeadlines
from spolia.server.cache import CacheEndpoints
from spolia.server.cache_admin import CacheAdminEndpoints
from spolia.server.chat import ChatEndpoint
from spolia.server.completions import CompletionEndpoint
from spolia.server.config import ServerConfig
from spolia.server.embeddings import EmbeddingEndpoint
from spolia.server.errors import handle_disconnect, handle_error, handle_http_exception
from spolia.server.events import EventEndpoints
from spolia.server.llamacpp import LlamaCppEndpoints
from spolia.server.mcp import McpChat, McpServers, read_mcp_file
from spolia.server.ollama import OllamaEndpoints, OllamaLibrary, OllamaMaking
from spolia.server.page import PageEndpoints
from spolia.server.pins import Pins
from spolia.server.responses import ResponsesEndpoints
from spolia.server.resuming import ResumableStreams
from spolia.server.routes import Route
from spolia.server.schema import ChatRequest, CompletionRequest
from spolia.server.served import HoldsModels, ModelSource, ServedModels
from spolia.server.sessions import SessionEndpoints
from spolia.server.shelf import Shelf
from spolia.server.status import StatusEndpoints
from spolia.server.tokenize import TokenizeEndpoints
from spolia.server.tracing import Tracing

__all__ = ["create_app"]


def create_app(
    engines: Mapping[str, AsyncEngine | Future[AsyncEngine] | ModelSource],
    config: ServerConfig | None = None,
    *,
    library: Callable[[], Mapping[str, ModelSource]] = dict,
) -> FastAPI:
    """The app that serves `engines`, by the names that clients use.

    The app does not own engines that it was given: whoever made them closes them.

    Args:
        engines: loaded; or about to be, and until then requests are answered 503; or to be had from a source when a
            request wants them.
        library: further models that requests may want.

    Raises:
        InvalidRequest: the file of keys or that of MCP servers cannot be read, or what it says is not allowed; the
            folder for slots cannot be made; or OpenTelemetry is not installed.
    """
    config = config or ServerConfig()
    models = ServedModels(
        {name: _promise(engine) for name, engine in engines.items()},
        request_timeout_s=config.request_timeout_s,
        shelf=Shelf(memory_bytes=config.memory_bytes, keep_alive_s=config.keep_alive_s, wait_s=config.load_wait_s),
        library=library,
    )
    mcp = None if config.mcp is None else McpServers(read_mcp_file(config.mcp))
    streams, pins = ResumableStreams(), Pins(models.shelf)
    events = EventEndpoints(models)
    app = _App([*_routes(models, config, pins, McpChat(mcp, config)), *streams.routes(), *events.routes()])
    if config.slot_save_path is not None:
        _make_folder(config.slot_save_path)
    app.state.resumable_streams = streams
    app.state.cache_events = events
    app.state.models = models
    app.state.mcp = mcp
    app.state.pins = pins
    app.state.body_deadlines = BodyDeadlines(config.body_timeout_s)
    app.state.tracing = tracing = None if config.traces is None else Tracing(config.traces)
    app.add_middleware(HoldsModels, models=models)
    ring = None if config.keys is None else KeyRing(config.keys, time.monotonic)
    app.add_middleware(Gate, ring=ring, tracing=tracing)
    app.add_exception_handler(SpoliaError, handle_error)
    app.add_exception_handler(HTTPException, handle_http_exception)
    app.add_exception_handler(ClientDisconnect, handle_disconnect)
    return app


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(
            f"slot_save_path is {path}, which cannot be made: {error.strerror}; name a folder that you may write to"
        ) from error


def _routes(models: ServedModels, config: ServerConfig, pins: Pins, mcp: McpChat) -> list[Route]:
    """Every API's, and what llama.cpp's clients call without /v1."""
    complete, chat = CompletionEndpoint(models, config), ChatEndpoint(models, config, mcp.respond)
    return [
        *StatusEndpoints(models).routes(),
        *PageEndpoints(models).routes(),
        *CacheEndpoints(models, config, pins).routes(),
        *CacheAdminEndpoints(models, config, pins).routes(),
        *SessionEndpoints(models, config).routes(),
        *TokenizeEndpoints(models, config).routes(),
        Route("POST", "/v1/completions", complete.respond, CompletionRequest),
        Route("POST", "/v1/completions/render", complete.render, CompletionRequest),
        Route("POST", "/v1/chat/completions", chat.respond, ChatRequest),
        Route("POST", "/v1/chat/completions/render", chat.render, ChatRequest),
        Route("POST", "/chat/completions", chat.respond, ChatRequest),
        *EmbeddingEndpoint(models, config).routes(),
        *ResponsesEndpoints(models, config).routes(),
        *AnthropicEndpoints(models, config).routes(),
        *OllamaEndpoints(models, config).routes(),
        *OllamaLibrary(models, config).routes(),
        *OllamaMaking(models, config).routes(),
        *LlamaCppEndpoints(models, config).routes(),
    ]


class _App(FastAPI):
    """FastAPI, which cannot see our bodies: they are msgspec's, so their schemas are put into its document."""

    def __init__(self, routes: Sequence[Route]) -> None:
        super().__init__(title="Spolia", version=spolia.__version__, docs_url=None, redoc_url=None)
        self._bodies = {(route.path, route.method): route.body for route in routes if route.body is not None}
        self._owned = tuple(routes)
        for route in routes:
            endpoint = _endpoint_of(route)
            self.add_api_route(route.path, endpoint, methods=[route.method], response_model=None)
            if route.method == "GET":
                self.add_api_route(route.path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            template = "#/components/schemas/{name}"
            schemas, components = msgspec.json.schema_components(self._bodies.values(), ref_template=template)
            for (path, method), schema in zip(self._bodies, schemas, strict=True):
                body = {"required": True, "content": {"application/json": {"schema": schema}}}
                document["paths"][path][method.lower()]["requestBody"] = body
            document.setdefault("components", {}).setdefault("schemas", {}).update(components)
        return super().openapi()


def _endpoint_of(route: Route) -> Callable[..., Awaitable[Response]]:
    """What FastAPI is given, which keeps thousands of functions in caches of its module, also when their app has gone.

    An endpoint is bound to the models of its app, and so the caches would keep engines with all their memory.
    """
    there = weakref.ref(route)

    async def respond(**variables: Any) -> Response:
        owned = there()
        assert owned is not None, "an app that answers has its routes"
        return await owned.endpoint(**variables)

    respond.__name__, respond.__doc__ = route.endpoint.__name__, route.endpoint.__doc__
    setattr(respond, "__signature__", signature(route.endpoint, eval_str=True))  # noqa: B010 - not in the type's stub
    return respond


def _promise(engine: AsyncEngine | Future[AsyncEngine] | ModelSource) -> Future[AsyncEngine] | ModelSource:
    if isinstance(engine, Future | ModelSource):
        return engine
    done: Future[AsyncEngine] = Future()
    done.set_result(engine)
    return done
