"""Whatever a tier's place does: every request is answered right and in time, it shows, and the tier is used afterwards.

The places and what goes wrong at each are in `places.py`: real files, a real Valkey, a real HTTP server behind a wire.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from engine.test_tiering import CONVERSATION, assert_right, settle, tokens
from engine.toy import GREEDY, answer, submit, toy_answer, toy_engine, until
from spolia.engine import LLM, AsyncEngine, CacheAdmin, Engine, RequestOutput
from spolia.errors import InvalidRequest, StorageUnavailable
from spolia.server.metrics import Reading, _EngineCollector
from spolia.tiers import (
    Checksum,
    FolderBackend,
    StorageBackend,
    Tier,
    TierState,
    TierStats,
    TierUse,
    open_extent,
    verify_folder,
)

from .places import FAULTS, MEANINGLESS, NUM_LEFT, PLACES, Folder, Place, place_for

PAIRS = [(place, fault) for place in PLACES for fault in FAULTS if (place, fault) not in MEANINGLESS]

MATRIX = pytest.mark.parametrize(("place", "fault"), PAIRS, ids=["-".join(pair) for pair in PAIRS])

LIMIT_S = 30.0
"""No request takes longer, whatever its tiers do: then nobody waits any more for what brings nothing."""

HOURS_S = 7_200.0


class Clock:
    """The real one, moved on by hours where a test would have to wait."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._ahead_s

    def jump(self) -> None:
        self._ahead_s += HOURS_S


def watched(backend: StorageBackend, threads: set[int]) -> StorageBackend:
    """The same, which notes whose thread each call is on."""

    def noting(call: Callable[..., object]) -> Callable[..., object]:
        def note(*arguments: object) -> object:
            threads.add(threading.get_ident())
            return call(*arguments)

        return note

    for name in ("exists", "get_into", "put", "delete", "touch", "health"):
        setattr(backend, name, noting(getattr(backend, name)))
    return backend


def all_right(engine: Engine, prompts: Sequence[Sequence[int]], meanwhile: Callable[[], object]) -> list[RequestOutput]:
    """Ask about all of these at once, and check the answers."""
    requests = [submit(engine, prompt) for prompt in prompts]
    outputs: dict[str, RequestOutput] = {}

    def step() -> None:
        meanwhile()
        outputs.update((id_, delta.output) for id_, delta in engine.core.step() if delta.output is not None)

    until(lambda: not engine.core.has_work, step)
    answers = [outputs[request.request_id] for request in requests]
    for output, prompt in zip(answers, prompts, strict=True):
        assert_right(output, prompt)
        assert output.finish_reason == "length"
        assert output.timings.total_s < LIMIT_S
    return answers


def is_told(place: str, fault: str, before: TierStats, now: TierStats) -> bool:
    """Whether a tier's figures show what is going on."""
    is_up, is_down = now.state is TierState.UP, now.state is TierState.DOWN
    match fault:
        case "hang":
            return now.state is TierState.STALLED and "has not returned" in now.reason
        case "slow":
            return is_up and (now.read_bytes_per_s or 0) < (before.read_bytes_per_s or 0)
        case "full" if place in ("valkey", "own"):  # which answer that they have no room
            return is_up and now.num_no_room > 0 and "full" in now.reason
        case "full":
            return is_down and {"host": "MemoryError", "folder": "No space left", "objects": "507"}[place] in now.reason
        case "vanishing":
            return is_up and now.num_misses > before.num_misses
        case "wrong_bytes":
            return is_up and now.num_refused > 0
        case "torn" if place in ("folder", "own"):
            return is_up and now.num_refused > 0
        case "torn" | "lost" | "gone":
            return is_down and bool(now.reason)
        case "denied":
            words = {
                "folder": "Permission denied",
                "valkey": "NoPermission",
                "objects": "403",
                "own": "PermissionError",
            }
            return is_down and words[place] in now.reason
        case "deleted" if place == "objects":
            return is_down and "NoSuchBucket" in now.reason
        case "deleted":  # it works, and has nothing
            return is_up and now.reason == ""
    raise AssertionError(fault)


def logged(fault: str, state: TierState, now: TierStats) -> str:
    """What the log has of it; "": what is only a miss needs no words."""
    if state is TierState.STALLED:
        return "hangs"
    if state is TierState.DOWN:
        return "is down"
    return "took none of" if fault == "full" else "dropped block" if now.num_refused else ""


def scraped(engine: Engine) -> str:
    registry = CollectorRegistry()
    registry.register(_EngineCollector(lambda: {"toy": Reading(engine.core.stats, engine.core.cache.stats)}))
    return generate_latest(registry).decode()


def rest(engine: Engine, tier: Tier) -> None:
    """Wait until all is done with a tier: what was under way when the clock jumps would seem to hang."""
    settle(engine)
    engine.core.tiering.tiers.mover.call(tier, lambda _: None).result(LIMIT_S)
    until(lambda: not tier._calls)


def assert_clean(engine: Engine, made: Place) -> None:
    """Nothing is lent, held or left over, and what lies there is what was put."""
    settle(engine)
    mover = engine.core.tiering.tiers.mover
    until(lambda: not any(lane.buffers._num_lent_bytes for lane in mover._lanes.values()))
    until(lambda: not mover._reads._num_lent_bytes)
    for ledger in engine.core.stats.ledger:
        assert (ledger.leased, ledger.free + ledger.cached) == (0, ledger.total)
    engine.core.cache.check()
    for key, extent in made.held().items():
        open_extent(memoryview(bytearray(extent)), Checksum(), key)
    if isinstance(made, Folder):
        assert verify_folder(FolderBackend(made.folder, sweep=False))[2:] == ((), 0)


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    """None of ours that was not there before: other tests' may be."""
    before = set(threading.enumerate())
    yield
    until(lambda: not any(thread.name.startswith("spolia-") for thread in set(threading.enumerate()) - before))


@MATRIX
def test_requests_are_answered_right_before_during_and_after(place, fault, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "spolia.tiers")
    with place_for(place, fault, tmp_path, monkeypatch) as made:
        clock, threads = Clock(), set[int]()
        tier = Tier(place, watched(made.backend, threads), stall_s=HOURS_S / 2, clock=clock)
        engine = toy_engine(tiers=[tier], clock=time.monotonic)
        # The answer, too: so that each block that was written is asked for again.
        whole = [*CONVERSATION, *toy_answer(CONVERSATION, 8), 1]
        others = [tokens(200, 1), tokens(200, 2)]
        num_whole = 304

        def ask_again(*prompts: Sequence[int]) -> list[dict[str, int]]:
            """How much of each was restored."""
            settle(engine)
            engine.core.cache.clear()
            return [output.num_restored_tokens for output in all_right(engine, prompts, lambda: None)]

        assert ask_again(whole) == [{}]
        assert ask_again(whole) == [{place: num_whole}]
        assert tier.stats.reason == ""
        settle(engine)
        engine.core.cache.clear()
        before = tier.stats

        with made.fault(fault):
            meanwhile = clock.jump if fault == "hang" else lambda: None
            first, *_ = all_right(engine, [whole, others[0], [1, 2, 3]], meanwhile)
            left = {"slow": {place: num_whole}, "vanishing": {place: 16 * NUM_LEFT}}
            if fault != "full":  # which of reads and writes came first is up to the machine
                assert first.num_restored_tokens == left.get(fault, {})
            until(lambda: is_told(place, fault, before, tier.stats), meanwhile)
            state = tier.stats.state
            assert f'spolia_tier_state{{model="toy",state="{state}",tier="{place}"}} 1.0' in scraped(engine)
            # The log is written after the state is seen.
            until(lambda: logged(fault, state, tier.stats) in caplog.text, meanwhile)
            engine.core.cache.clear()
            all_right(engine, [others[1], whole], meanwhile)

        rest(engine, tier)  # what hung has returned
        clock.jump()  # over the pause after failures
        for _ in range(2):  # what was offered just before its damaged self was dropped is offered again at its next use
            ask_again(whole, *others)
        assert ask_again(whole, *others) == [{place: num_whole}, {place: 192}, {place: 192}]
        assert (tier.stats.state, tier.stats.reason) == (TierState.UP, "")
        assert ("is up again" in caplog.text) == (state is not TierState.UP)
        assert threading.get_ident() not in threads, "a step waited for the tier"

        assert_clean(engine, made)
        engine.core.close()


@pytest.mark.parametrize("place", PLACES)
def test_faults_that_come_and_go_under_traffic_change_no_answer(place, tmp_path, monkeypatch):
    """One after the other, in the midst of reads and writes, in pools that are too small for all that is asked."""
    prompts = [tokens(120, seed) for seed in range(6)]
    right = [toy_answer(prompt, 8) for prompt in prompts]
    with place_for(place, "", tmp_path, monkeypatch) as made:
        clock = Clock()
        tier = Tier(place, made.backend, stall_s=HOURS_S / 2, clock=clock)
        engine = toy_engine(tiers=[tier], clock=time.monotonic, num_blocks=24)
        stop, num_asked, failures = threading.Event(), [0, 0], list[BaseException]()

        def go_on_asking(llm: LLM, number: int) -> None:
            rng = random.Random(number)
            try:
                while not stop.is_set():
                    choice = rng.randrange(len(prompts))
                    output = llm.generate(prompts[choice], GREEDY)
                    assert list(output.token_ids) == right[choice]
                    assert output.timings.total_s < LIMIT_S
                    num_asked[number] += 1
            except BaseException as error:
                failures.append(error)

        with LLM(engine) as llm:
            threads = [threading.Thread(target=go_on_asking, args=(llm, number)) for number in range(len(num_asked))]
            for thread in threads:
                thread.start()

            def answered(count: int, meanwhile: Callable[[], object] = lambda: None) -> None:
                goal = [num + count for num in num_asked]
                until(
                    lambda: bool(failures) or all(num >= least for num, least in zip(num_asked, goal, strict=True)),
                    meanwhile,
                )

            try:
                for fault in [fault for where, fault in PAIRS if where == place]:
                    until(lambda: bool(failures) or len(made.held()) > NUM_LEFT, lambda: (answered(1), clock.jump()))
                    with made.fault(fault):
                        answered(4, clock.jump if fault == "hang" else lambda: None)
                    clock.jump()  # over the pause
            finally:
                stop.set()
                for thread in threads:
                    thread.join()
            assert failures == []
            rest(engine, tier)
            clock.jump()
            num_restored = 0
            for _ in range(2):
                for prompt, wanted in zip(prompts, right, strict=True):
                    output = llm.generate(prompt, GREEDY)
                    assert list(output.token_ids) == wanted
                    num_restored += output.num_restored_tokens.get(place, 0)
                    settle(engine)
            assert num_restored > 6 * 112 - 24 * 16
            assert (tier.stats.state, tier.stats.reason) == (TierState.UP, "")
            engine.core.cache.check()
        assert_clean(engine, made)


SEEN_BY_TRYING = [
    (place, fault)
    for place, fault in PAIRS
    if (fault in ("hang", "full", "denied", "lost", "gone") and (place, fault) != ("folder", "hang"))
    or (place, fault) in [("own", "wrong_bytes"), ("valkey", "torn"), ("objects", "torn"), ("objects", "deleted")]
]
"""What of others is wrong is seen when there is something to lose."""

AT_THE_START = pytest.mark.parametrize(
    ("place", "fault"), SEEN_BY_TRYING, ids=["-".join(pair) for pair in SEEN_BY_TRYING]
)


def filled(made: Place) -> Place:
    """The same, once there is something that could be torn."""
    engine = toy_engine(tiers=[Tier("first", made.backend, stall_s=HOURS_S)], clock=time.monotonic)
    answer(engine, CONVERSATION[:100])
    close, made.backend.close = made.backend.close, lambda: None  # with its engine; it is used on
    engine.core.close()
    made.backend.close = close
    return made


@AT_THE_START
def test_a_place_that_does_not_work_is_not_attached_and_later_is(place, fault, tmp_path, monkeypatch):
    with place_for(place, fault, tmp_path, monkeypatch) as made, LLM(toy_engine(clock=time.monotonic)) as llm:
        clock = Clock()
        tier = Tier("mine", filled(made).backend, stall_s=0.2 if fault == "hang" else HOURS_S / 2, clock=clock)
        with made.fault(fault):
            with pytest.raises(StorageUnavailable, match="tier mine does not work"):
                llm.attach_tier(TierUse(tier))
            assert llm.stats.tiers == ()
            assert list(llm.generate(CONVERSATION, GREEDY).token_ids) == toy_answer(CONVERSATION, 8)
        until(lambda: not tier._calls)
        tier._stall_s = HOURS_S  # a machine that stops for a while is no tier that hangs
        clock.jump()
        llm.attach_tier(TierUse(tier))
        assert [each.name for each in llm.stats.tiers] == ["mine"]


@AT_THE_START
def test_an_engine_whose_tier_is_in_trouble_at_the_start_starts_and_uses_it_later(place, fault, tmp_path, monkeypatch):
    with place_for(place, fault, tmp_path, monkeypatch) as made:
        clock, backend = Clock(), filled(made).backend
        with made.fault(fault):
            tier = Tier("mine", backend, stall_s=0.2 if fault == "hang" else HOURS_S / 2, clock=clock)
            engine = toy_engine(tiers=[tier], clock=time.monotonic)
            all_right(engine, [CONVERSATION], lambda: None)
        tier._stall_s = HOURS_S
        for _ in range(
            4
        ):  # what is damaged is dropped and written anew; who offers it meanwhile takes it for there once more
            rest(engine, tier)
            clock.jump()
            engine.core.cache.clear()
            (output,) = all_right(engine, [CONVERSATION], lambda: None)
            if output.num_restored_tokens == {"mine": 288}:
                break
        assert output.num_restored_tokens == {"mine": 288}
        assert tier.stats.state is TierState.UP
        engine.core.close()


OPERATED = [(place, fault) for place, fault in PAIRS if place in ("own", "folder", "valkey")]


@pytest.mark.parametrize(("place", "fault"), OPERATED, ids=["-".join(pair) for pair in OPERATED])
def test_operators_are_answered_too_and_what_they_do_works_afterwards(place, fault, tmp_path, monkeypatch):
    async def check(made: Place) -> None:
        clock = Clock()
        tier = Tier(place, made.backend, stall_s=0.3 if fault == "hang" else HOURS_S / 2, clock=clock)
        parts = toy_engine(tiers=[tier], clock=time.monotonic)
        async with AsyncEngine(parts) as engine:
            admin = CacheAdmin(engine, engine.sealer)

            async def ask() -> None:
                output = await engine.generate(CONVERSATION, GREEDY).output()
                assert list(output.token_ids) == toy_answer(CONVERSATION, 8)

            async def told(*acts: Callable[[], Awaitable[object]]) -> None:
                """Each is done, or says in time why not."""
                for act in acts:
                    with suppress(StorageUnavailable, InvalidRequest):
                        await asyncio.wait_for(act(), LIMIT_S)

            await ask()
            settle(parts)
            assert (await admin.lookup(CONVERSATION)).num_tier_tokens == {place: 288}
            with made.fault(fault):
                await admin.clear(tiers=False)
                await told(
                    lambda: admin.lookup(CONVERSATION),
                    lambda: admin.move(CONVERSATION, "device"),
                    lambda: admin.export(CONVERSATION),
                )
                await ask()
                await told(
                    lambda: admin.move(CONVERSATION, place, keep=True, timeout_s=1.0),
                    lambda: admin.clear_prefix(CONVERSATION[:100]),
                    lambda: admin.clear(),
                )
                await ask()
            await asyncio.to_thread(rest, parts, tier)
            tier._stall_s = HOURS_S
            clock.jump()
            for _ in range(2):
                await admin.clear(tiers=False)
                await ask()
                await asyncio.to_thread(rest, parts, tier)
            assert await admin.move(CONVERSATION, place) == 288
            assert (await admin.lookup(CONVERSATION)).num_tier_tokens == {place: 288}
            assert await admin.move(CONVERSATION, "device") == 288
            assert tier.stats.state is TierState.UP
        assert all(ledger.leased == 0 for ledger in parts.core.cache.ledger())

    with place_for(place, fault, tmp_path, monkeypatch) as made:
        asyncio.run(check(made))
