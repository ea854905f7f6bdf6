"""Kept conversations, token for token: what was generated is what the next turn goes on from.

    session    | prompt of turn 1 | answer 1 | what was added | answer 2 | ...       ids, as the engine saw them
    marks      0                             ^                           ^           ends of turns: `rewind` goes there

A client that sends its history as text has it rendered and tokenised again, and any difference (a space, a thought left
out, keys in another order) costs the cache from there on. A session never renders what it has: new text is added after
the ids that are there, so all of a turn's history is reused as long as the cache holds it.

A session has one turn at a time. Only an answer that was completed becomes part of it. With `SessionFiles` they outlive
the process: each is written when it changes, and found again, with what is left of its time. Several servers may share
a folder: each sees what the others made of a session when it is asked for it, and two that change one at the same time
are not both right: the second is told.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from spolia.engine.session_files import Found, KeptSession, SessionFiles
from spolia.errors import InvalidRequest, Overloaded, StorageUnavailable

__all__ = ["Session", "SessionBusy", "SessionStore", "SessionTurn", "UnknownSession"]

_MAX_SESSIONS = 4_096
_DEFAULT_TTL_S = 3_600.0
_DISK_TIMEOUT_S = 2.0


class UnknownSession(InvalidRequest):
    """No session of that id is open here for this caller."""


class SessionBusy(InvalidRequest):
    """The session has a turn that has not ended."""


@dataclass(slots=True, eq=False)
class Session:
    """One conversation.

    Attributes:
        cache_salt: who it belongs to; only requests with the same one may use it.
        token_ids: all of it.
        messages: what it was made of, where it was made of messages; replies are as their text was.
        marks: (number of tokens, number of messages) at the end of each turn.
        ttl_s: it is closed when nobody has used it for so long.
        turn: the one that is running.
        saved: done when it is on disk as it is now; None: it is not to be.
        on_change: hears that it has changed.
        hangs: whether the disk is known not to answer.
    """

    id: str
    cache_salt: str
    created_s: float
    used_s: float
    ttl_s: float
    token_ids: list[int] = field(default_factory=list)
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)
    turn: SessionTurn | None = None
    saved: Future[None] | None = None
    on_change: Callable[[Session], None] = lambda _: None
    hangs: Callable[[], bool] = lambda: False

    @property
    def is_busy(self) -> bool:
        """Whether a turn is running."""
        return self.turn is not None

    @property
    def is_changing(self) -> bool:
        """Whether a turn is running, or what it is now waits to be written."""
        return self.is_busy or (self.saved is not None and not self.saved.done())

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    async def kept(self, timeout_s: float = _DISK_TIMEOUT_S) -> None:
        """Wait until it is on disk as it is now, if it is to be, but no longer than that: a disk may hang.

        Raises:
            SessionConflict: another server has changed it since it was last looked at here.
        """
        if self.saved is not None and not self.saved.done() and not self.hangs():
            await asyncio.wait([asyncio.wrap_future(self.saved)], timeout=timeout_s)
        if self.saved is not None and self.saved.done() and (error := self.saved.exception()) is not None:
            raise error

    def append(self, token_ids: Sequence[int], messages: Sequence[Mapping[str, Any]] = ()) -> None:
        """Add what somebody said; a turn that ends here can be rewound to."""
        self._require_idle()
        self.token_ids += token_ids
        self.messages += messages
        self._mark()
        self.on_change(self)

    def rewind(self, *, turns: int | None = None, num_tokens: int | None = None) -> None:
        """Forget the last turns, or all after so many tokens.

        Raises:
            InvalidRequest: it has not so many, or not one of both was given, or so many tokens end inside a message.
        """
        self._require_idle()
        if (turns is None) == (num_tokens is None):
            raise InvalidRequest("give either turns or num_tokens", param="turns")
        if turns is not None:
            if not 0 <= turns <= len(self.marks):
                raise InvalidRequest(f"turns is {turns}; the session has {len(self.marks)}", param="turns")
            del self.marks[len(self.marks) - turns :]
            keep, num_messages = self.marks[-1] if self.marks else (0, 0)
        else:
            keep = num_tokens or 0
            if not 0 <= keep <= self.num_tokens:
                raise InvalidRequest(f"num_tokens is {keep}; the session has {self.num_tokens}", param="num_tokens")
            ends = [0, *(mark[0] for mark in self.marks)]
            if self.messages and keep not in ends:
                there = ", ".join(map(str, ends))
                raise InvalidRequest(
                    f"num_tokens is {keep}, inside a message; turns of this session end after {there}",
                    param="num_tokens",
                )
            self.marks = [mark for mark in self.marks if mark[0] <= keep]
            num_messages = self.marks[-1][1] if self.marks else 0
        del self.token_ids[keep:]
        del self.messages[num_messages:]
        self.on_change(self)

    def _mark(self) -> None:
        mark = (self.num_tokens, len(self.messages))
        if not self.marks or self.marks[-1] != mark:
            self.marks.append(mark)

    def _require_idle(self) -> None:
        if self.is_busy:
            raise SessionBusy(f"session {self.id} has a turn that has not ended; wait for its answer", param="session")


class SessionTurn:
    """One turn of a session: `prompt_ids` go to the engine, `finish` takes what came back.

        turn = SessionTurn(session, added_ids, messages)     the session is as it was, whatever becomes of the request
        turn.begin()                                         nobody else may take a turn
        turn.finish(output_ids, text)  or  turn.abandon()

    Attributes:
        num_history_tokens: so many of the prompt were in the session before.

    Raises:
        SessionBusy: another turn is running.
    """

    def __init__(self, session: Session, added_ids: Sequence[int], messages: Sequence[Mapping[str, Any]]) -> None:
        session._require_idle()
        self.session = session
        self.num_history_tokens = session.num_tokens
        self.prompt_ids = [*session.token_ids, *added_ids]
        self._messages = messages

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """The conversation that is to be answered, the session's own messages first."""
        return [*self.session.messages, *self._messages]

    def begin(self) -> None:
        """
        Raises:
            SessionBusy: another turn is running, or the session has changed since this one was made.
        """
        session = self.session
        session._require_idle()
        if session.token_ids != self.prompt_ids[: self.num_history_tokens]:
            raise SessionBusy(f"session {session.id} has changed meanwhile; send the turn again", param="session")
        session.turn = self

    def finish(self, output_ids: Sequence[int], text: str) -> None:
        """The answer was completed: from now on it is part of the session."""
        session = self.session
        if session.turn is self:
            session.turn = None
            session.token_ids = [*self.prompt_ids, *output_ids]
            if self._messages:  # a session of text has none
                session.messages += [*self._messages, {"role": "assistant", "content": text}]
            session._mark()
            session.on_change(session)

    def abandon(self) -> None:
        """It was not, and the session is as it was. Does nothing before `begin` and after `finish`."""
        if self.session.turn is self:
            self.session.turn = None


class SessionStore:
    """The sessions of one engine. Any thread may call.

    Args:
        closed: hears of each session that was closed or has expired.
        files: where they are kept, too; those that are there already are open as soon as they are read. None: nowhere.
        now: seconds since the epoch: files outlive the clock.

    Attributes:
        loaded: done when what earlier processes had open is open here.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        closed: Callable[[Session], None] = lambda _: None,
        max_sessions: int = _MAX_SESSIONS,
        ttl_s: float = _DEFAULT_TTL_S,
        files: SessionFiles | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._closed = closed
        self._max_sessions = max_sessions
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._open: dict[str, Session] = {}
        self._files = files
        self.loaded: Future[None] = Future()
        if files is None:
            self.loaded.set_result(None)
        else:
            files.load().add_done_callback(partial(self._find_again, files, now()))

    def _find_again(self, files: SessionFiles, now_s: float, read: Future[list[tuple[KeptSession, float]]]) -> None:
        """Open what an earlier process had open, and forget what has expired since."""
        kept = [] if read.exception() is not None else read.result() or []
        for number, (one, used_s) in enumerate(kept):
            age_s = max(0.0, now_s - used_s)
            if age_s >= one.ttl_s or number < len(kept) - self._max_sessions:
                files.delete(one.id)
                continue
            then_s = self._clock() - age_s
            with self._lock:
                session = self._open.get(one.id)
                if session is None:
                    session = self._open[one.id] = self._make(one.id, one.cache_salt, then_s, one.ttl_s)
                if not session.is_changing:
                    session.token_ids, session.messages, session.marks = one.token_ids, one.messages, one.marks
        self.loaded.set_result(None)

    def _make(self, session_id: str, cache_salt: str, now_s: float, ttl_s: float) -> Session:
        return Session(
            session_id,
            cache_salt,
            now_s,
            now_s,
            ttl_s,
            on_change=self._save,
            hangs=partial(self._hangs, _DISK_TIMEOUT_S),
        )

    def _hangs(self, timeout_s: float) -> bool:
        """Whether the disk has not answered for so long: nobody need wait that long again to know it."""
        return self._files is not None and self._files.busy_s >= timeout_s

    def _take(self, found: Found) -> None:
        """Go on with what another process has made of a session, unless it has been changed here since."""
        kept = found.session
        with self._lock:
            session = self._open.get(kept.id)
            if (session is not None and session.is_changing) or self._files is None or not self._files.take(found):
                return
            if session is None:
                now_s = self._clock()
                session = self._open[kept.id] = self._make(kept.id, kept.cache_salt, now_s, kept.ttl_s)
        session.token_ids, session.messages, session.marks = kept.token_ids, kept.messages, kept.marks
        session.saved = None

    def _save(self, session: Session) -> None:
        if self._files is not None and session.id in self._open:
            kept = KeptSession(
                session.id, session.cache_salt, session.ttl_s, session.token_ids, session.messages, session.marks
            )
            session.saved = self._files.save(kept)

    def adopt(self, other: SessionStore) -> None:
        """Go on with the sessions of a store whose engine has ended, but for those that `files` has brought already."""
        with self._lock:
            for session in other._open.values():
                session.on_change, session.hangs = self._save, partial(self._hangs, _DISK_TIMEOUT_S)
                self._open.setdefault(session.id, session)

    def open(self, cache_salt: str, *, ttl_s: float | None = None) -> Session:
        """A new, empty one.

        Raises:
            InvalidRequest: a time limit that is none.
            Overloaded: too many are open.
        """
        if ttl_s is not None and not 0 < ttl_s < float("inf"):
            raise InvalidRequest(f"ttl is {ttl_s}; it must be a positive number of seconds", param="ttl")
        self.expire()
        now_s = self._clock()
        session = self._make(f"session-{secrets.token_hex(16)}", cache_salt, now_s, ttl_s or self._ttl_s)
        with self._lock:
            if len(self._open) >= self._max_sessions:
                raise Overloaded(f"{len(self._open)} sessions are open, the limit; close some")
            self._open[session.id] = session
        self._save(session)
        return session

    async def find(self, session_id: str, cache_salt: str, timeout_s: float = _DISK_TIMEOUT_S) -> Session:
        """A session as it is now, also if another process has opened or changed it.

        Raises:
            UnknownSession: as `get`.
            StorageUnavailable: it is not here, and the disk that may have it fails, or has not answered in time. One
                that is here goes on as it is: if another process has changed it, `Session.kept` tells.
        """
        session = self._open.get(session_id)
        if self._files is None or (session is not None and (session.is_changing or self._hangs(timeout_s))):
            return self.get(session_id, cache_salt)
        look = asyncio.wrap_future(self._files.look(session_id))
        await asyncio.wait([look], timeout=0.0 if self._hangs(timeout_s) else timeout_s)
        trouble = f"has not answered for {timeout_s:g} s"
        if look.done():
            error = look.exception()
            if error is None:
                if (found := look.result()) is not None:
                    self._take(found)
                return self.get(session_id, cache_salt)
            trouble = f"fails: {error}"
        else:
            look.cancel()  # nobody waits for it any more, however long it takes
        if session_id not in self._open:
            raise StorageUnavailable(
                f"session {session_id!r} is not in memory, and the disk with the others {trouble}; "
                "try again when it answers, or open another session"
            )
        return self.get(session_id, cache_salt)

    def get(self, session_id: str, cache_salt: str) -> Session:
        """A session that is in memory.

        Raises:
            UnknownSession: it was never opened, was closed, has expired, or belongs to somebody else.
        """
        self.expire()
        session = self._open.get(session_id)
        if session is None or session.cache_salt != cache_salt:
            raise UnknownSession(
                f"no session {session_id!r} is open here; open one with POST /v1/sessions", param="session"
            )
        session.used_s = self._clock()
        if self._files is not None:
            self._files.touch(session.id)
        return session

    def fork(self, session: Session) -> Session:
        """Another with the same content; from here on each goes its own way.

        Raises:
            SessionBusy, Overloaded: as its name says, and as `open`.
        """
        session._require_idle()
        other = self.open(session.cache_salt, ttl_s=session.ttl_s)
        other.token_ids, other.messages = list(session.token_ids), list(session.messages)
        other.marks = list(session.marks)
        other.on_change(other)
        return other

    def close(self, session: Session) -> None:
        """Forget it; what of its KV nobody else uses goes first when room is short.

        Raises:
            SessionBusy: it has a turn that has not ended.
        """
        session._require_idle()
        with self._lock:
            found = self._open.pop(session.id, None)
        if found is not None:
            self._forget(found)

    async def listed(self, cache_salt: str, timeout_s: float = _DISK_TIMEOUT_S) -> list[Session]:
        """As `all`, once those of earlier processes are among them.

        Raises:
            StorageUnavailable: the disk has not answered in time.
        """
        if not self.loaded.done():
            await asyncio.wait([asyncio.wrap_future(self.loaded)], timeout=timeout_s)
        if not self.loaded.done():
            raise StorageUnavailable(
                f"the disk with the sessions of earlier servers has not answered for {timeout_s:g} s; try again later"
            )
        return self.all(cache_salt)

    def all(self, cache_salt: str) -> list[Session]:
        """Those of one owner, the oldest first."""
        self.expire()
        with self._lock:
            return [session for session in self._open.values() if session.cache_salt == cache_salt]

    def idle_s(self, session: Session) -> float:
        """How long nobody has used it."""
        return self._clock() - session.used_s

    def latest(self, count: int) -> list[Session]:
        """Of everybody's idle ones, those that were used last, the last first."""
        with self._lock:
            idle = [session for session in self._open.values() if not session.is_busy]
        return sorted(idle, key=lambda session: -session.used_s)[:count]

    def expire(self) -> None:
        """Close those that nobody has used for longer than they may be left."""
        now_s = self._clock()
        with self._lock:
            gone = [s for s in self._open.values() if not s.is_busy and s.used_s + s.ttl_s <= now_s]
            for session in gone:
                del self._open[session.id]
        for session in gone:
            if self._files is None:
                self._closed(session)
            else:
                self._files.expire(session.id).add_done_callback(partial(self._has_expired, session))

    def _has_expired(self, session: Session, deleted: Future[bool]) -> None:
        if deleted.cancelled() or deleted.exception() is not None or deleted.result() is not False:
            self._closed(session)  # but for one that another process goes on with

    def end(self, timeout_s: float = 10.0) -> None:
        """The process is about to end: write what waits to be written, for so long at most."""
        if self._files is not None:
            self._files.close(timeout_s)

    def _forget(self, session: Session) -> None:
        if self._files is not None:
            self._files.delete(session.id)
        self._closed(session)
