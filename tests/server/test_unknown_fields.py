"""A field that a body has and its schema has not: refused if it is misspelt, told if it is another server's."""

from __future__ import annotations

import httpx
import pytest

HELLO = [{"role": "user", "content": "hello"}]
SHORT = {"model": "toy", "max_tokens": 1}
DIALECTS = {
    "/v1/completions": {**SHORT, "prompt": "x"},
    "/v1/chat/completions": {**SHORT, "messages": HELLO},
    "/v1/responses": {"model": "toy", "input": "x", "max_output_tokens": 1},
    "/v1/messages": {**SHORT, "messages": HELLO},
    "/api/chat": {"model": "toy", "messages": HELLO, "stream": False, "options": {"num_predict": 1}},
    "/api/generate": {"model": "toy", "prompt": "x", "stream": False, "options": {"num_predict": 1}},
    "/completion": {"prompt": "x", "n_predict": 1},
    "/infill": {"input_prefix": "x", "n_predict": 1},
}
OURS = {
    "/v1/cache/lookup": {"prompt": "x"},
    "/v1/cache/warm": {"prompt": "x"},
    "/v1/cache/pins": {"prompt": "x"},
    "/v1/cache/clear": {"all": True},
    "/v1/cache/config": {"kv_policy": "lru"},
    "/v1/sessions": {"model": "toy"},
}

# What clients of these servers send, and nothing here reads: all as one word each.
OPENAI = "user store metadata service_tier prompt_cache_key prompt_cache_options safety_identifier "
OPENAI += "verbosity include_obfuscation moderation"
VLLM = "spaces_between_special_tokens detokenize "
VLLM += "mm_processor_kwargs kv_transfer_params vllm_xargs include_reasoning "
VLLM += "guided_decoding_backend guided_whitespace_pattern prompt_embeds media_io_kwargs top_a repetition_penalty_range"
LLAMA = "n_keep n_discard n_cache_reuse chat_format parse_tool_calls preserved_tokens grammar_lazy penalize_nl"
OLLAMA = "num_ctx num_batch num_gpu main_gpu num_thread num_keep use_mmap numa low_vram f16_kv vocab_only use_mlock "
OLLAMA += "penalize_newline tfs_z draft_num_predict"
RESPONSES = "max_tool_calls stream_options user "
RESPONSES += "context_management service_tier prompt_cache_key safety_identifier"
ANTHROPIC = "metadata service_tier context_management inference_geo speed diagnostics"
OTHERS = {
    "/v1/completions": OPENAI + " " + VLLM,
    "/v1/chat/completions": OPENAI + " " + VLLM,
    "/v1/responses": RESPONSES,
    "/v1/messages": ANTHROPIC,
    "/completion": LLAMA,
}


def post(url: str, path: str, **body: object) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=60)


@pytest.mark.parametrize("path", DIALECTS)
def test_a_misspelt_field_is_refused_with_the_one_that_was_meant(toy_url: str, path: str):
    reply = post(toy_url, path, **DIALECTS[path], strem=True)
    assert reply.status_code == 400, reply.text
    assert "there is no field `strem`; did you mean `stream`?" in reply.text


def test_so_is_one_inside(toy_url: str):
    asked = {**DIALECTS["/api/chat"], "options": {"temprature": 0}}
    assert "`options.temprature`; did you mean `options.temperature`?" in post(toy_url, "/api/chat", **asked).text
    asked = {**DIALECTS["/v1/completions"], "retention": [{}, {"priorty": 3}]}
    assert (
        "`retention[1].priorty`; did you mean `retention[1].priority`?"
        in post(toy_url, "/v1/completions", **asked).text
    )


def test_a_field_that_must_be_there_is_named_when_it_is_misspelt(toy_url: str):
    assert "did you mean `messages`" in post(toy_url, "/v1/chat/completions", model="toy", mesages=HELLO).text


@pytest.mark.parametrize("path", DIALECTS)
def test_what_nobody_knows_is_told_in_a_header(toy_url: str, path: str):
    reply = post(toy_url, path, **DIALECTS[path], quux=1, user_name="me")
    assert reply.headers["x-spolia-ignored"] == "quux,user_name"
    assert "x-spolia-ignored" not in post(toy_url, path, **DIALECTS[path]).headers


def test_a_streams_header_tells_it_too_and_so_does_the_log(toy_url: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    assert (
        post(toy_url, "/v1/completions", **DIALECTS["/v1/completions"], stream=True, quux=1).headers["x-spolia-ignored"]
        == "quux"
    )
    assert any("answered" in line and "ignored=quux" in line for line in caplog.messages)


@pytest.mark.parametrize("path", OTHERS)
def test_fields_of_the_other_servers_are_accepted(toy_url: str, path: str):
    names = OTHERS[path].split()
    reply = post(toy_url, path, **DIALECTS[path], **dict.fromkeys(names))
    assert reply.status_code == 200, reply.text
    assert set(reply.headers["x-spolia-ignored"].split(",")) == set(names)


def test_so_are_ollamas_options(toy_url: str):
    names = OLLAMA.split()
    asked = {**DIALECTS["/api/chat"], "options": {"num_predict": 1, **dict.fromkeys(names, 1)}}
    reply = post(toy_url, "/api/chat", **asked)
    assert reply.headers["x-spolia-ignored"] == ",".join(f"options.{name}" for name in names)


@pytest.mark.parametrize("path", OURS)
def test_where_no_other_server_has_the_endpoint_every_unknown_field_is_refused(toy_url: str, path: str):
    reply = post(toy_url, path, **OURS[path], quux=1)
    assert reply.status_code == 400, reply.text
    assert "there is no field `quux`; there are " in reply.text
    assert reply.json()["error"]["param"] == "quux"


def test_names_that_are_no_header_do_not_get_into_one(toy_url: str):
    asked = {"a\r\nset-cookie: x=1": 1, "é": 2, "": 3, "x" * 1000: 4, "a,b": 5}
    reply = post(toy_url, "/v1/completions", **DIALECTS["/v1/completions"], **asked)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-spolia-ignored"] == f"?,?,?,{'x' * 64}...,?"
    assert "set-cookie" not in reply.headers


def test_a_hundred_thousand_fields_are_not_looked_at_one_by_one(toy_url: str):
    many = {f"field{number}": number for number in range(100_000)}
    reply = post(toy_url, "/v1/completions", **DIALECTS["/v1/completions"], **many)
    assert reply.status_code == 400
    assert "more than 64 fields are not known here" in reply.text
