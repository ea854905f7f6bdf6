"""Sessions on disk, so that they outlive the process: see `SessionFiles`."""

from __future__ import annotations

import logging
import queue
import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from spolia.errors import StorageUnavailable
from spolia.tiers import DocumentFolder, Sealer

__all__ = ["SESSIONS_FOLDER", "KeptSession", "SessionFiles"]

logger = logging.getLogger("spolia.engine")

SESSIONS_FOLDER = "spolia-sessions-1"
"""Beside the KV, in the folder that `kv_disk` names."""

_ID = re.compile(r"session-[0-9a-f]{32}")


class KeptSession(msgspec.Struct, frozen=True):
    """A session as it lies on disk; its fields are `Session`'s."""

    id: str
    cache_salt: str
    ttl_s: float
    token_ids: list[int]
    messages: list[Mapping[str, Any]]
    marks: list[tuple[int, int]]


class _Job(NamedTuple):
    id: str
    content: bytes | None  # None: delete it
    done: Future[None]


class SessionFiles:
    """Writes sessions in the background, each whole whenever it changes, and finds them again.

    A disk that fails costs no session: those here go on, and what could not be written is logged, and tried again when
    the session changes next.

    Args:
        folder: `kv_disk`'s.
        owner: whose sessions: those of one model. What others have there is left alone.
    """

    def __init__(self, folder: Path, owner: bytes, sealer: Sealer) -> None:
        self._documents = DocumentFolder(folder / SESSIONS_FOLDER, owner, sealer)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # guards `_thread`

    def load(self) -> Iterator[tuple[KeptSession, float]]:
        """Sessions and when each was last used, in seconds since the epoch; the least recently used first."""
        for document in self._documents.documents():
            if _ID.fullmatch(document.name) is None:
                continue
            try:
                kept = msgspec.json.decode(document.content, type=KeptSession)
            except msgspec.DecodeError:  # of another version
                continue
            if kept.id == document.name:
                yield kept, document.used_s

    def save(self, session: KeptSession) -> Future[None]:
        """Have a session written; the future is done when it is, or when that failed. Does not wait."""
        return self._put(_Job(session.id, msgspec.json.encode(session), Future()))

    def delete(self, session_id: str) -> Future[None]:
        """As `save`."""
        return self._put(_Job(session_id, None, Future()))

    def touch(self, session_id: str) -> None:
        """It was used just now."""
        self._documents.touch(session_id)

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what waits, for so long at most. What is saved later is written all the same."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join(timeout_s)

    def _put(self, job: _Job) -> Future[None]:
        with self._lock:
            self._jobs.put(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="spolia-sessions", daemon=True)
                self._thread.start()
        return job.done

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.done.set_running_or_notify_cancel()
            try:
                if job.content is None:
                    self._documents.delete(job.id)
                else:
                    self._documents.put(job.id, job.content)
            except StorageUnavailable as error:
                logger.warning("a session is kept in memory only: %s", error)
            if not job.done.cancelled():
                job.done.set_result(None)
