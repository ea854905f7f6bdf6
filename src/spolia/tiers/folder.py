"""A tier in a local folder: one file an extent, and the folder is the index.

    DIR/spolia-kv-1/3f/3f09c4...e1.kv     one extent, by its key
    DIR/spolia-kv-1/tmp/4711-12.part      being written; locked by its writer as long as that lives

A file appears under its name by a rename, complete or not at all, so a process that is killed leaves nothing but a
`.part` that nobody holds the lock of, which the next one removes. After a power cut a file may have the right name and
wrong bytes: the extent's seal tells. Recency is the file's modification time. Several processes may share a folder:
each sees the others' files, and counts them when it looks through the folder again.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from spolia.errors import InvalidRequest, StorageUnavailable

from .backend import Buffer, Entry, Health
from .extent import MAX_HEADER_BYTES, ExtentError, ExtentHeader
from .keys import KEY_BYTES

__all__ = ["FolderBackend"]

_RESCAN_SHARE = 8
"""The folder is looked through again when 1/8 of the capacity has been written: others may write there, too."""

_STEP_NS = 1_000
"""Between the modification times of a chain's files, so that after a restart its tail still goes before its head."""

_LOOK_S = 10.0
"""How often to look for expired extents."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

_BAD_FILE = (errno.EIO, errno.EUCLEAN, errno.EACCES, errno.EPERM)
"""A bad sector, say, or somebody else's file: it would take the tier down each time that it is asked for."""


class FolderBackend:
    """Extents as files under `folder`, at most `capacity_bytes` of them.

    Args:
        folder: made if it is not there.
        capacity_bytes: of all files together; None: no limit.
        ttl_s: extents that were not used for so long go, too; None: never.
        sweep: remove at once what killed writers left behind.

    Raises:
        InvalidRequest: the folder cannot be made or written to.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        capacity_bytes: int | None = None,
        *,
        clock: Callable[[], float] = time.time,
        ttl_s: float | None = None,
        sweep: bool = True,
    ) -> None:
        self.on_evict: Callable[[bytes, Buffer], None] | None = None
        self.folder = Path(folder)
        self._capacity = capacity_bytes
        self._clock = clock
        self._ttl_s = ttl_s
        self._looked_s = clock()  # for expired ones
        self._files = self.folder / "spolia-kv-1"
        self._parts = self._files / "tmp"
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards what follows
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # by key, the least recently used first
        self._num_bytes = 0  # the sum of these
        self._num_reserved_bytes = 0  # being written
        self._num_unseen_bytes = 0  # written since the last look through the folder
        try:
            self._parts.mkdir(parents=True, exist_ok=True)
            self._write_file(b"", None)  # a folder that cannot be written to is told now
        except OSError as error:
            raise InvalidRequest(
                f"the KV folder {self.folder} cannot be used: {error.strerror}; choose another, or make it writable",
                param="kv_disk",
            ) from error
        if sweep:
            self.sweep()
        self._scan()
        with self._lock:
            doomed = self._over_capacity(0)
        self._remove(doomed)
        self._drop_expired()

    # -- StorageBackend ------------------------------------------------------------------------------------------------

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            known = [key in self._sizes for key in keys]
        return [here or os.path.exists(self._path(key)) for here, key in zip(known, keys, strict=True)]

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[int | None]:
        return [self._read(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def put(self, keys: Sequence[bytes], values: Sequence[Buffer]) -> list[bool]:
        return [self._put(key, value) for key, value in zip(keys, values, strict=True)]

    def delete(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._forget(key)
        self._remove(keys)

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        now_ns = int(self._clock() * 1e9)
        with self._lock:
            for key in reversed(keys):
                if key in self._sizes:
                    self._sizes.move_to_end(key)
        return [self._set_time(key, now_ns - depth * _STEP_NS) for depth, key in enumerate(keys)]

    def health(self) -> Health:
        with self._lock:
            return Health(len(self._sizes), self._num_bytes, self._capacity)

    def close(self) -> None:
        return

    # -- For whoever looks after the folder ----------------------------------------------------------------------------

    def entries(self) -> Iterator[Entry]:
        """What lies in the folder now, the least recently used first."""
        self._scan()
        with self._lock:
            keys = list(self._sizes)
        for key in keys:
            try:
                status = os.stat(self._path(key))
            except FileNotFoundError:
                continue
            yield Entry(key, status.st_size, status.st_mtime)

    def read_header(self, key: bytes) -> ExtentHeader | None:
        """The header of an extent, without its payload; None if there is none that makes sense."""
        try:
            with open(self._path(key), "rb") as file:
                beginning = file.read(MAX_HEADER_BYTES)
                return ExtentHeader.peek(memoryview(beginning), os.fstat(file.fileno()).st_size)
        except (FileNotFoundError, ExtentError):
            return None
        except OSError as error:
            raise self._unavailable(error) from error

    def sweep(self) -> int:
        """Remove what killed writers left behind; how many files. What a living process is writing stays."""
        num_removed = 0
        for part in self._parts.glob("*.part"):
            try:
                with part.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    part.unlink()
                    num_removed += 1
            except OSError:
                continue  # held by its writer, or just renamed
        return num_removed

    # -- Parts ---------------------------------------------------------------------------------------------------------

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._files}/{name[:2]}/{name}.kv"

    def _scan(self) -> None:
        """Take the folder's files as what there is."""
        found: list[tuple[int, bytes, int]] = []
        try:
            for shard in _list(self._files):
                for file in _list(shard.path) if len(shard.name) == 2 else ():
                    key = _key_of(file.name)
                    if key is not None:
                        with suppress(FileNotFoundError):  # evicted meanwhile, by this process or another
                            status = file.stat()
                            found.append((status.st_mtime_ns, key, status.st_size))
        except OSError as error:
            raise self._unavailable(error) from error
        found.sort()
        with self._lock:
            self._sizes = OrderedDict((key, size) for _, key, size in found)
            self._num_bytes = sum(self._sizes.values())
            self._num_unseen_bytes = 0

    def _read(self, key: bytes, buffer: Buffer) -> int | None:
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY)
        except FileNotFoundError:
            with self._lock:
                self._forget(key)
            return None
        except OSError as error:
            raise self._unreadable(key, error) from error
        try:
            if os.fstat(descriptor).st_size > len(buffer):
                return None
            size = 0
            while size < len(buffer):
                count = os.readv(descriptor, [buffer[size:]])
                if not count:
                    break
                size += count
            return size
        except OSError as error:
            raise self._unreadable(key, error) from error
        finally:
            os.close(descriptor)

    def _unreadable(self, key: bytes, error: OSError) -> StorageUnavailable:
        """What to raise of a file; if it is that one alone, it is gone, and fails no more."""
        if error.errno in _BAD_FILE:
            with suppress(OSError):  # the whole folder is so
                os.unlink(self._path(key))
                with self._lock:
                    self._forget(key)
        return self._unavailable(error)

    def _set_time(self, key: bytes, used_ns: int) -> bool:
        try:
            os.utime(self._path(key), ns=(used_ns, used_ns))
        except FileNotFoundError:
            with self._lock:
                self._forget(key)
            return False
        except OSError as error:
            raise self._unavailable(error) from error
        return True

    def _put(self, key: bytes, value: Buffer) -> bool:
        size = len(value)
        if self._capacity is not None and size > self._capacity:
            return False
        with self._lock:
            if key in self._sizes:
                return True
            doomed = self._over_capacity(size)
            self._num_reserved_bytes += size
        try:
            self._evict(doomed)
            self._write(key, value)
        finally:
            with self._lock:
                self._num_reserved_bytes -= size
        with self._lock:
            if key not in self._sizes:
                self._sizes[key] = size
                self._num_bytes += size
                self._num_unseen_bytes += size
            is_due = self._capacity is not None and self._num_unseen_bytes > self._capacity // _RESCAN_SHARE
        if is_due:
            self._scan()
        if self._clock() - self._looked_s >= _LOOK_S:
            self._drop_expired()
        return True

    def _drop_expired(self) -> None:
        """Remove what was not used for too long; it stands first."""
        self._looked_s = now_s = self._clock()
        while self._ttl_s is not None:
            with self._lock:
                oldest = next(iter(self._sizes), None)
            if oldest is None:
                return
            try:
                used_s = os.stat(self._path(oldest)).st_mtime
            except FileNotFoundError:
                used_s = 0.0
            if used_s >= now_s - self._ttl_s:
                return
            self.delete([oldest])

    def _write(self, key: bytes, value: Buffer) -> None:
        """Write a file; on a full disk, in place of the least recently used."""
        for num_left in (2, 1, 0):
            try:
                self._write_file(value, self._path(key))
                return
            except OSError as error:
                if num_left and error.errno in _NO_ROOM and self._give_way(2 * len(value)):
                    continue
                if num_left and error.errno == errno.ENOENT:  # the first of its shard, or the folder was deleted
                    self._make_folders(key)
                    continue
                raise self._unavailable(error) from error

    def _make_folders(self, key: bytes) -> None:
        try:
            if not self._parts.exists():
                self._parts.mkdir(parents=True)
                self._scan()
            os.makedirs(os.path.dirname(self._path(key)), exist_ok=True)
        except OSError as error:
            raise self._unavailable(error) from error

    def _write_file(self, value: Buffer | bytes, path: str | None) -> None:
        """Write a file whole before it appears as `path`; None: just try. Nothing is left of a failure."""
        part = self._parts / f"{os.getpid()}-{id(self):x}-{next(self._numbers)}.part"
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            view = memoryview(value)
            while len(view):
                view = view[os.write(descriptor, view) :]
            if path is not None:
                os.rename(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        if path is None:
            part.unlink(missing_ok=True)

    def _give_way(self, num_bytes: int) -> bool:
        """Delete the least recently used files of about that size; False if there are none."""
        doomed = []
        with self._lock:
            while self._sizes and num_bytes > 0:
                key, size = self._sizes.popitem(last=False)
                self._num_bytes -= size
                num_bytes -= size
                doomed.append(key)
        self._evict(doomed)
        return bool(doomed)

    def _over_capacity(self, size: int) -> list[bytes]:
        """Forget what must go for `size` more bytes to fit. The lock is held."""
        doomed = []
        while (
            self._capacity is not None
            and self._sizes
            and self._num_bytes + self._num_reserved_bytes + size > self._capacity
        ):
            key, freed = self._sizes.popitem(last=False)
            self._num_bytes -= freed
            doomed.append(key)
        return doomed

    def _evict(self, keys: Sequence[bytes]) -> None:
        """Remove what has to make room, and show it to whoever may want to keep it."""
        if self.on_evict is not None:
            for key in keys:
                with suppress(OSError):  # another process was quicker
                    self.on_evict(key, memoryview(bytearray(Path(self._path(key)).read_bytes())))
        self._remove(keys)

    def _forget(self, key: bytes) -> None:
        self._num_bytes -= self._sizes.pop(key, 0)

    def _remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            try:
                os.unlink(self._path(key))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self._unavailable(error) from error

    def _unavailable(self, error: OSError) -> StorageUnavailable:
        return StorageUnavailable(f"the KV folder {self.folder} fails: {error.strerror}")


def _list(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    """What is in a folder; nothing, if it is not there."""
    try:
        return os.scandir(folder)
    except FileNotFoundError:
        return iter(())


def _key_of(name: str) -> bytes | None:
    """The key of a file name; None if it is not one of ours."""
    stem, _, suffix = name.partition(".")
    if suffix != "kv" or len(stem) != 2 * KEY_BYTES:
        return None
    try:
        return bytes.fromhex(stem)
    except ValueError:
        return None
