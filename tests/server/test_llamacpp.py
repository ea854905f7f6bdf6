"""What llama.cpp's server has beside OpenAI's API, against the toy and Qwen2.5-Coder-0.5B."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.toy import toy_answer
from spolia.engine import AsyncEngine, EngineConfig
from spolia.server import ServerConfig

from .harness import Pace, chatty_engine, eventually, scripted_engine, serving
from .test_completions import text_of

GREEDY = {"temperature": 0, "n_predict": 10}


def post(url: str, path: str, **body: Any) -> Any:
    reply = httpx.post(url + path, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(url: str, **body: Any) -> list[dict[str, Any]]:
    with httpx.stream("POST", f"{url}/completion", json={**body, "stream": True}, timeout=60) as reply:
        return [json.loads(line[6:]) for line in reply.iter_lines() if line]


def test_a_completion_has_its_content_and_figures(toy_url):
    reply = post(toy_url, "/completion", prompt="a stone", return_tokens=True, **GREEDY)
    expected = toy_answer(list(b"a stone"), 10)
    assert reply["content"] == text_of(expected)
    assert reply["tokens"] == expected
    assert (reply["stop"], reply["stop_type"]) == (True, "limit")
    assert (reply["tokens_predicted"], reply["tokens_evaluated"]) == (10, 7)
    assert reply["timings"]["predicted_n"] == 10
    assert reply["timings"]["cache_n"] + reply["timings"]["prompt_n"] == 7


def test_a_prompt_may_mix_texts_and_token_ids(toy_url):
    reply = post(toy_url, "/completion", prompt=["ab", 200, 201, "c"], return_tokens=True, **GREEDY)
    assert reply["tokens"] == toy_answer([*b"ab", 200, 201, *b"c"], 10)


def test_a_stream_carries_the_same_text_and_ends_with_the_figures(toy_url):
    whole = post(toy_url, "/completion", prompt="to be streamed", n_predict=40, temperature=0, n_probs=2)
    pieces = events(toy_url, prompt="to be streamed", n_predict=40, temperature=0, n_probs=2)
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert [piece["stop"] for piece in pieces] == [*[False] * (len(pieces) - 1), True]
    assert pieces[-1]["tokens_predicted"] == 40
    streamed = [token for piece in pieces for token in piece.get("completion_probabilities", ())]
    assert streamed == whole["completion_probabilities"]
    assert all(len(token["top_logprobs"]) == 2 for token in streamed)


def test_what_stopped_it_is_told():
    engine = scripted_engine({"user: count": "one two three"}, num_blocks=64)
    with serving({"scripted": engine}) as url:
        prompt = "user: count\nassistant:"
        assert post(url, "/completion", prompt=prompt, temperature=0)["stop_type"] == "eos"
        reply = post(url, "/completion", prompt=prompt, temperature=0, stop=["two"])
        assert (reply["stop_type"], reply["stopping_word"], reply["content"]) == ("word", "two", "one ")
    asyncio.run(engine.aclose())


def test_props_and_slots_describe_the_server():
    pace = Pace(step_s=0.01)
    engine = chatty_engine(observer=pace, max_sequences=3)
    with serving({"toy": engine}) as url:
        assert httpx.get(f"{url}/props").json()["total_slots"] == 3
        assert [slot["is_processing"] for slot in httpx.get(f"{url}/slots").json()] == [False] * 3
        body = {"prompt": "abc", "n_predict": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/completion", json=body, timeout=30) as reply:
            lines = reply.iter_lines()
            next(lines)
            (busy,) = [slot for slot in httpx.get(f"{url}/slots").json() if slot["is_processing"]]
            assert (busy["n_prompt_tokens"], busy["n_prompt_tokens_processed"]) == (3, 3)
            assert busy["n_decoded"] > 0
        eventually(lambda: not any(slot["is_processing"] for slot in httpx.get(f"{url}/slots").json()))
    asyncio.run(engine.aclose())


def test_a_grammar_and_a_schema_form_the_answer(toy_url):
    reply = post(toy_url, "/completion", prompt="x", grammar='root ::= "yes" | "no"', n_predict=8, seed=3)
    assert reply["content"] in ("yes", "no")
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    reply = post(toy_url, "/completion", prompt="x", json_schema=schema, n_predict=200, seed=-1)
    assert isinstance(json.loads(reply["content"])["a"], bool)


def test_the_template_is_applied_without_generating(toy_url):
    messages = [{"role": "user", "content": "hi"}]
    assert post(toy_url, "/apply-template", messages=messages) == {"prompt": "user: hi\nassistant:"}


BAD = [
    ("/completion", {"prompt": ""}, "prompt"),
    ("/completion", {"prompt": [1.5]}, "prompt[0]"),
    ("/completion", {"prompt": [9999]}, "prompt"),
    ("/completion", {"prompt": "x", "top_p": 3}, "top_p"),
    ("/completion", {"prompt": "x", "grammar": "root ::= ("}, "grammar"),
    ("/infill", {"input_prefix": "x", "input_suffix": "y"}, "suffix"),
    ("/infill", {"input_prefix": "x", "input_extra": [{}]}, "input_extra[0]"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD, ids=lambda value: str(value)[:40])
def test_bad_requests_are_400_and_name_their_field(toy_url, path, body, param):
    reply = httpx.post(toy_url + path, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_qwen_fills_in_between_prefix_and_suffix(qwen_coder_path: Path):
    engine = AsyncEngine(qwen_coder_path, EngineConfig(kv_memory=64 << 20, max_context=2048))
    with serving({"qwen": engine}) as url:
        reply = post(
            url,
            "/infill",
            input_extra=[{"filename": "maths.py", "text": "def double(number):\n    return 2 * number\n"}],
            input_prefix="def add(first, second):\n    return ",
            input_suffix="\n\nprint(add(1, 2))\n",
            **GREEDY,
        )
        assert reply["content"].strip().startswith("first + second")
    asyncio.run(engine.aclose())


# Slots.


@contextmanager
def slot_server(tmp_path: Path) -> Iterator[str]:
    engine = chatty_engine(num_blocks=64)
    with serving({"toy": engine}, ServerConfig(slot_save_path=tmp_path)) as url:
        yield url
    asyncio.run(engine.aclose())


def ask(url: str, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": 8, "temperature": 0, "ignore_eos": True, **fields}
    reply = httpx.post(f"{url}/completion", json=body, timeout=30)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def act(url: str, id_slot: int, action: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/slots/{id_slot}", params={"action": action}, json=body, timeout=30)


PROMPT = "A prompt of more than three blocks of sixteen tokens."


def test_a_slot_that_was_saved_is_restored_by_another_server_and_its_conversation_is_warm(tmp_path: Path):
    tmp_path = tmp_path / "made" / "at the start"
    with slot_server(tmp_path) as url:
        first = ask(url, PROMPT, id_slot=3)
        assert first["id_slot"] == 3
        saved = act(url, 3, "save", filename="mine.bin").json()
        assert saved["n_saved"] == (len(PROMPT) + 7) // 16 * 16  # whole blocks; the last token has no KV
        assert saved["n_written"] == (tmp_path / "mine.bin").stat().st_size
        assert (saved["id_slot"], saved["filename"], saved["timings"]["save_ms"] > 0) == (3, "mine.bin", True)
    with slot_server(tmp_path) as url:
        restored = act(url, 1, "restore", filename="mine.bin").json()
        assert restored["n_restored"] == saved["n_saved"]
        again = ask(url, PROMPT)
        assert again["id_slot"] == 1  # where most of it is
        assert again["content"] == first["content"]
        assert again["tokens_cached"] == 48


def test_restoring_into_a_cache_that_has_a_part_of_it_already(tmp_path: Path):
    with slot_server(tmp_path) as url:
        expected = ask(url, PROMPT, id_slot=0)
        act(url, 0, "save", filename="x")
    with slot_server(tmp_path) as url:
        ask(url, PROMPT[:21])
        assert act(url, 0, "restore", filename="x").json()["n_restored"] == 48
        assert ask(url, PROMPT)["content"] == expected["content"]


def test_a_slot_takes_the_salt_that_it_is_told(tmp_path: Path):
    with slot_server(tmp_path) as url:
        ask(url, PROMPT, id_slot=0, cache_salt="mine")
        act(url, 0, "save", filename="salted")
        ask(url, PROMPT, id_slot=1)
        act(url, 1, "save", filename="plain")
        assert act(url, 0, "restore", filename="plain").status_code == 400
        assert act(url, 0, "restore", filename="plain", cache_salt="").json()["n_restored"] == 48
        act(url, 0, "erase")
    with slot_server(tmp_path) as url:
        assert act(url, 0, "restore", filename="salted").status_code == 400
        assert act(url, 0, "restore", filename="salted", cache_salt="mine").json()["n_restored"] == 48
        assert ask(url, PROMPT, cache_salt="mine")["tokens_cached"] == 48


def test_an_erased_slot_is_empty_and_goes_first(tmp_path: Path):
    with slot_server(tmp_path) as url:
        ask(url, PROMPT, id_slot=2)
        held = [slot["n_tokens_held"] for slot in httpx.get(f"{url}/slots").json()]
        assert held[2] == len(PROMPT) + 8
        assert sum(held) == held[2]
        assert httpx.post(f"{url}/slots/2?action=erase").json() == {"id_slot": 2, "n_erased": len(PROMPT) + 8}
        assert act(url, 2, "erase").json()["n_erased"] == 0


def test_a_file_that_is_not_as_it_was_saved_is_refused(tmp_path: Path):
    with slot_server(tmp_path) as url:
        ask(url, PROMPT, id_slot=0)
        act(url, 0, "save", filename="x")
        whole = (tmp_path / "x").read_bytes()
        flipped = bytearray(whole)
        flipped[-100] ^= 1
        damaged = {"flipped": bytes(flipped), "short": whole[:-40], "none": b"GGUF", "empty": b""}
        for name, content in damaged.items():
            (tmp_path / name).write_bytes(content)
            refused = act(url, 1, "restore", filename=name)
            assert refused.status_code == 400, name
        assert act(url, 1, "restore", filename="absent").status_code == 400
    with slot_server(tmp_path) as url:
        ask(url, "x", id_slot=5, cache_salt="somebody else")
        refused = act(url, 5, "restore", filename="x")
        assert "another model, KV type, cache salt" in refused.json()["error"]["message"]


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", ".hidden", "a/b", "", "x" * 200, "a\x00b", None])
def test_no_file_outside_the_folder_is_reached(tmp_path: Path, name: str | None):
    with slot_server(tmp_path) as url:
        for action in ("save", "restore"):
            refused = act(url, 0, action, filename=name)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "filename"
    assert list(tmp_path.iterdir()) == []


def test_what_slots_there_are_is_known_and_saving_has_to_be_allowed(toy_url: str):
    for refused in (act(toy_url, 99, "erase"), act(toy_url, 0, "fly"), act(toy_url, 0, "save", filename="x")):
        assert refused.status_code == 400
    body = {"prompt": "x", "id_slot": 99}
    assert httpx.post(f"{toy_url}/completion", json=body).json()["error"]["param"] == "id_slot"


def test_all_slots_in_use_can_be_asked_for():
    engine = chatty_engine(observer=Pace(step_s=0.05), max_sequences=1)
    with serving({"toy": engine}) as url:
        assert httpx.get(f"{url}/slots?fail_on_no_slot=1").status_code == 200
        body = {"prompt": "x", "n_predict": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/completion", json=body, timeout=60) as reply:
            lines = reply.iter_lines()  # held: a reader that is dropped closes the stream
            next(lines)
            assert httpx.get(f"{url}/slots?fail_on_no_slot=1").status_code == 503
    asyncio.run(engine.aclose())


def test_a_stream_tells_how_far_its_prompt_has_come():
    engine = chatty_engine(observer=Pace(step_s=0.05))
    with serving({"toy": engine}) as url:
        body = {"prompt": "x" * 100, "n_predict": 20, "stream": True, "return_progress": True, "temperature": 0}
        text = httpx.post(f"{url}/completion", json=body, timeout=30).text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        assert [each["total"] for each in progress] == [100] * len(progress)
        done = [each["processed"] for each in progress]
        assert done == sorted(done)
        assert done[-1] == 100
        assert events[-1]["stop"]
        whole = httpx.post(f"{url}/completion", json={**body, "stream": False}, timeout=30).json()
        assert "".join(event["content"] for event in events) == whole["content"]
        text = httpx.post(f"{url}/completion", json=body, timeout=30).text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        assert next(event["prompt_progress"]["cache"] for event in events if "prompt_progress" in event) == 99
    asyncio.run(engine.aclose())
