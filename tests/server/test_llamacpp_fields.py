"""llama.cpp's fields one by one: each does what its README says, is refused by name, or is named as ignored."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from engine.toy import toy_answer

from .harness import Pace, chatty_engine, metric, scripted_engine, serving
from .test_completions import text_of

GREEDY = {"temperature": 0, "n_predict": 10}


def post(url: str, path: str = "/completion", **body: Any) -> Any:
    reply = httpx.post(url + path, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(url: str, path: str = "/completion", **body: Any) -> list[dict[str, Any]]:
    reply = httpx.post(url + path, json={**body, "stream": True}, timeout=60)
    return [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]


def test_several_prompts_are_answered_in_their_order(toy_url):
    texts = [text_of(toy_answer(list(prompt), 10)) for prompt in (b"one", b"two", b"three")]
    asked = ["one", list(b"two"), {"prompt_string": "three"}]
    replies = post(toy_url, prompt=asked, **GREEDY)
    assert [(reply["index"], reply["content"]) for reply in replies] == list(enumerate(texts))
    assert [reply["content"] for reply in post(toy_url, prompt=["one", "two"], **GREEDY)] == texts[:2]
    assert post(toy_url, prompt=["one"], **GREEDY)["content"] == texts[0]
    streamed = events(toy_url, prompt=asked, **GREEDY)
    for index, text in enumerate(texts):
        mine = [event for event in streamed if event["index"] == index]
        assert "".join(event["content"] for event in mine) == text
        assert [event["stop"] for event in mine] == [*[False] * (len(mine) - 1), True]


def test_a_prompt_is_completed_several_times(toy_url):
    replies = post(toy_url, prompt="x", n_cmpl=3, n_predict=12, seed=7)
    assert [reply["generation_settings"]["seed"] for reply in replies] == [7, 8, 9]
    assert len({reply["content"] for reply in replies}) == 3
    assert post(toy_url, prompt="x", n_predict=12, seed=8)["content"] == replies[1]["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_may_be_asked_for_and_the_prompt_is_cached(toy_url, stream):
    prompt = f"only to be computed, {stream}"
    body = {"prompt": prompt, "n_predict": 0, "n_probs": 2}
    reply = events(toy_url, **body)[-1] if stream else post(toy_url, **body)
    assert (reply["content"], reply["tokens_predicted"], reply["stop_type"]) == ("", 0, "limit")
    assert reply["timings"]["predicted_n"] == 0
    assert post(toy_url, prompt=prompt, **GREEDY)["tokens_cached"] == len(prompt) - 1


CODE = "f(x):\n    a = 1\n\n      b = 2\n  c\n    d"


@pytest.fixture(scope="module")
def scripted_url():
    script = {"user: code": CODE, "user: lines": "first\n" + "line after line\n" * 100, "user: line": "x" * 300}
    engine = scripted_engine(script, num_blocks=256, max_context=4096, observer=Pace(step_s=0.002))
    with serving({"scripted": engine}) as url:
        yield url
    asyncio.run(engine.aclose())


@pytest.mark.parametrize(("n_indent", "length"), [(0, len(CODE)), (1, len(CODE)), (2, len(CODE)), (3, CODE.index("c"))])
def test_the_answer_ends_before_a_line_that_is_indented_less(scripted_url, n_indent, length):
    body = {"prompt": "user: code\nassistant:", "temperature": 0, "n_indent": n_indent}
    whole = post(scripted_url, **body)
    assert whole["content"] == CODE[:length]
    assert whole["stop_type"] == ("eos" if length == len(CODE) else "limit")
    assert "".join(event["content"] for event in events(scripted_url, **body)) == CODE[:length]


def test_the_time_after_the_first_token_is_limited_from_a_line_break_on(scripted_url):
    body = {"temperature": 0, "t_max_predict_ms": 100}
    cut = post(scripted_url, prompt="user: lines\nassistant:", **body)
    assert cut["stop_type"] == "limit"
    assert 1 < cut["tokens_predicted"] < 1000
    assert cut["has_new_line"]
    assert post(scripted_url, prompt="user: line\nassistant:", **body)["stop_type"] == "eos"


def test_more_tokens_than_the_context_has_room_for_are_as_many_as_fit(toy_url):
    reply = post(toy_url, prompt="x" * 100, n_predict=100_000, ignore_eos=True, temperature=0)
    assert (reply["tokens_predicted"], reply["stop_type"]) == (412, "limit")


def test_only_the_fields_that_were_asked_for_are_told(toy_url):
    fields = ["content", "generation_settings/n_predict", "timings/no_such", "nothing"]
    reply = post(toy_url, prompt="x", response_fields=fields, **GREEDY)
    assert reply == {"content": text_of(toy_answer(list(b"x"), 10)), "n_predict": 10}


def test_probabilities_after_sampling_are_those_the_token_was_drawn_by(toy_url):
    body = {"prompt": "x", "n_probs": 3, "n_predict": 20, "seed": 1, "temperature": 2.0, "top_k": 5}
    tokens = post(toy_url, post_sampling_probs=True, return_tokens=True, **body)
    for token_id, token in zip(tokens["tokens"], tokens["completion_probabilities"], strict=True):
        assert token["id"] == token_id
        assert 0 < token["prob"] <= 1
        assert [each["prob"] for each in token["top_probs"]] == sorted(e["prob"] for e in token["top_probs"])[::-1]
        assert sum(each["prob"] for each in token["top_probs"]) <= 1 + 1e-6
        assert set(token) == {"id", "token", "bytes", "prob", "top_probs"}
    streamed = events(toy_url, post_sampling_probs=True, **body)
    assert [t for e in streamed for t in e.get("completion_probabilities", ())] == tokens["completion_probabilities"]
    single = post(toy_url, post_sampling_probs=True, **{**body, "top_k": 1})["completion_probabilities"]
    plain = post(toy_url, **body)["completion_probabilities"]
    assert len(single) == len(plain) == 20
    assert set(plain[0]) == {"id", "token", "bytes", "logprob", "top_logprobs"}


def test_samplers_that_are_not_named_are_not_used(toy_url):
    settings = post(toy_url, prompt="x", n_predict=1)["generation_settings"]
    assert (settings["top_k"], settings["top_p"], settings["min_p"], settings["temperature"]) == (40, 0.95, 0.05, 0.8)
    assert settings["samplers"] == ["top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
    for asked in (["min_p", "temperature", "no_such"], "mt"):
        settings = post(toy_url, prompt="x", n_predict=1, samplers=asked, repeat_penalty=1.5)["generation_settings"]
        assert settings["samplers"] == ["min_p", "temperature"]
        assert (settings["top_k"], settings["top_p"], settings["min_p"]) == (0, 1.0, 0.05)
        assert settings["repeat_penalty"] == 1.0


def test_the_cache_may_be_left_out(toy_url):
    body = {"prompt": "left out of the cache, or not", **GREEDY}
    first = post(toy_url, **body)
    again = post(toy_url, cache_prompt=False, **body)
    assert (again["tokens_cached"], again["content"]) == (0, first["content"])
    assert post(toy_url, cache_prompt=False, **body)["tokens_cached"] == 0
    assert post(toy_url, cache_prompt=True, **body)["tokens_cached"] == len(body["prompt"]) - 1


def test_timings_come_with_each_token(toy_url):
    streamed = events(toy_url, prompt="to be timed", timings_per_token=True, return_tokens=True, **GREEDY)
    counts = [event["timings"]["predicted_n"] for event in streamed]
    assert counts == sorted(counts)
    assert counts[-1] == 10
    assert all(event["timings"].keys() <= streamed[-1]["timings"].keys() for event in streamed)


def test_a_reply_tells_its_prompt_and_settings(toy_url):
    reply = post(toy_url, prompt="a prompt", stop=["zz"], **GREEDY)
    assert (reply["prompt"], reply["truncated"]) == ("a prompt", False)
    settings = reply["generation_settings"]
    assert (settings["model"], settings["n_predict"], settings["stop"], settings["n_ctx"]) == ("toy", 10, ["zz"], 512)


REFUSED = [
    ({"lora": [{"id": 0, "scale": 1.0}]}, "lora"),
    ({"min_keep": 3}, "min_keep"),
    ({"n_probs": 21}, "n_probs"),
    ({"n_predict": 2**40}, "n_predict"),
    ({"n_cmpl": 0, "n": 65}, "n_cmpl"),
    ({"n_indent": 4, "stop_regex": "x"}, "n_indent"),
    ({"repeat_penalty": -1}, "repeat_penalty"),
    ({"prompt": ["a", "b"], "id_slot": 0}, "id_slot"),
    ({"prompt": {"prompt_string": "x", "multimodal_data": ["AA=="]}}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"grammar": "root ::= ("}, "grammar"),
    ({"json_schema": {"type": "list"}}, "json_schema"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=str)
def test_what_is_not_supported_is_refused_in_its_own_form(toy_url, fields, param):
    reply = httpx.post(f"{toy_url}/completion", json={"prompt": "x", "n_predict": 1, **fields})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["type"]) == (400, 400, error["type"])
    assert error["param"] == param


def test_errors_have_llamacpps_words(toy_url):
    reply = httpx.post(f"{toy_url}/completion", json={"prompt": "x" * 600})
    assert reply.json()["error"]["type"] == "exceed_context_size_error"
    reply = httpx.post(f"{toy_url}/completion", json={"prompt": "x", "model": "other"})
    assert (reply.json()["error"]["code"], reply.json()["error"]["type"]) == (404, "not_found_error")
    assert httpx.post(f"{toy_url}/props", json={}).json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(f"{toy_url}/lora-adapters").json() == []


def test_tokenize_and_detokenize_answer_both_servers_clients(toy_url):
    assert post(toy_url, "/tokenize", content="aé") == {"tokens": list("aé".encode())}
    assert post(toy_url, "/tokenize", content="aé", with_pieces=True) == {
        "tokens": [{"id": 97, "piece": "a"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    }
    assert post(toy_url, "/tokenize", prompt="ab")["tokens"] == [97, 98]
    assert post(toy_url, "/detokenize", tokens=[97, 98]) == {"prompt": "ab", "content": "ab"}


def test_props_slots_and_models_have_what_clients_read(toy_url):
    props = httpx.get(f"{toy_url}/props").json()
    params = props["default_generation_settings"]["params"]

    assert {"n_predict", "seed", "samplers", "dry_base", "n_probs"} <= params.keys()
    assert httpx.get(f"{toy_url}/models").json()["data"][0]["meta"]["n_vocab"] == 257
    assert httpx.get(f"{toy_url}/v1/health").json() == {"status": "ok"}


def test_slots_tell_the_parameters_of_what_runs():
    engine = chatty_engine(observer=Pace(step_s=0.01))
    with serving({"toy": engine}) as url:
        body = {"model": "toy", "prompt": "abc", "max_tokens": 300, "ignore_eos": True, "stream": True, "top_p": 0.5}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as reply:
            lines = reply.iter_lines()  # held: a reader that is dropped closes the stream
            next(lines)
            (busy,) = [slot for slot in httpx.get(f"{url}/slots").json() if slot["is_processing"]]
            assert (busy["params"]["n_predict"], busy["params"]["top_p"]) == (300, 0.5)
            assert busy["next_token"]["has_next_token"]
    asyncio.run(engine.aclose())


def test_openais_endpoints_tell_timings_and_progress_to_clients_that_ask():
    engine = chatty_engine(observer=Pace(step_s=0.05))
    with serving({"toy": engine}) as url:
        for path, prompt in (
            ("/chat/completions", {"messages": [{"role": "user", "content": "x" * 90}]}),
            (
                "/v1/completions",
                {"prompt": "y" * 90},
            ),
        ):
            body = {**prompt, "max_tokens": 4, "timings_per_token": True, "ignore_eos": True}
            assert post(url, path, **body)["timings"]["predicted_n"] == 4
            prompt = json.loads(json.dumps(prompt).replace("x" * 9, "z" * 9).replace("y" * 9, "w" * 9))
            chunks = events(url, path, **{**body, **prompt}, return_progress=True)
            progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
            assert progress
            assert progress[-1]["processed"] == progress[-1]["total"] >= 90
            assert [c["timings"]["predicted_n"] for c in chunks if "timings" in c][-1] == 4
            assert not any("timings" in chunk for chunk in events(url, path, **prompt, max_tokens=2))
    asyncio.run(engine.aclose())


def test_metrics_have_llamacpps_names():
    engine = chatty_engine()
    with serving({"toy": engine}) as url:
        for _ in range(2):
            post(url, prompt="to be counted", ignore_eos=True, **GREEDY)
        assert metric(url, "llamacpp:prompt_tokens_total", model="toy") == len("to be counted") + 1
        assert metric(url, "llamacpp:tokens_predicted_total", model="toy") == 20
        assert metric(url, "llamacpp:requests_processing", model="toy") == 0
    asyncio.run(engine.aclose())
