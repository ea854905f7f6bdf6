"""The file of keys:

    [[keys]]
    name = "alice-laptop"              # for messages and the log
    key = "sk-..."                     # or key_sha256, so that the file holds no secret
    tenant = "alice"                   # shares a cache with other keys of this tenant; default: the name
    requests_per_minute = 60           # each limit is optional
    tokens_per_minute = 100_000        # of prompts and answers
    tokens_per_day = 5_000_000
    max_concurrent = 8
    weight = 2.0                       # the tenant's share of what is computed of prompts, beside others'; default 1
    kv_quota = 2_000_000_000           # bytes of KV that the tenant may have cached
    priority = 50                      # of its KV, 0 to 100, where a request says nothing
    mcp = true                         # may have tools of MCP servers called
    admin = true                       # may see what concerns everybody: metrics, slots, the cache

A change takes effect within a second. What runs on a key that was taken out goes on to its end; nothing new begins, and
what its tenant has kept stays. Put in again, the key begins with all that it may use. A file that cannot be read any
more changes nothing, and the log says so.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path

import msgspec

from spolia.errors import InvalidRequest

__all__ = ["KeySettings", "read_keys"]

_MIN_KEY_CHARACTERS = 16
_SHA256 = re.compile(r"[0-9a-f]{64}")


class KeySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key of the file; see the module's docstring."""

    name: str
    key: str | None = None
    key_sha256: str | None = None
    tenant: str = ""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    max_concurrent: int | None = None
    priority: int | None = None
    weight: float = 1.0
    kv_quota: int | None = None
    mcp: bool = False
    admin: bool = False

    @property
    def digest(self) -> str:
        """SHA-256 of the key, in hexadecimal: what keys are looked up by."""
        if self.key is not None:
            return hashlib.sha256(self.key.encode()).hexdigest()
        return (self.key_sha256 or "").lower()


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[KeySettings]


def read_keys(path: Path) -> list[KeySettings]:
    """What the file says.

    Raises:
        InvalidRequest: it cannot be read, or what it says is not allowed; the message names the key and the field.
    """
    try:
        said = tomllib.loads(path.read_text())
        if "keys" not in said:
            raise InvalidRequest(f"the key file {path} has no keys; each is a table [[keys]] with a name and a key")
        keys = msgspec.convert(said, _File).keys
    except OSError as error:
        raise InvalidRequest(f"the key file {path} cannot be read: {error.strerror}") from error
    except (msgspec.ValidationError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the key file {path}: {error}") from error
    named = [msgspec.structs.replace(each, tenant=each.tenant or each.name) for each in keys]
    for each in named:
        _check(path, each)
    for what, values in ("name", [each.name for each in named]), ("key", [each.digest for each in named]):
        if len(set(values)) < len(values):
            raise InvalidRequest(f"the key file {path}: a {what} is there twice; each must be one of its own")
    return named


def _check(path: Path, each: KeySettings) -> None:
    where = f"the key file {path}, key {each.name!r}"
    if not each.name:
        raise InvalidRequest(f"the key file {path}: a key has an empty name")
    if (each.key is None) == (each.key_sha256 is None):
        raise InvalidRequest(f"{where}: give either key or key_sha256")
    if each.key is not None and len(each.key) < _MIN_KEY_CHARACTERS:
        raise InvalidRequest(
            f"{where}: key has {len(each.key)} characters; it needs {_MIN_KEY_CHARACTERS}, for instance from "
            "`openssl rand -hex 24`"
        )
    if each.key_sha256 is not None and not _SHA256.fullmatch(each.digest):
        raise InvalidRequest(f"{where}: key_sha256 must be 64 hexadecimal digits, as `sha256sum` prints them")
    for name in ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "max_concurrent", "kv_quota"):
        value = getattr(each, name)
        if value is not None and value < 1:
            raise InvalidRequest(f"{where}: {name} is {value}; it must be at least 1, or left out")
    if not 0 < each.weight < float("inf"):
        raise InvalidRequest(f"{where}: weight is {each.weight}; it must be a positive number")
    if each.priority is not None and not 0 <= each.priority <= 100:
        raise InvalidRequest(f"{where}: priority is {each.priority}; it must be from 0 to 100")
