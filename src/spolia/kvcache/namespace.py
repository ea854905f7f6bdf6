"""Who may share: one digest over everything that KV depends on besides the tokens."""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import TypeAlias

__all__ = ["Field", "namespace_key"]

Field: TypeAlias = "bool | int | float | str | bytes | tuple[Field, ...] | None"

_DOMAIN = b"spolia.kvcache.namespace.1"


def namespace_key(**fields: Field) -> bytes:
    """Keyed BLAKE2b (32 bytes) over typed, length-framed fields, in the order of their names.

    Two keys are equal only if every name, type and value is: `(a="bc")` is not `(ab="c")`, `1` is not `"1"` or `True`,
    and a tenant's salt can never equal an adapter's name. The same in every process and on every machine.

    Raises:
        TypeError: for a value whose bytes would not be its meaning (a set, an object).
    """
    digest = blake2b(key=_DOMAIN, digest_size=32)
    for name in sorted(fields):
        digest.update(_framed(b"n", name.encode()))
        digest.update(_encode(name, fields[name]))
    return digest.digest()


def _encode(name: str, value: Field) -> bytes:
    match value:
        case None:
            return _framed(b"0", b"")
        case bool():
            return _framed(b"?", bytes([value]))
        case int():
            return _framed(b"i", str(value).encode())
        case float():
            return _framed(b"f", struct.pack("<d", value))
        case str():
            return _framed(b"s", value.encode())
        case bytes():
            return _framed(b"b", value)
        case tuple():
            return _framed(b"t", b"".join(_encode(name, item) for item in value))
    allowed = "None, bool, int, float, str, bytes or a tuple of these"
    raise TypeError(f"namespace field {name!r} is a {type(value).__name__}; allowed: {allowed}")


def _framed(tag: bytes, payload: bytes) -> bytes:
    return tag + struct.pack("<Q", len(payload)) + payload
