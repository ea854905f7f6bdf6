"""What Ollama's clients ask about models: `/api/tags`, `show`, `ps`, `pull`, `version`."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from spolia.errors import InvalidRequest, ModelError, SpoliaError, UnknownModel
from spolia.models import Model, Progress, Recipe, check_source, pull
from spolia.server.body import read_body
from spolia.server.config import ServerConfig
from spolia.server.errors import ollama_error_body
from spolia.server.ollama.schema import ModelRequest, PullRequest
from spolia.server.resuming import LineStream
from spolia.server.routes import Route
from spolia.server.served import ServedModel, ServedModels

__all__ = ["OllamaLibrary"]

_SPOKEN = "0.12.11"  # the first that has log-probabilities
_NEVER = "9999-12-31T23:59:59Z"
_LAST_SECOND = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()


class OllamaLibrary:
    """Bound to the models of one app."""

    def __init__(self, models: ServedModels, config: ServerConfig) -> None:
        self._models = models
        self._config = config

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/api/version", self.version),
            Route("GET", "/api/tags", self.tags),
            Route("GET", "/api/ps", self.running),
            Route("POST", "/api/show", self.show, ModelRequest),
            Route("POST", "/api/pull", self.pull, PullRequest),
        ]

    async def version(self) -> Response:
        """The version of Ollama's API that is spoken: clients refuse to work with what is older than they need."""
        return _json({"version": _SPOKEN})

    async def tags(self) -> Response:
        """All models, in memory or not; of one that was never loaded only the name is known."""
        return _json({"models": [await _listed(served) for served in self._models.everything()]})

    async def running(self) -> Response:
        """Models in memory, with their sizes there and until when they stay."""
        shown = []
        for served in self._models.all():
            if served.state == "ready":
                engine = served.engine
                kept = {
                    "size": engine.weights_bytes + (engine.config.kv_memory or 0),
                    "expires_at": _expires_at(served),
                    "size_vram": 0,
                    "context_length": engine.context_tokens,
                }
                shown.append({**await _listed(served), **kept})
        return _json({"models": shown})

    async def show(self, request: Request) -> Response:
        """What is known of a model."""
        body = await read_body(request, ModelRequest, max_bytes=self._config.max_body_bytes)
        served = await self._models.ready(body.asked)
        model = served.model
        template = "" if model.chat_template is None else model.chat_template.source
        fills_in = model.tokenizer.special.fim_middle is not None
        return _json(
            {
                "modelfile": _modelfile(served),
                "parameters": _parameters(served.recipe),
                "template": template,
                "details": _details(model, served.recipe),
                **_told(served.recipe),
                "model_info": {
                    "general.architecture": model.architecture,
                    "general.basename": model.name,
                    "general.parameter_count": model.num_parameters,
                    f"{model.architecture}.context_length": model.context_length,
                    f"{model.architecture}.embedding_length": served.engine.hidden_size,
                },
                "capabilities": [
                    "completion",
                    *(["tools"] if "tools" in template else []),
                    *(["insert"] if fills_in else []),
                    *(["thinking"] if "<think>" in template or "enable_thinking" in template else []),
                ],
                "modified_at": _time(served),
            }
        )

    async def pull(self, request: Request) -> Response:
        """Fetch a model to this machine; it is served after a start with its name."""
        body = await read_body(request, PullRequest, max_bytes=self._config.max_body_bytes)
        name = body.asked
        if not name or (os.sep in name and not name.startswith("hf:")) or name.startswith((".", "~")):
            raise InvalidRequest(f"model is {name!r}; it must be a name, or hf:owner/repo[/file]", param="model")
        try:
            await asyncio.to_thread(check_source, name)
        except ModelError as error:
            raise UnknownModel(str(error), param="model") from None
        if body.stream:
            return LineStream(_pulling(name), on_disconnect=lambda: None, headers={})
        await asyncio.to_thread(pull, name)
        return _json({"status": "success"})


async def _pulling(name: str) -> AsyncIterator[bytes]:
    """What `pull` reports, a line each. A client that goes away does not end the pull: what has arrived is kept."""
    loop = asyncio.get_running_loop()
    reports: asyncio.Queue[Progress | None] = asyncio.Queue()
    yield msgspec.json.encode({"status": "pulling manifest"}) + b"\n"

    def report(progress: Progress) -> None:
        loop.call_soon_threadsafe(reports.put_nowait, progress)

    fetching = asyncio.ensure_future(asyncio.to_thread(pull, name, progress=report))
    fetching.add_done_callback(lambda _: reports.put_nowait(None))
    while (progress := await reports.get()) is not None:
        status = {"status": progress.activity, "total": progress.total_bytes, "completed": progress.done_bytes}
        yield msgspec.json.encode(status) + b"\n"
    try:
        await fetching
    except SpoliaError as error:
        yield ollama_error_body(error) + b"\n"
        return
    yield msgspec.json.encode({"status": "success"}) + b"\n"


async def _listed(served: ServedModel) -> dict[str, Any]:
    if served.state != "ready":
        unknown = dict.fromkeys(("parent_model", "format", "family", "parameter_size", "quantization_level"), "")
        head = {"name": served.name, "model": served.name, "modified_at": _time(served)}
        return {**head, "size": 0, "digest": "", "details": {**unknown, "families": []}}
    model = served.model
    digest = await asyncio.to_thread(lambda: model.digest)  # reads the file, if nobody has yet
    return {
        "name": served.name,
        "model": served.name,
        "modified_at": _time(served),
        "size": model.file_bytes,
        "digest": digest.hex(),
        "details": _details(model, served.recipe),
    }


def _told(recipe: Recipe | None) -> dict[str, Any]:
    if recipe is None:
        return {}
    told = {"system": recipe.system, "messages": recipe.messages, "license": "\n".join(recipe.license)}
    return {name: value for name, value in told.items() if value}


def _parameters(recipe: Recipe | None) -> str:
    return "".join(f"{line}\n" for line in _parameter_lines(recipe))


def _parameter_lines(recipe: Recipe | None) -> list[str]:
    """A line each, as a Modelfile has them; those of a list, as many as it has."""
    parameters = {} if recipe is None else recipe.parameters
    several = ((name, value if isinstance(value, list) else [value]) for name, value in parameters.items())
    return [f"{name} {msgspec.json.encode(each).decode()}" for name, values in several for each in values]


def _modelfile(served: ServedModel) -> str:
    recipe = served.recipe
    if recipe is None:
        return f"FROM {served.name}\n"
    quoted = {"TEMPLATE": recipe.template, "SYSTEM": recipe.system, "LICENSE": "\n".join(recipe.license)}
    lines = [
        f"FROM {recipe.base}",
        *(f'{word} """{text}"""' for word, text in quoted.items() if text),
        *(f"PARAMETER {line}" for line in _parameter_lines(recipe)),
        *(f"MESSAGE {message['role']} {message['content']}" for message in recipe.messages),
    ]
    return "".join(f"{line}\n" for line in lines)


def _details(model: Model, recipe: Recipe | None = None) -> dict[str, Any]:
    return {
        "parent_model": "" if recipe is None else recipe.base,
        "format": "gguf",
        "family": model.architecture,
        "families": [model.architecture],
        "parameter_size": f"{model.num_parameters / 1e6:.0f}M",
        "quantization_level": model.main_type,
    }


def _time(served: ServedModel) -> str:
    return _iso(served.since_s)


def _expires_at(served: ServedModel) -> str:
    """Of one that is in use: when its time would be over if nobody asked again."""
    if served.is_pinned or served.keep_alive_s is None or math.isinf(served.keep_alive_s):
        return _NEVER
    return _iso(served.expires_s or time.time() + served.keep_alive_s)


def _iso(unix_s: float) -> str:
    if unix_s >= _LAST_SECOND:
        return _NEVER
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
