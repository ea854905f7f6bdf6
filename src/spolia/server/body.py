"""Reading request bodies, within the size limit."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import Request

from spolia.server.errors import BodyTooLarge
from spolia.server.schema import decode

__all__ = ["read_body"]

_Body = TypeVar("_Body", bound=msgspec.Struct)


async def read_body(request: Request, kind: type[_Body], *, max_bytes: int) -> _Body:
    """The request's body as a `kind`.

    Raises:
        BodyTooLarge: declared or found to be longer than `max_bytes`; the rest is not read.
        InvalidRequest: not JSON, or not of this kind.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise BodyTooLarge(f"the body has {declared} bytes; allowed are {max_bytes}")
    parts: list[bytes] = []
    num_bytes = 0
    async for part in request.stream():
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise BodyTooLarge(f"the body has more than {max_bytes} bytes, the limit")
    return decode(b"".join(parts), kind)
