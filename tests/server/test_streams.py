"""Streams that their clients leave: every block comes back, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from contextlib import suppress

import httpx
import pytest

from engine.toy import toy_answer
from spolia.engine import AsyncEngine
from spolia.server import create_app
from spolia.server.sse import with_signs_of_life

from .harness import Pace, chatty_engine, eventually, metric, serving

COMPLETIONS = "/v1/completions"


async def leave_early(url: str, rng: random.Random, *, vocab_size: int, max_tokens: int, most_own_ids: int) -> str:
    """Ask for something and hang up, or not; returns how it ended.

    On a bare socket, for the moment may lie anywhere: before the request was sent whole, too.
    """
    patience = rng.choice(["hang up after a time", "hang up after a time", "hang up after some tokens", "stay"])
    stream = patience == "hang up after some tokens" or rng.random() < 0.5
    prompt = list(range(40, 40 + rng.randrange(1, 60)))  # shared with others, up to somewhere
    prompt += [rng.randrange(vocab_size) for _ in range(rng.randrange(1, most_own_ids))]
    num_tokens = rng.randrange(1, 20) if patience == "stay" else rng.randrange(30, max_tokens)
    fields = {"prompt": prompt, "max_tokens": num_tokens, "stream": stream, "ignore_eos": True}
    body = json.dumps({**fields, "return_token_ids": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    message = head.encode() + body
    if patience == "hang up after a time" and rng.random() < 0.1:
        message = message[: rng.randrange(1, len(message))]
    most_events = rng.randrange(0, 10) if patience == "hang up after some tokens" else num_tokens + 1
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))

    async def read() -> str:
        num_events = 0
        while line := await reader.readline():
            assert not line.startswith(b"HTTP/1.1") or b" 200 " in line
            num_events += line.startswith(b"data: {")
            if num_events > most_events:
                break
        return patience

    try:
        writer.write(message)
        return await asyncio.wait_for(read(), rng.uniform(0, 0.1) if patience == "hang up after a time" else None)
    except TimeoutError:
        return patience
    finally:
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def abort_many(url: str, *, num_clients: int, concurrency: int, **limits: int) -> list[str]:
    rng = random.Random(num_clients)
    room = asyncio.Semaphore(concurrency)

    async def one() -> str:
        async with room:
            return await leave_early(url, rng, **limits)

    return await asyncio.gather(*(one() for _ in range(num_clients)))


def assert_nothing_is_held(url: str, engine: AsyncEngine) -> None:
    eventually(lambda: engine.stats.num_running == 0 and engine.stats.num_waiting == 0)
    for group, ledger in enumerate(engine.stats.ledger):
        assert ledger.leased == 0
        assert ledger.free + ledger.cached == ledger.total
        states = [metric(url, "spolia_kv_blocks", group=str(group), state=s) for s in ("free", "cached", "leased")]
        assert states == [ledger.free, ledger.cached, ledger.leased]


def test_a_thousand_random_aborts_leave_the_pool_as_it_was():
    engine = chatty_engine(num_blocks=96, windows=(None, 40), observer=Pace(step_s=0.0005))
    with serving({"toy": engine}) as url:
        limits = {"vocab_size": 256, "max_tokens": 200, "most_own_ids": 60}
        ends = asyncio.run(abort_many(url, num_clients=1000, concurrency=24, **limits))
        assert_nothing_is_held(url, engine)
        assert min(Counter(ends).values()) > 200
        assert metric(url, "spolia_requests_finished_total", reason="abort") > 200

        reply = httpx.post(
            url + COMPLETIONS, json={"prompt": [7, 8, 9], "max_tokens": 20, "temperature": 0, "return_token_ids": True}
        )
        assert reply.json()["choices"][0]["token_ids"] == toy_answer([7, 8, 9], 20, (None, 40))

        asyncio.run(engine.call(lambda core: core.cache.clear()))
        asyncio.run(engine.call(lambda core: core.cache.check()))
        assert all(ledger.free == ledger.total for ledger in asyncio.run(engine.call(lambda core: core.cache.ledger())))
    asyncio.run(engine.aclose())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request_at_once(stream):
    engine = chatty_engine(observer=Pace(step_s=0.01))
    with serving({"toy": engine}) as url:
        with httpx.Client() as http:
            body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": stream}
            request = http.build_request("POST", url + COMPLETIONS, json=body, extensions={"timeout": {"read": 0.3}})
            if stream:
                response = http.send(request, stream=True)
                next(response.iter_lines())
                response.close()
            else:
                with pytest.raises(httpx.ReadTimeout):
                    http.send(request)
        eventually(lambda: metric(url, "spolia_requests_finished_total", reason="abort") == 1, timeout_s=2)
        assert engine.stats.counters.num_generated_tokens < 200
        assert_nothing_is_held(url, engine)
    asyncio.run(engine.aclose())


def test_leaving_one_of_many_choices_ends_them_all():
    engine = chatty_engine(observer=Pace(step_s=0.01))
    with serving({"toy": engine}) as url:
        body = {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + COMPLETIONS, json=body) as response:
            next(response.iter_lines())
        eventually(lambda: metric(url, "spolia_requests_finished_total", reason="abort") == 6, timeout_s=2)
        assert_nothing_is_held(url, engine)
    asyncio.run(engine.aclose())


def test_a_reader_that_is_behind_gets_several_tokens_an_event():
    """Straight through ASGI: the socket takes nothing after the first event until the engine is done."""
    body = {"prompt": [5], "max_tokens": 300, "temperature": 0, "stream": True, "return_token_ids": True, "logprobs": 1}

    async def slow_reader() -> list[bytes]:
        engine = chatty_engine()
        app = create_app({"toy": engine})
        request = {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        sent: list[bytes] = []

        async def receive() -> dict[str, object]:
            nonlocal request
            if request is None:
                await asyncio.Event().wait()
            message, request = request, None
            return message

        async def send(message: dict[str, object]) -> None:
            sent.append(message.get("body", b""))
            while len(sent) == 2 and engine.stats.counters.num_finished.get("length", 0) == 0:
                await asyncio.sleep(0.01)

        scope = {
            "type": "http", "method": "POST", "path": COMPLETIONS, "raw_path": COMPLETIONS.encode(),
            "query_string": b"", "headers": [], "http_version": "1.1", "asgi": {"version": "3.0"},
        }  # fmt: skip
        await app(scope, receive, send)
        await engine.aclose()
        return sent

    events = [json.loads(data[6:]) for data in asyncio.run(slow_reader()) if data.startswith(b"data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    assert len(events) == 2
    assert [id_ for choice in choices for id_ in choice["token_ids"]] == toy_answer([5], 300)
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices) == 300
    assert choices[-1]["finish_reason"] == "length"


def test_a_silent_stream_gives_signs_of_life_and_loses_nothing():
    async def test() -> None:
        may_go_on = asyncio.Event()

        async def events():
            yield b"one"
            await may_go_on.wait()
            yield b"two"

        seen: list[bytes] = []
        async for data in with_signs_of_life(events(), b"ping", interval_s=0.01):
            seen.append(data)
            if seen.count(b"ping") == 3:
                may_go_on.set()
        assert [data for data in seen if data != b"ping"] == [b"one", b"two"]
        assert seen.index(b"two") > seen.index(b"ping")

    asyncio.run(test())
