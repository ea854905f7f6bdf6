"""The asyncio face: streams, aborts at any moment, draining, and failures that nobody hangs on."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import threading

import pytest

from spolia.engine import AsyncEngine, EngineConfig, SamplingParams
from spolia.errors import Bug, InvalidRequest, ModelError, Overloaded
from spolia.generation.processors import green_list

from .toy import GREEDY, toy_answer, toy_engine

LONG = SamplingParams(temperature=0.0, max_tokens=200)


def with_engine(test, **options):
    """Run `test(engine, core)` on a fresh loop, and insist that no block is left held."""

    async def main():
        parts = toy_engine(**{"num_blocks": 200, "max_context": 2_000} | options)
        async with AsyncEngine(parts) as engine:
            await test(engine, parts.core)
        if engine.failure is None:
            assert all(ledger.leased == 0 for ledger in parts.core.cache.ledger())

    asyncio.run(asyncio.wait_for(main(), 60))


def num_leased(engine):
    return sum(ledger.leased for ledger in engine.stats.ledger)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def test_many_streams_at_once_each_get_their_answer():
    async def test(engine, core):
        async def one(i):
            async with engine.generate([i, i + 1], GREEDY) as stream:
                ids = ()
                async for delta in stream:
                    ids += delta.token_ids
                assert list(ids) == toy_answer([i, i + 1], 8)

        await asyncio.gather(*(one(i) for i in range(40)))

    with_engine(test)


def test_output_is_the_whole_answer():
    async def test(engine, core):
        output = await engine.generate("hello", GREEDY, request_id="mine").output()
        assert output.request_id == "mine"
        assert list(output.token_ids) == toy_answer(b"hello", 8)

    with_engine(test)


def test_a_reader_that_is_behind_gets_everything_in_one_delta():
    async def test(engine, core):
        stream = engine.generate([1], GREEDY)
        await until(lambda: engine.stats.counters.num_finished)
        await engine.call(lambda _: None)  # comes after all that has been handed out
        deltas = [delta async for delta in stream]
        assert len(deltas) == 1
        assert deltas[0].token_ids == deltas[0].output.token_ids

    with_engine(test)


def test_first_token_and_end_come_at_once_and_the_rest_in_intervals():
    async def test(engine, core):
        first, second = engine.generate([1], LONG), engine.generate([2, 3], GREEDY)
        await second.output()
        deltas = [delta async for delta in first]  # an interval is longer than the test may take
        assert len(deltas[0].token_ids) < 200
        assert len(deltas) <= 3, "its first token, what was there when the other ended, the rest"
        assert [id_ for delta in deltas for id_ in delta.token_ids] == toy_answer([1], 200)

    with_engine(test, stream_interval_ms=10_000)


def test_what_waits_for_an_interval_does_not_wait_for_the_next_step():
    async def test(engine, core):
        gate, run, num_steps = threading.Event(), core.executable.run, itertools.count()

        def run_to_the_gate(step, logits):
            if next(num_steps) == 50:
                assert gate.wait(30)
            run(step, logits)

        core.executable.run = run_to_the_gate
        ids = []
        async for delta in engine.generate([1], LONG):
            ids += delta.token_ids
            if len(ids) == 50:  # all there is: the 51st token's step stands at the gate
                gate.set()
        assert ids == toy_answer([1], 200)

    with_engine(test, stream_interval_ms=5)


def test_without_an_interval_a_reader_that_keeps_up_sees_each_token():
    async def test(engine, core):
        turn = threading.Semaphore(1)
        run = core.executable.run

        def run_when_read(step, logits):
            assert turn.acquire(timeout=30)
            run(step, logits)

        core.executable.run = run_when_read
        num_ids = []
        async for delta in engine.generate([1], GREEDY):
            num_ids.append(len(delta.token_ids))
            turn.release()
        assert num_ids == [1] * 8

    with_engine(test, stream_interval_ms=0)


@pytest.mark.parametrize("interval", [-1, float("nan"), float("inf"), 20_000, True, "5"])
def test_an_impossible_interval_is_refused(interval):
    with pytest.raises(InvalidRequest, match="stream_interval_ms"):
        EngineConfig(stream_interval_ms=interval)


def test_a_bad_request_raises_at_the_call():
    async def test(engine, core):
        with pytest.raises(InvalidRequest):
            engine.generate([9999])

    with_engine(test)


def test_the_table_of_a_watermark_is_made_on_neither_the_loops_nor_the_engines_thread(monkeypatch):
    makers = []
    make = green_list._swaps

    def noted(size, count, seed):
        if size == green_list._TABLE_SIZE:
            makers.append(threading.current_thread())
        return make(size, count, seed)

    monkeypatch.setattr(green_list, "_swaps", noted)
    green_list._table.cache_clear()

    async def test(engine, core):
        marking = {"seeding_scheme": "selfhash", "hashing_key": 77}
        params = SamplingParams(temperature=0.0, max_tokens=5, watermarking_config=marking)
        await engine.prepare(params)
        async with engine.generate([1, 2, 3], params) as stream:
            async for _ in stream:
                pass
        (maker,) = makers
        assert maker is not threading.current_thread()
        assert maker.name.startswith("asyncio_")

    with_engine(test)


def test_who_asks_for_a_call_and_leaves_before_its_turn_harms_nobody():
    async def check():
        async with AsyncEngine(toy_engine()) as engine:
            has_begun, gate = threading.Event(), threading.Event()
            calls = [asyncio.ensure_future(engine.call(lambda _: (has_begun.set(), gate.wait(30)))) for _ in range(3)]
            await until(has_begun.is_set)  # one runs, two wait
            for call in calls:
                call.cancel()
            gate.set()
            assert await engine.call(lambda _: 7) == 7

    asyncio.run(check())


def test_an_id_in_flight_is_refused_and_free_again_afterwards():
    async def test(engine, core):
        stream = engine.generate([1], SamplingParams(temperature=0.0, max_tokens=1_900), request_id="same")
        with pytest.raises(InvalidRequest) as caught:
            engine.generate([2], GREEDY, request_id="same")
        assert caught.value.param == "request_id"
        engine.abort("same")
        await stream.output()
        await engine.generate([2], GREEDY, request_id="same").output()

    with_engine(test)


def test_leaving_a_stream_ends_its_request():
    async def test(engine, core):
        async with engine.generate([1, 2, 3], LONG) as stream:
            await anext(stream)
            assert num_leased(engine) > 0
        await until(lambda: num_leased(engine) == 0)
        assert engine.stats.counters.num_finished == {"abort": 1}

    with_engine(test)


def test_cancelling_the_reader_ends_its_request():
    async def test(engine, core):
        task = asyncio.create_task(engine.generate([1, 2, 3], LONG).output())
        await until(lambda: num_leased(engine) > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: engine.stats.counters.num_finished == {"abort": 1})

    with_engine(test)


def test_dropping_a_stream_ends_its_request():
    async def test(engine, core):
        stream = engine.generate([1, 2, 3], LONG)
        await anext(stream)
        del stream
        gc.collect()
        await until(lambda: engine.stats.counters.num_finished == {"abort": 1})

    with_engine(test)


def test_abort_ends_the_stream_with_what_there_was():
    async def test(engine, core):
        stream = engine.generate([1, 2, 3], LONG)
        await anext(stream)
        engine.abort(stream.request_id)
        output = None
        async for delta in stream:
            output = delta.output
        assert output.finish_reason == "abort"
        assert list(output.token_ids) == toy_answer([1, 2, 3], len(output.token_ids))

    with_engine(test)


def test_random_aborts_leave_nothing_behind():
    """While queued, in the prompt, while generating, after the end: all blocks come back."""

    async def test(engine, core):
        rng = random.Random(1)

        async def one(i):
            prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 200))]
            async with engine.generate(
                prompt, SamplingParams(temperature=0.0, max_tokens=rng.randrange(1, 30))
            ) as stream:
                try:
                    async with asyncio.timeout(rng.random() * 0.2 if i % 4 else None):
                        await stream.output()
                except TimeoutError:
                    pass

        await asyncio.gather(*(one(i) for i in range(200)))
        await until(lambda: engine.stats.num_waiting + engine.stats.num_running == 0)
        assert num_leased(engine) == 0
        finished = engine.stats.counters.num_finished
        assert sum(finished.values()) == 200
        assert finished["abort"] > 10
        assert finished["length"] >= 50

    with_engine(test, num_blocks=40, max_context=256)


def test_a_prompt_that_the_model_has_no_answer_to_fails_alone():
    async def test(engine, core):
        core.executable.poison = 7
        good = engine.generate([1, 2, 3], GREEDY)
        bad = engine.generate([1, 2, 7], GREEDY)
        with pytest.raises(ModelError, match=r"after 3 tokens .* not finite"):
            await bad.output()
        assert list((await good.output()).token_ids) == toy_answer([1, 2, 3], 8)
        assert engine.failure is None
        assert list((await engine.generate([1, 2, 4], GREEDY).output()).token_ids) == toy_answer([1, 2, 4], 8)
        assert engine.stats.counters.num_finished["error"] == 1

    with_engine(test)


def test_a_failing_step_fails_every_request_and_the_engine():
    async def test(engine, core):
        running = [engine.generate([i], LONG) for i in range(3)]
        await anext(running[0])
        core.executable.error = RuntimeError("the kernel broke")
        for stream in running:
            with pytest.raises(Bug, match="the kernel broke"):
                await stream.output()
        assert engine.failure is not None
        with pytest.raises(Bug, match="the kernel broke"):
            engine.generate([1], GREEDY)
        with pytest.raises(Bug, match="the kernel broke"):
            await engine.call(lambda core: None)

    with_engine(test)


def test_an_observer_that_raises_fails_the_requests_too():
    class Broken:
        def on_step(self, stats):
            raise KeyError("oops")

        def on_finish(self, output):
            pass

    async def test(engine, core):
        with pytest.raises(Bug, match="oops"):
            await engine.generate([1], GREEDY).output()

    with_engine(test, observer=Broken())


def test_draining_finishes_what_runs_and_refuses_what_comes():
    async def test(engine, core):
        stream = engine.generate([1], GREEDY)
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            engine.generate([2], GREEDY)
        assert await draining
        assert len((await stream.output()).token_ids) == 8

    with_engine(test)


def test_a_drain_that_takes_too_long_says_so():
    async def test(engine, core):
        engine.generate([1], SamplingParams(max_tokens=1_900, ignore_eos=True))
        stream = engine.generate([2], SamplingParams(max_tokens=1_900, ignore_eos=True))
        assert not await engine.drain(timeout_s=0.01)
        await stream.aclose()

    with_engine(test)


def test_closing_answers_whoever_waits():
    async def main():
        engine = AsyncEngine(toy_engine(max_sequences=1))
        streams = [engine.generate([i], LONG) for i in range(3)]
        await anext(streams[0])
        await engine.aclose()
        outputs = [await stream.output() for stream in streams]
        assert [output.finish_reason for output in outputs] == ["abort"] * 3
        await engine.aclose()
        with pytest.raises(Overloaded, match="closed"):
            engine.generate([1], GREEDY)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_loops_in_several_threads_share_one_engine():
    engine = AsyncEngine(toy_engine())
    answers = {}

    def work(i):
        async def main():
            answers[i] = list((await engine.generate([i], GREEDY).output()).token_ids)

        asyncio.run(main())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    asyncio.run(engine.aclose())
    assert answers == {i: toy_answer([i], 8) for i in range(4)}


def test_a_loop_that_died_does_not_stop_others():
    engine = AsyncEngine(toy_engine(max_context=2_000, num_blocks=200))
    left = []

    async def leave():
        left.append(engine.generate([1], LONG))

    async def stay():
        return await engine.generate([2], GREEDY).output()

    asyncio.run(leave())
    assert list(asyncio.run(stay()).token_ids) == toy_answer([2], 8)
    asyncio.run(engine.aclose())


def test_the_cache_can_be_looked_into_between_steps():
    async def test(engine, core):
        await engine.generate([1] * 40, GREEDY).output()
        assert await engine.call(lambda core: core.cache.clear()) == 47
        with pytest.raises(ZeroDivisionError):
            await engine.call(lambda core: 1 // 0)
        assert engine.failure is None

    with_engine(test)
