"""The BLAKE3 digest of a file, computed once.

Namespaces of KV carry the digest of the weights, so every start needs it; a gigabyte takes a quarter of a second to
hash. It is remembered in the cache folder with the file's size and time of change: a file that changed has another.
"""

from __future__ import annotations

import json
import logging
from hashlib import blake2b
from pathlib import Path

from blake3 import blake3

from spolia.errors import ModelError
from spolia.models.cache_folder import cache_folder, write_atomically

__all__ = ["file_digest"]

log = logging.getLogger(__name__)
Identity = dict[str, str | int]


def file_digest(path: Path) -> bytes:
    """BLAKE3 of the file's contents, 32 bytes.

    Raises:
        ModelError: the file cannot be read.
    """
    path = path.resolve()
    try:
        found = path.stat()
        identity: Identity = {"path": str(path), "num_bytes": found.st_size, "mtime_ns": found.st_mtime_ns}
        note = cache_folder() / "digests" / f"{blake2b(bytes(path), digest_size=16).hexdigest()}.json"
        remembered = _remembered(note, identity)
        if remembered is not None:
            return remembered
        digest = blake3(max_threads=blake3.AUTO).update_mmap(path).digest()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        write_atomically(note, json.dumps({**identity, "blake3": digest.hex()}).encode())
    except OSError as error:
        log.info("%s: digest not remembered: %s", path, error)  # a read-only cache folder costs time, not service
    return digest


def _remembered(note: Path, identity: Identity) -> bytes | None:
    """The digest in `note`, if it was taken of the file as it is now."""
    try:
        found = json.loads(note.read_bytes())
        digest = bytes.fromhex(found.pop("blake3"))
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None  # never taken, or damaged: take it (again)
    return digest if found == identity and len(digest) == 32 else None
