"""Contrastive search over HTTP is that of Python, and what does not go with it is refused by name."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from urllib.parse import urlsplit

import httpx
import pytest

from engine.toy import EOS, toy_engine
from spolia.engine import LLM, ContrastiveParams, SamplingParams

from .harness import ChattyToy, Pace, chatty_engine, serving

PROMPT = [5, 6, 7, 5, 6, 7]


@pytest.fixture(scope="module")
def url():
    engine = chatty_engine(eos_token_ids=[EOS], num_blocks=200)
    with serving({"toy": engine}) as url:
        yield url
    asyncio.run(engine.aclose())


def complete(url, **body):
    body = {"prompt": PROMPT, "max_tokens": 8, "return_token_ids": True, **body}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def in_python(prompt, **params):
    with LLM(replace(toy_engine(eos_token_ids=[EOS], num_blocks=200), model=ChattyToy())) as llm:
        return llm.contrastive_search(prompt, ContrastiveParams(**{"max_tokens": 8, **params}))


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"penalty_alpha": 0.6, "top_k": 4, "temperature": 0}, {"penalty_alpha": 0.6, "top_k": 4}),
        ({"penalty_alpha": 0.3}, {"penalty_alpha": 0.3}),
        ({"penalty_alpha": 1, "top_k": 9, "n": 1, "seed": 3}, {"penalty_alpha": 1.0, "top_k": 9}),
        ({"penalty_alpha": 0.6, "ignore_eos": True}, {"ignore_eos": True}),
        (
            {"penalty_alpha": 0.6, "presence_penalty": 2.0, "bad_words": ["a"], "stop": "e", "logprobs": 2},
            {"processing": SamplingParams(presence_penalty=2.0, bad_words=("a",), stop="e", logprobs=2)},
        ),
        (
            {"penalty_alpha": 0.6, "guided_regex": "[a-c]{4}|[x-z]{6}"},
            {"processing": SamplingParams(structured_outputs={"regex": "[a-c]{4}|[x-z]{6}"})},
        ),
    ],
    ids=str,
)
def test_an_answer_over_http_is_that_of_python(url, fields, params):
    expected = in_python(PROMPT, **params)
    for _ in range(2):  # the second time all of it is cached
        reply = complete(url, **fields)
        assert reply.status_code == 200, reply.text
        reply = reply.json()
        (choice,) = reply["choices"]
        assert tuple(choice["token_ids"]) == expected.token_ids
        assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish_reason)
        if "logprobs" in fields:
            assert choice["logprobs"]["token_logprobs"] == [token.logprob for token in expected.logprobs]
        usage = reply["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), len(expected.token_ids))
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0  # the prompt's states are computed anew
        assert reply["system_fingerprint"]
        assert "spolia" not in reply


def test_a_stop_id_ends_the_answer_and_is_not_in_its_text(url):
    third = in_python(PROMPT).token_ids[2]
    reply = complete(url, penalty_alpha=0.6, stop_token_ids=[third])
    (choice,) = reply.json()["choices"]
    expected = in_python(PROMPT, stop_token_ids=(third,))
    assert tuple(choice["token_ids"]) == expected.token_ids
    assert choice["text"] == expected.text == ChattyToy().tokenizer.decode(expected.token_ids[:-1])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", third)
    assert expected.stop_reason == third


def test_each_of_several_prompts_has_its_answer_and_its_echo(url):
    reply = complete(url, prompt=["ab", "cd"], penalty_alpha=0.6, echo=True).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    expected = [text + in_python(list(text.encode())).text for text in ("ab", "cd")]
    assert [choice["text"] for choice in reply["choices"]] == expected
    assert reply["usage"]["prompt_tokens"] == 4


def test_it_explains_itself(url):
    fields = {"penalty_alpha": 0.6, "top_k": 3, "explain": True, "explain_candidates": 2, "logit_bias": {"65": 1.0}}
    reply = complete(url, **fields).json()
    (told,) = reply["spolia"]["choices"]
    assert told["num_prompt_tokens"] == len(PROMPT)
    assert [token["token_id"] for token in told["tokens"]] == reply["choices"][0]["token_ids"]
    for token in told["tokens"]:
        assert token["chosen"] == "contrastive search"
        assert [stage["name"] for stage in token["stages"]] == ["model", "logit_bias"]
        first, second = token["options"]
        assert (first["token_id"], first["is_kept"], second["is_kept"]) == (token["token_id"], True, False)
        assert first["score"] == token["score"] >= second["score"]
        assert first["score"] == pytest.approx(0.4 * first["probability"] - 0.6 * first["likeness"], abs=1e-6)
    asked_later = httpx.get(f"{url}/v1/cache/explain/{reply['id']}").json()
    assert asked_later["choices"][0]["num_prompt_tokens"] == len(PROMPT)


def test_chats_have_it(url):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 6, "penalty_alpha": 0.6}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    expected = in_python(list(b"user: hi\nassistant:"), max_tokens=6)
    assert reply["choices"][0]["message"]["content"] == expected.text
    del body["max_completion_tokens"]
    refused = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    refused = httpx.post(f"{url}/v1/chat/completions", json={**body, "mcp": True}, timeout=60)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "mcp")


def test_without_a_penalty_it_is_a_plain_answer(url):
    plain = complete(url, temperature=0).json()["choices"]
    assert complete(url, temperature=0, penalty_alpha=0).json()["choices"] == plain
    assert complete(url, temperature=0, penalty_alpha=None).json()["choices"] == plain


def test_a_neighbours_answer_is_what_it_is_alone(url):
    asked = {"prompt": "a neighbour", "max_tokens": 40, "seed": 1}
    alone = complete(url, **asked).json()["choices"]
    searched = complete(url, penalty_alpha=0.6).json()["choices"]
    with ThreadPoolExecutor(4) as pool:
        searches = [pool.submit(complete, url, penalty_alpha=0.6) for _ in range(2)]
        neighbours = [pool.submit(complete, url, **asked) for _ in range(2)]
        assert [each.result().json()["choices"] for each in neighbours] == [alone] * 2
        assert [each.result().json()["choices"] for each in searches] == [searched] * 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"penalty_alpha": 1.5}, "penalty_alpha"),
        ({"penalty_alpha": -0.1}, "penalty_alpha"),
        ({"penalty_alpha": "much"}, "penalty_alpha"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 257}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100_000}, "prompt"),
        ({"num_beams": 2}, "penalty_alpha"),
        ({"do_sample": True}, "do_sample"),
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"priority": 90}, "priority"),
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"guided_regex": "a("}, "guided_regex"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"dola_layers": "low"}, "dola_layers"),
    ],
    ids=str,
)
def test_bad_ranges_and_what_does_not_go_with_it_are_refused_by_name(url, fields, param):
    reply = complete(url, **{"penalty_alpha": 0.6, **fields})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_a_client_that_leaves_ends_its_search():
    pace = Pace()
    engine = chatty_engine(observer=pace, num_blocks=200)
    search, has_begun, is_cancelled = engine.contrastive_search, threading.Event(), threading.Event()

    async def watched(*args, **settings):
        has_begun.set()
        try:
            async for step in search(*args, **settings):
                yield step
        except asyncio.CancelledError:
            is_cancelled.set()
            raise

    engine.contrastive_search = watched
    with serving({"toy": engine}) as url, pace.held():
        body = json.dumps({"prompt": PROMPT, "max_tokens": 8, "penalty_alpha": 0.6}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: toy\r\nContent-Type: application/json\r\nContent-Length: "
        with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port)) as connection:
            connection.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
            assert has_begun.wait(timeout=60)
        assert is_cancelled.wait(timeout=60)
    asyncio.run(engine.aclose())
