"""`/health`, `/metrics`, `/v1/models`, `/tokenize` and the rest of what is not an answer."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import httpx
import pytest

import spolia
from spolia.engine import AsyncEngine
from spolia.errors import ModelError
from spolia.server import ServerConfig

from .harness import Pace, chatty_engine, eventually, metric, serving

COMPLETIONS = "/v1/completions"


def complete(url: str, prompt: object = "hello", **fields: object) -> httpx.Response:
    return httpx.post(url + COMPLETIONS, json={"prompt": prompt, "max_tokens": 4, "temperature": 0, **fields})


def test_until_the_model_is_loaded_everything_is_503_with_the_reason():
    loading: Future[AsyncEngine] = Future()
    engine = chatty_engine()
    with serving({"toy": loading}) as url:
        health = httpx.get(f"{url}/health")
        assert health.status_code == 503
        assert "toy is loading" in health.json()["reason"]
        assert httpx.get(f"{url}/readyz").status_code == 503
        assert httpx.get(f"{url}/livez").json() == {"status": "alive"}
        answer = complete(url)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "not_ready"
        assert int(answer.headers["retry-after"]) >= 1
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "toy"
        assert httpx.get(f"{url}/metrics").status_code == 200

        loading.set_result(engine)
        assert [httpx.get(f"{url}/{name}").status_code for name in ("health", "readyz", "livez")] == [200, 200, 200]
        assert complete(url).status_code == 200
    asyncio.run(engine.aclose())


def test_a_model_that_cannot_be_loaded_says_why():
    loading: Future[AsyncEngine] = Future()
    loading.set_exception(ModelError("weights.gguf is cut short"))
    with serving({"toy": loading}) as url:
        assert "cut short" in httpx.get(f"{url}/health").json()["reason"]
        assert httpx.get(f"{url}/livez").status_code == 503
        assert complete(url).status_code == 503


def test_models_are_listed_with_what_a_client_needs_to_know(client):
    (card,) = client.models.list().data
    assert (card.id, card.object, card.max_model_len, card.vocab_size) == ("toy", "model", 512, 257)
    assert client.models.retrieve("toy").id == "toy"


def test_a_model_with_slashes_in_its_name_can_be_retrieved():
    engine = chatty_engine()
    with serving({"hf:owner/repo": engine}) as url:
        assert httpx.get(f"{url}/v1/models/hf:owner/repo").json()["id"] == "hf:owner/repo"
        assert complete(url, model="hf:owner/repo").status_code == 200
    asyncio.run(engine.aclose())


def test_several_models_are_told_apart_and_none_is_the_default():
    engines = {"a": chatty_engine(), "b": chatty_engine()}
    with serving(engines) as url:
        assert complete(url, model="b").json()["model"] == "b"
        assert complete(url).status_code == 404
        assert metric(url, "spolia_requests_finished_total", model="b") == 1
        assert metric(url, "spolia_requests_finished_total", model="a") == 0
    for engine in engines.values():
        asyncio.run(engine.aclose())


def test_metrics_count_tokens_by_source_and_blocks_by_state():
    engine = chatty_engine(num_blocks=64, observer=Pace(step_s=0.01))
    prompt = list(range(100))
    with serving({"toy": engine}) as url:
        assert metric(url, "spolia_kv_blocks", state="free") == 64
        for _ in range(2):
            assert complete(url, prompt).status_code == 200
        eventually(lambda: metric(url, "spolia_requests_running") == 0)
        assert metric(url, "spolia_prompt_tokens_total", source="computed") == 101
        assert metric(url, "spolia_prompt_tokens_total", source="device") == 99
        assert metric(url, "spolia_generated_tokens_total") == 8
        assert metric(url, "spolia_requests_finished_total", reason="length") == 2
        assert metric(url, "spolia_reuse_ended_total", reason="full") == 1
        assert metric(url, "spolia_time_to_first_token_seconds_count") == 2
        assert metric(url, "spolia_inter_token_seconds_count") > 0
        assert metric(url, "spolia_request_seconds_count") == 2
        blocks = {
            state: metric(url, "spolia_kv_blocks", group="0", state=state) for state in ("free", "cached", "leased")
        }
        assert sum(blocks.values()) == 64
        assert blocks["cached"] == 7  # 100 tokens and 3 of the answer
        assert blocks["leased"] == 0
    asyncio.run(engine.aclose())


def test_what_runs_and_what_waits_is_shown_while_it_does():
    pace = Pace(step_s=0.01)
    engine = chatty_engine(observer=pace, max_sequences=1)
    with serving({"toy": engine}) as url:
        body = {"prompt": ["a", "b", "c"], "max_tokens": 200, "stream": True}
        with httpx.stream("POST", url + COMPLETIONS, json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            eventually(lambda: metric(url, "spolia_requests_waiting") == 2, timeout_s=1)
            assert metric(url, "spolia_requests_running") == 1
    asyncio.run(engine.aclose())


def test_tokenize_and_detokenize_are_inverse(toy_url):
    reply = httpx.post(f"{toy_url}/tokenize", json={"model": "toy", "prompt": "héllo"}).json()
    assert reply == {"count": 6, "max_model_len": 512, "tokens": list("héllo".encode()), "token_strs": None}
    assert httpx.post(f"{toy_url}/detokenize", json={"tokens": reply["tokens"]}).json()["prompt"] == "héllo"


def test_tokenize_takes_messages_too(toy_url):
    body = {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}
    reply = httpx.post(f"{toy_url}/tokenize", json=body).json()
    assert "".join(reply["token_strs"]) == "user: hi\nassistant:"


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}, {"messages": []}, {"prompt": 5}])
def test_tokenize_refuses_what_is_neither(toy_url, body):
    assert httpx.post(f"{toy_url}/tokenize", json=body).status_code == 400


@pytest.mark.parametrize("tokens", [[-1], [257], [2**80], ["a"], None])
def test_detokenize_refuses_ids_out_of_range(toy_url, tokens):
    reply = httpx.post(f"{toy_url}/detokenize", json={"tokens": tokens})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith("tokens")


def test_long_texts_are_encoded_too(toy_url):
    text = "long " * 2000
    assert httpx.post(f"{toy_url}/tokenize", json={"prompt": text}).json()["count"] == len(text)


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version", "/v1/models"])
def test_head_is_get_without_a_body(toy_url, path):
    head, get = httpx.head(toy_url + path), httpx.get(toy_url + path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


def test_the_version_is_told(toy_url):
    assert httpx.get(f"{toy_url}/version").json() == {"version": spolia.__version__}


def test_the_openapi_document_describes_the_bodies(toy_url):
    document = httpx.get(f"{toy_url}/openapi.json").json()
    for path in (COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize"):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        name = schema["$ref"].removeprefix("#/components/schemas/")
        assert document["components"]["schemas"][name]["properties"]


@pytest.mark.parametrize(
    "field", [{"host": ""}, {"port": -1}, {"port": 70_000}, {"max_waiting": 0}, {"max_body_bytes": 1}]
)
def test_impossible_settings_are_refused_at_birth(field):
    (name,) = field
    with pytest.raises(ValueError, match=f"{name} is"):
        ServerConfig(**field)
