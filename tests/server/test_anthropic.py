"""`/v1/messages` through Anthropic's own client, against a model that knows its lines and Qwen2.5-Coder-0.5B."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic

from spolia.engine import AsyncEngine, EngineConfig

from .harness import Pace, chatty_engine, eventually, scripted_engine, serving
from .test_tools import PARIS, ROME, tagged

TOOLS: list[Any] = [
    {
        "name": name,
        "description": f"The {name} in a city",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
    for name in ("weather", "time")
]
SCRIPT = {
    "user: rome": tagged(ROME),
    "user: both": "At once.\n" + tagged(ROME, PARIS),
    "user: hello": "Hello! How are you?",
    "user: count": "one two three",
    "user: silence": "",
    "tool: 21 degrees": "It is 21 degrees.",
}
GREEDY = {"temperature": 0}  # newer clients do not name it
MARK = {"type": "ephemeral"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = scripted_engine(SCRIPT, num_blocks=512, max_context=4096)
    with serving({"scripted": engine}) as url:
        yield url
    asyncio.run(engine.aclose())


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: Anthropic, content: Any, **fields: Any) -> Any:
    messages = fields.pop("messages", [{"role": "user", "content": content}])
    return client.messages.create(
        model="scripted", max_tokens=fields.pop("max_tokens", 300), messages=messages, **fields
    )


def blocks_of(message: Any) -> list[Any]:
    """Its blocks but for the calls' ids, which are drawn."""
    return [block.text if block.type == "text" else (block.name, block.input) for block in message.content]


def test_system_messages_may_stand_among_the_others(client):
    """Claude Code sends some."""
    messages = [
        {"role": "user", "content": "x"},
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "hello"},
    ]
    reply = client.messages.create(model="scripted", max_tokens=100, messages=messages)  # type: ignore[arg-type]
    assert reply.content[0].text == SCRIPT["user: hello"]


def test_a_message_is_answered_with_text(client):
    reply = ask(client, "hello")
    assert (reply.type, reply.role, reply.model) == ("message", "assistant", "scripted")
    assert [block.text for block in reply.content] == ["Hello! How are you?"]
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    assert reply.usage.output_tokens == len("Hello! How are you?") + 1
    assert reply.id.startswith("msg-")


@pytest.mark.parametrize("content", ["hello", "rome", "both", "silence"])
def test_a_stream_tells_the_same_as_the_whole_message(client, content):
    whole = ask(client, content, tools=TOOLS)
    with client.messages.stream(
        model="scripted", max_tokens=300, messages=[{"role": "user", "content": content}], tools=TOOLS
    ) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert blocks_of(message) == blocks_of(whole)
    assert message.stop_reason == whole.stop_reason
    assert message.usage.output_tokens == whole.usage.output_tokens
    assert message.usage.cache_read_input_tokens == whole.usage.cache_read_input_tokens + whole.usage.input_tokens - 1
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(message.content)


def test_tools_are_called_and_their_results_go_back(client):
    reply = ask(client, "both", tools=TOOLS)
    assert reply.stop_reason == "tool_use"
    text, first, second = reply.content
    assert text.text == "At once."
    assert (first.name, first.input, second.name, second.input) == (
        "weather", {"city": "Rome"}, "time", {"city": "Paris"},
    )  # fmt: skip
    results = [
        {"type": "tool_result", "tool_use_id": second.id, "content": "noon"},
        {"type": "tool_result", "tool_use_id": first.id, "content": [{"type": "text", "text": "21 degrees"}]},
    ]
    turns = [
        {"role": "user", "content": "both"},
        {"role": "assistant", "content": reply.content},
        {"role": "user", "content": results},
    ]
    assert ask(client, "", messages=turns, tools=TOOLS).content[0].text == "It is 21 degrees."


def test_the_choice_of_tools_is_minded(client):
    assert len(ask(client, "both", tools=TOOLS).content) == 3
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert [block.type for block in ask(client, "both", tools=TOOLS, tool_choice=one).content] == ["text", "tool_use"]
    by_name = {"type": "tool", "name": "weather"}
    for choice in ({"type": "any"}, by_name):
        (call,) = ask(client, "rome", tools=TOOLS, tool_choice=choice).content
        assert (call.name, call.input) == ("weather", {"city": "Rome"})
    assert "<tool_call>" in ask(client, "rome", tools=TOOLS, tool_choice={"type": "none"}).content[0].text


def test_a_call_cut_short_keeps_its_text(client):
    reply = ask(client, "rome", tools=TOOLS, max_tokens=55)
    assert reply.stop_reason == "max_tokens"
    assert reply.content[0].input["unparsed"].startswith('{"ci')


def test_limits_and_stop_sequences_are_told_apart(client):
    assert ask(client, "hello", max_tokens=5).stop_reason == "max_tokens"
    reply = ask(client, "count", stop_sequences=["two", "three"])
    assert (reply.stop_reason, reply.stop_sequence, reply.content[0].text) == ("stop_sequence", "two", "one ")


def test_a_reply_that_the_client_began_goes_on_from_there(client):
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Hello! How"}]
    assert ask(client, "", messages=turns).content[0].text == " are you?"


def test_system_text_comes_first_and_its_blocks_are_joined(client):
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}]}
    blocks = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    expected = len("system: Be brief.\nBe kind.\nuser: hello\nassistant:")
    for system in ("Be brief.\nBe kind.", blocks):
        assert client.messages.count_tokens(**body, system=system).input_tokens == expected
        assert ask(client, "hello", system=system).content[0].text == "Hello! How are you?"
    assert client.messages.count_tokens(**body, tools=TOOLS).input_tokens == len(
        "weather\ntime\nuser: hello\nassistant:"
    )


def test_usage_tells_what_was_read_and_what_was_written_up_to_the_breakpoint(client):
    system = [{"type": "text", "text": "A long rule that no other test has. " * 5, "cache_control": MARK}]
    first = ask(client, "hello", system=system).usage
    marked = len("system: ") + len(system[0]["text"])
    assert first.cache_creation_input_tokens + first.cache_read_input_tokens == pytest.approx(marked, abs=12)
    assert first.cache_creation_input_tokens > 150
    second = ask(client, "count", system=system).usage
    assert second.cache_creation_input_tokens == 0
    assert second.cache_read_input_tokens >= marked
    total = first.input_tokens + first.cache_creation_input_tokens + first.cache_read_input_tokens
    assert total == marked + len("\nuser: hello\nassistant:")


def test_a_breakpoint_in_a_message_counts_up_to_its_block(client):
    blocks = [
        {"type": "text", "text": "Something of its own. " * 8, "cache_control": MARK},
        {"type": "text", "text": "hello"},
    ]
    turns = [
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "hello"},
    ]
    usage = ask(client, "", messages=turns).usage
    assert usage.cache_creation_input_tokens + usage.cache_read_input_tokens == len("user: ") + len(blocks[0]["text"])


BAD = [
    ({"messages": [{"role": "developer", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "tool_use_id"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}]}, "input"),
    ({"messages": []}, "messages"),
    ({"tools": [{"name": "web_search", "type": "web_search_20250305"}]}, "web_search_20250305"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "other"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "some"}}, "some"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"extra_body": {"temperature": -1}}, "temperature"),
]


@pytest.mark.parametrize(("fields", "words"), BAD, ids=lambda value: str(value)[:40])
def test_bad_requests_raise_anthropics_own_error(client, fields, words):
    with pytest.raises(anthropic.BadRequestError, match="invalid_request_error") as caught:
        ask(client, "hello", **fields)
    assert words in caught.value.message
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_other_errors_have_anthropics_shape_too(url, client):
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        client.messages.create(model="claude", max_tokens=1, messages=[{"role": "user", "content": "x"}])
    reply = httpx.get(f"{url}/v1/messages")
    assert (reply.status_code, reply.json()["type"]) == (405, "error")


def test_models_are_listed_for_this_client_as_well(client):
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name) == ("scripted", "model", "scripted")
    assert client.models.retrieve("scripted").created_at.year >= 2024


def test_leaving_a_stream_ends_its_request():
    engine = chatty_engine(observer=Pace(step_s=0.01))
    with serving({"toy": engine}) as url, Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        with client.messages.stream(model="toy", max_tokens=400, messages=[{"role": "user", "content": "x"}]) as stream:
            next(iter(stream.text_stream))
        eventually(lambda: engine.stats.counters.num_finished.get("abort") == 1, timeout_s=5)
    asyncio.run(engine.aclose())


def test_an_engine_that_fails_in_mid_stream_sends_an_error_event():
    engine = chatty_engine(observer=Pace(step_s=0.02))
    with serving({"toy": engine}) as url:
        body = {"model": "toy", "messages": [{"role": "user", "content": "x"}], "max_tokens": 400, "stream": True}
        with httpx.stream("POST", f"{url}/v1/messages", json=body, timeout=30) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: "))
            assert json.loads(next(lines)[6:])["type"] == "message_start"
            asyncio.run(engine.call(lambda core: setattr(core.executable, "error", RuntimeError("cosmic ray"))))
            events = [json.loads(line[6:]) for line in lines]
        assert events[-1]["type"] == "error"
        assert "cosmic ray" in events[-1]["error"]["message"]
    asyncio.run(engine.aclose())


def test_qwen_answers_anthropics_client_and_calls_its_tools(qwen_coder_path: Path):
    engine = AsyncEngine(qwen_coder_path, EngineConfig(kv_memory=64 << 20, max_context=2048))
    with serving({"scripted": engine}) as url, Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        reply = ask(client, "What is the weather in Paris?", tools=TOOLS, max_tokens=100, extra_body=GREEDY)
        assert reply.stop_reason == "tool_use"
        assert [(block.name, block.input) for block in reply.content] == [("weather", {"city": "Paris"})]
        reply = ask(client, "Say the word ready.", max_tokens=20, extra_body=GREEDY, system="Obey.")
        assert "ready" in reply.content[0].text.lower()
    asyncio.run(engine.aclose())
