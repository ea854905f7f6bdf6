"""`/v1/cache`, for operators: what is where, and having it elsewhere.

POST /v1/cache/lookup   where the KV of a prompt lies
POST /v1/cache/warm     compute a prompt ahead
POST /v1/cache/move     from the device to a tier, or from the tiers to the device
POST /v1/cache/compress what tiers hold of exact KV in fewer bits
POST /v1/cache/clear    drop all, or what a namespace, tenant, prefix or session has
POST /v1/cache/export   the KV of a prompt or session as a file
POST /v1/cache/import   and back
GET  /v1/cache/config   size, policy, tiers
POST /v1/cache/config   change them, all or none

Where they take a prompt it is text, token ids, messages, or a session's.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from spolia.engine import AsyncEngine, CacheAdmin, ClearReport, SamplingParams, Wish
from spolia.errors import InvalidRequest
from spolia.server.access import current_caller, tenant_salt
from spolia.server.answer import Answer
from spolia.server.body import BodyDeadlines, read_body
from spolia.server.config import ServerConfig
from spolia.server.encoding import encode
from spolia.server.errors import Forbidden
from spolia.server.hot_changes import ConfigChange, HotChanges, describe, describe_unloaded
from spolia.server.pins import Pins
from spolia.server.prompting import encode_chat
from spolia.server.routes import Route
from spolia.server.served import ServedModel, ServedModels
from spolia.server.sessions import find_session

__all__ = ["CacheAdminEndpoints", "Selection", "select_ids", "warm"]

logger = logging.getLogger("spolia.server")


class Selection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A prompt, as text, token ids, messages or a session's id."""

    model: str | None = None
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    session: str | None = None
    cache_salt: str | None = None


class LookupRequest(Selection, kw_only=True):
    """`exact_kv`: of the KV that requests with `exact_kv` have, where tiers round."""

    exact_kv: bool = False


class WarmRequest(Selection, kw_only=True):
    """`pin` keeps it for `ttl` seconds, or until it is lifted; `priority` is a wish.

    `exact_kv`: for requests with `exact_kv`, where tiers round.
    """

    exact_kv: bool = False
    priority: int | None = None
    pin: bool = False
    ttl: float | None = None


class MoveRequest(LookupRequest, kw_only=True):
    """`to`: a tier's name, or "device". `keep`: on the device, too."""

    to: str
    keep: bool = False


class CompressRequest(Selection, kw_only=True):
    """Just one of: `all`, `tenant`, `namespace` (`cache_salt`'s), a prompt (all that begins with it), `session`."""

    all: bool = False
    namespace: bool = False
    tenant: str | None = None


class ClearRequest(CompressRequest, kw_only=True):
    """What `CompressRequest` says; `tiers` false leaves what lies in tiers, `pinned` true takes what is pinned, too."""

    tiers: bool = True
    pinned: bool = False


async def select_ids(served: ServedModel, body: Selection) -> list[int]:
    """The token ids of what was chosen.

    Raises:
        InvalidRequest: not just one way of saying it, or what it says is no prompt.
    """
    model = served.model
    if sum(way is not None for way in (body.prompt, body.messages, body.session)) != 1:
        raise InvalidRequest("send one of prompt, messages and session", param="prompt")
    if body.session is not None:
        return list((await find_session(served, body.session, body.cache_salt)).token_ids)
    if body.messages is not None:
        return await encode_chat(model, body.messages, add_generation_prompt=False)
    prompt = body.prompt or ""
    ids = await encode(model.tokenizer, prompt) if isinstance(prompt, str) else prompt
    if not ids or not all(0 <= id_ < model.tokenizer.vocab_size for id_ in ids):
        raise InvalidRequest("prompt is empty, or has token ids that are not in the vocabulary", param="prompt")
    return ids


async def warm(served: ServedModel, body: WarmRequest, pins: Pins, *, max_waiting: int) -> dict[str, Any]:
    """Compute a prompt, so that who asks for it finds it.

    Raises:
        InvalidRequest, Overloaded: as for a request with that prompt; or its pin has no room.
    """
    if body.ttl is not None and not 0 < body.ttl < float("inf"):
        raise InvalidRequest(f"ttl is {body.ttl}; it must be a positive number of seconds", param="ttl")
    ids = await select_ids(served, body)
    try:
        wishes = [] if body.priority is None else [Wish(body.priority, body.ttl)]
    except ValueError as error:
        raise InvalidRequest(str(error), param="priority") from None
    answer = Answer.submit(
        "warm",
        served,
        [ids],
        [SamplingParams(max_tokens=1, temperature=0.0, exact_kv=body.exact_kv)],
        cache_salt=body.cache_salt or "",
        max_waiting=max_waiting,
        wishes=wishes,
    )
    (output,) = (await answer.finish()).values()
    done = {
        "object": "cache.warmed",
        "model": served.name,
        "num_tokens": len(ids),
        "num_cached_tokens": output.num_cached_tokens,
        "num_computed_tokens": len(ids) - output.num_cached_tokens,
    }
    if body.pin:
        pin = await pins.put(served, ids, _salt(body.cache_salt), body.ttl, exact_kv=body.exact_kv)
        done["pin"] = pin.id
    return done


class CacheAdminEndpoints:
    """Bound to the models of one app."""

    def __init__(self, models: ServedModels, config: ServerConfig, pins: Pins) -> None:
        self._models = models
        self._config = config
        self._pins = pins
        self._changes = HotChanges(self._free_bytes)
        self._left: dict[ServedModel, dict[str, Any]] = {}
        models.shelf.on_leave = self._leave
        models.shelf.on_back = self._come_back

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/cache/lookup", self.lookup, LookupRequest),
            Route("POST", "/v1/cache/warm", self.warm, WarmRequest),
            Route("POST", "/v1/cache/move", self.move, MoveRequest),
            Route("POST", "/v1/cache/compress", self.compress, CompressRequest),
            Route("POST", "/v1/cache/clear", self.clear, ClearRequest),
            Route("POST", "/v1/cache/export", self.export, LookupRequest),
            Route("POST", "/v1/cache/import", self.import_file),
            Route("GET", "/v1/cache/config", self.config),
            Route("POST", "/v1/cache/config", self.change, ConfigChange),
        ]

    async def lookup(self, request: Request) -> Response:
        """Where the KV of a prompt lies now, and why no more of it is on the device."""
        served, body, admin = await self._read(request, LookupRequest)
        ids = await select_ids(served, body)
        found = await admin.lookup(ids, cache_salt=_salt(body.cache_salt), exact_kv=body.exact_kv)
        explanation, ranges = found.hit.explanation, found.ranges
        is_below = bool(ranges) and ranges[-1][1] > found.hit.num_tokens
        return _json(
            {
                "object": "cache.lookup",
                "model": served.name,
                "num_tokens": len(ids),
                "num_cached_tokens": found.hit.num_tokens,
                "reason": f"in_{ranges[-1][2]}" if is_below else explanation.reason.value,
                "divergence": explanation.divergence,
                "tiers": found.num_tier_tokens,
                "ranges": [{"start": start, "stop": stop, "source": source} for start, stop, source in ranges],
            }
        )

    async def warm(self, request: Request) -> Response:
        """Compute a prompt ahead."""
        served, body, _ = await self._read(request, WarmRequest)
        return _json(await warm(served, body, self._pins, max_waiting=self._config.max_waiting))

    async def move(self, request: Request) -> Response:
        """Have a prompt's KV in a tier, or on the device."""
        served, body, admin = await self._read(request, MoveRequest)
        ids = await select_ids(served, body)
        num_tokens = await admin.move(
            ids, body.to, cache_salt=_salt(body.cache_salt), exact_kv=body.exact_kv, keep=body.keep
        )
        return _json({"object": "cache.moved", "model": served.name, "to": body.to, "num_tokens": num_tokens})

    async def compress(self, request: Request) -> Response:
        """Have tiers keep in fewer bits what they hold of exact KV."""
        served, body, admin = await self._read(request, CompressRequest)
        _check_one_way(body)
        salt = _salt(body.cache_salt)
        if body.all:
            report = await admin.compress({salt, *served.engine.salts})
        elif body.tenant is not None:
            report = await admin.compress(await _salts_of(served, body.tenant))
        elif body.namespace:
            report = await admin.compress({salt})
        else:
            ids = await select_ids(served, body)
            report = await admin.compress({salt}, ids, is_alone=body.session is not None)
        return _json(
            {
                "object": "cache.compressed",
                "model": served.name,
                "tiers": report.tiers,
                "unlisted_tiers": report.unlisted,
            }
        )

    async def clear(self, request: Request) -> Response:
        """Drop what was chosen, on the device and in the tiers."""
        served, body, admin = await self._read(request, ClearRequest)
        report = await self._clear(served, body, admin)
        return _json(
            {
                "object": "cache.cleared",
                "model": served.name,
                "num_tokens": report.num_tokens,
                "num_tier_blocks": report.num_tier_blocks,
                "unlisted_tiers": report.unlisted,
                "kept_pins": report.kept_pins,
            }
        )

    async def _clear(self, served: ServedModel, body: ClearRequest, admin: CacheAdmin) -> ClearReport:
        _check_one_way(body)
        salt = _salt(body.cache_salt)
        if body.all:
            return await admin.clear(tiers=body.tiers, pinned=body.pinned)
        if body.namespace:
            return await admin.clear(served.engine.namespaces(salt), tiers=body.tiers, pinned=body.pinned)
        if body.tenant is not None:
            tenant = body.tenant
            known = await served.engine.call(lambda core: core.namespaces_of(tenant))
            namespaces = known | {_tenants_own(served, tenant)}
            return await admin.clear(namespaces, tiers=body.tiers, pinned=body.pinned)
        ids = await select_ids(served, body)
        clear = admin.clear_prefix if body.session is None else admin.clear_tail
        return await clear(ids, cache_salt=salt, tiers=body.tiers, pinned=body.pinned)

    async def export(self, request: Request) -> Response:
        """The KV of a prompt or session as a file."""
        served, body, admin = await self._read(request, LookupRequest)
        ids = await select_ids(served, body)
        content = await admin.export(ids, cache_salt=_salt(body.cache_salt), exact_kv=body.exact_kv)
        headers = {"content-disposition": 'attachment; filename="conversation.spolia-kv"'}
        return Response(content, media_type="application/octet-stream", headers=headers)

    async def import_file(self, request: Request) -> Response:
        """Take in a file of `export`, the request's body."""
        _refuse_other_sites(request)
        served = await self._models.ready(request.query_params.get("model"))
        admin = _admin(served)
        deadlines: BodyDeadlines = request.app.state.body_deadlines
        most = max(self._config.max_body_bytes, served.engine.config.kv_memory or 0)
        content = await deadlines.wait_for(request, most)
        imported = await admin.import_file(content, cache_salt=_salt(request.query_params.get("cache_salt")))
        return _json({"object": "cache.imported", "model": served.name, **imported._asdict()})

    async def config(self, request: Request) -> Response:
        """Size, policy and tiers, as they are now; of a model that is not in memory, as it will have them."""
        return _json(await self._describe(self._models.owner(request.query_params.get("model"))))

    async def change(self, request: Request) -> Response:
        """Change them, one after the other; if one fails, those before it are undone."""
        _, body, admin = await self._read(request, ConfigChange)
        served = self._models.owner(body.model)  # it holds for all that are made of it, and when it has been away
        changes = await self._changes.make(served, admin, body)
        failed = next((change for change in changes if change.error is not None), None)
        content = {
            "object": "cache.config.change",
            "outcome": "done" if failed is None else "rolled_back",
            "changes": changes,
            "config": await self._describe(served),
        }
        if failed is not None:
            content["error"] = {"message": failed.error, "type": "invalid_request_error", "param": failed.change,
                                "code": "rolled_back"}  # fmt: skip
        return Response(msgspec.json.encode(content), 200 if failed is None else 409, media_type="application/json")

    async def _describe(self, served: ServedModel) -> dict[str, Any]:
        if served.state == "unloaded":
            return self._left.get(served) or describe_unloaded(served)
        return await describe(served, served.engine, may_grow_bytes=self._free_bytes())

    async def _leave(self, served: ServedModel, engine: AsyncEngine) -> None:
        """Before an engine ends: what the next one is to have."""
        await self._pins.leave(served, engine)  # first: from now on nobody else could say what is pinned
        left = await describe(served, engine, may_grow_bytes=self._free_bytes())
        rest = {"state": "unloaded", "reason": f"it is there when model {served.name} is loaded again"}
        self._left[served] = {**left, "status": "unloaded", "tiers": [{**tier, **rest} for tier in left["tiers"]]}

    async def _come_back(self, served: ServedModel) -> None:
        await self._changes.make_again(served, _admin(served))
        await self._pins.put_again(served)

    def _free_bytes(self) -> int | None:
        """Of the server's `--memory`."""
        return self._models.shelf.free_bytes(self._models.all())

    async def _read(self, request: Request, kind: type[Any]) -> tuple[ServedModel, Any, CacheAdmin]:
        _refuse_other_sites(request)
        body = await read_body(request, kind, max_bytes=self._config.max_body_bytes)
        served = await self._models.ready(body.model)
        return served, body, _admin(served)


def _admin(served: ServedModel) -> CacheAdmin:
    return CacheAdmin(served.engine, served.engine.sealer)


def _salt(asked: str | None) -> str:
    return current_caller().cache_salt(asked or "")


def _tenants_own(served: ServedModel, tenant: str) -> bytes:
    """The namespace of a tenant that sends no salts of its own."""
    return served.engine.namespace(tenant_salt(tenant, ""))


async def _salts_of(served: ServedModel, tenant: str) -> set[str]:
    """A tenant's own, and those that it has sent lately."""
    engine = served.engine
    known = await engine.call(lambda core: core.namespaces_of(tenant))
    sent = {salt for salt in engine.salts if known & {engine.namespace(salt), engine.exact_namespace(salt)}}
    return {tenant_salt(tenant, ""), *sent}


def _check_one_way(body: CompressRequest) -> None:
    """
    Raises:
        InvalidRequest: what is meant is said in no way, or in several.
    """
    prompt = body.prompt is not None or body.messages is not None
    ways = (body.all, body.namespace, body.tenant is not None, prompt, body.session is not None)
    if sum(ways) != 1:
        raise InvalidRequest("send one of all, namespace, tenant, prompt, messages and session", param="all")


def _refuse_other_sites(request: Request) -> None:
    """A page of another site may make a browser send these, though it cannot read the answer.

    Raises:
        Forbidden: a browser says that such a page sent it.
    """
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise Forbidden("the cache is not changed from pages of other sites")


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
