"""Tiers that come and go while requests are answered."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest

from spolia.engine import LLM, SamplingParams
from spolia.errors import InvalidRequest, StorageUnavailable
from spolia.tiers import HostBackend, Tier, TierUse
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


def test_names_are_unique_and_unknown_ones_are_told(llm):
    llm.attach_tier(TierUse(Tier("host", HostBackend(1_000_000))))
    with pytest.raises(InvalidRequest, match="there is a tier 'host' already"):
        llm.attach_tier(TierUse(Tier("host", HostBackend(1_000_000))))
    with pytest.raises(InvalidRequest, match="there is no tier 'disk'; there are: host"):
        llm.detach_tier("disk")


def test_tiers_come_and_go_under_traffic_and_every_answer_is_right(llm):
    stop = threading.Event()
    failures: list[BaseException] = []

    def traffic(number: int) -> None:
        rng = random.Random(number)
        while not stop.is_set():
            try:
                ask(llm, rng.randrange(8))
            except BaseException as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=traffic, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    backend = FaultyBackend()
    for _ in range(8):
        llm.attach_tier(TierUse(Tier("remote", backend)))
        llm.attach_tier(TierUse(Tier("host", HostBackend(100_000)), "write_back", is_exclusive=True), index=0)
        time.sleep(0.05)
        llm.detach_tier("host")
        llm.detach_tier("remote")
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert names(llm) == []
