"""A tier in Valkey or Redis: a cache server that several Spolia processes share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from spolia.errors import InvalidRequest, StorageUnavailable

from .backend import Buffer, Entry, Health
from .extent import MAX_HEADER_BYTES, ExtentError, ExtentHeader

__all__ = ["ValkeyBackend"]

_PREFIX = b"spolia-kv-1:"
_HEALTH_S = 5.0
_SCANNED = 1_000


class ValkeyBackend:
    """Extents as strings under `spolia-kv-1:`; the server's `maxmemory` and its policy say what goes.

    Give the server `maxmemory-policy allkeys-lru`: without any it refuses when it is full, which is told as no room.

    Args:
        url: `valkey://`, `redis://`, `rediss://` or `unix://`, as the `redis` client takes it.
        ttl_s: extents that were not used for so long go; None: never.
        timeout_s: of connecting, and of each answer.

    Raises:
        InvalidRequest: the `redis` package is missing, or the URL makes no sense.
    """

    def __init__(
        self,
        url: str,
        *,
        ttl_s: float | None = None,
        timeout_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        try:
            import redis
        except ImportError:
            raise InvalidRequest(
                "a Valkey tier needs the package redis: pip install 'spolia[valkey]'", param="kv_remote"
            ) from None
        scheme, _, rest = url.partition("://")
        known = {"valkey": "redis", "valkeys": "rediss"}
        try:
            self._client: Any = redis.Redis.from_url(
                f"{known.get(scheme, scheme)}://{rest}",
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=None,
            )
        except ValueError as error:
            raise InvalidRequest(f"kv_remote is no address of a Valkey server: {error}", param="kv_remote") from None
        self._errors = redis.RedisError, OSError
        self._no_room = redis.exceptions.OutOfMemoryError
        self._clock = clock
        self._ttl_ms = None if ttl_s is None else max(1, int(1_000 * ttl_s))
        self._health = Health(None, None, None)
        self._asked_s: float | None = None

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [bool(found) for found in self._pipeline(lambda pipe: [pipe.exists(_name(key)) for key in keys])]

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[int | None]:
        try:
            values = self._client.mget([_name(key) for key in keys]) if keys else []
        except self._errors as error:
            raise _unavailable(error) from error
        return [_copy(value, buffer) for value, buffer in zip(values, buffers, strict=True)]

    def put(self, keys: Sequence[bytes], values: Sequence[Buffer]) -> list[bool]:
        answers = self._pipeline(
            lambda pipe: [
                pipe.set(_name(key), bytes(value), nx=True, px=self._ttl_ms)
                for key, value in zip(keys, values, strict=True)
            ],
            raises=False,
        )
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, self._no_room):
                raise _unavailable(answer) from answer
        return [not isinstance(answer, Exception) for answer in answers]

    def delete(self, keys: Sequence[bytes]) -> None:
        self._pipeline(lambda pipe: [pipe.delete(_name(key)) for key in keys])

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        last_first = list(keys)[::-1]
        ttl_ms = self._ttl_ms

        def fill(pipe: Any) -> None:
            for key in last_first:
                if ttl_ms is None:
                    pipe.touch(_name(key))
                else:
                    pipe.pexpire(_name(key), ttl_ms)

        answers = self._pipeline(fill)
        return [bool(found) for found in answers][::-1]

    def health(self) -> Health:
        """Asked of the server every few seconds at most."""
        now_s = self._clock()
        if self._asked_s is None or now_s - self._asked_s >= _HEALTH_S:
            try:
                memory, num_entries = self._client.info("memory"), self._client.dbsize()
            except self._errors as error:
                raise _unavailable(error) from error
            self._health = Health(num_entries, memory["used_memory"], memory.get("maxmemory") or None)
            self._asked_s = now_s
        return self._health

    def entries(self) -> Iterator[Entry]:
        """What is there now of all that use this database; the server knows what was used when, and does not tell."""
        try:
            for name in self._client.scan_iter(match=_PREFIX + b"*", count=_SCANNED):
                yield Entry(name.removeprefix(_PREFIX), 0, 0.0)
        except self._errors as error:
            raise _unavailable(error) from error

    def read_header(self, key: bytes) -> ExtentHeader | None:
        """The header of an extent; None if it is gone, or makes no sense."""
        name = _name(key)
        size, beginning = self._pipeline(lambda pipe: pipe.strlen(name).getrange(name, 0, MAX_HEADER_BYTES - 1))
        try:
            return ExtentHeader.peek(memoryview(beginning), size)
        except ExtentError:
            return None

    def close(self) -> None:
        self._client.close()

    def _pipeline(self, fill: Callable[[Any], object], *, raises: bool = True) -> list[Any]:
        try:
            with self._client.pipeline(transaction=False) as pipe:
                fill(pipe)
                answers: list[Any] = pipe.execute(raise_on_error=raises)
                return answers
        except self._errors as error:
            raise _unavailable(error) from error


def _name(key: bytes) -> bytes:
    return _PREFIX + key


def _copy(value: bytes | None, buffer: Buffer) -> int | None:
    if value is None or len(value) > len(buffer):
        return None
    buffer[: len(value)] = value
    return len(value)


def _unavailable(error: Exception) -> StorageUnavailable:
    return StorageUnavailable(f"the Valkey server fails: {type(error).__name__}: {error}")
