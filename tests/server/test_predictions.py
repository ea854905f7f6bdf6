"""Speculation over HTTP: OpenAI's `prediction`, the switch, usage, metrics."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from openai import BadRequestError, OpenAI

from .harness import chatty_engine, metric, serving

MESSAGES = [{"role": "user", "content": "go"}]


@pytest.fixture(scope="module")
def url():
    engine = chatty_engine(speculation="auto", max_batch_tokens=64, num_blocks=256)
    with serving({"toy": engine}) as url:
        yield url
    asyncio.run(engine.aclose())


@pytest.fixture
def client(url):
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client, salt, **options):
    """A letter a token, drawn from four: no guess but the prediction is right for long."""
    extra = {"cache_salt": salt, "allowed_token_ids": list(b"abcd"), **options.pop("extra_body", {})}
    return client.chat.completions.create(
        model="toy", messages=MESSAGES, max_tokens=60, temperature=0.0, extra_body=extra, **options
    )


@pytest.mark.parametrize("as_parts", [False, True])
def test_a_prediction_that_comes_true_is_counted_as_openai_counts_it(client, url, as_parts):
    plain = ask(client, f"plain{as_parts}")
    said = plain.choices[0].message.content
    content = [{"type": "text", "text": said[:30]}, {"type": "text", "text": said[30:]}] if as_parts else said
    before = metric(url, "spolia_spec_decode_num_accepted_tokens_total", source="prediction")
    predicted = ask(client, f"predicted{as_parts}", prediction={"type": "content", "content": content})
    assert predicted.choices[0].message.content == said
    details = predicted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 35
    assert details.rejected_prediction_tokens < 10
    after = metric(url, "spolia_spec_decode_num_accepted_tokens_total", source="prediction")
    assert after - before == details.accepted_prediction_tokens
    drafted = metric(url, "spolia_spec_decode_num_draft_tokens_total", source="prediction")
    assert drafted >= after


def test_a_prediction_that_does_not_come_true_costs_little_and_changes_nothing(client):
    plain = ask(client, "one")
    predicted = ask(client, "two", prediction={"type": "content", "content": "dcba" * 20})
    assert predicted.choices[0].message.content == plain.choices[0].message.content
    details = predicted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens < 100


def test_streams_tell_it_too(client):
    said = ask(client, "stream").choices[0].message.content
    options = {"prediction": {"type": "content", "content": said}, "stream_options": {"include_usage": True}}
    chunks = list(ask(client, "streams", stream=True, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == said
    assert chunks[-1].usage.completion_tokens_details.accepted_prediction_tokens > 35


def test_a_request_may_switch_it_off(client):
    ask(client, "off")
    again = ask(client, "off")
    assert again.usage.completion_tokens_details.accepted_tokens > 20
    without = ask(client, "off", extra_body={"speculation": False})
    assert without.usage.completion_tokens_details is None
    assert without.choices[0].message.content == again.choices[0].message.content


@pytest.mark.parametrize("wrong", [{"type": "text", "content": "a"}, {"type": "content"}, {"content": [{"text": 1}]}])
def test_a_prediction_of_another_form_is_refused(client, wrong):
    with pytest.raises(BadRequestError, match="prediction must be") as caught:
        ask(client, "", prediction=wrong)
    assert caught.value.body["param"] == "prediction"


def test_llama_cpps_timings_tell_it(url):
    body = {"prompt": "once more", "n_predict": 40, "temperature": 0.0}
    httpx.post(f"{url}/completion", json=body)
    timings = httpx.post(f"{url}/completion", json=body).json()["timings"]
    assert timings["draft_n"] >= timings["draft_n_accepted"] > 15


def test_an_explanation_says_of_each_token_whether_it_was_drafted(client):
    said = ask(client, "explained").choices[0].message.content
    options = {"explain": True, "explain_candidates": 1}
    reply = ask(client, "explained too", prediction={"type": "content", "content": said}, extra_body=options)
    tokens = reply.spolia["choices"][0]["tokens"]
    drafted = [token["drafted"] for token in tokens]
    assert "".join(token["token"] for token in tokens) == said
    assert drafted[0] is None
    assert drafted.count("prediction") == reply.usage.completion_tokens_details.accepted_prediction_tokens
