"""Errors with the right status, in the shape that the clients of each API know.

OpenAI's, and ours   {"error": {"message", "type", "param", "code"}}
Anthropic's          {"type": "error", "error": {"type", "message"}, "request_id"}   under /v1/messages; overloaded: 529
Ollama's             {"error": "message"}                                under /api
llama.cpp's          {"error": {"code", "message", "type", "param"}}     of its own paths; the code is the status

InvalidRequest, UnknownResponse 400 · Unauthorized 401 · Forbidden 403 ·
UnknownModel, UnknownThing, UnknownSession 404 · BodyTooSlow 408 ·
Conflict, SessionBusy, SessionConflict 409 · BodyTooLarge 413 · Overloaded 429 ·
NotReady, StorageUnavailable 503 · TookTooLong 504 · others 500
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from http import HTTPStatus
from urllib.parse import quote

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from spolia.engine import SessionBusy, SessionConflict, UnknownSession
from spolia.errors import (
    InvalidRequest,
    NotReady,
    Overloaded,
    PromptTooLong,
    SpoliaError,
    StorageUnavailable,
    UnknownModel,
)

__all__ = [
    "REQUEST_ID",
    "BodyTooLarge",
    "BodyTooSlow",
    "Conflict",
    "ErrorBody",
    "Forbidden",
    "QuotaExceeded",
    "RateLimited",
    "TookTooLong",
    "Unauthorized",
    "UnknownResponse",
    "UnknownThing",
    "anthropic_error_body",
    "error_body",
    "error_response",
    "handle_disconnect",
    "handle_error",
    "handle_http_exception",
    "llamacpp_error_body",
    "ollama_error_body",
]

logger = logging.getLogger("spolia.server")

REQUEST_ID = "spolia.request_id"  # of an ASGI scope


class BodyTooLarge(InvalidRequest):
    """The request's body is longer than `ServerConfig.max_body_bytes` (HTTP 413)."""


class BodyTooSlow(InvalidRequest):
    """The request's body did not arrive within `ServerConfig.body_timeout_s` (HTTP 408)."""


class UnknownThing(InvalidRequest):
    """What the path names is not here (HTTP 404)."""


class Conflict(InvalidRequest):
    """What is asked for cannot be done as things are (HTTP 409)."""


class Unauthorized(InvalidRequest):
    """No key, or one that is not known (HTTP 401)."""


class Forbidden(InvalidRequest):
    """A key that may not do this (HTTP 403)."""


class RateLimited(Overloaded):
    """The key has used up what it gets for now (HTTP 429).

    Attributes:
        retry_after_s: when it has some again.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaExceeded(RateLimited):
    """The key has used up what it gets a day (HTTP 429); clients that know OpenAI's code do not try again at once."""


class UnknownResponse(InvalidRequest):
    """The response to go on from is not here (HTTP 400, as OpenAI has it)."""


class TookTooLong(Overloaded):
    """Not one token came within `ServerConfig.request_timeout_s` (HTTP 504)."""


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


# Status, OpenAI's type, and the code where the error has none. The first class that fits wins: subclasses come first.
_KINDS: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (UnknownModel, 404, "invalid_request_error", "model_not_found"),
    (UnknownThing, 404, "invalid_request_error", "not_found"),
    (UnknownSession, 404, "invalid_request_error", "session_not_found"),
    (SessionBusy, 409, "invalid_request_error", "session_busy"),
    (SessionConflict, 409, "invalid_request_error", "session_conflict"),
    (Conflict, 409, "invalid_request_error", "conflict"),
    (BodyTooLarge, 413, "invalid_request_error", "body_too_large"),
    (BodyTooSlow, 408, "invalid_request_error", "body_too_slow"),
    (Unauthorized, 401, "authentication_error", "invalid_api_key"),
    (Forbidden, 403, "permission_error", "not_allowed"),
    (UnknownResponse, 400, "invalid_request_error", "previous_response_not_found"),
    (InvalidRequest, 400, "invalid_request_error", None),
    (NotReady, 503, "service_unavailable_error", "not_ready"),
    (StorageUnavailable, 503, "service_unavailable_error", "storage_unavailable"),
    (TookTooLong, 504, "timeout_error", "request_timeout"),
    (QuotaExceeded, 429, "insufficient_quota", "insufficient_quota"),
    (RateLimited, 429, "rate_limit_error", "rate_limit_exceeded"),
    (Overloaded, 429, "rate_limit_error", "overloaded"),
    (SpoliaError, 500, "server_error", None),
)

_RETRY_AFTER_S = 1
_MAX_MESSAGE = 8_000  # characters


def _kind(error: Exception) -> tuple[int, str, str | None]:
    for cls, status, type_, code in _KINDS:
        if isinstance(error, cls):
            return status, type_, code
    return 500, "server_error", None


# Anthropic's statuses, where they are not ours, and its words for them; 4xx and 5xx beyond these are the first and the
# last.
_ANTHROPIC_OVERLOADED = 529
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _ANTHROPIC_OVERLOADED: "overloaded_error",
    500: "api_error",
}
_IS_OVERLOADED = frozenset({"not_ready", "overloaded", "storage_unavailable"})

# llama.cpp's words, where they are not OpenAI's, and the paths that only it has.
_LLAMACPP_TYPES = {404: "not_found_error", 501: "not_supported_error", 503: "unavailable_error"}
_LLAMACPP_PATHS = re.compile(r"/(completions?|infill|embeddings?|apply-template|props|slots(/.*)?|lora-adapters)")


def _told(error: Exception) -> ErrorBody:
    """In OpenAI's words. An error that is not ours says nothing of the inside; its traceback is in the log."""
    _, type_, code = _kind(error)
    message = str(error) if isinstance(error, SpoliaError) else "internal error; the server's log has the details"
    if len(message) > _MAX_MESSAGE:  # what was sent may be of any size; what to do stands at the end
        message = f"{message[: _MAX_MESSAGE // 2]} ... {message[-_MAX_MESSAGE // 2 :]}"
    own_code = getattr(error, "code", None) if isinstance(error, InvalidRequest) else None
    param = error.param if isinstance(error, InvalidRequest) else None
    if isinstance(error, UnknownModel):
        param = "model"
    return ErrorBody(message, type_, param, own_code or code)


def error_body(error: Exception) -> bytes:
    """The JSON body as OpenAI has it."""
    return msgspec.json.encode({"error": _told(error)})


def anthropic_error_body(error: Exception, request_id: str | None = None) -> bytes:
    """The JSON body as Anthropic has it."""
    return _anthropic(_kind(error)[0], _told(error), request_id)[1]


def llamacpp_error_body(error: Exception) -> bytes:
    """The JSON body as llama.cpp has it."""
    return _llamacpp(_kind(error)[0], _told(error), _sizes(error))


def ollama_error_body(error: Exception) -> bytes:
    """The JSON body as Ollama has it."""
    return msgspec.json.encode({"error": _told(error).message})


def _anthropic(status: int, error: ErrorBody, request_id: str | None) -> tuple[int, bytes]:
    if error.code in _IS_OVERLOADED:
        status = _ANTHROPIC_OVERLOADED
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    shown: dict[str, object] = {"type": "error", "error": {"type": kind, "message": error.message}}
    return status, msgspec.json.encode(shown if request_id is None else {**shown, "request_id": request_id})


def _llamacpp(status: int, error: ErrorBody, sizes: Mapping[str, int]) -> bytes:
    kind = "exceed_context_size_error" if sizes else _LLAMACPP_TYPES.get(status, error.type)
    shown = {"code": status, "message": error.message, "type": kind, "param": error.param, **sizes}
    return msgspec.json.encode({"error": shown})


def _sizes(error: Exception) -> dict[str, int]:
    """What llama.cpp tells of a prompt that is too long."""
    return (
        {"n_prompt_tokens": error.num_tokens, "n_ctx": error.context_tokens} if isinstance(error, PromptTooLong) else {}
    )


def _response(
    status: int, error: ErrorBody, sizes: Mapping[str, int], request: Request, headers: Mapping[str, str] | None
) -> Response:
    """An error of ours or of routing, as the clients of the path that was asked know it."""
    path = request.url.path
    if path.startswith("/v1/messages"):
        status, body = _anthropic(status, error, request.scope.get(REQUEST_ID))
    elif path.startswith("/api/"):
        body = msgspec.json.encode({"error": error.message})
    elif _LLAMACPP_PATHS.fullmatch(path):
        body = _llamacpp(status, error, sizes)
    else:
        body = msgspec.json.encode({"error": error})
    return Response(body, status, headers, media_type="application/json")


def error_response(error: Exception, request: Request) -> Response:
    """The answer to an exception, as the clients of the path that was asked know it."""
    status, _, _ = _kind(error)
    wait_s = error.retry_after_s if isinstance(error, RateLimited) else _RETRY_AFTER_S
    headers = {"retry-after": str(max(1, math.ceil(wait_s)))} if status in (429, 503) else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if status == 408:
        headers["connection"] = "close"  # the rest of that body may still come
    return _response(status, _told(error), _sizes(error), request, headers)


async def handle_error(request: Request, error: Exception) -> Response:
    """The answer to every exception that leaves an endpoint."""
    if _kind(error)[0] == 500:
        told = (request.scope.get(REQUEST_ID, "-"), request.method, quote(request.url.path))
        logger.error("request=%s %s %s failed", *told, exc_info=error)
    return error_response(error, request)


async def handle_disconnect(_: Request, __: Exception) -> Response:
    """The client left while it was still sending: nobody reads this."""
    return Response(status_code=499)


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """Routing's own refusals (no such path, wrong method), in the same shape."""
    if not isinstance(error, HTTPException):
        raise error
    name = HTTPStatus(error.status_code).name.lower()
    body = ErrorBody(str(error.detail), "invalid_request_error", None, name)
    return _response(error.status_code, body, {}, request, error.headers)
