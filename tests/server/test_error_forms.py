"""What goes wrong, by API: the status and the body are those that the API documents, and say what was wrong and what to
do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from spolia.engine import AsyncEngine
from spolia.server import ServerConfig

from .harness import Pace, chatty_engine, eventually, serving
from .test_access import bearer

USER, POOR, HASTY = "sk-user-0123456789", "sk-poor-0123456789", "sk-hasty-0123456789"
KEYS = f"""
[[keys]]
name = "user"
key = "{USER}"
admin = true
[[keys]]
name = "poor"
key = "{POOR}"
tokens_per_day = 1
[[keys]]
name = "hasty"
key = "{HASTY}"
requests_per_minute = 1
"""
MAX_BODY_BYTES, CONTEXT = 4096, 256


@dataclass(frozen=True)
class Endpoint:
    """
    Attributes:
        asks: what it reads its prompt from, given as text.
        wrong: a field that has a wrong type, and its value.
        answers: it generates, so that it can be refused for what it would cost, and be cut off.
    """

    api: str
    path: str
    asks: Callable[[str], dict[str, Any]]
    wrong: dict[str, Any]
    answers: bool = True

    def body(self, prompt: str = "x", **fields: Any) -> dict[str, Any]:
        return {"model": "toy", **self.asks(prompt), **fields}


def _messages(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]}


ENDPOINTS = [
    Endpoint("openai", "/v1/completions", lambda prompt: {"prompt": prompt}, {"max_tokens": "5"}),
    Endpoint("openai", "/v1/chat/completions", _messages, {"temperature": "hot"}),
    Endpoint("openai", "/v1/responses", lambda prompt: {"input": prompt}, {"temperature": "hot"}),
    Endpoint("openai", "/v1/embeddings", lambda prompt: {"input": prompt}, {"dimensions": "5"}, answers=False),
    Endpoint("anthropic", "/v1/messages", lambda prompt: {"max_tokens": 5000, **_messages(prompt)}, {"top_k": "5"}),
    Endpoint("anthropic", "/v1/messages/count_tokens", _messages, {"tools": 5}, answers=False),
    Endpoint("ollama", "/api/generate", lambda prompt: {"prompt": prompt, "stream": False}, {"options": 5}),
    Endpoint("ollama", "/api/chat", lambda prompt: {**_messages(prompt), "stream": False}, {"messages": 5}),
    Endpoint("ollama", "/api/embed", lambda p: {"input": p, "truncate": False}, {"truncate": 5}, answers=False),
    Endpoint("llama.cpp", "/completion", lambda prompt: {"prompt": prompt}, {"n_predict": "5"}),
    Endpoint("llama.cpp", "/embedding", lambda prompt: {"content": prompt}, {"embd_normalize": "5"}, answers=False),
    Endpoint("llama.cpp", "/apply-template", _messages, {"messages": 5}, answers=False),
]
ANSWERING = [endpoint for endpoint in ENDPOINTS if endpoint.answers]

# Status and type as the API's own reference has them; None: the error has no type there.
FORMS: dict[str, dict[str, tuple[int, str | None]]] = {
    "openai": {
        "wrong": (400, "invalid_request_error"),
        "too long": (400, "invalid_request_error"),
        "no key": (401, "authentication_error"),
        "unknown": (404, "invalid_request_error"),
        "too large": (413, "invalid_request_error"),
        "rate": (429, "rate_limit_error"),
        "quota": (429, "insufficient_quota"),
        "full": (429, "rate_limit_error"),
        "ending": (503, "service_unavailable_error"),
    },
    "anthropic": {
        "wrong": (400, "invalid_request_error"),
        "too long": (400, "invalid_request_error"),
        "no key": (401, "authentication_error"),
        "unknown": (404, "not_found_error"),
        "too large": (413, "request_too_large"),
        "rate": (429, "rate_limit_error"),
        "quota": (429, "rate_limit_error"),
        "full": (529, "overloaded_error"),
        "ending": (529, "overloaded_error"),
    },
    "ollama": {
        "wrong": (400, None),
        "too long": (400, None),
        "no key": (401, None),
        "unknown": (404, None),
        "too large": (413, None),
        "rate": (429, None),
        "quota": (429, None),
        "full": (429, None),
        "ending": (503, None),
    },
    "llama.cpp": {
        "wrong": (400, "invalid_request_error"),
        "too long": (400, "exceed_context_size_error"),
        "no key": (401, "authentication_error"),
        "unknown": (404, "not_found_error"),
        "too large": (413, "invalid_request_error"),
        "rate": (429, "rate_limit_error"),
        "quota": (429, "insufficient_quota"),
        "full": (429, "rate_limit_error"),
        "ending": (503, "unavailable_error"),
    },
}


def told(api: str, body: Any, status: int) -> tuple[str | None, str]:
    """Type and message of a body that has that API's form and no other."""
    match api, body:
        case "openai", {"error": {"message": str(message), "type": str(type_), "param": _, "code": str() | None} as e}:
            assert (len(body), len(e)) == (1, 4)
            return type_, message
        case "anthropic", {"type": "error", "error": {"type": str(type_), "message": str(message)} as e}:
            assert set(body) == {"type", "error", "request_id"}
            assert body["request_id"]
            assert len(e) == 2
            return type_, message
        case "ollama", {"error": str(message)}:
            assert len(body) == 1
            return None, message
        case "llama.cpp", {"error": {"code": int(code), "message": str(message), "type": str(type_)} as e}:
            assert code == status
            sizes = {"n_prompt_tokens", "n_ctx"} if type_ == "exceed_context_size_error" else set()
            assert set(e) == {"code", "message", "type", "param"} | sizes
            return type_, message
    raise AssertionError(f"not {api}'s: {body}")


def check(endpoint: Endpoint, reply: httpx.Response, situation: str, *words: str) -> None:
    status, type_ = FORMS[endpoint.api][situation]
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert ("retry-after" in reply.headers) == (status in (429, 503, 529))
    got, message = told(endpoint.api, reply.json(), status)
    assert got == type_
    for word in words:
        assert word in message
    if endpoint.api == "anthropic":
        assert reply.json()["request_id"] == reply.headers["request-id"]


def post(url: str, endpoint: Endpoint, body: Any, key: str | None = USER) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(url + endpoint.path, content=content, headers={} if key is None else bearer(key), timeout=30)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(KEYS)
    return path


@pytest.fixture(scope="module")
def url(keys: Path) -> Iterator[str]:
    engine = chatty_engine(num_blocks=64, max_context=CONTEXT)
    with serving({"toy": engine}, ServerConfig(keys=keys, max_body_bytes=MAX_BODY_BYTES)) as url:
        yield url
    asyncio.run(engine.aclose())


@pytest.fixture(scope="module")
def ending_url(keys: Path) -> Iterator[str]:
    engine = chatty_engine(num_blocks=64, max_context=CONTEXT)
    with serving({"toy": engine}, ServerConfig(keys=keys)) as url:
        asyncio.run(engine.drain())
        yield url
    asyncio.run(engine.aclose())


every = pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
answering = pytest.mark.parametrize("endpoint", ANSWERING, ids=lambda endpoint: endpoint.path)


@every
def test_an_unknown_model(url, endpoint):
    check(endpoint, post(url, endpoint, endpoint.body(model="nobody")), "unknown", "'nobody'", "toy")


@every
def test_a_misspelt_model_is_told_the_near_one(url, endpoint):
    check(endpoint, post(url, endpoint, endpoint.body(model="Tooy")), "unknown", "did you mean toy? ")
    assert "did you mean" not in post(url, endpoint, endpoint.body(model="nobody")).text


@every
def test_a_body_that_is_no_json(url, endpoint):
    check(endpoint, post(url, endpoint, b"{"), "wrong", "JSON")


@every
def test_a_field_of_the_wrong_type(url, endpoint):
    (name,) = endpoint.wrong
    check(endpoint, post(url, endpoint, endpoint.body(**endpoint.wrong)), "wrong", name, "expected")


@every
def test_a_prompt_longer_than_the_context(url, endpoint):
    reply = post(url, endpoint, endpoint.body("x" * 2 * CONTEXT))
    if endpoint.path in ("/apply-template", "/v1/messages/count_tokens"):  # which generate nothing
        assert reply.status_code == 200
        return
    cut = '"truncation": "auto"' if endpoint.path == "/v1/responses" else '"truncate": '
    check(endpoint, reply, "too long", str(CONTEXT), "Shorten", cut, "take one with a longer context")
    assert any(str(number) in reply.text for number in range(2 * CONTEXT, 2 * CONTEXT + 20))
    if endpoint.api == "openai":
        assert reply.json()["error"]["code"] == "context_length_exceeded"
    if endpoint.api == "llama.cpp":
        assert reply.json()["error"]["n_ctx"] == CONTEXT
        assert reply.json()["error"]["n_prompt_tokens"] >= 2 * CONTEXT


@answering
def test_what_the_refusal_says_lets_a_prompt_that_is_too_long_be_cut(url, endpoint):
    long, few = "x" * 2 * CONTEXT, {"options": {"num_predict": 2}} if endpoint.api == "ollama" else {"max_tokens": 2}
    if endpoint.path == "/v1/responses":  # which drops whole messages
        turns = [{"role": "user", "content": text} for text in (long, "y")]
        body = endpoint.body(truncation="auto", max_output_tokens=2, input=turns)
    else:
        body = endpoint.body(long, truncate="head", **few)
    assert post(url, endpoint, body).status_code == 200


@every
@pytest.mark.parametrize("key", [None, "sk-wrong-0123456789"])
def test_no_key_or_a_wrong_one(url, endpoint, key):
    reply = post(url, endpoint, endpoint.body(), key)
    check(endpoint, reply, "no key", "key", "Authorization: Bearer" if key is None else "not known")
    assert "sk-wrong" not in reply.text


@every
def test_a_body_that_is_too_large(url, endpoint):
    check(endpoint, post(url, endpoint, b" " * (MAX_BODY_BYTES + 1)), "too large", str(MAX_BODY_BYTES), "--max-body")


@answering
@pytest.mark.parametrize(("key", "kind", "limit"), [(POOR, "quota", "tokens_per_day"), (HASTY, "rate", "per_minute")])
def test_a_key_that_has_used_up_what_it_has(url, endpoint, key, kind, limit):
    replies = [post(url, endpoint, endpoint.body(), key) for _ in range(2)]  # one of all may be answered
    check(endpoint, replies[-1], kind, limit, "try again in")
    assert int(replies[-1].headers["retry-after"]) > 1


@answering
def test_a_queue_that_is_full(endpoint):
    pace = Pace()
    engine = chatty_engine(observer=pace, max_sequences=1, max_batch_tokens=32, max_context=CONTEXT)
    with serving({"toy": engine}, ServerConfig(max_waiting=1)) as url, ExitStack() as stack, pace.held():
        for _ in range(2):  # one in the batch, one that waits
            body = {"model": "toy", "prompt": "x", "max_tokens": 4, "stream": True}
            stack.enter_context(httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30))
            eventually(lambda: engine.stats.num_running == 1)
        check(endpoint, post(url, endpoint, endpoint.body()), "full", "1 requests are waiting", "try again later")
    asyncio.run(engine.aclose())


@answering
def test_a_server_that_ends(ending_url, endpoint):
    check(endpoint, post(ending_url, endpoint, endpoint.body()), "ending", "shutting down", "try again")


@pytest.fixture
def slow() -> Iterator[AsyncEngine]:
    engine = chatty_engine(observer=Pace(step_s=0.01), max_context=4096, num_blocks=512)
    yield engine
    asyncio.run(engine.aclose())


@answering
def test_an_answer_that_the_servers_end_cuts_off(slow, endpoint):
    with serving({"toy": slow}) as url, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, url, endpoint, endpoint.body())
        eventually(lambda: slow.stats.num_running == 1)
        asyncio.run(slow.aclose())
        check(endpoint, asked.result(), "ending", "cut off", "send the request again")


@answering
def test_a_stream_that_the_servers_end_cuts_off_says_so_in_its_last_event(slow, endpoint):
    with serving({"toy": slow}) as url:
        body = endpoint.body(stream=True)
        with httpx.stream("POST", url + endpoint.path, json=body, timeout=30) as response:
            lines = response.iter_lines()
            first = [next(lines)]
            eventually(lambda: slow.stats.num_running == 1)
            asyncio.run(slow.aclose())
            events = [line.removeprefix("data: ") for line in [*first, *lines] if line.startswith(("data: ", "{"))]
        assert response.status_code == 200
    last = json.loads(events[-1])
    if endpoint.path == "/v1/responses":
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        assert "cut off" in last["response"]["error"]["message"]
        return
    status, type_ = FORMS[endpoint.api]["ending"]
    got, message = told(endpoint.api, last, status)
    assert got == type_
    assert "cut off" in message


KEPT = [  # (endpoint's path, method, path, body, status, what is named)
    ("/v1/chat/completions", "POST", "/v1/chat/completions", {"session": "none"}, 404, "'none'"),
    ("/v1/completions", "POST", "/v1/completions", {"session": "none"}, 404, "'none'"),
    ("/v1/completions", "GET", "/v1/sessions/none", None, 404, "'none'"),
    ("/v1/completions", "GET", "/v1/streams/none", None, 404, "none"),
    ("/v1/responses", "POST", "/v1/responses", {"previous_response_id": "none"}, 400, "'none'"),
    ("/v1/responses", "GET", "/v1/responses/none", None, 404, "'none'"),
    ("/v1/responses", "DELETE", "/v1/responses/none", None, 404, "'none'"),
    ("/v1/responses", "GET", "/v1/responses/none/input_items", None, 404, "'none'"),
    ("/completion", "POST", "/completion", {"id_slot": 99999}, 400, "99999"),
    ("/completion", "POST", "/slots/99999?action=erase", None, 400, "99999"),
]


@pytest.mark.parametrize(("asked", "method", "path", "fields", "status", "name"), KEPT, ids=lambda value: str(value))
def test_a_session_response_or_slot_that_is_not_there(url, asked, method, path, fields, status, name):
    (endpoint,) = (each for each in ENDPOINTS if each.path == asked)
    body = None if fields is None else endpoint.body(**fields)
    reply = httpx.request(method, url + path, json=body, headers=bearer(USER), timeout=30)
    assert reply.status_code == status, reply.text
    _, message = told(endpoint.api, reply.json(), status)
    assert name in message
    if path == "/v1/responses":  # programs that keep conversations look for this
        assert reply.json()["error"]["code"] == "previous_response_not_found"
