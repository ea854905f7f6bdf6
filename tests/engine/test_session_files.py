"""Sessions outlive the process: what was written is found again, what is damaged or another's is not."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from pathlib import Path

import pytest

from spolia.engine import SessionConflict, SessionStore, SessionTurn, UnknownSession
from spolia.engine.session_files import SESSIONS_FOLDER, SessionFiles
from spolia.errors import StorageUnavailable
from spolia.tiers import AesGcm, Checksum, DocumentFolder

from .test_sessions import Clock

OWNER, OTHER = b"o" * 32, b"p" * 32


class Place:
    """A folder, and stores over it as a process has them."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.clock = Clock()
        self.now_s = time.time()

    def store(self, owner=OWNER, sealer=None, **options) -> SessionStore:
        files = SessionFiles(self.folder, owner, sealer or Checksum())
        store = SessionStore(clock=self.clock, files=files, now=lambda: self.now_s, **options)
        store.loaded.result(10)
        return store

    def files(self, suffix=".doc"):
        return sorted((self.folder / SESSIONS_FOLDER).glob(f"*{suffix}"))


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def find(store, session_id, salt, **options):
    return asyncio.run(store.find(session_id, salt, **options))


def open_with_turns(store, *, salt="", ttl_s=100.0):
    session = store.open(salt, ttl_s=ttl_s)
    for number in range(2):
        turn = SessionTurn(session, [10 * number, 10 * number + 1], [{"role": "user", "content": f"q{number}"}])
        turn.begin()
        turn.finish([7, 8], f"a{number}")
    return session


def test_a_session_is_there_token_for_token_in_the_next_process(place):
    store = place.store()
    before = open_with_turns(store, salt="mine")
    before.saved.result(10)  # killed from here on: nothing was closed
    again = place.store()
    after = again.get(before.id, "mine")
    assert (after.token_ids, after.messages, after.marks) == (before.token_ids, before.messages, before.marks)
    after.rewind(turns=1)
    after.saved.result(10)
    assert place.store().get(before.id, "mine").token_ids == [0, 1, 7, 8]


def test_nobody_else_gets_it_after_a_restart_either(place):
    session = open_with_turns(place.store(), salt="mine")
    session.saved.result(10)
    with pytest.raises(UnknownSession):
        place.store().get(session.id, "theirs")
    assert place.store(owner=OTHER).all("mine") == []  # another model's ids mean nothing to this one
    assert place.store().all("mine")[0].id == session.id


def test_its_time_runs_while_no_server_does(place):
    session = open_with_turns(place.store(), ttl_s=100.0)
    session.saved.result(10)
    place.now_s += 60
    store = place.store()
    assert [found.id for found in store.all("")] == [session.id]
    place.clock.now_s += 45  # 105 in all
    assert store.all("") == []
    store.end()
    assert place.files() == []


def test_what_expired_meanwhile_is_gone_from_the_disk_too(place):
    open_with_turns(place.store(), ttl_s=100.0).saved.result(10)
    place.now_s += 101
    store = place.store()
    assert store.all("") == []
    store.end()
    assert place.files() == []


def test_using_it_keeps_it(place):
    store = place.store()
    session = open_with_turns(store)
    session.saved.result(10)
    os.utime(place.files()[0], (place.now_s - 99, place.now_s - 99))
    store.get(session.id, "")
    store.end()  # that it was used is noted on the disk beside everything else
    place.now_s += 50
    assert place.store().get(session.id, "").token_ids == session.token_ids


def test_a_closed_one_does_not_come_back(place):
    store = place.store()
    session = open_with_turns(store)
    store.close(session)
    session.on_change(session)  # a turn that ends late saves nothing
    store.end()
    assert place.files() == []


def test_a_fork_is_kept_as_well(place):
    store = place.store()
    fork = store.fork(open_with_turns(store))
    fork.saved.result(10)
    assert place.store().get(fork.id, "").token_ids == fork.token_ids


@pytest.mark.parametrize("sealer", [Checksum(), AesGcm(b"k" * 32)])
def test_what_was_damaged_or_swapped_is_no_session(place, sealer):
    store = place.store(sealer=sealer)
    for session in (open_with_turns(store), open_with_turns(store), open_with_turns(store)):
        session.saved.result(10)
    first, second, third = place.files()
    data = bytearray(first.read_bytes())
    data[-40] ^= 1
    first.write_bytes(data)
    second.write_bytes(third.read_bytes())
    assert [found.id for found in place.store(sealer=sealer).all("")] == [third.stem]


def test_with_a_key_nothing_of_a_session_is_readable_and_nobody_without_it_opens_it(place):
    session = place.store(sealer=AesGcm(b"k" * 32)).open("salt of mine", ttl_s=100)
    session.append([1, 2, 3], [{"role": "user", "content": "the secret of the abbey"}])
    session.saved.result(10)
    content = place.files()[0].read_bytes()
    assert b"abbey" not in content
    assert b"salt of mine" not in content
    assert place.store(sealer=AesGcm(b"l" * 32)).all("salt of mine") == []
    assert place.store().all("salt of mine") == []


def test_a_crash_while_writing_leaves_the_session_as_it_was(place):
    session = open_with_turns(place.store())
    session.saved.result(10)
    (place.folder / SESSIONS_FOLDER / f"{session.id}.part").write_bytes(b"half of")
    store = place.store()
    assert store.get(session.id, "").token_ids == session.token_ids
    assert DocumentFolder(place.folder / SESSIONS_FOLDER).sweep() == 1


def test_a_disk_that_fails_costs_no_session(place, caplog):
    store = place.store()
    (place.folder / SESSIONS_FOLDER).write_text("a file where the folder should be")
    session = open_with_turns(store)
    session.saved.result(10)
    assert store.get(session.id, "").num_tokens == 8
    assert "kept in memory only" in caplog.text


def test_the_latest_are_kept_where_there_are_too_many(place):
    store = place.store()
    sessions = [open_with_turns(store) for _ in range(4)]
    for number, session in enumerate(sessions):
        session.saved.result(10)
        used_s = place.now_s - 10 + number
        os.utime(place.folder / SESSIONS_FOLDER / f"{session.id}.doc", (used_s, used_s))
    small = place.store(max_sessions=2)
    assert [found.id for found in small.all("")] == [session.id for session in sessions[2:]]


def test_servers_that_share_a_folder_see_what_the_others_made_of_a_session(place):
    one, two = place.store(), place.store()
    mine = open_with_turns(one, salt="mine")
    mine.saved.result(10)
    theirs = find(two, mine.id, "mine")  # opened after the other server had started
    assert theirs.token_ids == mine.token_ids
    theirs.append([5, 6])
    theirs.saved.result(10)
    assert find(one, mine.id, "mine").token_ids == theirs.token_ids
    mine.append([9])
    mine.saved.result(10)
    assert find(two, mine.id, "mine").token_ids == [*theirs.token_ids[:-1], 9] == mine.token_ids
    with pytest.raises(UnknownSession):
        find(two, mine.id, "theirs")


def test_of_two_servers_that_change_a_session_at_once_the_second_is_told_and_nothing_is_lost(place):
    one, two = place.store(), place.store()
    mine = open_with_turns(one)
    mine.saved.result(10)
    theirs = find(two, mine.id, "")
    before = list(mine.token_ids)
    turns = [SessionTurn(session, [5], []) for session in (mine, theirs)]
    for turn in turns:
        turn.begin()
    turns[0].finish([1], "")
    mine.saved.result(10)
    turns[1].finish([2], "")
    assert isinstance(theirs.saved.exception(10), SessionConflict)
    with pytest.raises(SessionConflict, match=f"has {len(before) + 2} tokens of it"):
        asyncio.run(theirs.kept())
    assert find(two, mine.id, "").token_ids == [*before, 5, 1]  # and can go on from there
    theirs.append([3])
    theirs.saved.result(10)
    assert find(one, mine.id, "").token_ids == find(place.store(), mine.id, "").token_ids == [*before, 5, 1, 3]


def test_a_session_that_another_server_goes_on_with_does_not_expire_there(place):
    one, two = place.store(), place.store()
    mine = open_with_turns(one, ttl_s=100.0)
    mine.saved.result(10)
    place.clock.now_s += 60
    find(two, mine.id, "").append([5])
    find(two, mine.id, "").saved.result(10)
    place.clock.now_s += 60
    assert one.all("") == []
    one.end()
    assert [path.stem for path in place.files()] == [mine.id]
    assert find(one, mine.id, "").token_ids[-1] == 5


def test_nobody_waits_long_for_a_disk_that_hangs(place, monkeypatch):
    store = place.store()
    mine = open_with_turns(store, ttl_s=100.0)
    mine.saved.result(10)
    hangs, answers = threading.Event(), threading.Event()

    def hanging(folder, name, state=DocumentFolder.state):
        hangs.set()
        assert answers.wait(60)
        return state(folder, name)

    monkeypatch.setattr(DocumentFolder, "state", hanging)
    try:
        assert find(store, mine.id, "", timeout_s=0.1) is mine  # in memory: it goes on
        assert hangs.is_set()
        with pytest.raises(StorageUnavailable, match=r"has not answered for 0\.1 s"):
            find(store, "session-" + "0" * 32, "", timeout_s=0.1)
        mine.append([5])
        place.clock.now_s += 200
        assert store.all("") == []  # expired, and the loop went on
    finally:
        answers.set()
    store.end()
    assert place.files() == []


def test_a_store_is_made_at_once_whatever_the_disk_does(place, monkeypatch):
    """Whoever makes it may be an event loop. What is there is open as soon as the disk answers."""
    mine = open_with_turns(place.store())
    mine.saved.result(10)
    answers = threading.Event()

    def hanging(folder, documents=DocumentFolder.documents):
        assert answers.wait(60)
        yield from documents(folder)

    monkeypatch.setattr(DocumentFolder, "documents", hanging)
    store = SessionStore(clock=place.clock, files=SessionFiles(place.folder, OWNER, Checksum()))
    try:
        assert store.all("") == []
        with pytest.raises(StorageUnavailable, match="has not answered"):
            asyncio.run(store.listed("", timeout_s=0.05))
        new = store.open("")
    finally:
        answers.set()
    assert [session.id for session in asyncio.run(store.listed("", timeout_s=60))] == [new.id, mine.id]
    assert store.get(mine.id, "").token_ids == mine.token_ids


def test_once_a_disk_is_known_to_hang_nobody_waits_for_it_again(place, monkeypatch):
    """Waiting would take an hour here; that it hangs is known from the clock."""
    now = [0.0]
    files = SessionFiles(place.folder, OWNER, Checksum(), clock=lambda: now[0])
    store = SessionStore(clock=place.clock, files=files)
    store.loaded.result(10)
    mine = open_with_turns(store)
    mine.saved.result(10)
    hangs, answers = threading.Event(), threading.Event()

    def hanging(folder, name, state=DocumentFolder.state):
        hangs.set()
        assert answers.wait(120)
        return state(folder, name)

    def ask(coroutine):
        return asyncio.run(asyncio.wait_for(coroutine, 60))

    monkeypatch.setattr(DocumentFolder, "state", hanging)
    try:
        files.touch(mine.id)
        assert hangs.wait(60)
        now[0] += 4_000.0
        queued = files._jobs.qsize()
        assert ask(store.find(mine.id, "", timeout_s=3_600)) is mine
        assert files._jobs.qsize() == queued + 1  # that it was used; nobody looks
        with pytest.raises(StorageUnavailable, match="has not answered"):
            ask(store.find("session-" + "0" * 32, "", timeout_s=3_600))
        mine.append([5])
        ask(mine.kept(timeout_s=3_600))
        assert not mine.saved.done()
    finally:
        answers.set()
    mine.saved.result(10)
    assert files.busy_s == 0.0


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_session_on_a_disk_that_fails_is_not_told_to_be_unknown(place, monkeypatch, error):
    mine = open_with_turns(place.store())
    mine.saved.result(10)
    store = SessionStore(clock=place.clock, files=SessionFiles(place.folder / "empty", OWNER, Checksum()))
    store._files._documents.folder = place.folder / SESSIONS_FOLDER
    fails = True

    def failing(path, *args, **options):
        if fails and path.name == f"{mine.id}.doc":
            raise OSError(error, os.strerror(error))
        return stat(path, *args, **options)

    stat = Path.stat
    monkeypatch.setattr(Path, "stat", failing)
    with pytest.raises(StorageUnavailable, match=os.strerror(error)):
        find(store, mine.id, "")
    with pytest.raises(UnknownSession):
        find(store, "session-" + "0" * 32, "")
    fails = False
    assert find(store, mine.id, "").token_ids == mine.token_ids
    fails = True
    assert find(store, mine.id, "").token_ids == mine.token_ids  # it is in memory by now


def test_a_session_that_cannot_be_read_is_not_taken_for_a_damaged_one(place, monkeypatch):
    mine = open_with_turns(place.store())
    mine.saved.result(10)
    documents = DocumentFolder(place.folder / SESSIONS_FOLDER, OWNER, Checksum())

    def failing(path):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", failing)
    with pytest.raises(StorageUnavailable, match="Input/output error"):
        documents.read(mine.id)
    assert list(documents.documents()) == []


def test_what_waits_to_be_written_when_a_session_is_closed_is_no_conflict(place, monkeypatch):
    store = place.store()
    mine = open_with_turns(store)
    mine.saved.result(10)
    writes, goes_on = threading.Event(), threading.Event()

    def slow(folder, name, read=DocumentFolder.read):
        writes.set()
        assert goes_on.wait(60)
        return read(folder, name)

    monkeypatch.setattr(DocumentFolder, "read", slow)
    try:
        mine.append([5])
        assert writes.wait(60)
        mine.append([6])
        saved = mine.saved
        store.close(mine)
    finally:
        goes_on.set()
    assert saved.exception(10) is None
    store.end()
    assert place.files() == []


def test_what_was_looked_for_before_a_change_here_is_not_taken_after_it(place):
    one, two = place.store(), place.store()
    mine = open_with_turns(one)
    mine.saved.result(10)
    files = SessionFiles(place.folder, OWNER, Checksum())
    found = files.look(mine.id).result(10)
    assert found is not None
    assert found.session.token_ids == mine.token_ids
    assert files.take(found)
    assert not files.take(found)  # known by now
    find(two, mine.id, "").append([5])
    find(two, mine.id, "").saved.result(10)
    found = files.look(mine.id).result(10)
    files.delete(mine.id).result(10)
    assert not files.take(found)  # it was deleted here meanwhile
