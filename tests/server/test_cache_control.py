"""`cache_control`: what a client marks outlasts what it does not, in Anthropic's API and in chat."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from spolia.server.cache_control import last_mark, ttl_s_of, wish_up_to

from .harness import chatty_engine, serving

SYSTEM = "Be kind. " * 8
MARK = {"cache_control": {"type": "ephemeral"}}


def anthropic(url: str, mark: dict[str, Any]) -> int:
    system = [{"type": "text", "text": SYSTEM, **mark}]
    body = {"model": "toy", "system": system, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    usage = httpx.post(f"{url}/v1/messages", json=body, timeout=60).json()["usage"]
    return usage["cache_read_input_tokens"]


def chat(url: str, mark: dict[str, Any]) -> int:
    system = {"role": "system", "content": [{"type": "text", "text": SYSTEM, **mark}]}
    body = {"messages": [system, {"role": "user", "content": "Hi"}], "max_tokens": 1}
    usage = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("ask", [anthropic, chat])
@pytest.mark.parametrize("mark", [{}, MARK])
def test_what_is_marked_outlasts_what_came_after_it(ask, mark):
    engine = chatty_engine(num_blocks=14)
    with serving({"toy": engine}) as url:
        ask(url, mark)
        for first in range(1, 8):
            httpx.post(f"{url}/v1/completions", json={"prompt": [first] * 60, "max_tokens": 1}, timeout=60)
        again = ask(url, {})
        assert again >= len(SYSTEM) if mark else again == 0
    asyncio.run(engine.aclose())


def test_the_last_mark_counts_wherever_it_is_on_a_message():
    messages = [
        {"role": "system", "content": "a", **MARK},
        {"role": "user", "content": [{"type": "text", "text": "b", "cache_control": {"ttl": "1h"}}]},
        {"role": "user", "content": "c"},
    ]
    assert last_mark(messages) == (1, 3600.0)
    assert last_mark(messages[:1]) == (0, 300.0)
    assert last_mark(messages[2:]) is None


@pytest.mark.parametrize("mark", [None, {}, {"ttl": "5m"}, {"ttl": 7}, "x"])
def test_a_mark_that_says_nothing_else_means_five_minutes(mark):
    assert ttl_s_of(mark) == 300.0


def test_a_mark_before_the_first_token_asks_for_nothing():
    assert wish_up_to(0, 300.0) == []
    (wish,) = wish_up_to(5, 300.0)
    assert (wish.start, wish.stop, wish.ttl_s) == (0, 5, 300.0)
    assert wish.priority > 50
