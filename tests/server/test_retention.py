"""`priority`, `ttl` and `retention` in requests, and `--kv-policy`, as far as the server has to do with them."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from spolia.engine import EngineConfig, build_engine
from spolia.errors import InvalidRequest

from .harness import chatty_engine, serving

COMPLETIONS = "/v1/completions"


def complete(url: str, first: int, **fields: object) -> httpx.Response:
    prompt = [first] * 64
    return httpx.post(url + COMPLETIONS, json={"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields})


def cached(reply: httpx.Response) -> int:
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    "wish", [{"priority": 90}, {"retention": [{"start": 0, "end": 32, "priority": 90}, {"start": 32, "priority": 60}]}]
)
def test_what_is_worth_more_to_the_client_outlasts_what_came_later(wish):
    engine = chatty_engine(num_blocks=12)
    with serving({"toy": engine}) as url:
        assert complete(url, 1, **wish).status_code == 200
        for first in range(2, 8):
            complete(url, first)
        assert cached(complete(url, 1)) == 63
        assert cached(complete(url, 2)) == 0
    asyncio.run(engine.aclose())


def test_what_is_worth_less_goes_before_what_came_earlier():
    engine = chatty_engine(num_blocks=9)
    with serving({"toy": engine}) as url:
        complete(url, 1)
        complete(url, 2, priority=0)
        complete(url, 3)
        assert cached(complete(url, 1)) == 63
    asyncio.run(engine.aclose())


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"priority": 101}, "priority", "from 0 to 100"),
        ({"ttl": -1}, "ttl", "0 or more"),
        ({"retention": [{"start": 4, "end": 4}]}, "retention", "no range"),
        ({"retention": [{}] * 17}, "retention", "at most 16"),
        ({"priority": "high"}, "priority", "expected `int"),
    ],
)
def test_impossible_wishes_are_refused_by_name(toy_url, fields, param, message):
    reply = complete(toy_url, 1, **fields)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"].startswith(param)
    assert message in error["message"]


def test_an_unknown_policy_is_refused_with_what_there_is(smollm2_path):
    with pytest.raises(InvalidRequest, match=r"kv_policy.*lru, fifo, lfu") as caught:
        build_engine(smollm2_path, EngineConfig(kv_policy="mru"))
    assert caught.value.param == "kv_policy"


def test_the_policy_that_was_asked_for_is_the_one_that_evicts(smollm2_path):
    engine = build_engine(smollm2_path, EngineConfig(kv_policy="s3fifo", kv_memory=8 << 20))
    assert engine.core.cache.policy.name == "s3fifo"
