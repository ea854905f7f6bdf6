"""`best_of`, beams and contrastive search stream: what a client puts together is the answer that comes whole."""

from __future__ import annotations

import asyncio
import json
import threading
from functools import partial
from itertools import count
from typing import Any

import httpx
import pytest
from openai import OpenAI

from engine.toy import EOS
from spolia.engine import BeamParams, ContrastiveParams
from spolia.errors import Overloaded
from spolia.server import rendering, search
from spolia.server.config import ServerConfig

from .harness import ChattyToy, Pace, ThinkingTemplate, chatty_engine, eventually, scripted_engine, serving
from .test_tools import SCRIPT, ask, streamed

PROMPT = [5, 6, 7, 5, 6, 7]
MESSAGES: Any = [{"role": "user", "content": "hi"}]
SALTS = map(str, count())  # each request finds the cache cold

CONTRASTIVE = {"penalty_alpha": 0.6, "top_k": 4}
BEST_OF = {"best_of": 4, "n": 2, "seed": 5, "temperature": 1.3}
BEAMS = {"num_beams": 3, "n": 2}


@pytest.fixture(scope="module")
def url():
    engine = chatty_engine(eos_token_ids=[EOS], num_blocks=256)
    with serving({"toy": engine}) as url:
        yield url
    asyncio.run(engine.aclose())


@pytest.fixture(scope="module")
def client(url):
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def events(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = httpx.post(f"{url}/v1/completions", json={**body, "stream": True, "cache_salt": next(SALTS)}, timeout=60)
    assert reply.status_code == 200, reply.text
    *lines, done = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


def put_together(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a stream in the form of those of a whole answer."""
    choices: dict[int, dict[str, Any]] = {}
    for piece in (piece for chunk in chunks for piece in chunk["choices"]):
        whole = choices.setdefault(piece["index"], {"index": piece["index"], "text": "", "logprobs": None})
        whole["text"] += piece["text"]
        if piece["logprobs"] is not None:
            earlier = whole["logprobs"] or {name: [] for name in piece["logprobs"]}
            whole["logprobs"] = {name: earlier[name] + more for name, more in piece["logprobs"].items()}
        for name in ("token_ids", "prompt_token_ids"):
            if name in piece:
                whole[name] = whole.get(name, []) + piece[name]
        assert whole.get("finish_reason") is None, "a choice went on after its end"
        whole |= {name: piece[name] for name in ("finish_reason", "stop_reason")}
        if "prompt_logprobs" in piece:
            whole["prompt_logprobs"] = piece["prompt_logprobs"]
    return [choices[index] for index in sorted(choices)]


@pytest.mark.parametrize(
    "fields",
    [
        CONTRASTIVE,
        CONTRASTIVE | {"logprobs": 2, "stop_token_ids": [89]},
        CONTRASTIVE | {"prompt": ["ab", "cd"], "echo": True},
        CONTRASTIVE | {"guided_regex": "[a-c]{4}|[x-z]{6}"},
        CONTRASTIVE | {"truncate_prompt_tokens": 3},
        BEST_OF,
        BEST_OF | {"n": 1, "logprobs": 1, "stop": ["e", "a"]},
        BEST_OF | {"prompt": ["ab", "cd"], "echo": True, "logprobs": 0, "prompt_logprobs": 1},
        BEAMS,
        BEAMS | {"logprobs": 2, "stop_token_ids": [89], "truncate_prompt_tokens": 3},
        BEAMS | {"prompt": ["ab", "cd"], "echo": True},
        {"use_beam_search": True, "n": 2, "best_of": 4, "length_penalty": 0.3, "early_stopping": True},
        {"use_beam_search": True, "n": 2, "best_of": 4, "logprobs": 1, "prompt": ["ab", "cd"]},
        {"num_beams": 4, "n": 3, "num_beam_groups": 2, "diversity_penalty": 2.0},
        {"num_beams": 3, "force_words_ids": [[70, 71]]},
        {"num_beams": 3, "n": 3, "do_sample": True, "seed": 2},
    ],
    ids=str,
)
def test_the_sum_of_a_stream_is_the_whole_answer(url, fields):
    body = {"prompt": PROMPT, "max_tokens": 8, "return_token_ids": True, **fields}
    whole = httpx.post(f"{url}/v1/completions", json={**body, "cache_salt": next(SALTS)}, timeout=60).json()
    *chunks, last = events(url, {**body, "stream_options": {"include_usage": True}})
    assert put_together(chunks) == whole["choices"]
    assert last["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole["usage"][name]
    assert last.get("spolia", {}).get("beams") == whole.get("spolia", {}).get("beams")
    assert {chunk["id"] for chunk in chunks} == {last["id"]}


def test_contrastive_search_comes_token_by_token(url):
    chunks = events(url, {"prompt": "ab", "max_tokens": 8, "return_token_ids": True, **CONTRASTIVE})
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks] == [1] * 8
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 7 + ["length"]


@pytest.mark.parametrize("fields", [CONTRASTIVE, BEST_OF, BEAMS], ids=str)
def test_what_a_stream_tells_of_itself_is_what_the_whole_answer_tells(url, fields):
    asked = {"explain": True, "explain_candidates": 2, "timings_per_token": True}
    body = {"prompt": PROMPT, "max_tokens": 4, **fields, **asked}
    whole = httpx.post(f"{url}/v1/completions", json={**body, "cache_salt": next(SALTS)}, timeout=60).json()
    *chunks, last = events(url, {**body, "stream_options": {"continuous_usage_stats": True}})
    for told, expected in zip(last["spolia"]["choices"], whole["spolia"]["choices"], strict=True):
        assert told["tokens"] == expected["tokens"]
    assert chunks[-1]["usage"]["total_tokens"] == last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert whole["timings"]["predicted_n"] == 4
    assert all(chunk["timings"]["prompt_n"] >= 0 for chunk in chunks)
    later = httpx.get(f"{url}/v1/cache/explain/{last['id']}").json()
    assert len(later["choices"]) == len(whole["spolia"]["choices"])


@pytest.mark.parametrize("fields", [CONTRASTIVE, BEST_OF, BEAMS], ids=str)
def test_openais_client_reads_a_chat_of_it(client, fields):
    body = {"model": "toy", "messages": MESSAGES, "max_tokens": 6, "logprobs": True}
    whole = client.chat.completions.create(**body, extra_body={**fields, "cache_salt": next(SALTS)})
    texts, reasons, logprobs, roles = {}, {}, {}, []
    chunks = client.chat.completions.create(
        **body, stream=True, extra_body={**fields, "cache_salt": next(SALTS), "resumable": True}
    )
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            logprobs.setdefault(choice.index, []).extend(choice.logprobs.content if choice.logprobs else [])
            roles += [choice.delta.role] if choice.delta.role else []
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert logprobs == {choice.index: choice.logprobs.content for choice in whole.choices}
    assert roles == ["assistant"] * len(whole.choices)


@pytest.mark.parametrize("question", ["both", "hello"])
def test_the_best_of_several_answers_calls_tools_in_a_stream(question):
    engine = scripted_engine(SCRIPT, num_blocks=256, max_context=2048)
    with serving({"scripted": engine}) as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        asked = {"extra_body": {"best_of": 3}}
        (choice,) = ask(client, question, **asked).choices
        content, calls, reasons = streamed(ask(client, question, stream=True, **asked))
    asyncio.run(engine.aclose())
    assert content == (choice.message.content or "")
    assert reasons == [choice.finish_reason]
    whole = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    assert [(call["name"], call["arguments"]) for call in calls] == whole


@pytest.mark.parametrize("fields", [CONTRASTIVE, {"best_of": 3}, {"num_beams": 2}], ids=str)
def test_thoughts_of_it_are_told_apart_in_a_stream(fields):
    engine = scripted_engine(
        {"user: hi": "<think>\nWell.\n</think>\n\nHello!"},
        model=ChattyToy(chat_template=ThinkingTemplate()),
        num_blocks=256,
    )
    with serving({"toy": engine}) as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        body = {"model": "toy", "messages": MESSAGES, "max_tokens": 60, "extra_body": fields}
        message = client.chat.completions.create(**body).choices[0].message
        deltas = [
            chunk.choices[0].delta for chunk in client.chat.completions.create(**body, stream=True) if chunk.choices
        ]
    asyncio.run(engine.aclose())
    assert "Well." in message.reasoning_content
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == message.content == "Hello!"


@pytest.mark.parametrize(
    ("fields", "param"),
    [(CONTRASTIVE | {"max_tokens": 100_000}, "prompt"), (BEAMS | {"force_words_ids": [[999]]}, "force_words_ids")],
    ids=str,
)
def test_what_can_never_be_answered_is_refused_before_a_stream_begins(url, fields, param):
    reply = httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT, "stream": True, **fields}, timeout=60)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [
        CONTRASTIVE | {"allowed_token_ids": [5], "suppress_tokens": [5]},
        BEAMS | {"allowed_token_ids": [5], "suppress_tokens": [5]},
        {"num_beams": 3, "force_words_ids": [[70, 71]], "guided_regex": "[ab]{3}"},
    ],
    ids=str,
)
def test_what_fails_while_it_streams_is_its_last_event(url, fields):
    body = {"prompt": PROMPT, "max_tokens": 4, **fields}
    whole = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert whole.status_code == 400
    reply = httpx.post(f"{url}/v1/completions", json={**body, "stream": True}, timeout=60)
    (event,) = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    assert event == whole.json()
    assert "loosen its constraints" in event["error"]["message"]


@pytest.mark.parametrize("fields", [CONTRASTIVE, BEAMS], ids=str)
def test_a_search_that_takes_too_long_says_so(fields):
    engine = chatty_engine(num_blocks=256, observer=Pace(step_s=0.02))
    with serving({"toy": engine}, ServerConfig(port=0, request_timeout_s=0.2)) as url:
        body = {"prompt": PROMPT, "max_tokens": 100, **fields}
        whole = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        stream = httpx.post(f"{url}/v1/completions", json={**body, "stream": True}, timeout=60)
    asyncio.run(engine.aclose())
    assert whole.status_code == 504  # a client that repeated it by itself would have the same again
    assert "took longer than 0.2 s" in whole.json()["error"]["message"]
    assert "took longer than 0.2 s" in stream.text
    assert "[DONE]" not in stream.text


@pytest.mark.parametrize("is_resumable", [False, True])
@pytest.mark.parametrize("fields", [BEST_OF, BEAMS], ids=str)
def test_while_nothing_is_known_a_stream_shows_signs_of_life(monkeypatch, fields, is_resumable):
    monkeypatch.setattr(rendering, "with_signs_of_life", partial(rendering.with_signs_of_life, interval_s=0.01))
    pace = Pace()
    engine = chatty_engine(num_blocks=256, observer=pace)
    body = {"model": "toy", "prompt": "ab", "max_tokens": 4, "stream": True}
    with serving({"toy": engine}) as url:
        with pace.held():
            asked = {**body, **fields, "resumable": is_resumable}
            with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=60) as stream:
                assert ": searching" in next(line for line in stream.iter_lines() if not line.startswith("id:"))
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:  # and clients pass over them
            assert sum(len(chunk.choices) for chunk in client.completions.create(**body, extra_body=fields)) == 2
    asyncio.run(engine.aclose())


def test_a_prompt_that_finds_few_beams_leaves_the_next_prompts_choices_where_they_are(url):
    body = {
        "prompt": ["ab", "cdef"],
        "max_tokens": 4,
        "num_beams": 2,
        "n": 2,
        "echo": True,
        "stop": "x",
        "guided_regex": "yyy",
    }
    whole = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == [(0, "abyyy"), (2, "cdefyyy")]
    assert whole["usage"]["prompt_tokens"] == len("ab") + len("cdef")
    streamed = put_together(events(url, body))
    assert [(choice["index"], choice["text"]) for choice in streamed] == [(0, "abyyy"), (2, "cdefyyy")]


def test_a_search_that_is_to_be_resumed_keeps_its_model(monkeypatch):
    answers = []
    made = search._SearchAnswer
    monkeypatch.setattr(search, "_SearchAnswer", lambda *given: answers.append(made(*given)) or answers[-1])
    pace = Pace()
    engine = chatty_engine(num_blocks=256, observer=pace)
    body = {"prompt": PROMPT, "max_tokens": 4, "stream": True, "resumable": True, **BEAMS}
    with serving({"toy": engine}) as url:
        with pace.held():
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
                assert stream.status_code == 200
            (answer,) = answers
            served = answer._served
            eventually(lambda: not served.num_holds)  # the client has gone
            assert not served.is_idle
        eventually(lambda: served.is_idle)
    asyncio.run(engine.aclose())


@pytest.mark.parametrize("name", ["contrastive_search", "beam_search"])
def test_a_search_whose_engine_is_closed_says_so(name):
    async def main():
        engine = chatty_engine(num_blocks=256, observer=Pace(step_s=0.005))
        params = {"contrastive_search": ContrastiveParams, "beam_search": BeamParams}[name](max_tokens=400)
        steps = getattr(engine, name)(PROMPT, params)
        await anext(steps)
        closing = asyncio.create_task(engine.aclose())
        with pytest.raises(Overloaded, match="closed"):
            async for _ in steps:
                pass
        await closing

    asyncio.run(main())


@pytest.mark.parametrize("fields", [BEST_OF, BEAMS], ids=str)
def test_while_nothing_is_known_a_stream_tells_how_far_its_prompts_are(fields):
    engine = chatty_engine(num_blocks=256, max_batch_tokens=8, observer=Pace(step_s=0.15))
    with serving({"toy": engine}) as url:
        chunks = events(url, {"prompt": ["a" * 40, "b" * 40], "max_tokens": 1, "return_progress": True, **fields})
    asyncio.run(engine.aclose())
    told = [(chunk["choices"][0]["index"], chunk["prompt_progress"]) for chunk in chunks if "prompt_progress" in chunk]
    assert {choice for choice, _ in told} <= {0, 1, 2, 3}
    assert any(0 < progress["processed"] < progress["total"] == 40 for _, progress in told)
    assert [choice["index"] for choice in put_together(chunks)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "fields"), [("contrastive_search", CONTRASTIVE), ("beam_search", BEAMS)], ids=["contrastive", "beams"]
)
@pytest.mark.parametrize("with_progress", [False, True])
def test_a_client_that_leaves_a_stream_ends_its_search(name, fields, with_progress, caplog):
    pace = Pace(step_s=0.005)
    engine = chatty_engine(observer=pace, num_blocks=256)
    search, has_ended_early = getattr(engine, name), threading.Event()

    def watched(*args, **settings):
        async def watch(steps):
            try:
                async for step in steps:
                    yield step
            except (asyncio.CancelledError, GeneratorExit):
                has_ended_early.set()
                raise

        return watch(search(*args, **settings))

    setattr(engine, name, watched)
    body = {"prompt": PROMPT, "max_tokens": 100, "stream": True, "return_progress": with_progress, **fields}
    with serving({"toy": engine}) as url:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
            if name == "contrastive_search":
                assert json.loads(next(stream.iter_lines()).removeprefix("data: "))["choices"]
        assert has_ended_early.wait(timeout=60)
    asyncio.run(engine.aclose())
    assert not [record for record in caplog.records if record.exc_info]


def test_a_client_that_leaves_ends_all_of_several_answers():
    engine = chatty_engine(observer=Pace(step_s=0.005), num_blocks=256)
    with serving({"toy": engine}) as url:
        body = {"prompt": PROMPT, "max_tokens": 100, "stream": True, **BEST_OF}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
            assert stream.status_code == 200
        eventually(lambda: engine.stats.counters.num_finished.get("abort") == 4)
    asyncio.run(engine.aclose())
