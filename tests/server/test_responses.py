"""`/v1/responses` through OpenAI's own client, and streams that are resumed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from engine.toy import toy_answer
from spolia.server.responses import endpoints
from spolia.server.resuming import ResumableStreams

from .harness import Pace, chatty_engine, eventually, metric, scripted_engine, serving
from .test_completions import text_of
from .test_tools import PARIS, ROME, tagged

TOOLS: list[Any] = [
    {
        "type": "function",
        "name": name,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
    for name in ("weather", "time")
]
SCRIPT = {
    "user: rome": tagged(ROME),
    "user: both": "At once.\n" + tagged(ROME, PARIS),
    "user: hello": "Hello! How are you?",
    "user: silence": "",
    "tool: 21 degrees": "It is 21 degrees.",
}


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
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def shown(response: Any) -> list[Any]:
    """Its output items but for their ids, which are drawn."""
    return [item.content[0].text if item.type == "message" else (item.name, item.arguments) for item in response.output]


def test_a_text_is_answered_with_a_message(client):
    response = client.responses.create(model="scripted", input="hello", instructions="Be kind.")
    assert response.output_text == "Hello! How are you?"
    assert (response.status, response.object, response.error) == ("completed", "response", None)
    assert response.usage.input_tokens == len("system: Be kind.\nuser: hello\nassistant:")
    assert response.usage.output_tokens == len("Hello! How are you?") + 1


@pytest.mark.parametrize("question", ["hello", "rome", "both", "silence"])
def test_a_stream_tells_the_same_as_the_whole_response(client, question):
    whole = client.responses.create(model="scripted", input=question, tools=TOOLS)
    with client.responses.stream(model="scripted", input=question, tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert shown(final) == shown(whole)
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == sorted(
        event.sequence_number for event in events if hasattr(event, "sequence_number")
    )
    assert events[-1].type == "response.completed"
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_calls_are_items_and_their_outputs_go_back(client):
    response = client.responses.create(model="scripted", input="both", tools=TOOLS)
    assert shown(response) == ["At once.", ("weather", '{"city": "Rome"}'), ("time", '{"city": "Paris"}')]
    call = response.output[1]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    by_id = client.responses.create(model="scripted", previous_response_id=response.id, input=[output], tools=TOOLS)
    items = [{"role": "user", "content": "both"}, *response.output, output]
    by_items = client.responses.create(model="scripted", input=items, tools=TOOLS)
    assert by_id.output_text == by_items.output_text == "It is 21 degrees."
    assert by_id.usage.input_tokens == by_items.usage.input_tokens
    assert by_items.usage.input_tokens_details.cached_tokens == by_items.usage.input_tokens - 1


def test_a_response_goes_on_from_another_and_reuses_it(client):
    first = client.responses.create(model="toy", input="something new", max_output_tokens=20, temperature=0)
    assert (first.status, first.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    second = client.responses.create(
        model="toy", previous_response_id=first.id, input="more", max_output_tokens=5, temperature=0
    )
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens


def test_responses_are_kept_until_they_are_deleted_unless_not_stored(client):
    response = client.responses.create(model="scripted", input="hello")
    assert client.responses.retrieve(response.id).output_text == "Hello! How are you?"
    client.responses.delete(response.id)
    unkept = client.responses.create(model="scripted", input="hello", store=False)
    for id_ in (response.id, unkept.id, "resp-none"):
        with pytest.raises(openai.NotFoundError, match="no response"):
            client.responses.retrieve(id_)
        with pytest.raises(openai.BadRequestError, match="no response") as caught:
            client.responses.create(model="scripted", previous_response_id=id_, input="hello")
        assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")


def test_the_input_of_a_response_is_listed_and_referred_to(client):
    first = client.responses.create(model="scripted", input="hello")
    second = client.responses.create(
        model="scripted", previous_response_id=first.id, input=[{"role": "user", "content": "rome"}], tools=TOOLS
    )
    items = list(client.responses.input_items.list(second.id, order="asc", limit=2))  # two pages
    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert items[0].content[0].text == "hello"
    assert items[1] == first.output[0]
    assert [item.id for item in client.responses.input_items.list(second.id)] == [item.id for item in items[::-1]]
    references = [{"type": "item_reference", "id": item.id} for item in items[:2]]
    said = client.responses.create(model="scripted", input=[*references, items[2].to_dict()], tools=TOOLS)
    assert shown(said) == shown(second)
    assert said.usage.input_tokens == second.usage.input_tokens
    for call in (
        lambda: client.responses.input_items.list(first.id, limit=0),
        lambda: client.responses.input_items.list(first.id, after="msg_none"),
        lambda: client.responses.cancel(first.id),  # only what runs in the background can be
        lambda: client.responses.retrieve(first.id, stream=True),
    ):
        with pytest.raises(openai.BadRequestError):
            call()
    with pytest.raises(openai.NotFoundError, match="msg_none"):
        client.responses.create(model="scripted", input=[{"type": "item_reference", "id": "msg_none"}])


def test_tokens_are_counted_as_the_response_counts_them(client):
    asked: Any = {"model": "scripted", "input": "hello", "instructions": "Be kind.", "tools": TOOLS}
    counted = client.responses.input_tokens.count(**asked)
    assert counted.input_tokens == client.responses.create(**asked).usage.input_tokens


def test_of_the_tools_offered_only_those_allowed_are_called_and_the_prompt_stays(client):
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
    free = client.responses.create(model="scripted", input="both", tools=TOOLS)
    held = client.responses.create(model="scripted", input="both", tools=TOOLS, tool_choice=allowed)
    assert [item.name for item in free.output[1:]] == ["weather", "time"]
    assert [item.name for item in held.output if item.type == "function_call"] == ["weather"]
    assert "time" in held.output_text
    assert held.usage.input_tokens == free.usage.input_tokens
    forced = client.responses.create(model="toy", input="x", tools=TOOLS, tool_choice={**allowed, "mode": "required"})
    assert [item.name for item in forced.output] == ["weather"]


def test_what_is_kept_of_responses_is_bounded_in_bytes(client, monkeypatch):
    first = client.responses.create(model="scripted", input="hello")
    monkeypatch.setattr(endpoints, "_MAX_STORED_BYTES", 4500)
    last = client.responses.create(model="scripted", input="hello", metadata={"long": "x" * 3000})
    assert client.responses.retrieve(last.id).id == last.id
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_the_answer_has_the_form_that_was_asked_for(client):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    format_ = {"type": "json_schema", "name": "x", "schema": schema}
    response = client.responses.create(model="toy", input="x", text={"format": format_}, max_output_tokens=100)
    assert isinstance(json.loads(response.output_text)["a"], bool)


BAD = [
    ({"input": []}, "messages"),
    ({"input": [{"role": "nobody", "content": "x"}]}, "input[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"max_output_tokens": -1}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"text": {"format": {"type": "xml"}}}, "text"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "list"}}}}, "text.format"),
    ({"background": True, "store": False}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"tools": [{"type": "custom", "name": "shell"}]}, "tools[0].type"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": 5}]}}, "tool_choice"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_response_is_400_and_names_its_field(url, fields, param):
    reply = httpx.post(f"{url}/v1/responses", json={"model": "toy", "input": "x", **fields})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_the_logprobs_of_a_message_are_those_of_its_text_streamed_or_not(client):
    asked: Any = {"model": "scripted", "input": "both", "tools": TOOLS, "top_logprobs": 2}
    asked["include"] = ["message.output_text.logprobs"]
    whole = client.responses.create(**asked)
    content = whole.output[0].content[0]
    assert whole.top_logprobs == 2
    assert "".join(token.token for token in content.logprobs).startswith(content.text.rstrip())
    assert len(content.logprobs) < whole.usage.output_tokens / 2  # and not those of the calls
    for token in content.logprobs:
        assert bytes(token.bytes).decode() == token.token
        assert token.logprob <= token.top_logprobs[0].logprob
        assert len(token.top_logprobs) == 2
    deltas = [event for event in client.responses.create(**asked, stream=True) if "output_text" in event.type]
    told = [token.token for event in deltas if event.type.endswith("delta") for token in event.logprobs]
    assert told == [token.token for token in content.logprobs]
    assert [token.token for token in deltas[-1].logprobs] == told
    plain = client.responses.create(model="scripted", input="hello", include=["message.output_text.logprobs"])
    tokens = plain.output[0].content[0].logprobs
    assert "".join(token.token for token in tokens) == plain.output_text
    assert tokens[0].top_logprobs == []


# In the background.


@pytest.fixture
def held() -> Iterator[tuple[OpenAI, Pace, str]]:
    pace = Pace()
    engine = chatty_engine(observer=pace, num_blocks=256, max_context=2048)
    with serving({"toy": engine}) as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client, pace, url
    asyncio.run(engine.aclose())


BACKGROUND: Any = {"model": "toy", "input": "x", "max_output_tokens": 40, "temperature": 0, "background": True}


def test_a_response_in_the_background_is_answered_at_once_and_come_for_later(held):
    client, pace, _ = held
    expected = client.responses.create(**{**BACKGROUND, "background": False})
    with pace.held():
        begun = client.responses.create(**BACKGROUND)
        assert (begun.status, begun.background, begun.output) == ("queued", True, [])
        assert client.responses.retrieve(begun.id).status in ("queued", "in_progress")
    eventually(lambda: client.responses.retrieve(begun.id).status not in ("queued", "in_progress"))
    ended = client.responses.retrieve(begun.id)
    assert (ended.status, ended.output_text) == ("incomplete", expected.output_text)
    assert client.responses.cancel(begun.id) == ended  # which is too late
    assert [item.type for item in client.responses.input_items.list(begun.id)] == ["message"]
    client.responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(begun.id)


def test_a_response_in_the_background_is_cancelled_or_deleted_while_it_runs(held):
    client, pace, url = held
    pace.step_s = 0.01
    endless: Any = {**BACKGROUND, "max_output_tokens": 1900}
    begun = client.responses.create(**endless)
    eventually(lambda: client.responses.retrieve(begun.id).status == "in_progress")
    cancelled = client.responses.cancel(begun.id)
    assert cancelled.status == "cancelled"
    assert cancelled == client.responses.retrieve(begun.id) == client.responses.cancel(begun.id)
    other = client.responses.create(**endless)
    client.responses.delete(other.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(other.id)
    eventually(lambda: metric(url, "spolia_requests_running") == 0)


def test_a_stream_in_the_background_goes_on_without_its_reader_and_is_read_on(held):
    client, pace, _ = held
    with pace.held():
        stream = client.responses.create(**BACKGROUND, stream=True)
        first = next(iter(stream))
        stream.close()
    id_ = first.response.id
    eventually(lambda: client.responses.retrieve(id_).status == "incomplete")
    rest = list(client.responses.retrieve(id_, stream=True, starting_after=first.sequence_number))
    assert rest[-1].response == client.responses.retrieve(id_)
    assert [event.sequence_number for event in rest] == list(range(1, len(rest) + 1))


def is_gone(url: str, id_: str) -> bool:
    paths = (f"responses/{id_}", f"responses/{id_}?stream=true", f"streams/{id_}")
    return [httpx.get(f"{url}/v1/{path}").status_code for path in paths] == [404, 404, 404]


@pytest.mark.parametrize("kept", [{"background": True}, {"resumable": True}, {"resumable": True, "store": False}])
def test_deleting_a_response_deletes_its_stream(held, kept):
    client, _, url = held
    body = {**BACKGROUND, "background": False, "stream": True, **kept}
    answer = httpx.post(f"{url}/v1/responses", json=body)
    id_ = answer.headers["x-request-id"]
    assert httpx.get(f"{url}/v1/streams/{id_}").text == answer.text
    client.responses.delete(id_)
    assert is_gone(url, id_)
    with pytest.raises(openai.NotFoundError, match="no response"):
        client.responses.delete(id_)


@pytest.mark.parametrize("kept", [{"background": True}, {"resumable": True}, {"resumable": True, "store": False}])
def test_deleting_a_response_whose_stream_is_read_ends_both(held, kept):
    client, pace, url = held
    pace.step_s = 0.01
    body = {**BACKGROUND, "background": False, "max_output_tokens": 1900, "stream": True, **kept}
    with httpx.stream("POST", f"{url}/v1/responses", json=body, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        id_ = response.headers["x-request-id"]
        client.responses.delete(id_)
        assert is_gone(url, id_)
        assert sum("output_text.delta" in line for line in lines) < 1900
    eventually(lambda: metric(url, "spolia_requests_running") == 0)
    assert is_gone(url, id_)


def test_a_stream_in_the_background_outlives_the_time_that_streams_wait_for_a_reader(monkeypatch):
    forgotten, forget = [], ResumableStreams._forget
    monkeypatch.setattr(ResumableStreams.__init__, "__defaults__", (0.05, 1024))
    monkeypatch.setattr(ResumableStreams, "_forget", lambda self, id_: (forgotten.append(id_), forget(self, id_)))
    pace = Pace()
    engine = chatty_engine(observer=pace, num_blocks=256, max_context=2048)
    with serving({"toy": engine}) as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        expected = client.responses.create(**{**BACKGROUND, "background": False}).output_text
        with pace.held():
            stream = client.responses.create(**BACKGROUND, stream=True)
            id_ = next(iter(stream)).response.id
            stream.close()
            eventually(lambda: forgotten == [id_])
        eventually(lambda: client.responses.retrieve(id_).status == "incomplete")
        ended = client.responses.retrieve(id_)
        assert (ended.output_text, ended.incomplete_details.reason) == (expected, "max_output_tokens")
    asyncio.run(engine.aclose())


def test_what_fails_in_the_background_is_told_to_who_comes_for_it():
    engine = chatty_engine(observer=Pace(step_s=0.01), num_blocks=256, max_context=2048)
    with serving({"toy": engine}) as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        begun = client.responses.create(**{**BACKGROUND, "max_output_tokens": 1900})
        eventually(lambda: engine.stats.num_running == 1)
        asyncio.run(engine.aclose())
        eventually(lambda: client.responses.retrieve(begun.id).status == "failed")
        assert "cut off" in client.responses.retrieve(begun.id).error.message


# Streams that are resumed.


def test_a_dropped_stream_goes_on_and_is_read_to_its_end_from_any_event():
    engine = chatty_engine(observer=Pace(step_s=0.01))
    with serving({"toy": engine}) as url:
        body = {"prompt": [5], "max_tokens": 60, "temperature": 0, "stream": True, "resumable": True}
        body |= {"return_token_ids": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
            stream_id = response.headers["x-request-id"]
            lines = response.iter_lines()
            first = [next(lines) for _ in range(6)]
        assert first[0] == "id: 0"

        def rest(**sent: Any) -> list[str]:
            with httpx.stream("GET", f"{url}/v1/streams/{stream_id}", timeout=30, **sent) as response:
                assert response.status_code == 200
                return list(response.iter_lines())

        whole = rest()
        ids = [
            id_
            for line in whole
            if line.startswith("data: {")
            for id_ in json.loads(line[6:])["choices"][0]["token_ids"]
        ]
        assert ids == toy_answer([5], 60)
        assert whole[-2:] == ["data: [DONE]", ""]
        assert whole[:6] == first
        assert rest(params={"after": "1"}) == whole[6:]
        assert rest(headers={"last-event-id": "1"}) == whole[6:]
        for never_came in ("1000", "x"):
            refused = httpx.get(f"{url}/v1/streams/{stream_id}", params={"after": never_came})
            assert refused.status_code == 400
            assert "the id of the last event that came" in refused.json()["error"]["message"]
        assert httpx.get(f"{url}/v1/streams/cmpl-none").status_code == 404
        assert engine.stats.counters.num_finished == {"length": 1}
    asyncio.run(engine.aclose())


def test_a_stream_that_nobody_comes_back_to_is_aborted_and_forgotten():
    async def test() -> None:
        streams = ResumableStreams(kept_s=0.05)
        aborted = asyncio.Event()

        async def events():
            yield b"data: 1\n\n"
            await aborted.wait()

        response = streams.open("s", events(), abort=aborted.set, headers={})
        sent = []

        async def receive():
            while not sent:
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        await response({"type": "http"}, receive, send)
        assert not aborted.is_set()
        await asyncio.wait_for(aborted.wait(), 5)
        assert streams._by_id == {}

    asyncio.run(test())


def test_a_stream_whose_reader_never_comes_is_aborted_and_forgotten():
    async def test() -> None:
        streams = ResumableStreams(kept_s=0.05)
        aborted = asyncio.Event()

        async def events():
            yield b"data: 1\n\n"
            await aborted.wait()

        streams.open("s", events(), abort=aborted.set, headers={})  # and its response is never begun
        await asyncio.wait_for(aborted.wait(), 5)
        assert streams._by_id == {}

    asyncio.run(test())


def test_without_the_wish_a_dropped_stream_is_aborted():
    engine = chatty_engine(observer=Pace(step_s=0.01))
    with serving({"toy": engine}) as url:
        body = {"prompt": [5], "max_tokens": 400, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            assert text_of(toy_answer([5], 1)) is not None
            next(lines)
        eventually(lambda: engine.stats.counters.num_finished.get("abort") == 1, timeout_s=5)
    asyncio.run(engine.aclose())
