"""What is likely to be asked for next is brought up before it is, into memory that is free."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace

import pytest

from spolia.engine import AsyncEngine, SamplingParams, SessionTurn
from spolia.tiers import FolderBackend, Tier

from .toy import ToyCodec, toy_answer, toy_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def tokens(seed: int, count: int = 100) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


def engine_on(folder, num_blocks: int = 64, codec: ToyCodec | None = None) -> AsyncEngine:
    """As after a start: with the folder's KV and sessions."""
    disk = Tier("disk", FolderBackend(folder), stall_s=60)
    parts = toy_engine(tiers=[disk], num_blocks=num_blocks, clock=time.monotonic, codec=codec)
    model = replace(parts.model)
    model.digest = bytes(32)  # type: ignore[attr-defined]
    engine = AsyncEngine(replace(parts, model=model, config=replace(parts.config, kv_disk=folder)))
    engine.sessions.loaded.result(10)
    return engine


async def say(engine: AsyncEngine, session, added: list[int], params: SamplingParams = GREEDY):
    turn = SessionTurn(session, added, [])
    turn.begin()
    output = await engine.generate(turn.prompt_ids, params, cache_salt=session.cache_salt).output()
    turn.finish(output.token_ids, output.text)
    return output


async def num_here(engine: AsyncEngine, session, exact_kv: bool = False) -> int:
    namespace = engine.namespace_for(session.cache_salt, exact_kv=exact_kv)
    return await engine.call(lambda core: core.cache.probe(namespace, [*session.token_ids, 0]))


async def until(holds) -> None:
    deadline_s = time.monotonic() + 20
    while not await holds():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.005)


def talk(folder, count: int, params: SamplingParams = GREEDY, codec: ToyCodec | None = None) -> list[str]:
    """Sessions of a process that has ended."""

    async def run() -> list[str]:
        engine = engine_on(folder, codec=codec)
        ids = []
        for seed in range(count):
            session = engine.sessions.open("")
            await say(engine, session, tokens(seed), params)
            ids.append(session.id)
        await engine.aclose()
        return ids

    return asyncio.run(run())


def test_after_a_restart_sessions_are_warm_before_their_next_turn(tmp_path):
    ids = talk(tmp_path, 2)

    async def run() -> None:
        engine = engine_on(tmp_path)
        for session_id in ids:
            session = engine.sessions.get(session_id, "")
            await until(lambda session=session: _is_96(engine, session))
        output = await say(engine, session, tokens(7, 20))
        assert output.num_cached_tokens == 96
        assert output.num_restored_tokens == {}  # nothing was left to wait for
        assert list(output.token_ids) == toy_answer(session.token_ids[:-8], 8)
        await engine.call(lambda core: core.cache.check())
        await engine.aclose()

    async def _is_96(engine, session) -> bool:
        return await num_here(engine, session) == 96

    asyncio.run(run())


@pytest.mark.parametrize("exact_kv", [False, True])
def test_where_tiers_round_both_kinds_of_kv_are_brought_up_each_as_what_it_is(tmp_path, exact_kv):
    params = replace(GREEDY, exact_kv=exact_kv)
    (session_id,) = talk(tmp_path, 1, params, ToyCodec())

    async def run() -> None:
        engine = engine_on(tmp_path, codec=ToyCodec())
        session = engine.sessions.get(session_id, "")

        async def is_here() -> bool:
            return await num_here(engine, session, exact_kv) == 96

        await until(is_here)
        await until(lambda: engine.call(lambda core: core.tiering.transfers.is_idle))
        assert await num_here(engine, session, not exact_kv) == 0
        output = await say(engine, session, tokens(7, 20), params)
        assert (output.num_cached_tokens, output.num_restored_tokens) == (96, {})
        assert output.num_rounded_tokens == ({} if exact_kv else {"int8": 96})
        assert list(output.token_ids) == toy_answer(session.token_ids[:-8], 8)
        await engine.call(lambda core: core.cache.check())
        await engine.aclose()

    asyncio.run(run())


def test_spent_kv_goes_first_whichever_kind_it_is():
    async def run() -> None:
        engine = AsyncEngine(toy_engine(num_blocks=14, codec=ToyCodec()))
        exact = replace(GREEDY, exact_kv=True)
        first, spent = tokens(1, 64), tokens(2, 56)
        for ids in (first, spent):
            await engine.generate(ids, exact).output()
        engine.spend([*spent, *toy_answer(spent, 8)])
        await engine.generate(tokens(3), exact).output()
        output = await engine.generate(first, exact).output()
        assert output.num_cached_tokens == 63  # the oldest, and it is here
        await engine.aclose()

    asyncio.run(run())


def test_nothing_has_to_make_room_for_what_is_only_likely(tmp_path):
    ids = talk(tmp_path, 3)

    async def run() -> None:
        engine = engine_on(tmp_path, num_blocks=8)  # one session's and a half
        (first,) = engine.sessions.latest(1)
        assert first.id == ids[-1]

        async def is_here() -> bool:
            return await num_here(engine, first) == 96

        await until(is_here)
        await until(lambda: engine.call(lambda core: core.tiering.transfers.is_idle))
        assert await num_here(engine, engine.sessions.get(ids[0], "")) == 0
        await engine.call(lambda core: core.cache.check())
        await engine.aclose()

    asyncio.run(run())


def test_a_request_that_waits_for_its_turn_has_its_kv_brought_up_meanwhile(tmp_path):
    """What is queued behind others comes up while they are computed."""
    ids = talk(tmp_path, 1)

    async def run() -> None:
        engine = engine_on(tmp_path)
        session = engine.sessions.get(ids[0], "")
        await engine.call(lambda core: core.tiering.transfers.cancel())
        await engine.call(lambda core: core.cache.clear())
        others = [engine.generate(tokens(50 + seed, 60), GREEDY) for seed in range(10)]  # more than there are lanes
        output = await say(engine, session, tokens(7, 20))
        assert output.num_restored_tokens == {"disk": 96}
        for other in others:
            await other.output()
        await engine.aclose()

    asyncio.run(run())
