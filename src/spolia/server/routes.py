"""What an API says of itself: its paths, and the bodies that they take."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

import msgspec
from starlette.responses import Response

__all__ = ["Route"]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Route:
    """One path of an API. A GET is a HEAD too.

    Attributes:
        endpoint: takes the request, the path's variables by name, or nothing.
        body: what it reads, for the OpenAPI document.
    """

    method: Literal["GET", "HEAD", "POST", "PUT", "DELETE"]
    path: str
    endpoint: Callable[..., Awaitable[Response]]
    body: type[msgspec.Struct] | None = None
