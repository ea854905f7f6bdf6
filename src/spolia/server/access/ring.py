"""The accounts of a file's keys, which follow the file."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from spolia.errors import InvalidRequest
from spolia.server.access.account import Account
from spolia.server.access.keys import KeySettings, read_keys

__all__ = ["KeyRing"]

logger = logging.getLogger("spolia.server")

_LOOK_EVERY_S = 1.0


class KeyRing:
    """The accounts of a file's keys. Event loop only.

    Args:
        clock: seconds; only differences matter.

    Raises:
        InvalidRequest: the file cannot be read, or what it says is not allowed; the message names the key and field.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._looked_s = clock()
        self._version = _version(path)
        self._by_digest: dict[str, Account] = {}
        self._take(read_keys(path))

    def find(self, key: str) -> Account | None:
        """The account of a key; None for a key that is not in the file."""
        self._look_again()
        # A digest tells nothing of the key that is wrong, so the time of this look-up gives nothing away.
        return self._by_digest.get(hashlib.sha256(key.encode(errors="replace")).hexdigest())

    def _look_again(self) -> None:
        now_s = self._clock()
        if now_s - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        version = _version(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._take(read_keys(self._path))
            logger.info("keys read again from %s: %d keys", self._path, len(self._by_digest))
        except InvalidRequest as error:
            logger.error("the keys stay as they were: %s", error)

    def _take(self, keys: Sequence[KeySettings]) -> None:
        """What a key has used stays with it, also if its settings changed."""
        before = self._by_digest
        self._by_digest = {each.digest: Account(each, self._clock, before.get(each.digest)) for each in keys}


def _version(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size
