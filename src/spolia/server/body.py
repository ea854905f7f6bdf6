"""Reading request bodies, within limits of size and time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TypeVar

import msgspec
from starlette.requests import Request

from spolia.errors import InvalidRequest
from spolia.server.access import current_caller, set_caller
from spolia.server.errors import BodyTooLarge, BodyTooSlow
from spolia.server.schema import decode
from spolia.server.unknown_fields import ignored_fields

__all__ = ["BodyDeadlines", "check_encoding", "read_body"]

_REMEDY = "Send less at a time, or start the server with a larger --max-body"

_Body = TypeVar("_Body", bound=msgspec.Struct)


class BodyDeadlines:
    """Until when each body that is being read must be here. Event loop only.

    Args:
        timeout_s: from the request's head to its body's end.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._open: set[asyncio.Timeout] = set()

    async def wait_for(self, request: Request, max_bytes: int) -> bytes:
        """The whole body.

        Raises:
            BodyTooLarge, BodyTooSlow: it passes a limit; the rest is not read.
            InvalidRequest: it is compressed.
        """
        deadline = asyncio.timeout(self._timeout_s)
        self._open.add(deadline)
        try:
            async with deadline:
                return await _read(request, max_bytes)
        except TimeoutError:
            raise BodyTooSlow("the request's body did not arrive in time; send it again, in one go") from None
        finally:
            self._open.discard(deadline)

    def hurry(self, timeout_s: float) -> None:
        """Whoever has not sent all of a body within `timeout_s` from now is refused: the server wants to end."""
        latest_s = asyncio.get_running_loop().time() + timeout_s
        for deadline in self._open:
            if (due_s := deadline.when()) is not None and due_s > latest_s:
                deadline.reschedule(latest_s)


async def read_body(request: Request, kind: type[_Body], *, max_bytes: int) -> _Body:
    """The request's body as a `kind`.

    Raises:
        BodyTooLarge: declared or found to be longer than `max_bytes`; the rest is not read.
        BodyTooSlow: not here within `ServerConfig.body_timeout_s`, or soon after the server was told to end.
        InvalidRequest: not JSON, or not of this kind; or a field is misspelt, see `ignored_fields`.
    """
    deadlines: BodyDeadlines = request.app.state.body_deadlines
    body = await deadlines.wait_for(request, max_bytes)
    if ignored := ignored_fields(body, kind):
        set_caller(replace(current_caller(), ignored=ignored))  # the gate tells them, and so does the log
    return decode(body, kind)


def check_encoding(request: Request) -> None:
    """
    Raises:
        InvalidRequest: the body is compressed: what is small on the wire may be huge here.
    """
    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
        raise InvalidRequest(f"content-encoding is {encoding!r}; bodies are taken as they are, so send it uncompressed")


async def _read(request: Request, max_bytes: int) -> bytes:
    check_encoding(request)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise BodyTooLarge(f"the body has {declared} bytes; allowed are {max_bytes}. {_REMEDY}")
    parts: list[bytes] = []
    num_bytes = 0
    async for part in request.stream():
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise BodyTooLarge(f"the body has more than the {max_bytes} bytes that are allowed. {_REMEDY}")
    return b"".join(parts)
