"""What is left in the process of a server that has ended."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import httpx

from spolia.engine import AsyncEngine

from .harness import chatty_engine, eventually, serving


def serve_once() -> weakref.ref[AsyncEngine]:
    engine = chatty_engine(num_blocks=64)
    with serving({"toy": engine}) as url:
        body = {"model": "toy", "prompt": "Where does memory go?", "max_tokens": 4}
        assert httpx.post(f"{url}/v1/completions", json=body).json()["usage"]["completion_tokens"]
    asyncio.run(engine.aclose())
    return weakref.ref(engine)


def test_a_server_that_has_ended_keeps_neither_engines_nor_threads():
    before = set(threading.enumerate())
    engines = [serve_once() for _ in range(3)]
    gc.collect()
    assert [engine() for engine in engines] == [None] * 3
    eventually(lambda: not [left for left in set(threading.enumerate()) - before if left.name.startswith("spolia-")])
