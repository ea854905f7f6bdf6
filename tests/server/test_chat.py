"""`/v1/chat/completions` through OpenAI's own client, against the toy."""

from __future__ import annotations

import asyncio

import pytest
from openai import BadRequestError, OpenAI

from engine.toy import toy_answer

from .harness import ChattyToy, chatty_engine, serving
from .test_completions import text_of

HELLO = [{"role": "user", "content": "hello"}]
RENDERED = b"user: hello\nassistant:"


def greedy(client: OpenAI, messages: object = HELLO, **fields: object):
    return client.chat.completions.create(
        model="toy",
        messages=messages,
        temperature=0,
        max_completion_tokens=fields.pop("max_completion_tokens", 10),
        **fields,
    )


def test_messages_go_through_the_chat_template(client):
    reply = greedy(client)
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content == text_of(toy_answer(list(RENDERED), 10))
    assert reply.usage.prompt_tokens == len(RENDERED)
    assert reply.object == "chat.completion"


def test_a_stream_carries_the_same_content_and_one_role(client):
    chunks = list(greedy(client, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == greedy(client).choices[0].message.content
    assert [delta.role for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 10


def test_text_parts_are_joined(client):
    parts = [{"type": "text", "text": "one"}, {"type": "refusal", "refusal": "two"}]
    reply = greedy(client, [{"role": "user", "content": parts}])
    assert reply.choices[0].message.content == text_of(toy_answer(list(b"user: one\ntwo\nassistant:"), 10))


def test_tools_reach_the_template_unless_the_choice_is_none(client):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    with_tools = greedy(client, tools=tools)
    assert with_tools.usage.prompt_tokens == len(b"weather\n" + RENDERED)
    assert greedy(client, tools=tools, tool_choice="none").usage.prompt_tokens == len(RENDERED)


def test_logprobs_name_each_token_with_its_bytes(client):
    reply = greedy(client, logprobs=True, top_logprobs=3)
    tokens = reply.choices[0].logprobs.content
    assert [bytes(token.bytes) for token in tokens] == [
        bytes([i]) if i < 256 else b"" for i in toy_answer(list(RENDERED), 10)
    ]
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == token.logprob
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob >= token.top_logprobs[2].logprob


def test_without_top_logprobs_there_are_none_but_the_tokens_own(client):
    assert all(token.top_logprobs == [] for token in greedy(client, logprobs=True).choices[0].logprobs.content)


def test_several_choices_are_drawn_apart(client):
    reply = client.chat.completions.create(model="toy", messages=HELLO, max_tokens=12, n=4, seed=3)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in reply.choices}) == 4


def test_the_second_turn_reuses_the_first(client):
    opening = [{"role": "user", "content": "something that no other test says"}]
    first = greedy(client, opening)
    more = [*opening, {"role": "assistant", "content": "fine"}, {"role": "user", "content": "and then?"}]
    second = greedy(client, more)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1


def test_a_base_model_says_that_it_does_not_chat():
    engine = chatty_engine(ChattyToy(name="base", chat_template=None))
    with serving({"base": engine}) as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(BadRequestError, match="no chat template") as caught:
            client.chat.completions.create(model="base", messages=HELLO)
        assert caught.value.code == "no_chat_template"
    asyncio.run(engine.aclose())
