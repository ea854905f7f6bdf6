"""Whatever a field of a chat holds, the answer is 200, or a 400 that names the field and what it holds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from spolia.models.chat_template import ChatTemplate
from spolia.server.sampling import _ALIASES
from spolia.server.schema import ChatRequest

from .harness import ChattyToy, chatty_engine, serving
from .test_sampling_fields import ODD

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor -%}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% endfor -%}
{%- if add_generation_prompt %}assistant:{% if thinks %}<think>{% endif %}{% endif -%}
{%- if reasoning_effort %}{{ reasoning_effort }}{% endif -%}
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server whose model has a template as models have it."""
    engine = chatty_engine(ChattyToy(chat_template=ChatTemplate(TEMPLATE)), num_blocks=256, max_context=2_000)
    with serving({"toy": engine}) as url:
        yield url
    asyncio.run(engine.aclose())


def chat(url: str, **body: Any) -> httpx.Response:
    # Not httpx's `json=`, which refuses what no JSON can hold.
    content = json.dumps({"messages": HELLO, "max_tokens": 3, "seed": 1, **body})
    return httpx.post(f"{url}/v1/chat/completions", content=content, timeout=60)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def near(right: Any) -> st.SearchStrategy[Any]:
    """What is almost right: one part of it, anywhere, exchanged for whatever, or left out."""
    if isinstance(right, dict) and right:
        return st.sampled_from(sorted(right)).flatmap(
            lambda name: st.one_of(
                near(right[name]).map(lambda value: {**right, name: value}),
                st.just({key: value for key, value in right.items() if key != name}),
                JSON.map(lambda value: {**right, name: value}),
            )
        )
    if isinstance(right, list) and right:
        return st.integers(0, len(right) - 1).flatmap(
            lambda index: near(right[index]).map(lambda value: [*right[:index], value, *right[index + 1 :]])
        )
    return JSON | st.just(right)


CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0}}, "required": ["a"]}
NEAR: dict[str, st.SearchStrategy[Any]] = {
    "messages": near(
        [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "warm"},
        ]
    ),
    "tools": near([{**TOOLS[0], "function": {**TOOLS[0]["function"], "description": "of a city", "strict": True}}]),
    "tool_choice": st.sampled_from(["none", "auto", "required", "any", ""])
    | near({"type": "function", "function": {"name": "weather"}})
    | near({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS}}),
    "response_format": near({"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}})
    | near({"type": "json_object"}),
    "structured_outputs": near({"json": SCHEMA}) | near({"regex": "[ab]{2}"}) | near({"choice": ["a", "b"]}),
    "stream_options": near({"include_usage": True, "continuous_usage_stats": True}),
    "reasoning_format": st.sampled_from(["none", "auto", "deepseek", "other"]),
    "reasoning_effort": st.sampled_from(["none", "low", "high", "very high"]),
    "reasoning_tags": near(["<a>", "</a>"]),
    "chat_template_kwargs": near({"thinks": True, "colour": "blue"}),
    "retention": near([{"start": 0, "end": 4, "priority": 90, "ttl": 10.0}]),
    "prediction": near({"type": "content", "content": [{"type": "text", "text": "abc"}]}),
    "top_logprobs": st.integers(-2, 30),
    "logprobs": st.booleans(),
    "max_completion_tokens": st.integers(-2, 5),
    "watermarking_config": near({"seeding_scheme": "lefthash", "greenlist_ratio": 0.5, "context_width": 2}),
}
# `max_time` ends answers, which is no failure; the others ask for as much as they hold.
FUZZED = sorted({*ChatRequest.__struct_fields__} - {"model", "stream", "resumable", "max_tokens"})


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(FUZZED) | st.sampled_from(sorted(NEAR)), min_size=1, max_size=4, unique=True))
    body = {name: draw(NEAR.get(name, ODD) | ODD) for name in names}
    if draw(st.booleans()):
        body["stream"] = True
    if "tool_choice" in body and "tools" not in body and draw(st.booleans()):
        body["tools"] = TOOLS
    return body


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(bodies())
@example({"tools": TOOLS, "tool_choice": "required", "stream": True, "logprobs": True, "top_logprobs": 2})
def test_whatever_a_chats_fields_hold_the_answer_is_200_or_a_400_that_names_one(url, body):
    reply = chat(url, **body)
    absent = (404,) if isinstance(body.get("session"), str) else ()
    assert reply.status_code in (200, 400, *absent), (body, reply.text)
    if reply.status_code != 400:
        if reply.headers["content-type"].startswith("text/event-stream"):
            last = reply.text.strip().rpartition("data: ")[2]
            assert last == "[DONE]" or json.loads(last)["error"]["type"] == "invalid_request_error", (body, last)
        return
    error = reply.json()["error"]
    if error["code"] == "invalid_json" or error["param"] is None:
        # What is no JSON has no fields, and a row that forbids everything is no one field's.
        assert error["code"] == "invalid_json" or "no token" in error["message"], (body, error)
        return
    named = error["param"].split("[")[0].split(".")[0]
    assert named in {*body, *(_ALIASES.get(name, name) for name in body), "prompt", "max_tokens"}, (body, error)
    assert named in error["message"], (body, error)


# Field by field: what it holds is in the message, so that whoever has many fields, and a library in between, finds it.
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": "hello"}, "messages", "'hello'"),
    ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role", "5"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "5"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}, "messages[0].content[0].text", "7"),
    ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0]", "'video'"),
    ({"tools": {"name": "f"}}, "tools", "{'name': 'f'}"),
    ({"tools": [{"type": "search"}]}, "tools[0].type", "'search'"),
    ({"tools": [{"function": {"name": 5}}]}, "tools[0].function.name", "5"),
    ({"tools": [{"function": {"name": "f", "parameters": "x"}}]}, "tools[0].function.parameters", "'x'"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'any'"),
    ({"tools": TOOLS, "tool_choice": {"function": {"name": "time"}}}, "tool_choice", "time"),
    ({"tool_choice": 5}, "tool_choice", "5"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", "'no'"),
    ({"response_format": "json"}, "response_format", "'json'"),
    ({"response_format": {"type": "yaml"}}, "response_format", "'yaml'"),
    ({"response_format": {"type": "json_schema", "schema": 5}}, "response_format", "5"),
    ({"logprobs": 3}, "logprobs", "3"),
    ({"top_logprobs": 2}, "top_logprobs", "2"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "-1"),
    ({"logprobs": True, "top_logprobs": 1.5}, "top_logprobs", "1.5"),
    ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens", "0"),
    ({"max_tokens": None, "max_completion_tokens": -3}, "max_completion_tokens", "-3"),
    ({"max_tokens": None, "max_completion_tokens": "ten"}, "max_completion_tokens", "'ten'"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "6"),
    ({"reasoning_effort": "very high"}, "reasoning_effort", "'very high'"),
    ({"reasoning_format": "xml"}, "reasoning_format", "'xml'"),
    ({"reasoning_tags": ["<a>"]}, "reasoning_tags", "['<a>']"),
    ({"reasoning_tags": ["", "</a>"]}, "reasoning_tags", "''"),
    ({"thinking_budget": -1}, "thinking_budget", "-1"),
    ({"stream_options": {"include_usage": "yes"}, "stream": True}, "stream_options.include_usage", "'yes'"),
    ({"stream_options": {"include_usag": True}, "stream": True}, "stream_options.include_usag", "include_usage"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"continue_final_message": "yes"}, "continue_final_message", "'yes'"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "'tools'"),
    ({"chat_template_kwargs": "thinks"}, "chat_template_kwargs", "'thinks'"),
    ({"mcp_max_rounds": 3}, "mcp_max_rounds", "3"),
    ({"n": 65}, "n", "65"),
    ({"retention": [{"priority": "high"}]}, "retention[0].priority", "'high'"),
    ({"temperature": "hot"}, "temperature", "'hot'"),
    ({"logit_bias": {"5": "much"}}, "logit_bias[...]", "str"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param", "value"), WRONG, ids=lambda value: str(value)[:60])
def test_what_a_field_holds_is_told(url, fields, param, value, stream):
    asked = {"stream": stream, **fields} if "stream_options" not in fields else fields
    reply = chat(url, **asked)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert param.split("[")[0].split(".")[0] in error["message"]
    assert value in error["message"]


def test_two_names_of_the_limit_may_agree(url):
    reply = chat(url, max_tokens=2, max_completion_tokens=2).json()
    assert reply["usage"]["completion_tokens"] == 2
