"""In front of the app: who has no key goes no further."""

from __future__ import annotations

import logging
from dataclasses import replace
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spolia.server.access.account import Account
from spolia.server.access.caller import Caller, current_caller, fit_request_id, set_caller
from spolia.server.access.ring import KeyRing
from spolia.server.errors import REQUEST_ID, Forbidden, Unauthorized, handle_error
from spolia.server.logs import log_fields
from spolia.server.tracing import Tracing

__all__ = ["Gate"]

logger = logging.getLogger("spolia.requests")

# Anybody may ask these: load balancers, browsers that load the page, clients that look whether somebody is there.
_OPEN_PATHS = frozenset({"/", "/health", "/v1/health", "/ping", "/livez", "/readyz", "/version", "/api/version"})
_OPEN_PREFIXES = ("/static/",)
# These tell of everybody's requests.
_ADMIN_PATHS = frozenset({"/metrics", "/slots", "/props"})
_ADMIN_PREFIXES = (
    *("/v1/cache", "/slots/", "/api/pull", "/api/ps"),
    *("/api/create", "/api/copy", "/api/delete", "/api/push", "/api/blobs"),
)


class Gate:
    """ASGI middleware that says who calls.

    Args:
        ring: None lets everybody in.
        tracing: where spans go; None: nowhere.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing | None, tracing: Tracing | None = None) -> None:
        self._app = app
        self._ring = ring
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        caller = Caller(request_id=fit_request_id(headers.get("x-request-id")))
        set_caller(caller)
        scope[REQUEST_ID] = caller.id
        reply = _Reply(send, caller.id, scope["method"], path)
        try:
            account = self._account(path, headers)
            trace = None if self._tracing is None else self._tracing.begin(headers)
            set_caller(replace(caller, account=account, trace=trace))
            await self._app(scope, receive, reply.send)
        except Exception as error:
            if reply.has_begun:
                raise
            response = await handle_error(Request(scope), error)
            await response(scope, receive, reply.send)

    def _account(self, path: str, headers: Headers) -> Account | None:
        if self._ring is None or path in _OPEN_PATHS or path.startswith(_OPEN_PREFIXES):
            return None
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        key = headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        if not key:
            raise Unauthorized("this server wants a key: send `Authorization: Bearer KEY`, or `x-api-key: KEY`")
        account = self._ring.find(key)
        if account is None:
            raise Unauthorized("the key is not known here")
        if not account.settings.admin and (path in _ADMIN_PATHS or path.startswith(_ADMIN_PREFIXES)):
            raise Forbidden(f"{path} is for keys with admin = true; {account.settings.name!r} has not")
        return account


class _Reply:
    """What is sent, with headers that every reply has: the request's id, unless an answer has its own, and the names of
    the body's fields that were ignored. A refusal is a line of the log under that id."""

    def __init__(self, send: Send, id_: str, method: str, path: str) -> None:
        self.has_begun = False
        self._send = send
        self._id = id_
        self._method = method
        self._path = path

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            caller, headers = current_caller(), MutableHeaders(raw=list(message["headers"]))
            given = headers.setdefault("x-request-id", self._id)
            if self._path.startswith("/v1/messages"):
                headers["request-id"] = given  # Anthropic's name for it
            if caller.ignored:
                headers["x-spolia-ignored"] = ",".join(caller.ignored)
            message["headers"] = headers.raw
            if message["status"] >= 400:
                _log(caller, given, self._method, self._path, message["status"])
        await self._send(message)


def _log(caller: Caller, id_: str, method: str, path: str, status: int) -> None:
    fields = {"request": id_, "status": status, "method": method, "path": quote(path)}  # a path may hold anything
    if caller.account is not None:
        fields |= {"key": caller.account.settings.name, "tenant": caller.tenant}
    if caller.request_id is not None:
        fields["client_request"] = caller.request_id
    log_fields(logger, "refused", fields)
