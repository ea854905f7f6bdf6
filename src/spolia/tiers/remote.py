"""What `kv_remote` may name."""

from __future__ import annotations

import importlib
from typing import cast

from spolia.errors import InvalidRequest

from .backend import StorageBackend
from .objects import ObjectBackend
from .valkey import ValkeyBackend

__all__ = ["open_remote"]

_VALKEY = ("valkey", "valkeys", "redis", "rediss", "unix")
_OBJECTS = ("s3", "s3a", "gs", "az", "abfs", "abfss", "azure")
_METHODS = ("exists", "get_into", "put", "delete", "touch", "health", "close")


def open_remote(source: str, *, ttl_s: float | None = None) -> StorageBackend:
    """A backend from a URL, or from `package.module:Class` (called without arguments).

    Args:
        ttl_s: what was not used for so long goes, where the backend can do that: not in a class of one's own.

    Raises:
        InvalidRequest: it names nothing of the kind.
    """
    scheme, separator, _ = source.partition("://")
    if separator and scheme in _VALKEY:
        return ValkeyBackend(source, ttl_s=ttl_s)
    if separator and scheme in _OBJECTS:
        return ObjectBackend(source, ttl_s=ttl_s)
    module, colon, name = source.partition(":")
    if separator or not colon or not name.isidentifier():
        allowed = ", ".join(f"{known}://" for known in (*_VALKEY, *_OBJECTS))
        raise InvalidRequest(
            f"kv_remote is {source!r}; give a URL ({allowed}) or package.module:Class", param="kv_remote"
        )
    try:
        made = getattr(importlib.import_module(module), name)()
    except Exception as error:
        raise InvalidRequest(
            f"kv_remote {source} cannot be made: {type(error).__name__}: {error}", param="kv_remote"
        ) from error
    missing = [method for method in _METHODS if not callable(getattr(made, method, None))]
    if missing:
        raise InvalidRequest(
            f"kv_remote {source} has no {', '.join(missing)}; see spolia.tiers.StorageBackend", param="kv_remote"
        )
    return cast(StorageBackend, made)
