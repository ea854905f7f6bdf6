"""What a tier makes of a backend that fails, hangs or lies."""

from __future__ import annotations

import threading

import pytest

from spolia.errors import StorageUnavailable
from spolia.tiers import Health, HostBackend, Tier, TierState

from .faults import FaultyBackend
from .samples import extent_of, headers, payload_of
from .test_backends import SIZE, keys_of, values_of


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def backend():
    return FaultyBackend()


@pytest.fixture
def tier(backend, clock):
    return Tier("test", backend, clock=clock)


def get(tier, keys):
    return [
        None if p is None else p.tobytes() for p in tier.get_into(keys, [memoryview(bytearray(SIZE)) for _ in keys])
    ]


def test_payloads_come_back_and_are_counted(tier):
    keys = keys_of(3)
    assert tier.put(keys[:2], values_of(2)) == 2
    assert get(tier, keys) == [payload_of(headers(3)[0]), payload_of(headers(3)[1]), None]
    assert (tier.stats.num_hits, tier.stats.num_misses) == (2, 1)
    assert tier.count(keys) == 2
    assert [tier.knows(key) for key in keys] == [True, True, False]


def test_a_damaged_block_is_a_miss_and_is_dropped(tier, backend):
    tier.put(keys_of(2), values_of(2))
    backend.damage = True
    assert get(tier, keys_of(2)) == [None, None]
    assert tier.stats.num_refused == 2
    assert backend.values == {}
    assert tier.state is TierState.UP


def test_what_another_layout_left_under_the_key_is_a_miss(tier, backend):
    one, other = headers(2)
    backend.values[one.key] = bytes(extent_of(other))
    assert get(tier, [one.key]) == [None]


@pytest.mark.parametrize("error", [StorageUnavailable("the disk is gone"), ConnectionError("refused"), KeyError("?")])
def test_a_failing_backend_is_left_alone_for_longer_and_longer(tier, backend, clock, error):
    backend.error = error
    for pause_s in [1, 2, 4, 8, 16, 32, 60, 60]:
        assert get(tier, keys_of(1)) == [None]
        num_calls = len(backend.calls)
        clock.now_s += 0.99 * pause_s
        assert tier.put(keys_of(1), values_of(1)) == 0
        assert tier.count(keys_of(1)) == 0
        assert len(backend.calls) == num_calls, "it was asked while it was down"
        assert tier.state is TierState.DOWN
        clock.now_s += 0.02 * pause_s
    assert str(error).strip("'") in tier.stats.reason


def test_a_backend_that_comes_back_is_used_again(tier, backend, clock):
    backend.error = StorageUnavailable("away")
    assert tier.put(keys_of(1), values_of(1)) == 0
    backend.error = None
    clock.now_s += 1.5
    assert tier.put(keys_of(1), values_of(1)) == 1
    assert tier.state is TierState.UP
    assert tier.stats.reason == ""
    backend.error = StorageUnavailable("away")
    assert get(tier, keys_of(1)) == [None]
    clock.now_s += 1.5
    assert tier.is_usable, "the pause begins at a second again"


def test_a_hanging_backend_is_not_asked_until_it_returns(tier, backend, clock):
    backend.put(keys_of(1), values_of(1))
    backend.hang()
    stuck = threading.Thread(target=get, args=(tier, keys_of(1)))
    stuck.start()
    while "get_into" not in backend.calls:
        pass
    clock.now_s += 6
    assert tier.state is TierState.STALLED
    assert "has not returned for 6 s" in tier.stats.reason
    assert get(tier, keys_of(1)) == [None]
    assert backend.calls.count("get_into") == 1
    backend.resume()
    stuck.join()
    assert tier.state is TierState.UP
    assert get(tier, keys_of(1)) != [None]


def test_a_backend_that_is_closed_is_asked_nothing_more(tier, backend, monkeypatch):
    assert tier.put(keys_of(2), values_of(2)) == 2
    held, asked = tier.stats.health, []
    monkeypatch.setattr(backend, "health", lambda: asked.append("health"))
    tier.close()
    assert asked == []
    assert tier.stats.health == held
    assert held.num_entries == 2


@pytest.mark.parametrize("trouble", ["hangs", "fails"])
def test_a_backend_that_cannot_be_closed_holds_nobody_up(trouble, caplog):
    never = threading.Event()

    class Stubborn(FaultyBackend):
        def close(self):
            if trouble == "fails":
                raise ConnectionResetError("gone already")
            never.wait()

    Tier("test", Stubborn(), stall_s=0.05).close()
    assert ("gone already" in caplog.text) == (trouble == "fails")
    never.set()


def test_what_had_no_room_is_counted_and_told_once_until_there_is_room(tier, backend, caplog):
    backend.is_full = True
    for _ in range(2):
        assert tier.put(keys_of(2), values_of(2)) == 0
    assert (tier.state, tier.stats.num_no_room) == (TierState.UP, 4)
    assert "it is full" in tier.stats.reason
    assert caplog.text.count("it is full") == 1
    backend.is_full = False
    assert tier.put(keys_of(2), values_of(2)) == 2
    assert tier.stats.reason == ""


def test_memory_that_was_given_back_is_held_no_more():
    tier = Tier("host", HostBackend(10 * SIZE))
    assert tier.put(keys_of(2), values_of(2)) == 2
    assert tier.stats.health.num_entries == 2
    tier.close()
    assert tier.stats.health == Health(0, 0, 10 * SIZE)
