"""Sessions on disk, so that they outlive the process: see `SessionFiles`."""

from __future__ import annotations

import logging
import queue
import re
import secrets
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from spolia.errors import InvalidRequest, StorageUnavailable
from spolia.tiers import DocumentFolder, ExtentError, Sealer

__all__ = ["SESSIONS_FOLDER", "KeptSession", "SessionConflict", "SessionFiles"]

logger = logging.getLogger("spolia.engine")

SESSIONS_FOLDER = "spolia-sessions-1"
"""Beside the KV, in the folder that `kv_disk` names."""

_ID = re.compile(r"session-[0-9a-f]{32}")


class SessionConflict(InvalidRequest):
    """Another server has changed the session meanwhile; what it has made of it stands."""


class KeptSession(msgspec.Struct, frozen=True):
    """A session as it lies on disk; its fields are `Session`'s.

    Attributes:
        stamp: another each time it is written.
    """

    id: str
    cache_salt: str
    ttl_s: float
    token_ids: list[int]
    messages: list[Mapping[str, Any]]
    marks: list[tuple[int, int]]
    stamp: str = ""


class _Job(NamedTuple):
    id: str
    session: KeptSession | None  # None: delete it
    done: Future[None]


class SessionFiles:
    """Writes sessions in the background, each whole whenever it changes, and finds them again.

    A disk that fails costs no session: those here go on, and what could not be written is logged, and tried again when
    the session changes next.

    Several processes may use one folder. Each remembers the stamp of what it has read or written last, so one that is
    behind is told (`SessionConflict`) instead of writing over what another has added.

    Args:
        folder: `kv_disk`'s.
        owner: whose sessions: those of one model. What others have there is left alone.
    """

    def __init__(self, folder: Path, owner: bytes, sealer: Sealer) -> None:
        self._documents = DocumentFolder(folder / SESSIONS_FOLDER, owner, sealer)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # guards `_thread`
        self._stamps: dict[str, str] = {}
        self._states: dict[str, tuple[int, int, int] | None] = {}

    def load(self) -> Iterator[tuple[KeptSession, float]]:
        """Sessions and when each was last used, in seconds since the epoch; the least recently used first."""
        for document in self._documents.documents():
            kept = _decode(document.name, document.content)
            if kept is not None:
                self._note(kept)
                yield kept, document.used_s

    def newer(self, session_id: str) -> KeptSession | None:
        """A session as another process has left it; None: it is as it was last read or written here, or not there."""
        if _ID.fullmatch(session_id) is None or self._documents.state(session_id) in (
            None,
            self._states.get(session_id),
        ):
            return None
        kept = self._read(session_id)
        is_new = kept is not None and kept.stamp != self._stamps.get(session_id)
        if kept is not None:
            self._note(kept)
        return kept if is_new else None

    def is_used_elsewhere(self, session_id: str) -> bool:
        """Whether another process has used it since this one did."""
        return self._documents.state(session_id) not in (None, self._states.get(session_id))

    def save(self, session: KeptSession) -> Future[None]:
        """Have a session written; the future is done when it is, or when that failed. Does not wait.

        It raises `SessionConflict` if another process has written it since it was last read or written here.
        """
        stamped = msgspec.structs.replace(session, stamp=secrets.token_hex(8))
        # What it is made of goes on changing.
        frozen = msgspec.structs.replace(
            stamped,
            token_ids=list(session.token_ids),
            messages=list(session.messages),
            marks=list(session.marks),
        )
        return self._put(_Job(session.id, frozen, Future()))

    def delete(self, session_id: str) -> Future[None]:
        """As `save`."""
        return self._put(_Job(session_id, None, Future()))

    def touch(self, session_id: str) -> None:
        """It was used just now."""
        before, known = self._documents.state(session_id), self._states.get(session_id)
        self._documents.touch(session_id)
        if before == known:
            self._states[session_id] = self._documents.state(session_id)

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
                if job.session is None:
                    self._documents.delete(job.id)
                    self._stamps.pop(job.id, None)
                    self._states.pop(job.id, None)
                else:
                    self._write(job.session)
            except StorageUnavailable as error:
                logger.warning("a session is kept in memory only: %s", error)
            except SessionConflict as error:
                logger.warning("%s", error)
                job.done.set_exception(error)
                continue
            job.done.set_result(None)

    def _write(self, session: KeptSession) -> None:
        with self._documents.lock():
            there = self._read(session.id)
            if there is not None and there.stamp != self._stamps.get(session.id):
                raise SessionConflict(
                    f"session {session.id} was changed by another server meanwhile, which has {len(there.token_ids)} "
                    "tokens of it; what was added here is not part of it: look at it, and send the turn again",
                    param="session",
                )
            self._documents.put(session.id, msgspec.json.encode(session))
            self._note(session)

    def _read(self, session_id: str) -> KeptSession | None:
        try:
            return _decode(session_id, self._documents.read(session_id))
        except ExtentError:  # damaged, somebody else's, or not there
            return None

    def _note(self, session: KeptSession) -> None:
        """This is the state that is known here."""
        self._stamps[session.id] = session.stamp
        self._states[session.id] = self._documents.state(session.id)


def _decode(name: str, content: bytes) -> KeptSession | None:
    try:
        kept = msgspec.json.decode(content, type=KeptSession)
    except msgspec.DecodeError:  # of another version
        return None
    return kept if kept.id == name else None
