"""Small sealed files beside a folder's KV: what must be found again by its name, and is no block.

    DIR/spolia-sessions-1/session-3f09.doc     one document: an extent (`extent.py`) without tokens
    DIR/spolia-sessions-1/session-3f09.part    being written

A document appears under its name by a rename, after its bytes have reached the disk: after a crash there is the old one
or the new one. Its seal binds it to its name and its owner, so a file that was altered, swapped with another or belongs
to somebody else is not read. Its modification time says when it was last used.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

from spolia.errors import StorageUnavailable

from .extent import Checksum, ExtentError, ExtentHeader, Sealer, extent_bytes, open_extent
from .keys import DIGEST_BYTES, link

__all__ = ["Document", "DocumentFolder"]

_LAYOUT = "document/1"


class Document(NamedTuple):
    """What was kept under a name.

    Attributes:
        used_s: seconds since the epoch.
    """

    name: str
    content: bytes
    used_s: float


class DocumentFolder:
    """Documents of one owner in a folder that several may use. Any thread; one writer a name.

    Args:
        folder: made at the first `put`.
        owner: 32 bytes; None sees whatever there is, for whoever looks after the folder.
    """

    def __init__(self, folder: Path, owner: bytes | None = None, sealer: Sealer | None = None) -> None:
        self.folder = folder
        self._owner = owner
        self._sealer: Sealer = sealer or Checksum()

    def put(self, name: str, content: bytes) -> None:
        """Keep a document, in place of the one of that name.

        Raises:
            StorageUnavailable: it cannot be written; the one that was there still is.
        """
        if self._owner is None:
            raise ValueError("a document needs an owner")
        header = _header(name, self._owner, len(content))
        encoded = header.encode()
        extent = bytearray(extent_bytes(len(encoded), len(content)))
        extent[: len(encoded)] = encoded
        extent[len(encoded) : len(encoded) + len(content)] = content
        self._sealer.seal(memoryview(extent))
        part = self.folder / f"{name}.part"
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(extent)
                file.flush()
                os.fsync(descriptor)
            part.rename(self._path(name))
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            raise StorageUnavailable(f"{self._path(name)} cannot be written: {error.strerror}") from error

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Meanwhile no other process that asks for it writes here.

        Raises:
            StorageUnavailable: the folder cannot be written to.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageUnavailable(f"{self.folder} cannot be written to: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def state(self, name: str) -> tuple[int, int, int] | None:
        """Changes whenever the document does, or its use; None: it is not there.

        Raises:
            StorageUnavailable: the disk cannot say.
        """
        try:
            status = self._path(name).stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageUnavailable(f"{self._path(name)} cannot be looked for: {error.strerror}") from error
        return status.st_ino, status.st_size, status.st_mtime_ns

    def touch(self, name: str) -> None:
        """It was used just now; nothing if it is not there."""
        try:
            os.utime(self._path(name))
        except OSError:
            return

    def delete(self, name: str) -> None:
        """Drop a document, if it is there."""
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as error:
            raise StorageUnavailable(f"{self._path(name)} cannot be deleted: {error.strerror}") from error

    def names(self) -> list[str]:
        """Of everybody's documents."""
        return sorted(path.stem for path in self.folder.glob("*.doc"))

    def documents(self) -> Iterator[Document]:
        """The owner's, the least recently used first. Those that cannot be trusted are left out."""
        found = []
        for name in self.names():
            try:
                found.append(Document(name, self.read(name), self._path(name).stat().st_mtime))
            except (ExtentError, StorageUnavailable, OSError):
                continue
        yield from sorted(found, key=lambda document: document.used_s)

    def read(self, name: str) -> bytes:
        """One document.

        Raises:
            ExtentError: it is not there, damaged, sealed with another key, or somebody else's.
            StorageUnavailable: the disk does not give it.
        """
        try:
            extent = memoryview(bytearray(self._path(name).read_bytes()))
        except FileNotFoundError as error:
            raise ExtentError("it is not there") from error
        except OSError as error:
            raise StorageUnavailable(f"{self._path(name)} cannot be read: {error.strerror}") from error
        header = ExtentHeader.decode(extent)
        owner = header.namespace if self._owner is None else self._owner
        wanted = _header(name, owner, header.payload_bytes)
        if (header.namespace, header.layout, header.key) != (wanted.namespace, wanted.layout, wanted.key):
            raise ExtentError("it is another document, or somebody else's")
        _, payload = open_extent(extent, self._sealer, wanted.key)
        return np.asarray(payload).tobytes()

    def sweep(self) -> int:
        """Remove what killed writers left behind; how many files."""
        parts = list(self.folder.glob("*.part"))
        for part in parts:
            part.unlink(missing_ok=True)
        return len(parts)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.doc"


def _header(name: str, owner: bytes, num_bytes: int) -> ExtentHeader:
    parent = blake2b(name.encode(), digest_size=DIGEST_BYTES, person=b"spolia.document").digest()
    return ExtentHeader(owner, parent, link(parent, b""), 0, 1, b"", _LAYOUT, num_bytes)
