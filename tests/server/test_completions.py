"""`/v1/completions` through OpenAI's own client, against the toy: each answer is known beforehand."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
from openai import OpenAI

from engine.toy import toy_answer, toy_logits


def text_of(ids: list[int]) -> str:
    """What a stream of bytes reads as; the end-of-text token (256) has no text."""
    return bytes(id_ for id_ in ids if id_ < 256).decode(errors="replace")


def greedy(client: OpenAI, prompt: object, num_tokens: int = 12, **fields: object):
    """A greedy completion; fields that OpenAI's client does not know go into the body as they are."""
    known = {
        key: fields.pop(key) for key in ("n", "stream", "stream_options", "logprobs", "echo", "seed") if key in fields
    }
    return client.completions.create(
        model="toy", prompt=prompt, max_tokens=num_tokens, temperature=0, extra_body=fields, **known
    )


def test_a_text_prompt_is_answered_with_the_models_text(client):
    reply = greedy(client, "a text", 12)
    expected = toy_answer(list(b"a text"), 12)
    assert reply.choices[0].text == text_of(expected)
    assert reply.choices[0].finish_reason == "length"
    assert reply.object == "text_completion"
    assert reply.model == "toy"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (6, 12, 18)


def test_token_ids_go_in_as_they_are_and_come_back_on_request(client):
    reply = greedy(client, [200, 201, 256, 7], 9, return_token_ids=True)
    assert reply.choices[0].token_ids == toy_answer([200, 201, 256, 7], 9)
    assert reply.choices[0].prompt_token_ids == [200, 201, 256, 7]


@pytest.mark.parametrize("stream", [False, True])
def test_each_of_several_prompts_gets_its_own_choice(client, stream):
    prompts = [[1, 2, 3], [9, 8, 7, 6], [5]]
    reply = greedy(client, prompts, 5, return_token_ids=True, stream=stream)
    answers: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for chunk in reply if stream else [reply]:
        for choice in chunk.choices:
            answers[choice.index] += choice.token_ids
    assert answers == {index: toy_answer(prompt, 5) for index, prompt in enumerate(prompts)}


def test_several_texts_count_into_one_usage(client):
    reply = greedy(client, ["one", "three"], 4)
    assert [choice.text for choice in reply.choices] == [text_of(toy_answer(list(p), 4)) for p in (b"one", b"three")]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (8, 8)


def test_n_choices_of_one_seed_differ_and_can_be_had_again(client):
    def texts() -> list[str]:
        reply = client.completions.create(model="toy", prompt="seeded", max_tokens=16, n=3, seed=11)
        assert reply.usage.prompt_tokens == len("seeded")
        return [choice.text for choice in reply.choices]

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first


def test_a_stream_carries_the_same_text_as_the_whole_reply(client):
    whole = greedy(client, "to be streamed", 40)
    chunks = list(greedy(client, "to be streamed", 40, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_ends_with_usage_if_asked(client):
    *_, last = greedy(client, "usage, please", 5, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (13, 5)
    assert last.usage.prompt_tokens_details.cached_tokens == 0


def test_usage_reports_what_was_reused(client):
    prompt = list(range(40, 80))
    assert greedy(client, prompt).usage.prompt_tokens_details.cached_tokens == 0
    assert greedy(client, prompt).usage.prompt_tokens_details.cached_tokens == 39  # the last one is always computed
    assert greedy(client, [*prompt[:30], 1, 2]).usage.prompt_tokens_details.cached_tokens == 30


def test_another_salt_shares_nothing(client):
    prompt = list(range(90, 130))
    greedy(client, prompt, cache_salt="ours")
    assert greedy(client, prompt, cache_salt="theirs").usage.prompt_tokens_details.cached_tokens == 0
    assert greedy(client, prompt, cache_salt="ours").usage.prompt_tokens_details.cached_tokens == 39


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_models_distribution(client, stream):
    reply = greedy(client, [3, 1, 4], 3, logprobs=2, stream=stream)
    columns = [
        choice.logprobs for chunk in (reply if stream else [reply]) for choice in chunk.choices if choice.logprobs
    ]
    measured = [p for column in columns for p in column.token_logprobs]
    tops = [top for column in columns for top in column.top_logprobs]
    prefix, expected = [3, 1, 4], []
    for id_ in toy_answer(prefix, 3):
        logits = toy_logits(prefix).astype(np.float64)
        expected.append(logits[id_] - np.log(np.exp(logits).sum()))
        prefix.append(id_)
    assert measured == pytest.approx(expected, abs=1e-5)
    assert all(1 <= len(top) <= 2 for top in tops)  # two tokens may have the same text: U+FFFD
    assert [max(top.values()) for top in tops] == pytest.approx(expected, abs=1e-5)  # greedy took the likeliest


def test_text_offsets_add_up_over_a_stream(client):
    chunks = greedy(client, "offsets", 6, logprobs=0, stream=True)
    columns = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    tokens = [token for column in columns for token in column.tokens]
    offsets = [offset for column in columns for offset in column.text_offset]
    assert offsets == [sum(map(len, tokens[:i])) for i in range(6)]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_before_each_choice(client, stream):
    reply = greedy(client, ["first", "second"], 4, echo=True, stream=stream)
    texts = {0: "", 1: ""}
    for chunk in reply if stream else [reply]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {i: p.decode() + text_of(toy_answer(list(p), 4)) for i, p in enumerate((b"first", b"second"))}


def test_stop_ids_end_the_answer_and_are_named(client):
    answer = toy_answer([1, 2, 3, 4], 8)
    reply = greedy(client, [1, 2, 3, 4], 8, stop_token_ids=[answer[5]], return_token_ids=True)
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].stop_reason == answer[5]
    assert reply.choices[0].token_ids == answer[:6]


def test_without_max_tokens_there_are_sixteen(client):
    assert client.completions.create(model="toy", prompt="short").usage.completion_tokens == 16


def test_explain_tells_the_reason_of_a_miss_and_the_text_around_it(client):
    greedy(client, "The date is Monday, and all is well here.")
    reply = greedy(client, "The date is Tuesday, and all is well here.", explain=True)
    (choice,) = reply.spolia["choices"]
    assert (choice["reason"], choice["divergence"], choice["num_cached_tokens"]) == ("diverged", 12, 12)
    assert choice["text_around"] == " date is Tuesday"[1:] or "Tuesday" in choice["text_around"]
    assert choice["timings"]["total_s"] > 0


def test_explain_ends_a_stream(client):
    *_, last = greedy(client, "explained at the end", stream=True, explain=True)
    assert last.spolia["choices"][0]["reason"] == "never_seen"


def test_fields_that_nobody_knows_are_ignored(client):
    assert greedy(client, "x", 3, user="me", metadata={"a": "b"}, nonsense=[1, 2]).choices[0].finish_reason == "length"


def test_the_largest_seed_serves_for_several_choices_too(toy_url):
    body = {"model": "toy", "prompt": "x", "n": 2, "seed": 2**64 - 1, "max_tokens": 8, "temperature": 1.0}
    first, second = httpx.post(f"{toy_url}/v1/completions", json=body).json()["choices"]
    (zero,) = httpx.post(f"{toy_url}/v1/completions", json={**body, "n": 1, "seed": 0}).json()["choices"]
    assert first["text"] != second["text"] == zero["text"]


def test_an_answer_carries_the_systems_fingerprint(client):
    assert greedy(client, "x", 2).system_fingerprint == "toy"
    chat = client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "x"}], max_tokens=2)
    assert chat.system_fingerprint == "toy"
