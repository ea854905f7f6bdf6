"""Ollama's `create`, `copy`, `delete`, `push` and `blobs`: models made of others, or of files that clients send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from spolia.errors import InvalidRequest, ModelError, UnknownModel
from spolia.models import (
    BlobWriter,
    ChatTemplate,
    Recipe,
    blob_path,
    check_is_kept,
    check_name,
    made_of,
    read_recipe,
    remove,
)
from spolia.server.body import check_encoding, read_body
from spolia.server.config import ServerConfig
from spolia.server.errors import BodyTooSlow, Conflict, UnknownThing
from spolia.server.ollama.schema import CopyRequest, CreateRequest, ModelRequest, PullRequest
from spolia.server.resuming import LineStream
from spolia.server.routes import Route
from spolia.server.served import ServedModels

__all__ = ["OllamaMaking"]

_PIECE_BYTES = 1 << 20


class OllamaMaking:
    """Bound to the models of one app."""

    def __init__(self, models: ServedModels, config: ServerConfig) -> None:
        self._models = models
        self._config = config
        self._changing = asyncio.Lock()  # one model is made or deleted at a time

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/api/create", self.create, CreateRequest),
            Route("POST", "/api/copy", self.copy, CopyRequest),
            Route("DELETE", "/api/delete", self.delete, ModelRequest),
            Route("POST", "/api/push", self.push, PullRequest),
            Route("HEAD", "/api/blobs/{digest}", self.has_blob),
            Route("POST", "/api/blobs/{digest}", self.take_blob),
        ]

    async def create(self, request: Request) -> Response:
        """A model made of another, or of a file that was sent before; one that was made before is made anew."""
        body = await read_body(request, CreateRequest, max_bytes=self._config.max_body_bytes)
        name = check_name(body.asked or "")
        body.check()
        try:
            async with self._changing:
                told = await self._create(name, body)
        except ModelError as error:
            raise InvalidRequest(str(error), param="files" if body.files else "from") from None
        if body.stream:
            return LineStream(_lines([*told, "success"]), on_disconnect=lambda: None, headers={})
        return _json({"status": "success"})

    async def _create(self, name: str, body: CreateRequest) -> Sequence[str]:
        """What there is to tell."""
        before = await asyncio.to_thread(read_recipe, name)
        if before is None and any(served.name == name for served in self._models.everything()):
            raise Conflict(f"there is a model {name!r} that was not made here; take another name, or delete it first")
        if body.template:  # before anything is put in its place
            await asyncio.to_thread(_check_template, body.template)
        if body.files:
            if others := await asyncio.to_thread(made_of, name):
                raise Conflict(f"{', '.join(others)} would become another model with {name!r}; delete that first")
            await self._models.forget(name)
            recipe = await asyncio.to_thread(Recipe.of_blob, name, body.blob(), **body.given())
        else:
            recipe = body.over(await self._recipe_of(body.from_ or ""))
        await asyncio.to_thread(recipe.write, name)
        try:
            self._models.get(name)
        except UnknownModel:
            return [f"{name} is kept; this server was started for other models: `spolia serve` without names has it"]
        return [f"made of {recipe.base}"]

    async def copy(self, request: Request) -> Response:
        """The same model by another name."""
        body = await read_body(request, CopyRequest, max_bytes=self._config.max_body_bytes)
        name = check_name(body.destination.removesuffix(":latest"))
        async with self._changing:
            before = await asyncio.to_thread(read_recipe, name)
            there = any(served.name == name for served in self._models.everything())
            if there and (before is None or before.base == name):
                raise Conflict(f"there is a model {name!r} already; delete it first, or take another name")
            recipe = await self._recipe_of(body.source.removesuffix(":latest"))
            await asyncio.to_thread(recipe.write, name)
        return Response()

    async def _recipe_of(self, source: str) -> Recipe:
        """That of a made model, or the plainest there is for another.

        Raises:
            UnknownModel: not served here.
        """
        served = self._models.get(source)
        return Recipe(base=served.name) if served.recipe is None else served.recipe

    async def delete(self, request: Request) -> Response:
        """Delete a model's recipe or file; one that is in memory is unloaded first."""
        body = await read_body(request, ModelRequest, max_bytes=self._config.max_body_bytes)
        name = body.asked or ""
        async with self._changing:
            if others := await asyncio.to_thread(made_of, name):
                raise Conflict(f"{name!r} is what {', '.join(others)} has its weights from; delete that first")
            try:
                await asyncio.to_thread(check_is_kept, name)
                recipe = await asyncio.to_thread(read_recipe, name)
                if recipe is None or recipe.base == name:
                    await self._models.forget(name)
                await asyncio.to_thread(remove, name)
            except ModelError as error:
                raise UnknownModel(str(error), param="model") from None
        return Response()

    async def push(self, request: Request) -> Response:
        """There is nowhere to push to."""
        body = await read_body(request, PullRequest, max_bytes=self._config.max_body_bytes)
        raise InvalidRequest(
            f"{body.asked or 'a model'} cannot be pushed: Spolia has no registry. Put its GGUF file where others reach "
            "it, on Hugging Face for instance, and have them pull hf:owner/repo/file; a recipe is made with /api/create"
        )

    async def has_blob(self, digest: str) -> Response:
        """200 if the file is here."""
        if not await asyncio.to_thread(blob_path(digest).is_file):
            raise UnknownThing(f"there is no blob {digest}")
        return Response()

    async def take_blob(self, request: Request, digest: str) -> Response:
        """Keep a file under its digest, to make a model of."""
        check_encoding(request)
        if await asyncio.to_thread(blob_path(digest).is_file):
            return Response()
        writer = await asyncio.to_thread(BlobWriter, digest)
        try:
            async for piece in self._pieces(request):
                await asyncio.to_thread(writer.write, piece)
            await asyncio.to_thread(writer.finish)
        finally:
            writer.close()
        return Response(status_code=201)

    async def _pieces(self, request: Request) -> AsyncIterator[bytes]:
        """A body of any size, whose sender does not pause for longer than a body may take elsewhere."""
        chunks, held = aiter(request.stream()), bytearray()
        while True:
            try:
                held += await asyncio.wait_for(anext(chunks), self._config.body_timeout_s)
            except StopAsyncIteration:
                break
            except TimeoutError:
                raise BodyTooSlow("the rest of the file did not arrive; send it again") from None
            if len(held) >= _PIECE_BYTES:
                yield bytes(held)
                held.clear()
        yield bytes(held)


def _check_template(source: str) -> None:
    try:
        ChatTemplate(source).check()
    except ModelError as error:
        raise InvalidRequest(
            f"template is no Jinja, which is what templates are here: {error}. Ollama's own are Go's; leave it "
            "out, and the template in the model's file is used",
            param="template",
        ) from None


async def _lines(told: Sequence[str]) -> AsyncIterator[bytes]:
    for status in told:
        yield msgspec.json.encode({"status": status}) + b"\n"


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
