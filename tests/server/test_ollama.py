"""Ollama's API through its own client: against a model that knows its lines, the toy, and Qwen2.5-Coder-0.5B."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from engine.toy import toy_answer
from spolia.engine import AsyncEngine, EngineConfig

from .harness import Pace, chatty_engine, eventually, scripted_engine, serving
from .test_completions import text_of
from .test_tools import PARIS, ROME, TOOLS, tagged

SCRIPT = {
    "user: rome": tagged(ROME),
    "user: both": "At once.\n" + tagged(ROME, PARIS),
    "user: hello": "Hello! How are you?",
    "tool: 21 degrees": "It is 21 degrees.",
}
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engines = {
        "scripted": scripted_engine(SCRIPT, num_blocks=256, max_context=2048),
        "toy": chatty_engine(num_blocks=256, max_context=2048),
    }
    with serving(engines) as url:
        yield url
    for engine in engines.values():
        asyncio.run(engine.aclose())


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[ollama.Client]:
    with closing(ollama.Client(host=url)) as client:
        yield client


def chat(client: ollama.Client, content: str, **fields: Any) -> Any:
    messages = fields.pop("messages", [{"role": "user", "content": content}])
    return client.chat(model=fields.pop("model", "scripted"), messages=messages, **fields)


def test_a_chat_is_answered_with_its_figures(client):
    reply = chat(client, "hello")
    assert (reply.model, reply.message.role, reply.message.content) == ("scripted", "assistant", "Hello! How are you?")
    assert (reply.done, reply.done_reason) == (True, "stop")
    assert reply.prompt_eval_count == len("user: hello\nassistant:")
    assert reply.eval_count == len("Hello! How are you?") + 1
    assert reply.total_duration >= reply.eval_duration > 0


@pytest.mark.parametrize("content", ["hello", "rome", "both"])
def test_a_stream_tells_the_same_as_the_whole_reply(client, content):
    whole = chat(client, content, tools=TOOLS)
    chunks = list(chat(client, content, tools=TOOLS, stream=True))
    calls = [call for chunk in chunks for call in chunk.message.tool_calls or ()]
    assert "".join(chunk.message.content or "" for chunk in chunks) == whole.message.content
    assert calls == list(whole.message.tool_calls or ())
    assert [chunk.done for chunk in chunks] == [*[False] * (len(chunks) - 1), True]
    assert chunks[-1].eval_count == whole.eval_count


def test_calls_come_whole_and_their_results_go_back(client):
    reply = chat(client, "both", tools=TOOLS)
    assert reply.message.content == "At once."
    calls = [(call.function.name, call.function.arguments) for call in reply.message.tool_calls]
    assert calls == [("weather", {"city": "Rome"}), ("time", {"city": "Paris"})]
    turns = [
        {"role": "user", "content": "both"},
        reply.message,
        {"role": "tool", "tool_name": "weather", "content": "21 degrees"},
    ]
    assert chat(client, "", messages=turns, tools=TOOLS).message.content == "It is 21 degrees."


def test_generate_streams_and_its_context_goes_on(client):
    whole = client.generate(model="toy", prompt="a river", raw=True, options={**GREEDY, "num_predict": 12})
    assert whole.response == text_of(toy_answer(list(b"a river"), 12))
    assert whole.done_reason == "length"
    assert list(whole.context) == [*b"a river", *toy_answer(list(b"a river"), 12)]
    chunks = list(
        client.generate(model="toy", prompt="a river", raw=True, stream=True, options={**GREEDY, "num_predict": 12})
    )
    assert "".join(chunk.response for chunk in chunks) == whole.response
    more = client.generate(
        model="toy", prompt="!", raw=True, context=whole.context, options={**GREEDY, "num_predict": 5}
    )
    assert more.response == text_of(toy_answer([*whole.context, ord("!")], 5))


def test_generate_puts_the_prompt_through_the_template_unless_raw(client):
    options = {**GREEDY, "num_predict": 6}
    reply = client.generate(model="toy", prompt="hi", system="Be brief.", options=options)
    assert reply.response == text_of(toy_answer(list(b"system: Be brief.\nuser: hi\nassistant:"), 6))


def test_the_answer_has_the_form_that_was_asked_for(client):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    reply = chat(client, "x", model="toy", format=schema, options={"num_predict": 100, "seed": 1})
    assert isinstance(json.loads(reply.message.content)["a"], bool)
    reply = client.generate(model="toy", prompt="x", format=schema, options={"num_predict": 100, "repeat_penalty": 1.2})
    assert isinstance(json.loads(reply.response)["a"], bool)


def test_an_empty_prompt_loads_and_unloads(client):
    assert client.generate(model="scripted").done_reason == "load"
    assert client.generate(model="scripted", keep_alive=0).done_reason == "unload"
    assert client.chat(model="scripted", messages=[]).done_reason == "load"


def test_models_are_listed_shown_and_running(client):
    assert [model.model for model in client.list().models] == ["scripted", "toy"]
    shown = client.show("toy")
    assert shown.details.family == "toy"
    assert shown.details.parameter_size == "257M"
    assert shown.modelinfo["toy.context_length"] == 4096
    assert [model.name for model in client.ps().models] == ["scripted", "toy"]


def test_a_name_with_the_tag_latest_is_the_name(client):
    assert chat(client, "hello", model="scripted:latest").message.content == "Hello! How are you?"


def test_the_version_is_told(url):
    version = httpx.get(f"{url}/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)  # what editors ask for at least


BAD = [
    ("/api/chat", {"model": "other", "messages": [{"role": "user", "content": "x"}]}, 404, "other"),
    ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["AA=="]}]}, 400, "images"),
    ("/api/chat", {"messages": [{"role": "user"}]}, 400, "content"),
    ("/api/chat", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, 400, "function"),
    ("/api/chat", {"messages": [{"role": "user", "content": "x"}], "options": {"top_p": 7}}, 400, "top_p"),
    ("/api/chat", {"messages": [{"role": "user", "content": "x"}], "options": {"mirostat": 1}}, 400, "mirostat"),
    ("/api/chat", {"messages": [{"role": "user", "content": "x"}], "format": "xml"}, 400, "format"),
    (
        "/api/chat",
        {"messages": [{"role": "user", "content": "x"}], "format": {"type": "list"}},
        400,
        "format: the JSON",
    ),
    ("/api/generate", {"prompt": "x", "format": {"type": "list"}}, 400, "format: the JSON"),
    ("/api/generate", {"prompt": "x", "context": [-1], "raw": True}, 400, "context"),
    ("/api/generate", {"prompt": "x", "template": "{{ .Prompt }}"}, 400, "template"),
    ("/api/generate", {"prompt": "x", "suffix": "y"}, 400, "filling in"),
    ("/api/generate", b"{", 400, "JSON"),
    ("/api/pull", {"model": "/etc/passwd"}, 400, "name"),
    ("/api/pull", {"model": "../x"}, 400, "name"),
    ("/api/pull", {"model": "no-such-model", "stream": False}, 404, "no-such-model"),
    ("/api/nothing", {}, 404, "Not Found"),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), BAD, ids=lambda value: str(value)[:40])
def test_errors_have_ollamas_shape(url, path, body, status, words):
    body = {"model": "toy", **body} if isinstance(body, dict) else body
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = httpx.post(url + path, content=content)
    assert reply.status_code == status
    assert list(reply.json()) == ["error"]
    assert words in reply.json()["error"]


def test_the_client_raises_its_own_error(client):
    with pytest.raises(ollama.ResponseError, match="'other' does not exist") as caught:
        chat(client, "hello", model="other")
    assert caught.value.status_code == 404


def test_pull_reports_and_says_success(client, smollm2_path: Path):
    assert [progress.status for progress in client.pull("smollm2", stream=True)][-1] == "success"
    with pytest.raises(ollama.ResponseError, match="no-such-model"):
        list(client.pull("no-such-model", stream=True))
    with pytest.raises(ollama.ResponseError, match="no-such-model") as error:
        client.pull("no-such-model")
    assert error.value.status_code == 404


def test_a_model_that_is_kept_for_longer_than_the_calendar_has_days_is_kept_for_ever(client):
    client.generate(model="scripted", prompt="hello", keep_alive="9999999999h")
    try:
        (model,) = [model for model in client.ps().models if model.model == "scripted"]
        assert model.expires_at is not None
        assert model.expires_at.year == 9999
    finally:
        client.generate(model="scripted", prompt="hello", keep_alive=-1)


def test_leaving_a_stream_ends_its_request():
    engine = chatty_engine(observer=Pace(step_s=0.01))
    with serving({"toy": engine}) as url:
        with httpx.stream("POST", f"{url}/api/generate", json={"prompt": "x"}, timeout=30) as response:
            assert response.headers["content-type"] == "application/x-ndjson"
            assert not json.loads(next(response.iter_lines()))["done"]
        eventually(lambda: engine.stats.counters.num_finished.get("abort") == 1, timeout_s=5)
    asyncio.run(engine.aclose())


def test_qwen_answers_ollamas_client_and_fills_in(qwen_coder_path: Path):
    engine = AsyncEngine(qwen_coder_path, EngineConfig(kv_memory=64 << 20, max_context=2048))
    with serving({"qwen": engine}) as url, closing(ollama.Client(host=url)) as client:
        reply = chat(client, "What is the weather in Paris?", model="qwen", tools=TOOLS, options=GREEDY)
        calls = [(call.function.name, call.function.arguments) for call in reply.message.tool_calls]
        assert calls == [("weather", {"city": "Paris"})]
        reply = client.generate(
            model="qwen",
            prompt="def add(first, second):\n    return ",
            suffix="\n\nprint(add(1, 2))\n",
            options={**GREEDY, "num_predict": 12},
        )
        assert reply.response.strip().startswith("first + second\n")
        assert {"completion", "tools", "insert"} <= set(client.show("qwen").capabilities)
    asyncio.run(engine.aclose())
