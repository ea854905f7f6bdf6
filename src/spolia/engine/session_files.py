"""Sessions on disk, so that they outlive the process: see `SessionFiles`."""

from __future__ import annotations

import logging
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from spolia.errors import InvalidRequest, StorageUnavailable
from spolia.tiers import DocumentFolder, ExtentError, Sealer

__all__ = ["SESSIONS_FOLDER", "Found", "KeptSession", "SessionConflict", "SessionFiles"]

logger = logging.getLogger("spolia.engine")

SESSIONS_FOLDER = "spolia-sessions-1"
"""Beside the KV, in the folder that `kv_disk` names."""

_ID = re.compile(r"session-[0-9a-f]{32}")
_Result = TypeVar("_Result")
_State: TypeAlias = tuple[int, int, int] | None


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


class Found(NamedTuple):
    """A session that another process has written, as `SessionFiles.look` found it.

    Attributes:
        known: the stamp of what was known here when it was looked for.
        state: its file's.
    """

    session: KeptSession
    known: str | None
    state: _State


class _Job(NamedTuple):
    """`is_asked`: somebody wants to know what is there, and is told if the disk does not say."""

    do: Callable[[], Any]
    done: Future[Any]
    is_asked: bool = False


class SessionFiles:
    """Writes sessions in the background, each whole whenever it changes, and finds them again.

    All that meets the disk is done by one thread, one job after the other, and told by a future: no event loop waits
    for a disk.

    A disk that fails costs no session: those here go on, and what could not be written is logged, and tried again when
    the session changes next.

    Several processes may use one folder. Each remembers the stamp of what it has read or written last, so one that is
    behind is told (`SessionConflict`) instead of writing over what another has added.

    Args:
        folder: `kv_disk`'s.
        owner: whose sessions: those of one model. What others have there is left alone.
    """

    def __init__(self, folder: Path, owner: bytes, sealer: Sealer, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun_s: float | None = None  # the job that is being done
        self._documents = DocumentFolder(folder / SESSIONS_FOLDER, owner, sealer)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # guards `_thread`
        self._stamps: dict[str, str] = {}
        self._states: dict[str, _State] = {}
        self._to_delete: set[str] = set()  # what waits to be: nothing of it that is found goes on

    @property
    def busy_s(self) -> float:
        """For how long the disk has not answered; 0: nothing is asked of it."""
        begun_s = self._begun_s
        return 0.0 if begun_s is None else self._clock() - begun_s

    def load(self) -> Future[list[tuple[KeptSession, float]]]:
        """Sessions and when each was last used, in seconds since the epoch; the least recently used first."""
        return self._put(self._load)

    def look(self, session_id: str) -> Future[Found | None]:
        """Find a session if another process has left it as it is not known here; `take` it to know it.

        The future raises `StorageUnavailable` if the disk cannot say whether there is one.
        """
        return self._put(lambda: self._look(session_id), is_asked=True)

    def take(self, found: Found) -> bool:
        """Whether what was found goes on: nothing has been found, written or deleted since it was looked for."""
        session_id = found.session.id
        if session_id in self._to_delete or self._stamps.get(session_id) != found.known:
            return False
        self._stamps[session_id], self._states[session_id] = found.session.stamp, found.state
        return True

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
        return self._put(lambda: self._write(frozen))

    def delete(self, session_id: str) -> Future[None]:
        """As `save`."""
        self._to_delete.add(session_id)
        return self._put(lambda: self._delete(session_id))

    def expire(self, session_id: str) -> Future[bool]:
        """Delete it, unless another process has used it since this one did; whether it was deleted."""
        return self._put(lambda: self._expire(session_id))

    def touch(self, session_id: str) -> None:
        """It was used just now."""
        self._put(lambda: self._touch(session_id))

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what waits, for so long at most. What is saved later is written all the same."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join(timeout_s)

    def _put(self, do: Callable[[], _Result], *, is_asked: bool = False) -> Future[_Result]:
        done: Future[_Result] = Future()
        with self._lock:
            self._jobs.put(_Job(do, done, is_asked))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="spolia-sessions", daemon=True)
                self._thread.start()
        return done

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.done.set_running_or_notify_cancel():
                continue
            self._begun_s = self._clock()
            try:
                result = job.do()
            except StorageUnavailable as error:
                self._begun_s = None
                if job.is_asked:
                    job.done.set_exception(error)
                else:
                    logger.warning("a session is kept in memory only: %s", error)
                    job.done.set_result(None)
            except Exception as error:
                self._begun_s = None
                logger.warning("%s", error)
                job.done.set_exception(error)
            else:
                self._begun_s = None
                job.done.set_result(result)

    def _load(self) -> list[tuple[KeptSession, float]]:
        found = []
        for document in self._documents.documents():
            kept = _decode(document.name, document.content)
            if kept is not None:
                self._note(kept)
                found.append((kept, document.used_s))
        return found

    def _look(self, session_id: str) -> Found | None:
        if _ID.fullmatch(session_id) is None:
            return None
        known, state = self._stamps.get(session_id), self._documents.state(session_id)
        if state is None or state == self._states.get(session_id):
            return None
        kept = self._read(session_id)
        if kept is None:
            return None
        if kept.stamp == known:  # only used there
            self._states[session_id] = state
            return None
        return Found(kept, known, state)

    def _delete(self, session_id: str) -> None:
        self._to_delete.discard(session_id)
        self._documents.delete(session_id)
        self._stamps.pop(session_id, None)
        self._states.pop(session_id, None)

    def _expire(self, session_id: str) -> bool:
        if self._documents.state(session_id) not in (None, self._states.get(session_id)):
            return False
        self._delete(session_id)
        return True

    def _touch(self, session_id: str) -> None:
        before, known = self._documents.state(session_id), self._states.get(session_id)
        self._documents.touch(session_id)
        if before == known:
            self._states[session_id] = self._documents.state(session_id)

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
