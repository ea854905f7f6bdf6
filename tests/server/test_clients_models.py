"""Every reply fits its client's own types, strictly: no field that they need is missing or of another kind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic.types as of_anthropic
import httpx
import ollama
import openai.types as of_openai
import openai.types.chat as of_chat
import openai.types.responses as of_responses
import pytest
from anthropic import Anthropic
from openai import OpenAI
from pydantic import TypeAdapter

from .harness import ChattyToy, Pace, ThinkingTemplate, chatty_engine, eventually, scripted_engine, serving
from .test_tools import PARIS, ROME, TOOLS, tagged

SCRIPT = {
    "user: hello": "Hello! How are you?",
    "user: rome": tagged(ROME),
    "user: both": "At once.\n" + tagged(ROME, PARIS),
    "user: think": "<think>Yes or no?</think>Yes.",
    "user: ponder": "<think>Which tool?</think>" + tagged(ROME),
}
QUESTIONS = [question.removeprefix("user: ") for question in SCRIPT]
RESPONSES_TOOLS = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
ANTHROPIC_TOOLS = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    model = ChattyToy(chat_template=ThinkingTemplate())
    engine = scripted_engine(SCRIPT, model, num_blocks=512, max_context=2048)
    with serving({"scripted": engine}) as url:
        yield url
    asyncio.run(engine.aclose())


def fits(kind: Any, body: str | bytes) -> Any:
    return TypeAdapter(kind).validate_json(body, strict=True)


def ask(url: str, path: str, **body: Any) -> str:
    reply = httpx.post(url + path, json={"model": "scripted"} | body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.text


def events(url: str, path: str, **body: Any) -> list[str]:
    text = ask(url, path, stream=True, **body)
    return [line[6:] for line in text.splitlines() if line.startswith("data: {")]


def said(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.mark.parametrize("question", QUESTIONS)
def test_chat(url, question):
    body = {"messages": said(question), "tools": TOOLS, "logprobs": True, "top_logprobs": 2, "n": 2}
    whole = fits(of_chat.ChatCompletion, ask(url, "/v1/chat/completions", **body))
    assert whole.choices[0].finish_reason == ("tool_calls" if whole.choices[0].message.tool_calls else "stop")
    calls = [call.id for choice in whole.choices for call in choice.message.tool_calls or ()]
    assert len(set(calls)) == len(calls)
    chunks = events(url, "/v1/chat/completions", **body, stream_options={"include_usage": True})
    streamed = [fits(of_chat.ChatCompletionChunk, chunk) for chunk in chunks]
    assert len({chunk.id for chunk in streamed}) == 1
    for index, choice in enumerate(whole.choices):
        parts = [part for chunk in streamed for part in chunk.choices if part.index == index]
        assert "".join(part.delta.content or "" for part in parts) == (choice.message.content or "")
        pieces: dict[int, str] = {}
        for part in parts:
            for call in part.delta.tool_calls or ():
                pieces[call.index] = pieces.get(call.index, "") + (call.function.arguments or "")
        whole_calls = [call.function.arguments for call in choice.message.tool_calls or ()]
        assert list(pieces.values()) == whole_calls
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]


def test_completions_embeddings_and_models(url, toy_url):
    fits(of_openai.Completion, ask(url, "/v1/completions", prompt="user: hello\nassistant:", logprobs=2))
    fits(of_openai.CreateEmbeddingResponse, ask(toy_url, "/v1/embeddings", model="toy", input=["a", "b"]))
    (card,) = httpx.get(f"{url}/v1/models").json()["data"]
    fits(of_openai.Model, json.dumps(card))
    fits(of_anthropic.ModelInfo, json.dumps(card))


@pytest.mark.parametrize("question", QUESTIONS)
def test_responses(url, question):
    whole = fits(of_responses.Response, ask(url, "/v1/responses", input=question, tools=RESPONSES_TOOLS))
    told = [
        fits(of_responses.ResponseStreamEvent, event)
        for event in events(url, "/v1/responses", input=question, tools=RESPONSES_TOOLS)
    ]
    assert [event.sequence_number for event in told] == list(range(len(told)))
    last = told[-1].response
    assert [item.type for item in last.output] == [item.type for item in whole.output]
    assert (whole.output[0].type == "reasoning") == (question in ("think", "ponder"))
    assert (whole.usage.output_tokens_details.reasoning_tokens > 0) == (question in ("think", "ponder"))
    open_items: list[str] = []
    for event in told:
        if event.type == "response.output_item.added":
            assert not open_items
            open_items.append(event.item.id)
        elif event.type == "response.output_item.done":
            assert open_items.pop() == event.item.id
        elif hasattr(event, "item_id"):
            assert event.item_id == open_items[0]


@pytest.mark.parametrize("question", QUESTIONS)
def test_messages(url, question):
    body = {"messages": said(question), "tools": ANTHROPIC_TOOLS, "max_tokens": 300}
    whole = fits(of_anthropic.Message, ask(url, "/v1/messages", **body))
    told = [json.loads(event) for event in events(url, "/v1/messages", **body)]
    for event in told:
        if event["type"] != "ping":
            fits(of_anthropic.RawMessageStreamEvent, json.dumps(event))
    begun = [event["content_block"]["type"] for event in told if event["type"] == "content_block_start"]
    assert begun == [block.type for block in whole.content]
    fits(of_anthropic.MessageTokensCount, ask(url, "/v1/messages/count_tokens", messages=said(question)))


@pytest.mark.parametrize("question", QUESTIONS)
def test_ollama(url, question):
    body = {"messages": said(question), "tools": TOOLS, "stream": False, "logprobs": True, "top_logprobs": 2}
    whole = fits(ollama.ChatResponse, ask(url, "/api/chat", **body))
    assert len(whole.logprobs) == whole.eval_count
    assert bool(whole.message.thinking) == (question in ("think", "ponder"))
    prompt = {"prompt": question, "stream": False, "logprobs": True}
    made = fits(ollama.GenerateResponse, ask(url, "/api/generate", **prompt))
    assert (made.thinking or "", len(made.logprobs)) == (whole.message.thinking or "", made.eval_count)
    fits(ollama.ListResponse, httpx.get(f"{url}/api/tags").text)
    fits(ollama.ProcessResponse, httpx.get(f"{url}/api/ps").text)
    assert "thinking" in fits(ollama.ShowResponse, ask(url, "/api/show")).capabilities


def test_thoughts_of_a_response_go_back_as_they_came(url):
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        first = client.responses.create(model="scripted", input="think")
        more = client.responses.create(model="scripted", previous_response_id=first.id, input="hello")
        by_items = [{"role": "user", "content": "think"}, *first.output, {"role": "user", "content": "hello"}]
        assert client.responses.create(model="scripted", input=by_items).usage.input_tokens == more.usage.input_tokens


def test_a_conversation_that_is_too_long_loses_its_oldest_turns_if_that_is_asked_for(url):
    turns = [{"role": role, "content": "x" * 300} for _ in range(4) for role in ("user", "assistant")]
    items = [{"role": "system", "content": "Be kind."}, *turns, {"role": "user", "content": "hello"}]
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        reply = client.responses.create(model="scripted", input=items, truncation="auto", max_output_tokens=1000)
        assert reply.output_text == SCRIPT["user: hello"]
        assert (reply.truncation, reply.status) == ("auto", "completed")
        turn = len("\nuser: " + "x" * 300 + "\nassistant: " + "x" * 300)
        assert reply.usage.input_tokens == len("system: Be kind.\nuser: hello\nassistant:") + turn


def test_a_limit_beyond_the_context_is_as_many_as_fit(url):
    with Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        reply = client.messages.create(model="scripted", max_tokens=16_000, messages=said("hello"))
        assert reply.stop_reason == "end_turn"
    engine = chatty_engine()
    with serving({"toy": engine}) as toy_url, Anthropic(base_url=toy_url, api_key="none", max_retries=0) as client:
        reply = client.messages.create(model="toy", max_tokens=16_000, messages=said("x" * 400))
        assert reply.stop_reason == "model_context_window_exceeded"
        assert client.messages.create(model="toy", max_tokens=4, messages=said("x")).stop_reason == "max_tokens"
    asyncio.run(engine.aclose())


RESUMABLE = {
    "/v1/chat/completions": {"messages": said("x"), "max_tokens": 60},
    "/v1/completions": {"prompt": "x", "max_tokens": 60},
    "/v1/responses": {"input": "x", "max_output_tokens": 60},
    "/v1/messages": {"messages": said("x"), "max_tokens": 60},
    "/completion": {"prompt": "x", "n_predict": 60},
    "/api/chat": {"messages": said("x"), "options": {"num_predict": 60}},
    "/api/generate": {"prompt": "x", "options": {"num_predict": 60}},
}


@pytest.mark.parametrize("path", RESUMABLE)
def test_a_dropped_stream_of_each_api_is_read_on(path):
    engine = chatty_engine(observer=Pace(step_s=0.005))
    with serving({"toy": engine}) as url:
        body = {"model": "toy", "stream": True, "resumable": True, **RESUMABLE[path]}
        mark = "" if path.startswith("/api") else "id: "

        def payloads(lines: list[str]) -> list[str]:
            return [line for line in lines if line and not line.startswith("id: ")]

        with httpx.stream("POST", url + path, json=body, timeout=30) as reply:
            stream_id, media_type = reply.headers["x-request-id"], reply.headers["content-type"]
            seen: list[str] = []
            for line in reply.iter_lines():
                seen.append(line)
                if sum(bool(each) and each.startswith(mark) for each in seen) == 4:
                    break
        events_seen = [each for each in seen if each and each.startswith(mark)]
        seen = seen[: seen.index(events_seen[3])]  # of the fourth only the number has come, or nothing
        eventually(lambda: engine.stats.counters.num_finished.get("length") == 1)
        rest = httpx.get(f"{url}/v1/streams/{stream_id}", params={"after": 2}, timeout=30)
        assert rest.headers["content-type"] == media_type
        everything = httpx.get(f"{url}/v1/streams/{stream_id}", timeout=30).text.splitlines()
        assert payloads([*seen, *rest.text.splitlines()]) == payloads(everything)
        for wrong in ("1000", "-2", "\u0663", "two", ""):
            refused = httpx.get(f"{url}/v1/streams/{stream_id}", params={"after": wrong})
            assert refused.status_code == 400
            assert repr(wrong) in refused.json()["error"]["message"]
    asyncio.run(engine.aclose())


def test_openais_client_reads_a_response_on_by_its_id():
    engine = chatty_engine(observer=Pace(step_s=0.005))
    with serving({"toy": engine}) as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = client.responses.create(
            model="toy", input="x", max_output_tokens=60, stream=True, extra_body={"resumable": True}
        )
        first = [next(stream) for _ in range(4)]
        stream.close()
        rest = list(client.responses.retrieve(first[0].response.id, stream=True, starting_after=3))
        assert [event.sequence_number for event in (*first, *rest)] == list(range(len(first) + len(rest)))
        assert rest[-1].type == "response.incomplete"
    asyncio.run(engine.aclose())


def test_a_long_conversation_with_tools_counts_what_it_reads_and_writes(url):
    """As Claude Code's: system blocks, tools, results, a mark that moves along, another at the top level."""
    mark = {"type": "ephemeral", "ttl": "1h"}
    system = [
        {"type": "text", "text": "You are a helper. " * 5},
        {"type": "text", "text": "Be brief.", "cache_control": mark},
    ]
    messages: list[Any] = []
    known = 0
    with Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        for turn in range(5):
            result = {"type": "tool_result", "tool_use_id": "t", "content": f"{turn} degrees", "is_error": False}
            asked = [{"type": "text", "text": "rome" if turn % 2 else "hello"}]
            messages.append({"role": "user", "content": ([result] if turn % 2 == 0 and turn else []) + asked})
            marked = [
                *messages[:-1],
                {"role": "user", "content": [*messages[-1]["content"][:-1], {**asked[0], "cache_control": mark}]},
            ]
            body: Any = {"model": "scripted", "system": system, "tools": ANTHROPIC_TOOLS}
            fields: Any = {"cache_control": mark} if turn == 4 else {}
            shown = messages if turn == 4 else marked
            reply = client.messages.create(max_tokens=16_000, messages=shown, **body, **fields)
            usage = reply.usage
            num_prompt = client.messages.count_tokens(messages=shown, **body).input_tokens
            read, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
            assert usage.input_tokens + read + written == num_prompt
            assert usage.cache_creation.ephemeral_1h_input_tokens == written
            assert read >= known  # all that was written is read
            assert written or read
            known = read + written
            messages.append({"role": "assistant", "content": [block.to_dict() for block in reply.content]})
            for block in messages[-1]["content"]:
                if block["type"] == "tool_use":
                    block["id"] = "t"


def test_anthropics_forms_thinking_and_documents(url):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    engine = chatty_engine(num_blocks=128)
    with serving({"toy": engine}) as toy_url, Anthropic(base_url=toy_url, api_key="none", max_retries=0) as client:
        form: Any = {"format": {"type": "json_schema", "schema": schema}}
        reply = client.messages.create(model="toy", max_tokens=200, messages=said("x"), output_config=form)
        assert isinstance(json.loads(reply.content[0].text)["a"], bool)
        raw = client.messages.with_raw_response.create(
            model="toy",
            max_tokens=1,
            messages=said("x"),
            thinking={"type": "disabled"},
            output_config={"effort": "low"},
        )
        assert set(raw.headers["x-spolia-ignored"].split(",")) == {"reasoning_effort", "thinking"}
        document: Any = {
            "type": "document",
            "title": "T",
            "source": {"type": "text", "media_type": "text/plain", "data": "abc"},
        }
        found: Any = {"type": "search_result", "title": "S", "source": "u", "content": [{"type": "text", "text": "d"}]}
        content = [document, found, {"type": "text", "text": "x"}]
        count = client.messages.count_tokens(model="toy", messages=[{"role": "user", "content": content}])
        assert count.input_tokens == len("user: T\nabc\nS\nu\nd\nx\nassistant:")
    for field, value in ("container", "c"), ("mcp_servers", [{"url": "x"}]), ("thinking", {"type": "some"}):
        body = {"model": "scripted", "max_tokens": 1, "messages": said("hello"), field: value}
        reply = httpx.post(f"{url}/v1/messages", json=body)
        assert (reply.status_code, field in reply.text) == (400, True)
    asyncio.run(engine.aclose())


CANCELLED = {
    "/v1/completions": ({"prompt": "p" * 100}, "p" * 100),
    "/v1/chat/completions": ({"messages": said("c" * 100)}, f"user: {'c' * 100}\nassistant:"),
    "/v1/messages": ({"messages": said("m" * 100)}, f"user: {'m' * 100}\nassistant:"),
    "/api/chat": ({"messages": said("o" * 100)}, f"user: {'o' * 100}\nassistant:"),
    "/completion": ({"prompt": "l" * 100}, "l" * 100),
    "/v1/responses": ({"input": "r" * 100}, f"user: {'r' * 100}\nassistant:"),
}


@pytest.mark.parametrize("path", CANCELLED)
def test_what_a_cancelled_request_computed_is_kept(path):
    asked, prompt = CANCELLED[path]
    limits = {"max_tokens": 300} if path in ("/v1/completions", "/v1/messages") else {}
    engine = chatty_engine(observer=Pace(step_s=0.01))
    with serving({"toy": engine}) as url:
        body = {"model": "toy", "stream": True, **asked, **limits}
        with httpx.stream("POST", url + path, json=body, timeout=30) as reply:
            lines = reply.iter_lines()  # held: a reader that is dropped closes the stream
            for _ in range(8):
                next(lines)
        eventually(lambda: engine.stats.counters.num_finished.get("abort") == 1)
        body = {"model": "toy", "prompt": prompt, "max_tokens": 1}
        usage = httpx.post(f"{url}/v1/completions", json=body, timeout=30).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1
        assert engine.stats.counters.num_generated_tokens > 1
    asyncio.run(engine.aclose())
