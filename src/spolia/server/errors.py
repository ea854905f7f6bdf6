"""Errors as OpenAI's clients know them: `{"error": {"message", "type", "param", "code"}}` with the right status.

InvalidRequest 400 · UnknownModel, UnknownThing 404 · BodyTooSlow 408 · BodyTooLarge 413 · Overloaded 429 ·
NotReady 503 · others 500
"""

from __future__ import annotations

import logging
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from spolia.errors import InvalidRequest, NotReady, Overloaded, SpoliaError, UnknownModel

__all__ = [
    "BodyTooLarge",
    "BodyTooSlow",
    "ErrorBody",
    "UnknownThing",
    "error_body",
    "error_response",
    "handle_disconnect",
    "handle_error",
    "handle_http_exception",
]

logger = logging.getLogger("spolia.server")


class BodyTooLarge(InvalidRequest):
    """The request's body is longer than `ServerConfig.max_body_bytes` (HTTP 413)."""


class BodyTooSlow(InvalidRequest):
    """The request's body did not arrive within `ServerConfig.body_timeout_s` (HTTP 408)."""


class UnknownThing(InvalidRequest):
    """What the path names is not here (HTTP 404)."""


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class _Envelope(msgspec.Struct, frozen=True):
    error: ErrorBody


# Status, OpenAI's type, and the code where the error has none. The first class that fits wins: subclasses come first.
_KINDS: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (UnknownModel, 404, "invalid_request_error", "model_not_found"),
    (UnknownThing, 404, "invalid_request_error", "not_found"),
    (BodyTooLarge, 413, "invalid_request_error", "body_too_large"),
    (BodyTooSlow, 408, "invalid_request_error", "body_too_slow"),
    (InvalidRequest, 400, "invalid_request_error", None),
    (NotReady, 503, "service_unavailable_error", "not_ready"),
    (Overloaded, 429, "rate_limit_error", "overloaded"),
    (SpoliaError, 500, "server_error", None),
)

_RETRY_AFTER_S = 1


def _kind(error: Exception) -> tuple[int, str, str | None]:
    for cls, status, type_, code in _KINDS:
        if isinstance(error, cls):
            return status, type_, code
    return 500, "server_error", None


def error_body(error: Exception) -> bytes:
    """The JSON body. An error that is not ours says nothing of the inside; its traceback is in the log."""
    _, type_, code = _kind(error)
    message = str(error) if isinstance(error, SpoliaError) else "internal error; the server's log has the details"
    own_code = getattr(error, "code", None) if isinstance(error, InvalidRequest) else None
    param = error.param if isinstance(error, InvalidRequest) else None
    if isinstance(error, UnknownModel):
        param = "model"
    return msgspec.json.encode(_Envelope(ErrorBody(message, type_, param, own_code or code)))


def error_response(error: Exception) -> Response:
    status, _, _ = _kind(error)
    headers = {"retry-after": str(_RETRY_AFTER_S)} if status in (429, 503) else {}
    if status == 408:
        headers["connection"] = "close"  # the rest of that body may still come
    return Response(error_body(error), status, headers, media_type="application/json")


async def handle_error(request: Request, error: Exception) -> Response:
    """The app's handler of every exception that leaves an endpoint."""
    if _kind(error)[0] == 500:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(error)


async def handle_disconnect(_: Request, __: Exception) -> Response:
    """The client left while it was still sending: nobody reads this."""
    return Response(status_code=499)


async def handle_http_exception(_: Request, error: Exception) -> Response:
    """Routing's own refusals (no such path, wrong method), in the same shape."""
    if not isinstance(error, HTTPException):
        raise error
    name = HTTPStatus(error.status_code).name.lower()
    body = _Envelope(ErrorBody(str(error.detail), "invalid_request_error", None, name))
    return Response(msgspec.json.encode(body), error.status_code, error.headers, media_type="application/json")
