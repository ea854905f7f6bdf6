"""Pins, and the live curve: what is predicted for another size is what an engine of that size measures."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from spolia.engine import AsyncEngine

from .harness import chatty_engine, eventually, serving


def talks(seed: int, count: int) -> list[list[int]]:
    """Prompts of conversations that come and go, each beginning like an earlier one."""
    rng = random.Random(seed)
    known = [[7] * 20]
    prompts = []
    for _ in range(count):
        base = rng.choice(known[-12:])
        prompt = [*base, *(rng.randrange(250) for _ in range(rng.randrange(5, 40)))][:250]
        prompts.append(prompt)
        known.append(prompt)
    return prompts


def hit_rate(engine: AsyncEngine, prompts: list[list[int]]) -> tuple[float, dict[str, Any]]:
    """What an engine hits on these prompts, and the curve that its server draws meanwhile."""
    cached = 0
    with serving({"toy": engine}) as url, httpx.Client(timeout=60) as client:
        for prompt in prompts:
            body = {"prompt": prompt, "max_tokens": 3, "temperature": 0}
            usage = client.post(f"{url}/v1/completions", json=body).json()["usage"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
        for _ in range(500):
            curve = client.get(f"{url}/v1/cache/curve").json()
            if curve["num_requests"] == len(prompts):
                break
    asyncio.run(engine.aclose())
    return cached / sum(map(len, prompts)), curve


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_what_is_predicted_for_another_size_is_what_is_measured_there(factor):
    prompts = talks(1, 160)
    here, curve = hit_rate(chatty_engine(num_blocks=40), prompts)
    there, _ = hit_rate(chatty_engine(num_blocks=int(40 * factor)), prompts)
    points = {point["factor"]: point for point in curve["points"]}
    assert points[factor]["hit_rate"] == pytest.approx(there, abs=0.02)
    assert points[1.0]["hit_rate"] == pytest.approx(here, abs=0.02)
    assert curve["measured_hit_rate"] == pytest.approx(here, abs=0.001)
    assert abs(there - here) > 0.03  # the sizes differ in what they hit, so the prediction says something
    assert points[factor]["size_tokens"] == 16 * int(40 * factor)
    assert curve["num_requests_left_out"] == 0


def test_the_curve_knows_what_requests_wished_for_their_kv():
    """Without that, what is worth more to its client would be predicted to go with the rest."""
    engine = chatty_engine(num_blocks=24)
    rng = random.Random(4)
    kept = [rng.randrange(250) for _ in range(150)]
    num_prompt = cached = 0
    with serving({"toy": engine}) as url, httpx.Client(base_url=url, timeout=60) as client:
        for turn in range(24):
            flood = [rng.randrange(250) for _ in range(200)]
            prompt, priority = (kept, 90) if turn % 4 == 0 else (flood, 50)
            body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "priority": priority}
            usage = client.post("/v1/completions", json=body).json()["usage"]
            num_prompt += len(prompt)
            cached += usage["prompt_tokens_details"]["cached_tokens"]
        eventually(lambda: client.get("/v1/cache/curve").json()["num_requests"] == 24)
        curve = client.get("/v1/cache/curve").json()
    asyncio.run(engine.aclose())
    assert cached >= 5 * 149
    point = next(point for point in curve["points"] if point["factor"] == 1.0)
    assert point["hit_rate"] == pytest.approx(cached / num_prompt, abs=0.02)


def test_the_advice_is_in_words():
    engine = chatty_engine(num_blocks=40)
    _, curve = hit_rate(engine, talks(2, 60))
    assert "MiB you would have hit" in curve["advice"]


def test_the_curve_follows_a_change_of_policy_and_size():
    """What is predicted after the change is for what there is then, not for what there was at the first request."""
    engine = chatty_engine(num_blocks=40)
    with serving({"toy": engine}) as url, httpx.Client(base_url=url, timeout=60) as client:

        def ask(prompt: list[int]) -> dict[str, Any]:
            reply = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 3, "temperature": 0})
            return reply.json()["usage"]["prompt_tokens_details"]

        for prompt in talks(1, 30):
            ask(prompt)
        before = client.get("/v1/cache/curve").json()
        now = client.get("/v1/cache/config").json()["kv_memory"]
        change = {"kv_policy": "fifo", "kv_memory": now // 2}
        assert client.post("/v1/cache/config", json=change).status_code == 200
        changed = client.get("/v1/cache/curve").json()
        assert (before["policy"], changed["policy"]) == ("lru", "fifo")
        assert changed["num_requests"] == 0
        prompts = talks(3, 100)
        cached = sum(ask(prompt)["cached_tokens"] for prompt in prompts)
        eventually(lambda: client.get("/v1/cache/curve").json()["num_requests"] == len(prompts))
        curve = client.get("/v1/cache/curve").json()
    asyncio.run(engine.aclose())
    point = next(point for point in curve["points"] if point["factor"] == 1.0)
    assert point["size_tokens"] == 20 * 16
    assert point["size_bytes"] == now // 2
    assert curve["measured_hit_rate"] == pytest.approx(cached / sum(map(len, prompts)), abs=0.001)
    assert point["hit_rate"] == pytest.approx(curve["measured_hit_rate"], abs=0.02)


@pytest.fixture
def url():
    engine = chatty_engine(num_blocks=16)
    with serving({"toy": engine}) as url:
        yield url
    asyncio.run(engine.aclose())


def complete(url: str, first: int, **fields: object) -> int:
    body = {"prompt": [first] * 60, "max_tokens": 1, **fields}
    usage = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_a_pinned_prompt_outlasts_the_rest_until_it_is_lifted(url):
    complete(url, 1)
    pin = httpx.post(f"{url}/v1/cache/pins", json={"prompt": [1] * 60}).json()
    assert pin["num_tokens"] == 60
    for first in range(2, 9):
        complete(url, first)
    assert complete(url, 1) == 59
    assert httpx.get(f"{url}/v1/cache/pins").json()["data"] == [pin]
    assert httpx.delete(f"{url}/v1/cache/pins/{pin['id']}").json()["deleted"]
    for first in range(2, 9):
        complete(url, first)
    assert complete(url, 1) == 0


def test_pins_beyond_the_quota_are_refused(url):
    for first in (1, 2, 3):
        complete(url, first)
    statuses = [
        httpx.post(f"{url}/v1/cache/pins", json={"prompt": [first] * 60, "ttl": 100}).status_code for first in (1, 2, 3)
    ]
    assert statuses == [200, 200, 429]


def test_pins_are_their_owners(url):
    complete(url, 1, cache_salt="mine")
    pin = httpx.post(f"{url}/v1/cache/pins", json={"prompt": [1] * 60, "cache_salt": "mine"}).json()
    assert httpx.get(f"{url}/v1/cache/pins").json()["data"] == []
    assert httpx.delete(f"{url}/v1/cache/pins/{pin['id']}").status_code == 404
    assert httpx.delete(f"{url}/v1/cache/pins/{pin['id']}?cache_salt=mine").status_code == 200


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}, {"prompt": "a", "ttl": 0}, {"prompt": [-1]}])
def test_impossible_pins_are_refused(url, body):
    assert httpx.post(f"{url}/v1/cache/pins", json=body).status_code == 400
