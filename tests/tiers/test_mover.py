"""Between the engine and the tiers: what is in line decides what a tier will have."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from engine.toy import until
from spolia.tiers import BlockRun, Encoding, Mover, Tier

from .faults import FaultyBackend
from .samples import PAYLOAD_BYTES, extent_of, headers

BLOCK = np.zeros(PAYLOAD_BYTES, np.uint8)


@pytest.fixture
def line():
    """A tier that hangs, and its mover."""
    backend = FaultyBackend()
    tier = Tier("host", backend, stall_s=600)
    encoding = Encoding("test/f32", (PAYLOAD_BYTES,))
    mover = Mover([tier], encodings=[encoding])
    backend.hang()
    yield backend, tier, mover, encoding
    backend.resume()
    mover.close()


def test_what_is_dropped_after_it_was_handed_over_is_gone_and_can_be_handed_over_again(line):
    backend, tier, mover, encoding = line
    first, second = headers(2)
    for header in (first, second):
        assert mover.store(tier, header.encode(), 0, BLOCK, encoding)
        assert mover.has(tier, header.key)
    mover.discard(tier, [first.key, second.key])
    assert not mover.has(tier, first.key)  # else what is evicted now would be lost
    assert mover.store(tier, first.encode(), 0, BLOCK, encoding)
    assert mover.has(tier, first.key)
    assert mover.num_pending == 2
    backend.resume()
    assert mover.flush(20)
    assert list(backend.values) == [first.key]
    assert (mover.has(tier, first.key), mover.has(tier, second.key)) == (True, False)


def test_who_drops_something_hears_when_it_is_gone(line):
    backend, tier, mover, _ = line
    (header,) = headers(1)
    backend.values[header.key] = bytes(extent_of(header))
    told = mover.discard(tier, [header.key])
    assert not told.done()
    backend.resume()
    told.result(20)
    assert backend.values == {}


def test_a_block_that_is_read_while_it_is_dropped_is_not_taken_for_there():
    (header,) = headers(1)
    key, extent = header.key, extent_of(header)

    class Dropped(FaultyBackend):
        def get_into(self, keys, buffers):
            sizes = super().get_into(keys, buffers)
            tier.delete([key])  # another thread's
            return sizes

    backend = Dropped()
    backend.values[key] = bytes(extent)
    tier = Tier("host", backend)
    (payload,) = tier.get_into([key], [memoryview(bytearray(len(extent)))])
    assert payload is not None
    assert not tier.knows(key)


class Failing:
    """A codec that breaks as often as it is told to."""

    name = "failing"
    num_failures = 0

    def payload_bytes(self, group: int) -> int:
        return PAYLOAD_BYTES

    def encode(self, group, block):
        self.fail()
        return block

    def decode(self, group, payload, block):
        self.fail()
        block[:] = payload

    def fail(self) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise ValueError("a bug")


def test_a_job_that_fails_is_a_miss_and_the_next_ones_are_done():
    codec, backend = Failing(), FaultyBackend()
    tier = Tier("host", backend, stall_s=600)
    encoding = Encoding("test/f32", (PAYLOAD_BYTES,), codec)
    mover = Mover([tier], encodings=[encoding], staging_bytes=1, num_readers=1)  # a buffer that is lost is missed
    (header,) = headers(1)

    def store() -> None:
        assert mover.store(tier, header.encode(), 0, BLOCK, encoding)
        assert mover.flush(20)

    def restore() -> BlockRun | None:
        restore = mover.fetch([header.digest], 0, encoding)
        until(lambda: restore.is_done)
        return restore.take_run()

    codec.num_failures = 1
    store()
    assert (list(backend.values), mover.has(tier, header.key)) == ([], False)
    store()
    assert list(backend.values) == [header.key]
    codec.num_failures = 1
    assert restore() is None
    run = restore()
    assert run is not None
    assert run.payloads[0][0].tobytes() == BLOCK.tobytes()
    mover.give_back(run)
    mover.close()


def test_whoever_waits_for_a_drop_hears_of_it_though_what_was_to_be_stored_before_failed():
    entered, go_on = threading.Event(), threading.Event()

    class Waiting(FaultyBackend):
        def put(self, keys, values):
            entered.set()
            assert go_on.wait(20)
            return super().put(keys, values)

    codec, tier = Failing(), Tier("host", Waiting(), stall_s=600)
    encoding = Encoding("test/f32", (PAYLOAD_BYTES,), codec)
    mover = Mover([tier], encodings=[encoding])
    first, second = headers(2)
    assert mover.store(tier, first.encode(), 0, BLOCK, encoding)
    assert entered.wait(20)
    codec.num_failures = 1
    assert mover.store(tier, second.encode(), 0, BLOCK, encoding)
    dropped = mover.discard(tier, [first.key])
    go_on.set()
    dropped.result(20)
    assert mover.flush(20)
    assert not mover.has(tier, first.key)
    mover.close()


def test_a_tier_that_is_on_its_way_out_is_closed_with_the_others():
    closed = []

    class Closing(FaultyBackend):
        def close(self) -> None:
            closed.append(self)

    tiers = [Tier(name, Closing()) for name in ("one", "two")]
    mover = Mover(tiers, encodings=[Encoding("test/f32", (PAYLOAD_BYTES,))])
    mover.hide(tiers[0])
    mover.close()
    assert closed == [tier.backend for tier in tiers]


def test_a_tier_in_which_all_readers_hang_does_not_hold_up_what_a_healthy_one_has():
    class Stuck(FaultyBackend):
        def close(self) -> None:
            pass

    now = [0.0]
    stuck, healthy = Stuck(), FaultyBackend()
    tiers = [Tier(name, backend, clock=lambda: now[0]) for name, backend in (("stuck", stuck), ("healthy", healthy))]
    encoding = Encoding("test/f32", (PAYLOAD_BYTES,))
    mover = Mover(tiers, encodings=[encoding], num_readers=2)
    elsewhere = headers(3)
    header = elsewhere.pop(0)
    assert mover.store(tiers[1], header.encode(), 0, BLOCK, encoding)
    assert mover.flush(20)
    before = set(threading.enumerate())

    def readers() -> int:
        return sum(thread.name == "spolia-reader" and thread not in before for thread in threading.enumerate())

    def bring() -> None:
        restore = mover.fetch([header.digest], 0, encoding)
        until(lambda: restore.is_done)
        assert restore.has_arrived
        mover.cancel(restore)

    stuck.hang()
    lost = [mover.fetch([each.digest], 0, encoding) for each in elsewhere]
    until(lambda: stuck.calls.count("exists") == 2)
    waiting = mover.fetch([header.digest], 0, encoding)
    assert readers() == 2
    now[0] += 60.0
    mover.replace_readers()
    until(lambda: waiting.is_done)
    assert waiting.has_arrived
    mover.cancel(waiting)
    mover.hide(tiers[0])
    mover.detach(tiers[0])  # they hang in it all the same
    for _ in range(3):
        bring()
    assert readers() == 4

    stuck.resume()
    until(lambda: all(restore.is_done for restore in lost) and readers() == 2)
    bring()
    mover.close()
    assert readers() == 0
