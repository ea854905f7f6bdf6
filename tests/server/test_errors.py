"""Bad input of every kind is answered in OpenAI's shape, with the right status and the field at fault."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import ExitStack, suppress

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spolia.errors import InvalidRequest
from spolia.server import ServerConfig
from spolia.server.schema import _NEUTRAL, ChatRequest, CompletionRequest, decode

from .harness import Pace, chatty_engine, eventually, metric, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def post(url: str, path: str, body: object) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(url + path, content=content, headers={"content-type": "application/json"}, timeout=30)


def check_shape(response: httpx.Response) -> dict[str, str | None]:
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert response.headers["content-type"] == "application/json"
    return body["error"]


BAD_COMPLETIONS = [
    # (fields of the body, param, code)
    ({"prompt": ""}, "prompt", None),
    ({"prompt": []}, "prompt", None),
    ({"prompt": [[]]}, "prompt", None),
    ({"prompt": None}, "prompt", None),
    ({"prompt": 5}, "prompt", None),
    ({"prompt": ["a", 1]}, "prompt", None),
    ({"prompt": [1.5]}, "prompt[0]", None),
    ({"prompt": [1, -1]}, "prompt", None),
    ({"prompt": [1, 257]}, "prompt", None),
    ({"prompt": [2**70]}, "prompt", None),
    ({"prompt": "x" * 600}, "prompt", "context_length_exceeded"),
    ({"prompt": list(range(250)) * 3}, "prompt", "context_length_exceeded"),
    ({"max_tokens": -1}, "max_tokens", None),
    ({"max_tokens": -1}, "max_tokens", None),
    ({"max_tokens": 513}, "prompt", "context_length_exceeded"),
    ({"max_tokens": "5"}, "max_tokens", None),
    ({"max_tokens": 5.5}, "max_tokens", None),
    ({"max_tokens": True}, "max_tokens", None),
    ({"min_tokens": -1}, "min_tokens", None),
    ({"min_tokens": 30, "max_tokens": 20}, "min_tokens", None),
    ({"temperature": -0.5}, "temperature", None),
    ({"temperature": float("nan")}, "temperature", None),
    ({"temperature": float("inf")}, "temperature", None),
    ({"temperature": "hot"}, "temperature", None),
    ({"top_p": 1.5}, "top_p", None),
    ({"top_k": -2}, "top_k", None),
    ({"min_p": 2}, "min_p", None),
    ({"seed": 2**80}, "seed", None),
    ({"n": 0}, "n", None),
    ({"n": 1000}, "n", None),
    ({"stop": [""]}, "stop", None),
    ({"stop": 7}, "stop", None),
    ({"stop_token_ids": [9999]}, "stop_token_ids", None),
    ({"logprobs": 21}, "logprobs", None),
    ({"logprobs": -1}, "logprobs", None),
    ({"logprobs": True}, "logprobs", None),
    ({"stream": "yes"}, "stream", None),
    ({"stream_options": 5}, "stream_options", None),
    ({"cache_salt": 5}, "cache_salt", None),
    ({"model": 5}, "model", None),
    ({"best_of": 2, "n": 3}, "best_of", None),
    ({"best_of": 65}, "best_of", None),
    ({"suffix": "end"}, "suffix", None),
    ({"stop_regex": "(ab"}, "stop_regex", None),
    ({"stop_regex": "a*"}, "stop_regex", None),
    ({"max_time": 0}, "max_time", None),
    ({"truncate": "tail"}, "truncate", None),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", None),
    ({"reasoning_tags": ["<a>", ""]}, "reasoning_tags", None),
    ({"thinking_budget": -1}, "thinking_budget", None),
    ({"frequency_penalty": 1000}, "frequency_penalty", None),
    ({"presence_penalty": "much"}, "presence_penalty", None),
    ({"repetition_penalty": 0}, "repetition_penalty", None),
    ({"repeat_penalty": 1.2, "repetition_penalty": 1.3}, "repeat_penalty", None),
    ({"logit_bias": {"five": 10}}, "logit_bias", None),
    ({"logit_bias": {"9999": 10}}, "logit_bias", None),
    ({"logit_bias": {"5": "much"}}, "logit_bias[...]", None),
    ({"allowed_token_ids": []}, "allowed_token_ids", None),
    ({"bad_words": [""]}, "bad_words", None),
    ({"samplers": ["top_p", "top_p"]}, "filter_order", None),
    ({"mirostat": 1}, "mirostat", None),
    ({"watermark": {"colour": "green"}}, "watermark", None),
    ({"logits_processors": ["os:remove"]}, "logits_processors", None),
    ({"logits_processors": ["unknown"]}, "logits_processors", None),
    ({"response_format": {"type": "yaml"}}, "response_format", None),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", None),
    ({"response_format": {"type": "json_object", "schema": {"type": "objekt"}}}, "response_format", None),
    ({"guided_regex": "(ab"}, "guided_regex", None),
    ({"guided_choice": []}, "guided_choice", None),
    ({"grammar": 'root ::= "a" ('}, "grammar", None),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", None),
    ({"structured_outputs": {"yaml": "a"}}, "structured_outputs", None),
    ({"grammar": 'root ::= "a"', "guided_regex": "a"}, "grammar", None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param", "code"), BAD_COMPLETIONS, ids=lambda value: str(value)[:40])
def test_a_bad_completion_is_400_and_names_its_field(toy_url, fields, param, code, stream):
    response = post(toy_url, COMPLETIONS, {"stream": stream, "model": "toy", "prompt": "x", **fields})
    assert response.status_code == 400, response.text
    error = check_shape(response)
    assert error["type"] == "invalid_request_error"
    assert (error["param"], error["code"]) == (param, code)


BAD_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [{"content": "hello"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [*HELLO, {"role": "user", "content": 5}]}, "messages[1].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
    ({"max_completion_tokens": -3}, "max_completion_tokens"),
    ({"max_tokens": -3}, "max_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"tools": "weather"}, "tools"),
    ({"tools": [{}]}, "tools[0].function"),
    ({"tools": [{"type": "search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [{"function": {"name": "f", "parameters": "x"}}]}, "tools[0].function.parameters"),
    ({"messages": [*HELLO, {"role": "assistant", "tool_calls": "f()"}]}, "messages[1].tool_calls"),
    ({"messages": [*HELLO, {"role": "assistant", "tool_calls": ["f"]}]}, "messages[1].tool_calls[0]"),
    ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls[0].function"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"documents": [{"text": "x"}]}, "documents"),
    ({"chat_template_kwargs": {"messages": HELLO}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS, ids=lambda value: str(value)[:40])
def test_a_bad_chat_is_400_and_names_its_field(toy_url, fields, param):
    response = post(toy_url, CHAT, {"model": "toy", "messages": HELLO, **fields})
    assert response.status_code == 400, response.text
    assert check_shape(response)["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"model": "toy", "prompt": "x"',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
    ],
    ids=lambda body: repr(body[:20]),
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_what_is_not_a_json_object_is_400(toy_url, path, body):
    response = post(toy_url, path, body)
    assert response.status_code == 400
    assert check_shape(response)["type"] == "invalid_request_error"


def test_deep_nesting_in_an_ignored_field_is_400_and_harmless(toy_url):
    deep = (
        b'{"model": "toy", "messages": [{"role": "user", "content": "x", "y": '
        + b"[" * 100_000
        + b"]" * 100_000
        + b"}]}"
    )
    assert post(toy_url, CHAT, deep).status_code == 400
    assert post(toy_url, CHAT, {"model": "toy", "messages": HELLO, "max_tokens": 1}).status_code == 200


def test_parameters_of_a_tool_that_nest_too_deeply_are_400(toy_url):
    schema: dict[str, object] = {}
    for _ in range(300):
        schema = {"type": "object", "properties": {"deeper": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    response = post(toy_url, CHAT, {"model": "toy", "messages": HELLO, "max_tokens": 1, "tools": [tool]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


def test_a_refusal_does_not_send_back_all_that_was_sent(toy_url):
    body = {"model": "toy", "messages": [{"role": "user", "content": {"x": "y" * 1_000_000}}]}
    response = httpx.post(f"{toy_url}/v1/chat/completions", json=body, timeout=30)
    assert response.status_code == 400
    assert len(response.content) < 10_000
    message = response.json()["error"]["message"]
    assert message.startswith("messages[0].content is {'x': 'yyy")
    assert message.endswith("it must be a string or a list of text parts")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_unknown_model_is_404(toy_url, path):
    response = post(toy_url, path, {"model": "gpt-5", "prompt": "x", "messages": HELLO})
    assert response.status_code == 404
    error = check_shape(response)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "gpt-5" in error["message"]
    assert "toy" in error["message"]


def test_stream_options_without_a_stream_are_400(toy_url):
    response = post(toy_url, COMPLETIONS, {"model": "toy", "prompt": "x", "stream_options": {"include_usage": True}})
    assert response.status_code == 400
    assert check_shape(response)["param"] == "stream_options"


def test_openais_client_raises_its_own_errors(client):
    with pytest.raises(openai.NotFoundError, match="'other' does not exist") as caught:
        client.completions.create(model="other", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="max_tokens is -1") as caught:
        client.completions.create(model="toy", prompt="x", max_tokens=-1)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError, match="messages is empty"):
        client.chat.completions.create(model="toy", messages=[])
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v2/nothing", 404), ("GET", COMPLETIONS, 405)])
def test_a_wrong_path_or_method_has_the_same_shape(toy_url, method, path, status):
    response = httpx.request(method, toy_url + path)
    assert response.status_code == status
    check_shape(response)


def test_neutral_values_of_unsupported_fields_are_accepted(toy_url):
    neutral = {name: values[0] for name, values in _NEUTRAL.items() if values}
    assert post(toy_url, COMPLETIONS, {"model": "toy", "prompt": "x", **neutral}).status_code == 200
    nulls = dict.fromkeys(_NEUTRAL)
    assert post(toy_url, COMPLETIONS, {"model": "toy", "prompt": "x", **nulls}).status_code == 200


def test_each_unsupported_field_is_one_that_the_body_declares():
    assert set(_NEUTRAL) <= set(CompletionRequest.__struct_fields__)


def test_a_body_over_the_limit_is_413_declared_or_not():
    engine = chatty_engine()
    with serving({"toy": engine}, ServerConfig(max_body_bytes=2000)) as url:
        long = {"model": "toy", "prompt": "x" * 3000}
        assert post(url, COMPLETIONS, long).status_code == 413
        chunked = httpx.post(url + COMPLETIONS, content=(b"[" * 100 for _ in range(100)))
        assert chunked.status_code == 413
        assert check_shape(chunked)["code"] == "body_too_large"
    asyncio.run(engine.aclose())


def test_a_body_that_stops_half_way_is_408_and_its_connection_ends():
    engine = chatty_engine()
    with serving({"toy": engine}, ServerConfig(body_timeout_s=0.2)) as url:
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), timeout=20) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            answer = b"".join(iter(lambda: client.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"body_too_slow" in answer
    asyncio.run(engine.aclose())


def test_a_full_queue_is_429_with_a_time_to_come_back():
    pace = Pace()
    engine = chatty_engine(observer=pace, max_sequences=1, max_batch_tokens=32)
    with serving({"toy": engine}, ServerConfig(max_waiting=2)) as url, httpx.Client() as http:
        body = {"model": "toy", "prompt": "x", "max_tokens": 4, "stream": True}
        with ExitStack() as streams, pace.held():
            for _ in range(3):  # one in the batch and two that wait
                response = streams.enter_context(http.stream("POST", url + COMPLETIONS, json=body))
                assert response.status_code == 200
                eventually(lambda: engine.stats.num_running == 1)
            response = post(url, COMPLETIONS, body)
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert check_shape(response)["code"] == "overloaded"
        eventually(lambda: metric(url, "spolia_requests_running") == 0)
        assert post(url, COMPLETIONS, body).status_code == 200
    asyncio.run(engine.aclose())


@pytest.mark.parametrize(("fields", "param"), [({"prompt": ["x"] * 3}, "prompt"), ({"n": 3}, "n")])
def test_more_answers_than_may_ever_wait_are_400_and_not_try_again(fields, param):
    engine = chatty_engine()
    with serving({"toy": engine}, ServerConfig(max_waiting=2)) as url:
        response = post(url, COMPLETIONS, {"model": "toy", "prompt": "x", **fields})
        assert response.status_code == 400
        error = check_shape(response)
        assert error["param"] == param
        assert "3 answers are asked for" in str(error["message"])
    asyncio.run(engine.aclose())


def test_an_engine_that_fails_in_mid_stream_says_so_in_the_last_event():
    pace = Pace(step_s=0.02)
    engine = chatty_engine(observer=pace)
    with serving({"toy": engine}) as url:
        body = {"model": "toy", "prompt": "x", "max_tokens": 400, "stream": True}
        with httpx.stream("POST", url + COMPLETIONS, json=body, timeout=30) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            asyncio.run(engine.call(lambda core: setattr(core.executable, "error", RuntimeError("cosmic ray"))))
            events = [json.loads(line[6:]) for line in lines if line]
        assert events[-1]["error"]["type"] == "server_error"
        assert "cosmic ray" in events[-1]["error"]["message"]
        assert post(url, COMPLETIONS, body).status_code == 500
        health = httpx.get(f"{url}/health")
        assert health.status_code == 503
        assert "cosmic ray" in health.json()["reason"]
    asyncio.run(engine.aclose())


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_decoding_answers_any_bytes_with_a_body_or_invalid_request(data):
    for kind in (CompletionRequest, ChatRequest):
        with suppress(InvalidRequest):
            assert isinstance(decode(data, kind), kind)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*CompletionRequest.__struct_fields__, "messages", "tools", "x"]), json_values, max_size=6
    )
)
def test_no_body_of_known_fields_makes_the_server_fail(toy_url, fields):
    for path in (COMPLETIONS, CHAT):
        # Fields that are right by chance may ask for an answer; a stream of it is 200 before it begins.
        response = post(toy_url, path, {"model": "toy", "prompt": "x", "messages": HELLO, **fields, "max_tokens": 1})
        assert response.status_code in (200, 400, 404), (response.status_code, response.text)
