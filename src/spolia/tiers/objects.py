"""A tier in an object store (S3 and what speaks like it, Google Cloud Storage, Azure), by `obstore`."""

from __future__ import annotations

import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from spolia.errors import InvalidRequest, StorageUnavailable

from .backend import Buffer, Entry, Health
from .extent import MAX_HEADER_BYTES, ExtentError, ExtentHeader
from .keys import KEY_BYTES

__all__ = ["ObjectBackend"]

T = TypeVar("T")

_NUM_AT_ONCE = 8

_MAX_NOTED = 1 << 16
"""Objects of which is kept in mind when they were written."""


class ObjectBackend:
    """Extents as objects `spolia-kv-1/<key>` under a URL. Which go for want of room is the store's business: give it a
    lifecycle rule.

    A store notes when an object was written and not when it was used, so one that is used past half of its time is
    written anew, by and by: nobody waits for it. What is too old is a miss, and is removed when it is met, or when all
    are looked through: after a put, a quarter of the time after the last look.

    Args:
        url: `s3://bucket/prefix`, `gs://`, `az://`; credentials, region and endpoint are taken from the environment
            (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL` and so on).
        ttl_s: extents that were not used for so long go; None: never.
        timeout_s: of each request.
        clock: seconds since the epoch, to be compared with the store's.

    Raises:
        InvalidRequest: `obstore` is missing, or the URL or the environment makes no sense.
    """

    def __init__(
        self,
        url: str,
        *,
        ttl_s: float | None = None,
        timeout_s: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        try:
            import obstore
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError:
            raise InvalidRequest(
                "a tier in an object store needs the package obstore: pip install 'spolia[objects]'", param="kv_remote"
            ) from None
        try:
            options: Any = {"timeout": f"{timeout_s}s", "connect_timeout": f"{timeout_s}s", "allow_http": True}
            retries: Any = {"max_retries": 1, "retry_timeout": timedelta(seconds=timeout_s)}
            self._store: Any = from_url(url, client_options=options, retry_config=retries)
        except (BaseError, ValueError) as error:
            raise InvalidRequest(f"kv_remote is no object store that can be used: {error}", param="kv_remote") from None
        self._obstore: Any = obstore
        self._error: type[Exception] = BaseError
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()  # guards what follows
        self._written_s: OrderedDict[bytes, float] = OrderedDict()  # as far as is known here; empty without ttl_s
        self._swept_s = -math.inf
        self._threads = ThreadPoolExecutor(_NUM_AT_ONCE, thread_name_prefix="spolia-objects")
        self._chores = ThreadPoolExecutor(1, thread_name_prefix="spolia-objects-chores")  # what nobody waits for
        self._is_closed = False

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return self._each(self._exists, keys)

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[int | None]:
        return self._each(self._get, keys, buffers)

    def put(self, keys: Sequence[bytes], values: Sequence[Buffer]) -> list[bool]:
        taken = self._each(self._put, keys, values)
        if self._is_sweep_due():
            self._chores.submit(self._sweep)
        return taken

    def delete(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:  # or it would be renewed when somebody has used it
                self._written_s.pop(key, None)
        self._each(self._delete, keys)

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        """An object store knows no recency: those that would go soon are written anew."""
        if self._ttl_s is not None:
            now_s = self._clock()
            with self._lock:
                aging = [key for key in keys if now_s - self._written_s.get(key, now_s) > self._ttl_s / 2]
                for key in aging:  # once
                    del self._written_s[key]
            for key in aging:
                self._chores.submit(self._renew, key)
        return [True] * len(keys)

    def health(self) -> Health:
        """It would take a listing to know."""
        return Health(None, None, None)

    def entries(self) -> Iterator[Entry]:
        """What is there now of all that use this place, by when it was written."""
        try:
            for page in self._obstore.list(self._store, prefix=_FOLDER):
                for found in page:
                    name = found["path"].rpartition("/")[2]
                    if len(name) == 2 * KEY_BYTES:
                        yield Entry(bytes.fromhex(name), found["size"], found["last_modified"].timestamp())
        except (self._error, OSError, ValueError) as error:
            raise _unavailable(error) from error

    def read_header(self, key: bytes) -> ExtentHeader | None:
        """The header of an extent; None if it is gone, or makes no sense."""
        try:
            found = self._obstore.get(self._store, _path(key), options={"range": (0, MAX_HEADER_BYTES)})
            return ExtentHeader.peek(memoryview(found.bytes()), found.meta["size"])
        except (FileNotFoundError, ExtentError):
            return None
        except (self._error, OSError) as error:
            raise _unavailable(error) from error

    def close(self) -> None:
        self._is_closed = True
        self._chores.shutdown(wait=False, cancel_futures=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _exists(self, key: bytes) -> bool:
        try:
            found = self._obstore.head(self._store, _path(key))
        except FileNotFoundError:
            return False
        return self._is_alive(key, found)

    def _get(self, key: bytes, buffer: Buffer) -> int | None:
        try:
            found = self._obstore.get(self._store, _path(key))
            data = memoryview(found.bytes())
        except FileNotFoundError:
            return None
        if not self._is_alive(key, found.meta):
            return None
        if len(data) > len(buffer):
            return None
        buffer[: len(data)] = data
        return len(data)

    def _put(self, key: bytes, value: Buffer) -> bool:
        # The same key is the same content, so there is no need to ask whether it is there.
        self._obstore.put(self._store, _path(key), bytes(value), use_multipart=False)
        self._note_written(key, self._clock())
        return True

    def _delete(self, key: bytes) -> None:
        try:
            self._obstore.delete(self._store, _path(key))
        except FileNotFoundError:
            return

    def _is_alive(self, key: bytes, meta: Any) -> bool:
        """Whether an object's time is not over; if it is, the object goes."""
        if self._ttl_s is None:
            return True
        written_s = meta["last_modified"].timestamp()
        if self._clock() - written_s > self._ttl_s:
            with suppress(self._error, OSError):  # it is a miss, whether it can be removed or not
                self._delete(key)
            return False
        self._note_written(key, written_s)
        return True

    def _note_written(self, key: bytes, written_s: float) -> None:
        if self._ttl_s is None:
            return
        with self._lock:
            self._written_s[key] = written_s
            self._written_s.move_to_end(key)
            while len(self._written_s) > _MAX_NOTED:
                self._written_s.popitem(last=False)

    def _renew(self, key: bytes) -> None:
        with suppress(self._error, OSError):  # it is gone, or will be met again before its time is over
            data = self._obstore.get(self._store, _path(key)).bytes()
            self._put(key, data)

    def _is_sweep_due(self) -> bool:
        now_s = self._clock()
        with self._lock:
            is_due = self._ttl_s is not None and now_s - self._swept_s >= self._ttl_s / 4
            if is_due:
                self._swept_s = now_s
        return is_due

    def _sweep(self) -> None:
        """Remove what is too old."""
        with suppress(StorageUnavailable, self._error, OSError):  # next time, then
            for entry in self.entries():
                if self._is_closed:
                    return
                if self._ttl_s is not None and self._clock() - entry.used_s > self._ttl_s:
                    self._delete(entry.key)

    def _each(self, call: Callable[..., T], *arguments: Sequence[Any]) -> list[T]:
        try:
            return list(self._threads.map(call, *arguments))
        except (self._error, OSError) as error:
            raise _unavailable(error) from error


_FOLDER = "spolia-kv-1"
_TOLD = re.compile("<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", re.DOTALL)


def _path(key: bytes) -> str:
    return f"{_FOLDER}/{key.hex()}"


def _unavailable(error: Exception) -> StorageUnavailable:
    text = str(error).strip()
    told = _TOLD.search(text)  # what S3 says of it stands behind much about the attempt
    reason = f"{told[1]}: {told[2]}" if told else (text.splitlines() or [type(error).__name__])[0]
    return StorageUnavailable(f"the object store fails: {reason}")
