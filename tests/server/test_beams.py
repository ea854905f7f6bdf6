"""Beams over HTTP are those of Python, and what does not go with them is refused by name."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import pytest

from engine.toy import EOS, toy_engine
from spolia.engine import LLM, BeamParams, SamplingParams

from .harness import ChattyToy, chatty_engine, serving

PROMPT = [5, 6, 7, 5, 6, 7]


@pytest.fixture(scope="module")
def url():
    engine = chatty_engine(eos_token_ids=[EOS], num_blocks=200)
    with serving({"toy": engine}) as url:
        yield url
    asyncio.run(engine.aclose())


def complete(url, **body):
    return httpx.post(
        f"{url}/v1/completions",
        json={"prompt": PROMPT, "max_tokens": 8, "return_token_ids": True, **body},
        timeout=60,
    )


WORD = {"force_words_ids": (((70, 71),),)}
CASES = [
    ({"use_beam_search": True, "n": 3}, {"num_beams": 3}),
    ({"use_beam_search": True, "n": 2, "best_of": 5, "length_penalty": 0.5}, {"num_beams": 5, "length_penalty": 0.5}),
    (
        {"use_beam_search": True, "n": 2, "best_of": 4, "logprobs": 0, "length_penalty": 3.0},
        {"num_beams": 4, "length_penalty": 3.0, "processing": SamplingParams(logprobs=0)},
    ),
    ({"num_beams": 4, "early_stopping": True, "temperature": 0}, {"num_beams": 4, "early_stopping": True}),
    ({"use_beam_search": True, "early_stopping": "never"}, {"num_beams": 1, "early_stopping": "never"}),
    (
        {"num_beams": 4, "n": 4, "num_beam_groups": 2, "diversity_penalty": 3.0},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 3.0},
    ),
    ({"num_beams": 3, "force_words_ids": [[70, 71]]}, {"num_beams": 3, **WORD}),
    (
        {"num_beams": 3, "n": 3, "do_sample": True, "seed": 9, "temperature": 1.5, "top_k": 40},
        {"num_beams": 3, "sampling": SamplingParams(seed=9, temperature=1.5, top_k=40)},
    ),
    (
        {"num_beams": 3, "n": 3, "presence_penalty": 2.0, "bad_words": ["a"], "stop": "e", "logprobs": 2},
        {"num_beams": 3, "processing": SamplingParams(presence_penalty=2.0, bad_words=("a",), stop="e", logprobs=2)},
    ),
    (
        {"num_beams": 3, "n": 2, "guided_regex": "[a-c]{4}|[x-z]{6}"},
        {"num_beams": 3, "processing": SamplingParams(structured_outputs={"regex": "[a-c]{4}|[x-z]{6}"})},
    ),
]


@pytest.mark.parametrize(("fields", "params"), CASES, ids=str)
def test_beams_over_http_are_those_of_python(url, fields, params):
    reply = complete(url, **fields)
    assert reply.status_code == 200, reply.text
    reply = reply.json()
    with LLM(replace(toy_engine(eos_token_ids=[EOS], num_blocks=200), model=ChattyToy())) as llm:
        expected = llm.beam_search(PROMPT, BeamParams(max_tokens=8, num_return_sequences=fields.get("n", 1), **params))
    assert [tuple(choice["token_ids"]) for choice in reply["choices"]] == [beam.token_ids for beam in expected]
    assert [choice["text"] for choice in reply["choices"]] == [beam.text for beam in expected]
    assert [choice["finish_reason"] for choice in reply["choices"]] == [beam.finish_reason for beam in expected]
    assert [beam["score"] for beam in reply["spolia"]["beams"]] == [beam.score for beam in expected]
    assert reply["usage"]["prompt_tokens"] == len(PROMPT)
    assert reply["usage"]["completion_tokens"] == sum(len(beam.token_ids) for beam in expected)
    assert reply["system_fingerprint"]
    assert [choice["stop_reason"] for choice in reply["choices"]] == [beam.stop_reason for beam in expected]
    if "logprobs" in fields:
        shown = [choice["logprobs"]["token_logprobs"] for choice in reply["choices"]]
        assert shown == [[token.logprob for token in beam.logprobs] for beam in expected]


def test_each_of_several_prompts_has_its_beams_and_its_echo(url):
    reply = complete(url, prompt=["ab", "cd"], num_beams=2, n=2, echo=True).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [choice["text"][:2] for choice in reply["choices"]] == ["ab", "ab", "cd", "cd"]
    assert reply["usage"]["prompt_tokens"] == 4
    alone = complete(url, prompt=["cd"], num_beams=2, n=2, echo=True).json()
    assert [choice["text"] for choice in reply["choices"][2:]] == [choice["text"] for choice in alone["choices"]]


def test_beams_explain_themselves(url):
    fields = {"num_beams": 3, "n": 2, "explain": True, "explain_candidates": 4, "suppress_tokens": [7]}
    plain = complete(url, num_beams=3, n=2, suppress_tokens=[7]).json()
    reply = complete(url, **fields).json()
    assert reply["choices"] == plain["choices"]
    told = reply["spolia"]["choices"]
    assert [one["reason"] for one in told] == ["full"] * 2  # the plain search had computed it
    for one, choice in zip(told, reply["choices"], strict=True):
        assert [token["token_id"] for token in one["tokens"]] == choice["token_ids"]
        for token in one["tokens"]:
            assert token["chosen"] == "beam search"
            assert [stage["name"] for stage in token["stages"]] == ["model", "suppress_tokens"]
            assert len(token["options"]) == 4
            scores = [option["score"] for option in token["options"]]
            assert scores == sorted(scores, reverse=True)
            taken = token["options"][token["rank"]]
            assert (taken["score"], taken["is_kept"]) == (token["score"], True)
    assert told[0]["tokens"][-1]["score"] / 8 == reply["spolia"]["beams"][0]["score"]
    assert "tokens" not in complete(url, num_beams=2, explain=True).json()["spolia"]["choices"][0]


def test_chats_have_beams(url):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "num_beams": 3, "n": 2}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    assert [choice["message"]["role"] for choice in reply["choices"]] == ["assistant"] * 2
    assert len(reply["spolia"]["beams"]) == 2
    del body["max_tokens"]
    refused = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert refused.status_code == 400
    assert "max_tokens" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"num_beams": 2, "n": 3}, "n"),
        ({"num_beams": 0}, "num_beams"),
        ({"num_beams": 99}, "num_beams"),
        ({"num_beams": 2, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"num_beams": 2, "echo": True, "logprobs": 1}, "echo"),
        ({"num_beams": 2, "guidance_scale": 2.0}, "guidance_scale"),
        ({"num_beams": 2, "synthid": {"keys": [1]}}, "synthid"),
        ({"num_beams": 2, "guided_regex": "("}, "guided_regex"),
        ({"num_beams": 2, "dola_layers": "low"}, "dola_layers"),
        ({"num_beams": 2, "allowed_token_ids": [5], "suppress_tokens": [5]}, None),
        ({"num_beams": 2, "temperature": 0.7}, "temperature"),
        ({"num_beams": 2, "top_p": 0.7}, "top_p"),
        ({"num_beams": 2, "do_sample": True, "temperature": 0}, "do_sample"),
        ({"num_beams": 4, "num_beam_groups": 3}, "num_beam_groups"),
        ({"num_beams": 2, "early_stopping": "often"}, "early_stopping"),
        ({"num_beams": 2, "force_words_ids": [[999]]}, "force_words_ids"),
        ({"num_beams": 2, "force_words": ["a very long phrase"]}, "force_words_ids"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"do_sample": True}, "do_sample"),
        ({"force_words": ["x"]}, "force_words"),
        ({"num_beams": 1, "diversity_penalty": 1.0}, "diversity_penalty"),
    ],
    ids=str,
)
def test_what_does_not_go_with_beams_or_only_with_them_is_refused(url, fields, param):
    reply = complete(url, **fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_a_phrase_counts_once_however_many_ways_there_are_to_begin_it(url):
    """ "zigzag" may come with a space before it, which alone would be too long."""
    reply = complete(url, num_beams=3, force_words=["zigzag"], max_tokens=6)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["text"] == "zigzag"


def test_a_phrase_that_must_come_comes(url):
    reply = complete(url, num_beams=3, force_words=["zig"], max_tokens=10).json()
    assert "zig" in reply["choices"][0]["text"]
