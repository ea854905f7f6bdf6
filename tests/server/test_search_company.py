"""Beam and contrastive searches take turns of sessions and call tools, as any answer does, streamed or whole."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI

from engine.toy import EOS

from .harness import Pace, chatty_engine, eventually, scripted_engine, serving
from .test_tools import SCRIPT, TOOLS, ask, streamed

CONTRASTIVE = {"penalty_alpha": 0.6, "top_k": 4}
BEAMS = {"num_beams": 3}
SEARCHES: list[dict[str, Any]] = [
    CONTRASTIVE,
    BEAMS,
    {"use_beam_search": True, "best_of": 4},
    {"num_beams": 3, "do_sample": True, "seed": 5},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    {"num_beams": 3, "force_words_ids": [[40]]},
]


@pytest.fixture(scope="module")
def url():
    engine = chatty_engine(eos_token_ids=[EOS], num_blocks=512)
    with serving({"toy": engine}) as url:
        yield url
    asyncio.run(engine.aclose())


def post(url: str, path: str, **body: Any) -> Any:
    reply = httpx.post(f"{url}{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def open_session(url: str, **body: Any) -> str:
    session: str = post(url, "/v1/sessions", **(body or {"ttl": 100}))["id"]
    return session


def card(url: str, session: str) -> Any:
    return httpx.get(f"{url}/v1/sessions/{session}", timeout=60).json()


def complete(url: str, *, stream: bool = False, **body: Any) -> tuple[list[int], list[int], str]:
    """Ids of the prompt, ids of the answer, and its text."""
    body = {"max_tokens": 8, "return_token_ids": True, "stream": stream, **body}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    if not stream:
        (choice,) = reply.json()["choices"]
        return choice["prompt_token_ids"], choice["token_ids"], choice["text"]
    *lines, done = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    ids = [id_ for choice in choices for id_ in choice["token_ids"]]
    return choices[0]["prompt_token_ids"], ids, "".join(choice["text"] for choice in choices)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("fields", SEARCHES, ids=str)
def test_a_session_has_the_winners_ids_and_no_others(url, fields, stream):
    session, history = open_session(url), []
    for turn in range(3):
        added = [5 + turn, 6, 7]
        prompt, answer, text = complete(url, prompt=added, session=session, stream=stream, **fields)
        assert prompt == [*history, *added]
        assert (answer, text) == complete(url, prompt=prompt, **fields)[1:]
        history = [*prompt, *answer]
        assert (card(url, session)["num_tokens"], card(url, session)["num_turns"]) == (len(history), turn + 1)
    # What others generate goes on from the same ids.
    assert complete(url, prompt=[9], session=session)[0] == [*history, 9]


def test_beams_reuse_all_that_their_session_has(url):
    session = open_session(url)
    complete(url, prompt=list(range(20, 60)), session=session)
    before = card(url, session)["num_tokens"]
    body = {"prompt": [9, 8], "session": session, "max_tokens": 4, **BEAMS}
    usage = post(url, "/v1/completions", **body)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= before - 1
    assert usage["prompt_tokens"] == before + 2


@pytest.mark.parametrize("fields", [CONTRASTIVE, BEAMS], ids=str)
def test_a_chats_session_keeps_the_winner_as_its_reply(url, fields):
    session = open_session(url)
    for turn in range(2):
        body = {"messages": [{"role": "user", "content": f"Turn {turn}"}], "session": session, "max_tokens": 6}
        (choice,) = post(url, "/v1/chat/completions", **body, **fields)["choices"]
        messages = card(url, session)["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant"] * (turn + 1)
        assert messages[-1]["content"] == choice["message"]["content"]


@pytest.mark.parametrize("fields", SEARCHES, ids=str)
def test_turns_beside_each_other_are_what_they_are_alone(url, fields):
    def turns(salt: str, which: dict[str, Any], first: int) -> list[Any]:
        session = open_session(url, cache_salt=salt)
        asked = {"session": session, "cache_salt": salt, **which}
        return [complete(url, prompt=[first + turn, 6, 7], **asked) for turn in range(3)]

    kinds = [(fields, 5), (BEAMS, 11), (CONTRASTIVE, 17), ({"temperature": 0}, 23)]
    alone = [turns(f"alone {fields} {first}", which, first) for which, first in kinds]
    with ThreadPoolExecutor(len(kinds)) as pool:
        beside = [pool.submit(turns, f"beside {fields} {first}", which, first) for which, first in kinds]
        assert [each.result() for each in beside] == alone


@pytest.mark.parametrize("fields", [CONTRASTIVE, BEAMS], ids=str)
def test_a_search_that_is_left_leaves_its_session_as_it_was(fields):
    pace = Pace()
    engine = chatty_engine(observer=pace, num_blocks=256)
    with serving({"toy": engine}) as url:
        session = open_session(url)
        complete(url, prompt=[5, 6, 7], session=session)
        before = card(url, session)
        body = {"prompt": [9], "session": session, "max_tokens": 100, "stream": True, **fields}
        with pace.held(), httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
            assert stream.status_code == 200
            assert card(url, session)["is_busy"]
            busy = httpx.post(f"{url}/v1/completions", json={**body, "stream": False}, timeout=60)
            assert (busy.status_code, busy.json()["error"]["param"]) == (409, "session")
        eventually(lambda: not card(url, session)["is_busy"])
        after = card(url, session)
        assert [after[name] for name in ("num_tokens", "turns")] == [before[name] for name in ("num_tokens", "turns")]
        complete(url, prompt=[9], session=session, **fields)
    asyncio.run(engine.aclose())


def test_what_is_refused_leaves_its_session_free(url):
    session = open_session(url)
    body = {"prompt": [5], "session": session, "max_tokens": 100_000, **BEAMS}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 400
    assert complete(url, prompt=[5], session=session, **BEAMS)[0] == [5]


@pytest.fixture(scope="module")
def client():
    engine = scripted_engine(SCRIPT, num_blocks=256, max_context=2048)
    with serving({"scripted": engine}) as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client
    asyncio.run(engine.aclose())


def asked(client: OpenAI, question: str, fields: dict[str, Any], **more: Any) -> Any:
    return ask(client, question, max_tokens=200, extra_body=fields, **more)


def told(choice: Any) -> tuple[str, list[tuple[str, str]], str]:
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    return choice.message.content or "", calls, choice.finish_reason


@pytest.mark.parametrize("question", ["rome", "both", "hello"])
@pytest.mark.parametrize("fields", [CONTRASTIVE, {"num_beams": 2}], ids=str)
def test_a_winner_calls_tools_as_a_plain_answer_does(client, fields, question):
    plain = told(asked(client, question, {}).choices[0])
    assert told(asked(client, question, fields).choices[0]) == plain
    content, calls, reasons = streamed(asked(client, question, fields, stream=True))
    assert (content, [(call["name"], call["arguments"]) for call in calls], *reasons) == plain


@pytest.mark.parametrize("fields", [CONTRASTIVE, {"num_beams": 2}], ids=str)
def test_calls_that_must_be_and_strict_ones_are_of_their_schema(client, fields):
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    for settings in ({"tool_choice": "required"}, {"tools": strict}):
        body = {"model": "scripted", "messages": [{"role": "user", "content": "rome"}], "tools": TOOLS, **settings}
        reply = client.chat.completions.create(**body, max_tokens=200, extra_body=fields)
        (call,) = reply.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})


@pytest.mark.parametrize("fields", [CONTRASTIVE, {"num_beams": 2}], ids=str)
def test_a_tools_schema_that_cannot_be_compiled_is_refused_by_name(client, fields):
    wrong = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "thing"}}}]
    body = {"model": "scripted", "messages": [{"role": "user", "content": "rome"}], "tools": wrong, "max_tokens": 20}
    with pytest.raises(BadRequestError) as refused:
        client.chat.completions.create(**body, extra_body=fields)
    assert refused.value.param == "tools"
