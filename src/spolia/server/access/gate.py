"""In front of the app: who has no key goes no further."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spolia.errors import InvalidRequest
from spolia.server.access.account import Account
from spolia.server.access.caller import Caller, current_caller, fit_request_id, set_caller
from spolia.server.access.ring import KeyRing
from spolia.server.errors import Forbidden, Unauthorized, error_response
from spolia.server.tracing import Tracing

__all__ = ["Gate"]

# Anybody may ask these: load balancers, browsers that load the page, clients that look whether somebody is there.
_OPEN_PATHS = frozenset({"/", "/health", "/v1/health", "/ping", "/livez", "/readyz", "/version", "/api/version"})
_OPEN_PREFIXES = ("/static/",)
# These tell of everybody's requests.
_ADMIN_PATHS = frozenset({"/metrics", "/slots", "/props"})
_ADMIN_PREFIXES = ("/v1/cache", "/slots/", "/api/pull", "/api/ps")


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
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            path = scope["path"]
            try:
                account = self._account(path, headers)
            except InvalidRequest as error:
                await error_response(error, path)(scope, receive, send)
                return
            trace = None if self._tracing is None else self._tracing.begin(headers)
            set_caller(Caller(account, fit_request_id(headers.get("x-request-id")), trace))
            await self._app(scope, receive, _telling(send))
        else:
            await self._app(scope, receive, send)

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


def _telling(send: Send) -> Send:
    """`send`, with the names of the body's fields that were ignored in a header."""

    async def told(message: Message) -> None:
        if message["type"] == "http.response.start" and (ignored := current_caller().ignored):
            message["headers"] = [*message["headers"], (b"x-spolia-ignored", ",".join(ignored).encode())]
        await send(message)

    return told
