"""Sessions: token for token, one turn at a time, and nobody else's."""

from __future__ import annotations

import pytest

from spolia.engine import SessionBusy, SessionStore, SessionTurn, UnknownSession
from spolia.errors import InvalidRequest, Overloaded


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def closed() -> list[str]:
    return []


@pytest.fixture
def store(clock, closed) -> SessionStore:
    return SessionStore(clock=clock, closed=lambda session: closed.append(session.id), max_sessions=3, ttl_s=100)


def begun(session, added, messages=()) -> SessionTurn:
    turn = SessionTurn(session, added, messages)
    turn.begin()
    return turn


def take_turn(session, added, answer, messages=()) -> SessionTurn:
    turn = begun(session, added, messages)
    turn.finish(answer, "text")
    return turn


def test_what_was_generated_is_what_the_next_turn_goes_on_from(store):
    session = store.open("")
    take_turn(session, [1, 2], [3, 4])
    turn = SessionTurn(session, [5], ())
    assert (turn.prompt_ids, turn.num_history_tokens) == ([1, 2, 3, 4, 5], 4)


def test_an_answer_that_was_not_completed_leaves_the_session_as_it_was(store):
    session = store.open("")
    take_turn(session, [1], [2])
    begun(session, [9, 9], [{"role": "user", "content": "?"}]).abandon()
    assert (session.token_ids, session.messages) == ([1, 2], [])
    take_turn(session, [3], [4]).abandon()  # after the end it changes nothing
    assert session.token_ids == [1, 2, 3, 4]


def test_one_turn_at_a_time(store):
    session = store.open("")
    waiting = SessionTurn(session, [3], ())
    begun(session, [1])
    for act in (
        waiting.begin,
        lambda: SessionTurn(session, [2], ()),
        lambda: session.append([2]),
        lambda: session.rewind(turns=0),
        lambda: store.fork(session),
        lambda: store.close(session),
    ):
        with pytest.raises(SessionBusy, match="wait for its answer"):
            act()


def test_a_turn_that_never_began_holds_nothing_up(store):
    session = store.open("")
    SessionTurn(session, [1], ())  # its request was refused
    take_turn(session, [2], [3])
    assert session.token_ids == [2, 3]


@pytest.mark.parametrize("num_kept", [0, 1])
def test_a_turn_on_what_the_session_no_longer_is_does_not_begin(store, num_kept):
    session = store.open("")
    take_turn(session, [1], [2])
    stale = SessionTurn(session, [3], ())
    session.rewind(num_tokens=num_kept)
    session.append([8] * (2 - num_kept))  # as long as before, and another
    with pytest.raises(SessionBusy, match="changed meanwhile"):
        stale.begin()
    take_turn(session, [4], [5])


def test_an_ended_turn_does_not_end_the_next_one(store):
    session = store.open("")
    first = take_turn(session, [1], [2])
    second = begun(session, [3])
    first.abandon()
    assert session.is_busy
    second.finish([4], "text")
    assert session.token_ids == [1, 2, 3, 4]


def test_rewinding_goes_to_the_end_of_a_turn_or_in_text_to_a_token(store):
    session = store.open("")
    for turn in range(3):
        take_turn(session, [10 * turn], [10 * turn + 1], [{"role": "user", "content": str(turn)}])
    session.rewind(turns=1)
    assert session.token_ids == [0, 1, 10, 11]
    assert [message["content"] for message in session.messages] == ["0", "text", "1", "text"]
    with pytest.raises(InvalidRequest, match="inside a message; turns of this session end after 0, 2, 4"):
        session.rewind(num_tokens=3)
    session.rewind(num_tokens=2)
    assert session.token_ids == [0, 1]
    assert len(session.messages) == 2
    session.rewind(turns=1)
    assert session.token_ids == session.messages == []
    text = store.open("")
    take_turn(text, [0, 1], [2])
    text.rewind(num_tokens=1)
    assert text.token_ids == [0]


@pytest.mark.parametrize("where", [{}, {"turns": 1, "num_tokens": 1}, {"turns": 2}, {"turns": -1}, {"num_tokens": 3}])
def test_rewinding_to_nowhere_is_refused(store, where):
    session = store.open("")
    take_turn(session, [1], [2])
    with pytest.raises(InvalidRequest):
        session.rewind(**where)
    assert session.token_ids == [1, 2]


def test_a_fork_goes_its_own_way(store):
    session = store.open("", ttl_s=7)
    take_turn(session, [1], [2])
    other = store.fork(session)
    take_turn(other, [3], [4])
    take_turn(session, [5], [6])
    assert (session.token_ids, other.token_ids, other.ttl_s) == ([1, 2, 5, 6], [1, 2, 3, 4], 7)
    other.rewind(turns=1)
    assert other.token_ids == [1, 2]


def test_a_session_is_its_owners(store):
    session = store.open("mine")
    assert store.get(session.id, "mine") is session
    for salt in ("", "theirs"):
        with pytest.raises(UnknownSession, match="POST /v1/sessions"):
            store.get(session.id, salt)
        assert store.all(salt) == []
    assert store.all("mine") == [session]


def test_an_unused_session_expires_and_one_in_use_does_not(store, clock, closed):
    left, used, busy = (store.open("") for _ in range(3))
    begun(busy, [1])
    clock.now_s = 60
    store.get(used.id, "")
    clock.now_s = 100
    assert store.all("") == [used, busy]
    assert closed == [left.id]


def test_closing_tells_once_and_forgets(store, closed):
    session = store.open("")
    store.close(session)
    store.close(session)
    assert closed == [session.id]
    with pytest.raises(UnknownSession):
        store.get(session.id, "")


def test_there_is_a_limit_which_expiry_makes_room_below(store, clock):
    for _ in range(3):
        store.open("")
    with pytest.raises(Overloaded, match="3 sessions are open"):
        store.open("")
    clock.now_s = 101
    assert store.open("")


@pytest.mark.parametrize("ttl_s", [0, -1, float("inf")])
def test_impossible_time_limits_are_refused(store, ttl_s):
    with pytest.raises(InvalidRequest, match="ttl"):
        store.open("", ttl_s=ttl_s)
