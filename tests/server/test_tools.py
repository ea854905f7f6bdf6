"""Tools through OpenAI's own client: against a model that knows its lines, and against Qwen2.5-Coder-0.5B."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from spolia.engine import AsyncEngine, EngineConfig

from .harness import chatty_engine, scripted_engine, serving

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The {name} in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in ("weather", "time")
]


def tagged(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
PARIS = '{"name": "time", "arguments": {"city": "Paris"}}'
SCRIPT = {
    "user: rome": tagged(ROME),
    "user: both": "At once.\n" + tagged(ROME, PARIS),
    "user: bare": f"```json\n{ROME}\n```",
    "user: hello": "Hello! 1 < 2.",
    "tool: 21 degrees": "It is 21 degrees.",
}


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    engine = scripted_engine(SCRIPT, num_blocks=256, max_context=2048)
    with serving({"scripted": engine}) as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client
    asyncio.run(engine.aclose())


def ask(client: OpenAI, question: str, **fields: Any) -> Any:
    messages = fields.pop("messages", [{"role": "user", "content": question}])
    return client.chat.completions.create(model="scripted", messages=messages, tools=TOOLS, temperature=0, **fields)


def streamed(chunks: Any) -> tuple[str, list[dict[str, str]], list[str]]:
    """Content, calls and finish reasons as a client puts a stream together."""
    content, calls, reasons = "", [], []
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or ():
                if call.index == len(calls):
                    calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
                calls[call.index]["arguments"] += call.function.arguments or ""
    return content, calls, reasons


def test_a_call_is_told_as_openai_tells_it(client):
    (choice,) = ask(client, "rome").choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Rome"}


@pytest.mark.parametrize("question", ["rome", "both", "bare", "hello"])
def test_a_stream_tells_the_same_as_the_whole_reply(client, question):
    (choice,) = ask(client, question).choices
    content, calls, reasons = streamed(ask(client, question, stream=True))
    assert content == (choice.message.content or "")
    assert reasons == [choice.finish_reason]
    whole = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    assert [(call["name"], call["arguments"]) for call in calls] == whole
    assert len({call["id"] for call in calls}) == len(calls)


def test_parallel_calls_come_with_their_text_unless_one_is_wanted(client):
    (choice,) = ask(client, "both").choices
    assert choice.message.content == "At once."
    assert [call.function.name for call in choice.message.tool_calls] == ["weather", "time"]
    (choice,) = ask(client, "both", parallel_tool_calls=False).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]


def test_text_without_a_call_stays_text(client):
    (choice,) = ask(client, "hello").choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("Hello! 1 < 2.", None, "stop")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_must_be_is_begun_for_the_model(client, choice):
    plain = ask(client, "rome")
    forced = ask(client, "rome", tool_choice=choice)
    assert forced.usage.prompt_tokens > plain.usage.prompt_tokens
    assert forced.choices[0].message.tool_calls[0].function.name == "weather"
    assert json.loads(forced.choices[0].message.tool_calls[0].function.arguments) == {"city": "Rome"}
    assert streamed(ask(client, "rome", tool_choice=choice, stream=True))[1][0]["name"] == "weather"


def test_a_call_that_must_be_has_the_form_of_its_schema_whatever_the_model():
    engine = chatty_engine(num_blocks=64)
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 5}, "yes": {"type": "boolean"}},
        "required": ["n", "yes"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("first", "second")]
    second = {"type": "function", "function": {"name": "second"}}
    messages = [{"role": "user", "content": "x"}]
    with serving({"toy": engine}) as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for seed, (choice, names) in enumerate([("required", {"first", "second"}), (second, {"second"})] * 5):
            reply = client.chat.completions.create(
                model="toy", messages=messages, tools=tools, tool_choice=choice, seed=seed, max_tokens=300
            )
            (call,) = reply.choices[0].message.tool_calls
            assert call.function.name in names
            arguments = json.loads(call.function.arguments)
            assert arguments["n"] in range(1, 6)
            assert isinstance(arguments["yes"], bool)
            assert reply.choices[0].finish_reason == "tool_calls"
    asyncio.run(engine.aclose())


def test_a_call_and_a_form_cannot_both_be_had(client):
    form = {"type": "json_object"}
    with pytest.raises(BadRequestError, match="cannot be both"):
        ask(client, "rome", tool_choice="required", response_format=form)


def test_without_tools_a_call_is_text(client):
    assert "<tool_call>" in ask(client, "rome", tool_choice="none").choices[0].message.content


def test_a_call_cut_short_by_its_limit_says_length(client):
    (choice,) = ask(client, "rome", max_tokens=55).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments.startswith('{"ci')


def test_the_result_of_a_call_goes_back_to_the_model(client):
    message = ask(client, "rome").choices[0].message
    turns = [
        {"role": "user", "content": "rome"},
        message,
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21 degrees"},
    ]
    assert ask(client, "", messages=turns).choices[0].message.content == "It is 21 degrees."


@pytest.fixture(scope="module")
def qwen(qwen_coder_path: Path) -> Iterator[OpenAI]:
    engine = AsyncEngine(qwen_coder_path, EngineConfig(kv_memory=64 << 20, max_context=2048))
    with serving({"scripted": engine}) as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client
    asyncio.run(engine.aclose())


def test_qwen_calls_a_tool_reads_its_answer_and_can_be_made_to_call(qwen):
    question = "What is the weather in Paris?"
    (choice,) = ask(qwen, question, max_tokens=100).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
    _, calls, reasons = streamed(ask(qwen, question, max_tokens=100, stream=True))
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [("weather", {"city": "Paris"})]
    assert reasons == ["tool_calls"]

    turns = [{"role": "user", "content": question}, choice.message]
    turns += [{"role": "tool", "tool_call_id": call.id, "content": "It is 21 degrees and sunny in Paris."}]
    turns += [{"role": "user", "content": "Tell me in a sentence, please."}]  # half a billion parameters need a hint
    assert "21" in ask(qwen, "", messages=turns, max_tokens=60).choices[0].message.content

    by_name = {"type": "function", "function": {"name": "time"}}
    (call,) = ask(qwen, "Good morning, Rome!", tool_choice=by_name, max_tokens=60).choices[0].message.tool_calls
    assert call.function.name == "time"
    assert isinstance(json.loads(call.function.arguments), dict)
