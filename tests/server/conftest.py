"""Servers that most tests of this room share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from openai import OpenAI

from .harness import chatty_engine, serving


@pytest.fixture(scope="module")
def toy_url() -> Iterator[str]:
    """A server whose model is the engine tests' toy: a token is a byte."""
    engine = chatty_engine(num_blocks=256)
    with serving({"toy": engine}) as url:
        yield url
    asyncio.run(engine.aclose())


@pytest.fixture(scope="module")
def client(toy_url: str) -> Iterator[OpenAI]:
    """OpenAI's own client, unmodified."""
    with OpenAI(base_url=f"{toy_url}/v1", api_key="none", max_retries=0) as client:
        yield client
