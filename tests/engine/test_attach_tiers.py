"""Tiers that come and go while requests are answered."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from spolia.engine import LLM, SamplingParams
from spolia.errors import InvalidRequest, StorageUnavailable
from spolia.tiers import AesGcm, HandedDown, HostBackend, Tier, TierUse
from tiers.faults import FaultyBackend

from .toy import toy_answer, toy_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture
def llm() -> Iterator[LLM]:
    """On small pools, without a tier."""
    engine = toy_engine(num_blocks=40, fetch="wait", clock=time.monotonic)
    with LLM(engine) as made:
        yield made


def prompt(seed: int, length: int = 200) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def ask(llm: LLM, seed: int):
    output = llm.generate(prompt(seed), GREEDY)
    assert list(output.token_ids) == toy_answer(prompt(seed), 8)
    return output


@contextmanager
def traffic(llm: LLM, *, num_threads: int) -> Iterator[None]:
    """Threads that ask until the block ends, and every answer was right."""
    stop, failures = threading.Event(), list[BaseException]()

    def go_on_asking(number: int) -> None:
        rng = random.Random(number)
        while not stop.is_set():
            try:
                ask(llm, rng.randrange(8))
            except BaseException as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=go_on_asking, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []


def names(llm: LLM) -> list[str]:
    return [tier.name for tier in llm.stats.tiers]


def test_an_attached_tier_is_used_from_then_on_and_a_detached_one_no_more(llm):
    ask(llm, 0)
    llm.attach_tier(TierUse(Tier("host", HostBackend(1 << 20)), "write_through"))
    assert names(llm) == ["host"]
    for seed in range(1, 6):
        ask(llm, seed)
    assert ask(llm, 1).num_restored_tokens["host"] > 100
    llm.detach_tier("host")
    assert names(llm) == []
    for seed in range(6, 10):
        ask(llm, seed)
    assert ask(llm, 1).num_restored_tokens == {}


def test_the_fastest_is_asked_first_wherever_it_was_attached(llm):
    slow, fast = FaultyBackend(), FaultyBackend()
    llm.attach_tier(TierUse(Tier("slow", slow)))
    llm.attach_tier(TierUse(Tier("fast", fast)), index=0)
    assert names(llm) == ["fast", "slow"]
    for seed in range(6):
        ask(llm, seed)
    assert set(ask(llm, 0).num_restored_tokens) == {"fast"}


def test_a_tier_that_does_not_work_is_not_attached(llm):
    backend = FaultyBackend()
    backend.error = ConnectionError("refused")
    with pytest.raises(StorageUnavailable, match="refused"):
        llm.attach_tier(TierUse(Tier("remote", backend)))
    lossy = FaultyBackend()
    lossy.damage = True
    with pytest.raises(StorageUnavailable, match="does not keep what it takes"):
        llm.attach_tier(TierUse(Tier("remote", lossy)))
    assert names(llm) == []
    ask(llm, 0)


def test_a_tier_that_cannot_write_what_waits_stays_in_use(llm):
    backend = FaultyBackend()
    llm.attach_tier(TierUse(Tier("remote", backend, stall_s=60)))
    llm._engine.core.tiering.restores._fetch = "best_effort"  # or the request would wait for a tier that hangs
    backend.hang()
    ask(llm, 0)
    with pytest.raises(StorageUnavailable, match="stays in use"):
        llm.detach_tier("remote", timeout_s=0.1)
    assert names(llm) == ["remote"]
    backend.resume()
    llm.detach_tier("remote")
    assert names(llm) == []
    assert len(backend.values) == (200 + 7) // 16


def test_what_waits_for_a_tier_is_written_before_it_goes(llm):
    """Just after a request, before anything has been copied, and with room for one block at a time."""
    backend = FaultyBackend()
    tier = Tier("remote", backend, stall_s=600)
    llm.attach_tier(TierUse(tier, "write_through"))
    llm._engine.core.tiering.tiers.mover._lanes[tier].buffers._max_bytes = 1
    llm.generate(prompt(0, 290), SamplingParams(temperature=0.0, max_tokens=1))
    llm.detach_tier("remote", timeout_s=60)
    assert len(backend.values) == 290 // 16


def host(capacity_bytes: int = 1 << 20) -> TierUse:
    return TierUse(Tier("host", HostBackend(capacity_bytes)), "write_back", is_exclusive=True)


def filled(llm: LLM, use: TierUse) -> int:
    """Have an exclusive tier take what memory gives up; how many blocks it has then."""
    llm.attach_tier(use, index=0)
    for seed in range(6):
        ask(llm, seed)
    assert llm._engine.core.tiering.tiers.mover.flush(20)
    return len(use.tier.backend.entries())


@pytest.mark.parametrize("write", ["write_through", "write_back", "selective"])
def test_what_an_exclusive_tier_alone_holds_goes_to_the_one_below_when_it_is_detached(llm, write):
    num_blocks = filled(llm, use := host())
    assert num_blocks > 30
    num_bytes = use.tier.backend.health().num_bytes
    below = FaultyBackend()
    llm.attach_tier(TierUse(Tier("below", below, sealer=AesGcm(bytes(32))), write))
    assert llm.detach_tier("host") == HandedDown("below", num_blocks, num_bytes)
    assert names(llm) == ["below"]
    assert len(below.values) == num_blocks
    assert ask(llm, 1).num_restored_tokens["below"] > 100


def test_without_a_tier_below_it_is_told_how_much_is_dropped(llm):
    num_blocks = filled(llm, use := host())
    num_bytes = use.tier.backend.health().num_bytes
    done = llm.detach_tier("host")
    assert done == HandedDown(num_dropped_blocks=num_blocks, num_dropped_bytes=num_bytes)
    assert names(llm) == []
    assert num_blocks > 30


def test_what_the_tier_below_has_no_room_for_is_told(llm):
    num_blocks = filled(llm, use := host())
    num_bytes = use.tier.backend.health().num_bytes
    small = HostBackend(num_bytes // 3)
    llm.attach_tier(TierUse(Tier("small", small)))
    done = llm.detach_tier("host")
    assert (done.to, done.num_blocks, done.num_bytes) == ("small", len(small.entries()), small.health().num_bytes)
    assert (done.num_dropped_blocks, done.num_dropped_bytes) == (
        num_blocks - done.num_blocks,
        num_bytes - done.num_bytes,
    )
    assert done.num_blocks > 0 < done.num_dropped_blocks


@pytest.mark.parametrize("trouble", ["it fails", "it hangs", "it has no room"])
def test_if_the_tier_below_does_not_take_it_nothing_is_detached_or_lost(llm, trouble):
    num_blocks = filled(llm, use := host())
    below: FaultyBackend | HostBackend = HostBackend(300) if trouble == "it has no room" else FaultyBackend()
    tier = Tier("below", below, stall_s=60)
    if trouble == "it has no room":
        llm._engine.core.tiering.tiers.attach(TierUse(tier))  # it could not even be tried out
    else:
        llm.attach_tier(TierUse(tier, "write_back"))
    if isinstance(below, FaultyBackend):
        below.error = ConnectionError("refused") if trouble == "it fails" else None
        if trouble == "it hangs":
            below.hang()
    with pytest.raises(StorageUnavailable, match="tier host stays in use"):
        llm.detach_tier("host", timeout_s=0.2)
    if isinstance(below, FaultyBackend):
        below.error = None
        below.resume()
    assert names(llm) == ["host", "below"]
    assert len(use.tier.backend.entries()) == num_blocks
    assert ask(llm, 1).num_restored_tokens["host"] > 100


def test_what_an_exclusive_tier_holds_is_handed_down_whole_under_traffic_and_every_answer_is_right(llm):
    below = FaultyBackend()
    llm.attach_tier(TierUse(Tier("below", below), "write_back"))
    with traffic(llm, num_threads=1):
        for _ in range(8):
            filled(llm, use := host())
            num_blocks = len(use.tier.backend.entries())
            done = llm.detach_tier("host")
            assert (done.to, done.num_dropped_blocks) == ("below", 0)
            assert num_blocks > 0


def test_names_are_unique_and_unknown_ones_are_told(llm):
    llm.attach_tier(TierUse(Tier("host", HostBackend(1_000_000))))
    with pytest.raises(InvalidRequest, match="there is a tier 'host' already"):
        llm.attach_tier(TierUse(Tier("host", HostBackend(1_000_000))))
    with pytest.raises(InvalidRequest, match="there is no tier 'disk'; there are: host"):
        llm.detach_tier("disk")


def test_tiers_come_and_go_under_traffic_and_every_answer_is_right(llm):
    backend = FaultyBackend()
    with traffic(llm, num_threads=3):
        for _ in range(8):
            llm.attach_tier(TierUse(Tier("remote", backend)))
            llm.attach_tier(TierUse(Tier("host", HostBackend(100_000)), "write_back", is_exclusive=True), index=0)
            for seed in range(3):  # while all three are there
                ask(llm, seed)
            llm.detach_tier("host")
            llm.detach_tier("remote")
    assert names(llm) == []
