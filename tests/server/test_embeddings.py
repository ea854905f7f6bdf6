"""Embeddings in the APIs of OpenAI (its own client), Ollama (its own client) and llama.cpp."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import httpx
import numpy as np
import ollama
import openai
import pytest
from openai import OpenAI

from engine.toy import ToyExecutable, toy_logits
from spolia.engine import AsyncEngine, EngineConfig
from spolia.server import ServerConfig

from .harness import chatty_engine, serving


def unit(prompt: str | Sequence[int]) -> np.ndarray:
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    vector = toy_logits(ids)[: ToyExecutable.hidden_size]
    return vector / np.linalg.norm(vector)


def test_openais_client_gets_vectors_of_length_one_in_the_order_of_its_inputs(client: OpenAI):
    texts = ["one", "another", "one"]
    reply = client.embeddings.create(model="toy", input=texts)  # the client asks for base64 by itself
    assert [each.index for each in reply.data] == [0, 1, 2]
    for text, each in zip(texts, reply.data, strict=True):
        np.testing.assert_allclose(each.embedding, unit(text), rtol=1e-5)
    assert reply.model == "toy"
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == 13
    floats = client.embeddings.create(model="toy", input="one", encoding_format="float")
    np.testing.assert_array_equal(np.float32(floats.data[0].embedding), np.float32(reply.data[0].embedding))


def test_base64_is_little_endian_float32(toy_url: str):
    body = {"input": "x", "encoding_format": "base64"}
    (each,) = httpx.post(f"{toy_url}/v1/embeddings", json=body).json()["data"]
    vector = np.frombuffer(base64.b64decode(each["embedding"]), "<f4")
    np.testing.assert_allclose(vector, unit("x"), rtol=1e-5)


def test_token_ids_are_inputs_too(client: OpenAI):
    one = client.embeddings.create(model="toy", input=[5, 6, 7], dimensions=ToyExecutable.hidden_size)
    np.testing.assert_allclose(one.data[0].embedding, unit([5, 6, 7]), rtol=1e-5)
    two = client.embeddings.create(model="toy", input=[[5, 6, 7], [8]])
    np.testing.assert_allclose(two.data[1].embedding, unit([8]), rtol=1e-5)


def test_what_was_embedded_before_is_reused_and_usage_says_so(toy_url: str):
    body = {"input": "Quite a text that nobody else embeds"}
    for cached in (0, len(body["input"]) - 1):
        usage = httpx.post(f"{toy_url}/v1/embeddings", json=body).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached


def test_the_mean_is_another_pooling(toy_url: str):
    body = {"input": [5, 6], "pooling": "mean"}
    (each,) = httpx.post(f"{toy_url}/v1/embeddings", json=body).json()["data"]
    mean = (toy_logits([5]) + toy_logits([5, 6]))[: ToyExecutable.hidden_size]
    np.testing.assert_allclose(each["embedding"], mean / np.linalg.norm(mean), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", 5]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [9999]}, "input"),
        ({"input": "x" * 5000}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "x", "dimensions": 4}, "dimensions"),
        ({"input": "x", "pooling": "cls"}, "pooling"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": 5}, "input"),
    ],
    ids=str,
)
def test_what_cannot_be_is_400_and_names_its_field(toy_url: str, fields: dict, param: str):
    reply = httpx.post(f"{toy_url}/v1/embeddings", json={"model": "toy", **fields})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_openais_client_is_told_why_dimensions_cannot_be_chosen(client: OpenAI):
    with pytest.raises(openai.BadRequestError, match="not trained for shorter ones"):
        client.embeddings.create(model="toy", input="x", dimensions=4)


def test_ollamas_client(toy_url: str):
    with closing(ollama.Client(host=toy_url)) as client:
        reply = client.embed(model="toy", input=["one", "another"])
        np.testing.assert_allclose(reply.embeddings[1], unit("another"), rtol=1e-5)
        assert reply.prompt_eval_count == 10
        assert reply.total_duration > 0
        assert client.embed(model="toy", input="").embeddings == []
        (vector,) = client.embed(model="toy", input="x" * 5000).embeddings  # cut, unless told otherwise
        assert len(vector) == ToyExecutable.hidden_size
        with pytest.raises(ollama.ResponseError, match="context"):
            client.embed(model="toy", input="x" * 5000, truncate=False)
        old = client.embeddings(model="toy", prompt="one")
        np.testing.assert_allclose(old.embedding, toy_logits(list(b"one"))[: ToyExecutable.hidden_size], rtol=1e-5)


@pytest.mark.parametrize(
    ("norm", "length"),
    [
        (-1, lambda raw: 1.0),
        (0, lambda raw: np.abs(raw).max() / 32760),
        (1, lambda raw: np.abs(raw).sum()),
        (2, np.linalg.norm),
        (4, lambda raw: (raw**4).sum() ** 0.25),
    ],
)
def test_llamacpps_embedding_has_its_normalisations(toy_url: str, norm: int, length):
    body = {"content": "one", "embd_normalize": norm}
    raw = toy_logits(list(b"one"))[: ToyExecutable.hidden_size]
    for path in ("/embedding", "/embeddings"):
        ((each,),) = (reply["embedding"] for reply in httpx.post(f"{toy_url}{path}", json=body).json())
        np.testing.assert_allclose(each, raw / length(raw), rtol=1e-4)


def test_a_request_that_takes_too_long_is_504_and_leaves_nothing_behind():
    engine = chatty_engine()
    with serving({"toy": engine}, ServerConfig(request_timeout_s=0.01)) as url:
        body = {"input": [[n] * 30 for n in range(200)], "pooling": "mean"}
        reply = httpx.post(f"{url}/v1/embeddings", json=body, timeout=30)
        assert reply.status_code == 504
        assert reply.json()["error"]["code"] == "request_timeout"
        assert engine.stats.ledger[0].leased == 0
    asyncio.run(engine.aclose())


@pytest.fixture(scope="module")
def real_url(smollm2_path: Path) -> Iterator[str]:
    engine = AsyncEngine(str(smollm2_path), EngineConfig(max_context=512))
    with serving({"smollm2": engine}) as url:
        yield url
    asyncio.run(engine.aclose())


def test_a_real_models_vectors_are_nearer_for_nearer_texts(real_url: str):
    texts = ["The cat sits on the mat.", "A cat is sitting on a mat.", "Interest rates rose by half a point."]
    with OpenAI(base_url=f"{real_url}/v1", api_key="none") as client:
        reply = client.embeddings.create(model="smollm2", input=texts, extra_body={"pooling": "mean"})
    cat, also_cat, money = (np.array(each.embedding) for each in reply.data)
    assert len(cat) == 576
    assert cat @ also_cat > cat @ money + 0.05
