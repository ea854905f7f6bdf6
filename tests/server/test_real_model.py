"""SmolLM2 behind the server, through OpenAI's own client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import BadRequestError, OpenAI

from spolia.engine import AsyncEngine, EngineConfig, SamplingParams

from .harness import metric, serving
from .test_streams import abort_many, assert_nothing_is_held

RIVERS = [{"role": "user", "content": "Name three rivers."}]


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(smollm2_path, EngineConfig(kv_memory=128 << 20, max_context=2048))
    yield engine
    asyncio.run(engine.aclose())


@pytest.fixture(scope="module")
def url(engine: AsyncEngine) -> Iterator[str]:
    with serving({"smollm2": engine}) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_is_answered_in_words_and_ends_by_itself(client):
    reply = client.chat.completions.create(model="smollm2", messages=RIVERS, temperature=0, max_tokens=200)
    text = reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "stop"
    assert "river" in text.lower()
    assert "<|im_end|>" not in text


def test_streaming_whole_and_offline_give_the_same_text(client, engine):
    async def offline() -> str:
        return (
            await engine.generate("The capital of France", SamplingParams(temperature=0, max_tokens=24)).output()
        ).text

    fields = {"model": "smollm2", "prompt": "The capital of France", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**fields).choices[0].text
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**fields, stream=True))
    assert whole == streamed == asyncio.run(offline())
    assert "Paris" in whole


def test_text_and_its_token_ids_are_the_same_prompt(client, url):
    ids = httpx.post(f"{url}/tokenize", json={"prompt": "Once upon a time"}).json()["tokens"]
    by_text, by_ids = (
        client.completions.create(model="smollm2", prompt=prompt, max_tokens=16, temperature=0).choices[0].text
        for prompt in ("Once upon a time", ids)
    )
    assert by_text == by_ids


def test_a_seed_gives_the_same_answer_alone_and_among_strangers(client):
    fields = {"model": "smollm2", "prompt": "A short poem:", "max_tokens": 24, "seed": 5}
    alone = client.completions.create(**fields).choices[0].text
    crowd = client.completions.create(**{**fields, "prompt": ["A long poem:", "A short poem:", "Prose:"], "seed": 5})
    assert crowd.choices[1].text == alone


def test_chat_logprobs_spell_the_content(client):
    reply = client.chat.completions.create(
        model="smollm2", messages=RIVERS, temperature=0, max_tokens=12, logprobs=True, top_logprobs=2
    )
    tokens = reply.choices[0].logprobs.content
    spelt = b"".join(bytes(token.bytes) for token in tokens).decode()
    assert spelt.removesuffix("<|im_end|>") == reply.choices[0].message.content
    assert all(token.logprob <= 0 and token.top_logprobs[0].logprob == token.logprob for token in tokens)


def test_the_next_turn_reuses_the_conversation(client):
    opening = [{"role": "user", "content": "Tell me about the sea, please."}]
    fields = {"model": "smollm2", "temperature": 0, "max_tokens": 30}
    first = client.chat.completions.create(messages=opening, **fields)
    turns = [*opening, {"role": "assistant", "content": first.choices[0].message.content}]
    second = client.chat.completions.create(messages=[*turns, {"role": "user", "content": "And the sky?"}], **fields)
    # All of the first prompt, and what was generated after it.
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens + 25


def test_a_prompt_that_is_too_long_names_both_numbers(client):
    with pytest.raises(BadRequestError, match="2048") as caught:
        client.completions.create(model="smollm2", prompt=[5] * 3000, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"


def test_an_id_beyond_the_vocabulary_is_refused(client):
    with pytest.raises(BadRequestError, match="49152"):
        client.completions.create(model="smollm2", prompt=[1, 49152], max_tokens=1)


def test_a_thousand_random_aborts_leave_the_pool_as_it_was(url, engine):
    before = engine.stats.ledger
    limits = {"vocab_size": 49152, "max_tokens": 100, "most_own_ids": 12}
    asyncio.run(abort_many(url, num_clients=1000, concurrency=32, **limits))
    assert metric(url, "spolia_requests_finished_total", reason="abort") > 200
    assert_nothing_is_held(url, engine)
    asyncio.run(engine.call(lambda core: core.cache.clear()))
    asyncio.run(engine.call(lambda core: core.cache.check()))
    after = asyncio.run(engine.call(lambda core: core.cache.ledger()))
    assert [(ledger.free, ledger.total) for ledger in after] == [(ledger.total, ledger.total) for ledger in before]
