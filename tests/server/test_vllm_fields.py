"""What vLLM's clients send to OpenAI's endpoints beyond OpenAI's fields, and vLLM's own endpoints."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from engine.toy import toy_answer

from .harness import ChattyToy, PlainTemplate, chatty_engine, serving
from .test_completions import text_of
from .test_tools import TOOLS

HELLO = [{"role": "user", "content": "hello"}]
SHORT = {"model": "toy", "max_tokens": 8, "temperature": 0}


def post(url: str, path: str, **body: Any) -> Any:
    reply = httpx.post(url + path, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def chat(url: str, messages: Any = HELLO, **fields: Any) -> Any:
    return post(url, "/v1/chat/completions", messages=messages, **{**SHORT, **fields})


def chunks(url: str, path: str, **body: Any) -> list[dict[str, Any]]:
    reply = httpx.post(url + path, json={**body, "stream": True}, timeout=60)
    return [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]


def refusal(url: str, path: str, **body: Any) -> Any:
    reply = httpx.post(url + path, json=body, timeout=60)
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]["param"]


BEGUN = [*HELLO, {"role": "assistant", "content": "It is"}]


def test_the_final_message_is_continued(toy_url):
    prompt = b"user: hello\nassistant:It is"
    reply = chat(toy_url, BEGUN, continue_final_message=True, add_generation_prompt=False)
    assert reply["usage"]["prompt_tokens"] == len(prompt)
    text = text_of(toy_answer(list(prompt), 8))
    assert reply["choices"][0]["message"]["content"] == text
    echoed = chat(toy_url, BEGUN, continue_final_message=True, echo=True)
    assert echoed["choices"][0]["message"]["content"] == "It is" + text
    body = {**SHORT, "messages": BEGUN, "continue_final_message": True, "echo": True}
    streamed = chunks(toy_url, "/v1/chat/completions", **body)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in streamed) == "It is" + text


def test_a_users_message_is_continued_too(toy_url):
    ids = post(toy_url, "/tokenize", messages=HELLO, continue_final_message=True)["tokens"]
    assert bytes(ids) == b"user: hello"


def test_continuing_and_beginning_do_not_go_together(toy_url):
    path = "/v1/chat/completions"
    fields = {**SHORT, "messages": BEGUN, "continue_final_message": True}
    assert refusal(toy_url, path, **fields, add_generation_prompt=True) == "continue_final_message"
    assert refusal(toy_url, path, **SHORT, messages=HELLO, echo=True) == "echo"


def test_the_role_developer_is_system_where_the_template_knows_no_such_role(toy_url):
    messages = [{"role": "developer", "content": "Be brief."}, *HELLO]
    assert bytes(post(toy_url, "/tokenize", messages=messages)["tokens"]).startswith(b"system: Be brief.")


class MindfulTemplate(PlainTemplate):
    """Knows of effort, documents and developers."""

    source = tool_source = "<tool_call> developer reasoning_effort documents"

    def render(self, messages: list[dict[str, Any]], **variables: Any) -> str:  # type: ignore[override]
        told = {name: variables[name] for name in ("reasoning_effort", "documents") if name in variables}
        return f"{told} {[message['role'] for message in messages]}"


def test_a_template_that_minds_them_is_told_of_effort_and_documents():
    engine = chatty_engine(ChattyToy(chat_template=MindfulTemplate()))
    with serving({"toy": engine}) as url:
        documents = [{"title": "a", "text": "b"}]
        asked = {"reasoning_effort": "low", "documents": documents}
        ids = post(url, "/tokenize", messages=[{"role": "developer", "content": "x"}], **asked)["tokens"]
        assert bytes(ids).decode() == f"{asked} ['developer']"
        reply = httpx.post(f"{url}/v1/chat/completions", json={**SHORT, "messages": HELLO, "reasoning_effort": "low"})
        assert "x-spolia-ignored" not in reply.headers
    asyncio.run(engine.aclose())


def test_what_the_template_does_not_mind_is_named_or_refused(toy_url):
    reply = httpx.post(f"{toy_url}/v1/chat/completions", json={**SHORT, "messages": HELLO, "reasoning_effort": "low"})
    assert reply.headers["x-spolia-ignored"] == "reasoning_effort"
    path = "/v1/chat/completions"
    assert refusal(toy_url, path, **SHORT, messages=HELLO, documents=[{"text": "x"}]) == "documents"
    assert chat(toy_url, documents=[])["choices"]
    assert refusal(toy_url, path, **SHORT, messages=HELLO, chat_template="{{ x }}") == "chat_template"
    assert refusal(toy_url, path, **SHORT, messages=HELLO, web_search_options={}) == "web_search_options"
    kwargs = {"documents": []}
    assert refusal(toy_url, path, **SHORT, messages=HELLO, chat_template_kwargs=kwargs) == "chat_template_kwargs"


def test_tokens_are_told_as_their_ids(toy_url):
    ids = toy_answer(list(b"user: hello\nassistant:"), 8)
    reply = chat(toy_url, logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True)
    tokens = reply["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in tokens] == [f"token_id:{id_}" for id_ in ids]
    assert all(each["token"].startswith("token_id:") for token in tokens for each in token["top_logprobs"])
    asked = {**SHORT, "prompt": "ab", "logprobs": 1, "echo": True, "return_tokens_as_token_ids": True}
    columns = post(toy_url, "/v1/completions", **asked)["choices"][0]["logprobs"]
    ids = [*b"ab", *toy_answer(list(b"ab"), 8)]
    assert columns["tokens"] == [f"token_id:{id_}" for id_ in ids]
    plain = post(toy_url, "/v1/completions", **{**asked, "return_tokens_as_token_ids": False})["choices"][0]["logprobs"]
    assert columns["text_offset"] == plain["text_offset"]
    assert columns["token_logprobs"] == plain["token_logprobs"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompts_log_probabilities_come_without_an_answer(toy_url, stream):
    """As harnesses for evaluation ask for them."""
    body = {**SHORT, "prompt": "to be scored", "max_tokens": 0, "echo": True, "logprobs": 1}
    if stream:
        all_chunks = chunks(toy_url, "/v1/completions", **body, stream_options={"include_usage": True})
        usage = all_chunks[-1]["usage"]
        choice = all_chunks[0]["choices"][0]
        assert "".join(c["choices"][0]["text"] for c in all_chunks[:-1]) == "to be scored"
    else:
        reply = post(toy_url, "/v1/completions", **body)
        (choice,), usage = reply["choices"], reply["usage"]
        assert choice["text"] == "to be scored"
    assert len(choice["logprobs"]["token_logprobs"]) == len("to be scored")
    assert usage["completion_tokens"] == 0
    longer = post(toy_url, "/v1/completions", **{**body, "max_tokens": 3})["choices"][0]["logprobs"]
    assert longer["token_logprobs"][: len("to be scored")] == choice["logprobs"]["token_logprobs"]


def test_usage_comes_with_each_chunk_if_asked_for(toy_url):
    body = {**SHORT, "n": 2, "seed": 1, "temperature": 1, "ignore_eos": True, "messages": HELLO}
    options = {"include_usage": True, "continuous_usage_stats": True}
    told = [c["usage"] for c in chunks(toy_url, "/v1/chat/completions", **body, stream_options=options)]
    counts = [usage["completion_tokens"] for usage in told]
    assert counts == sorted(counts)
    assert counts[-2:] == [16, 16]
    assert {usage["prompt_tokens"] for usage in told} == {len(b"user: hello\nassistant:")}
    assert told[-1]["prompt_tokens_details"]["cached_tokens"] >= 0


def test_a_streams_chunks_have_the_fingerprint_of_the_whole(toy_url):
    whole = chat(toy_url)["system_fingerprint"]
    streamed = chunks(toy_url, "/v1/chat/completions", **SHORT, messages=HELLO)
    assert {chunk["system_fingerprint"] for chunk in streamed} == {whole}
    assert len({chunk["id"] for chunk in streamed}) == 1


def test_rendering_tells_what_would_be_asked_of_the_model(toy_url):
    tools = {"tools": TOOLS}
    rendered = post(
        toy_url, "/v1/chat/completions/render", **SHORT, messages=BEGUN, continue_final_message=True, **tools
    )
    ids = post(toy_url, "/tokenize", messages=BEGUN, continue_final_message=True, **tools)["tokens"]
    assert rendered["token_ids"] == ids
    assert bytes(ids).decode() == rendered["prompt"]
    assert rendered["sampling_params"] == {"temperature": 0.0, "max_tokens": 8}
    texts = post(toy_url, "/v1/completions/render", **SHORT, prompt=["ab", "c"], stop=["x"])
    assert [(each["token_ids"], each["sampling_params"]["stop"]) for each in texts] == [
        ([97, 98], ["x"]),
        ([99], ["x"]),
    ]
    answered = post(toy_url, "/v1/completions", **SHORT, prompt=rendered["token_ids"])
    body = {"messages": BEGUN, "continue_final_message": True, **tools}
    assert answered["choices"][0]["text"] == chat(toy_url, **body)["choices"][0]["message"]["content"]
    for path, field in (
        ("/v1/chat/completions/render", {"messages": HELLO}),
        ("/v1/completions/render", {"prompt": "x"}),
    ):
        assert refusal(toy_url, path, **SHORT, **field, session="s") == "session"


def test_the_clients_word_for_a_request_is_in_the_log(toy_url, caplog):
    with caplog.at_level(logging.INFO, logger="spolia.requests"):
        chat(toy_url, request_id="mine-1")
    assert "mine-1" in caplog.text


def test_what_is_to_be_kept_for_a_day_is(toy_url):
    assert chat(toy_url, prompt_cache_retention="24h")["choices"]
    body = {**SHORT, "messages": HELLO, "prompt_cache_retention": "7d"}
    assert refusal(toy_url, "/v1/chat/completions", **body) == "prompt_cache_retention"


def test_the_servers_state_is_told(toy_url):
    for method in ("GET", "POST"):
        assert httpx.request(method, f"{toy_url}/ping").status_code == 200
    assert httpx.get(f"{toy_url}/load").json() == {"server_load": 0}
