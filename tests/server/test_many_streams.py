"""Five hundred streams at once, some of which behave badly: nothing is lost, nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx

from spolia.server import ServerConfig

from .harness import Pace, chatty_engine, eventually, serving

NUM_STREAMS = 500
MAX_WAITING = 300
PROMPTS = [f"{letter * 20} and {number}" for number, letter in enumerate("abcdefghij")]


def body(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 12, "temperature": 0, "stream": True}


class Crowd:
    """Clients of all kinds, and what became of them.

    Attributes:
        texts: by client, of those that read to the end.
        num_begun: clients that have had a status.
    """

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
        self._http = httpx.AsyncClient(base_url=url, timeout=300, limits=limits)
        self.texts: dict[int, str] = {}
        self.num_begun = self.num_refused = self.num_left = self.num_bad = 0
        self._have_begun = asyncio.Event()

    async def run(self, pace: Pace) -> None:
        async with self._http:
            with pace.held():  # so that they are there at the same time, however slow the machine is
                clients = [asyncio.ensure_future(self._client(number)) for number in range(NUM_STREAMS)]
                await self._have_begun.wait()
            await asyncio.gather(*clients)

    def _note(self) -> None:
        self.num_begun += 1
        if self.num_begun == NUM_STREAMS:
            self._have_begun.set()

    async def _client(self, number: int) -> None:
        kind = random.Random(number).choices(["good", "leaves", "slow", "bad"], [14, 3, 1, 2])[0]
        if kind == "bad":
            reply = await self._http.post("/v1/completions", json={**body("x"), "temperature": -1})
            assert reply.status_code == 400
            self.num_bad += 1
            self._note()
            return
        is_first = True
        while True:
            asked = body(PROMPTS[number % len(PROMPTS)])
            async with self._http.stream("POST", "/v1/completions", json=asked) as reply:
                if is_first:
                    self._note()
                is_first = False
                if reply.status_code == 200:
                    await self._read(number, kind, reply)
                    return
                assert reply.status_code == 429
                self.num_refused += 1
                wait_s = float(reply.headers["retry-after"])
            await self._have_begun.wait()
            await asyncio.sleep(wait_s)

    async def _read(self, number: int, kind: str, reply: httpx.Response) -> None:
        text = ""
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                self.texts[number] = text
                return
            if line.startswith("data: "):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                if kind == "leaves":
                    self.num_left += 1
                    return
                if kind == "slow":
                    await asyncio.sleep(0.2)
        raise AssertionError(f"client {number} was cut off after {text!r}")


def test_five_hundred_streams_get_their_answers_whatever_the_others_do():
    pace = Pace()
    engine = chatty_engine(num_blocks=400, max_sequences=32, max_batch_tokens=64, observer=pace)
    with serving({"toy": engine}, ServerConfig(max_waiting=MAX_WAITING)) as url:
        alone = {}
        for prompt in PROMPTS:
            asked = {**body(prompt), "stream": False}
            alone[prompt] = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()["choices"][0]["text"]
        crowd = Crowd(url)
        asyncio.run(crowd.run(pace))
        assert crowd.num_refused > 0  # more than may wait: 429, and they came back
        assert crowd.num_bad > 0
        assert crowd.num_left > 0
        assert len(crowd.texts) == NUM_STREAMS - crowd.num_bad - crowd.num_left
        assert all(text == alone[PROMPTS[number % len(PROMPTS)]] for number, text in crowd.texts.items())
        eventually(lambda: engine.stats.num_running + engine.stats.num_waiting == 0)
        (ledger,) = engine.stats.ledger
        assert ledger.leased == 0
        assert ledger.free + ledger.cached == ledger.total
        live = httpx.get(f"{url}/v1/cache/live").json()
        assert (live["running"], live["waiting"], live["lanes"]) == (0, 0, [])
    asyncio.run(engine.aclose())
