"""Keys, tenants, rates and TLS: who gets in, what they share, and how much they get."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from openai import OpenAI

from engine.toy import ToyExecutable
from spolia.errors import InvalidRequest
from spolia.server import ServerConfig, read_keys
from spolia.server.access import Account, KeyRing, KeySettings
from spolia.server.errors import RateLimited
from spolia.server.responses import endpoints
from spolia.server.resuming import ResumableStreams

from .harness import Pace, chatty_engine, eventually, metric, serving
from .process import server_process

ALICE, ALICE_2, BOB, ADMIN = (
    "sk-alice-0123456789",
    "sk-alice-9876543210",
    "sk-bob-0123456789ab",
    "sk-admin-0123456789",
)
KEYS = f"""
[[keys]]
name = "alice-1"
key = "{ALICE}"
tenant = "alice"

[[keys]]
name = "alice-2"
key_sha256 = "{hashlib.sha256(ALICE_2.encode()).hexdigest()}"
tenant = "alice"

[[keys]]
name = "bob"
key = "{BOB}"

[[keys]]
name = "root"
key = "{ADMIN}"
admin = true
"""


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(KEYS)
    engine = chatty_engine(num_blocks=256)
    with serving({"toy": engine}, ServerConfig(keys=path)) as url:
        yield url
    asyncio.run(engine.aclose())


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def complete(url: str, key: str, prompt: str, **fields: Any) -> httpx.Response:
    body = {"model": "toy", "prompt": prompt, "max_tokens": 2, "explain": True, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, headers=bearer(key), timeout=30)


def cached(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    count: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/api/chat", "/completion", "/tokenize"]


@pytest.mark.parametrize(
    "headers",
    [{}, bearer("sk-wrong"), {"authorization": "Bearer"}, {"x-api-key": "sk-wrong"}, {"authorization": ALICE}],
)
@pytest.mark.parametrize("path", PATHS)
def test_without_a_right_key_nothing_is_answered(url, path, headers):
    reply = httpx.post(url + path, json={"prompt": "x"}, headers=headers)
    assert reply.status_code == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert "key" in reply.text
    assert "sk-wrong" not in reply.text


def test_each_clients_way_of_sending_a_key_is_taken(url):
    with OpenAI(base_url=f"{url}/v1", api_key=ALICE, max_retries=0) as client:
        assert client.models.list().data[0].id == "toy"
    with anthropic.Anthropic(base_url=url, api_key=ALICE, max_retries=0) as client:
        messages = [{"role": "user", "content": "x"}]
        assert client.messages.count_tokens(model="toy", messages=messages).input_tokens > 0
    nobody: dict[str, Any] = {"api_key": "sk-nobody", "max_retries": 0}
    with OpenAI(base_url=f"{url}/v1", **nobody) as client, pytest.raises(openai.AuthenticationError, match="not known"):
        client.models.list()
    with (
        anthropic.Anthropic(base_url=url, **nobody) as client,
        pytest.raises(anthropic.AuthenticationError, match="authentication_error"),
    ):
        client.messages.count_tokens(model="toy", messages=messages)


def test_some_paths_are_open_and_some_are_for_admins(url):
    for path in ("/health", "/version", "/api/version"):
        assert httpx.get(url + path).status_code == 200
    for path in ("/metrics", "/slots", "/props"):
        assert httpx.get(url + path).status_code == 401
        assert httpx.get(url + path, headers=bearer(BOB)).status_code == 403
        assert httpx.get(url + path, headers=bearer(ADMIN)).status_code == 200


def test_keys_of_one_tenant_share_a_cache_and_others_do_not(url):
    prompt = "a prompt that only tenants know"
    assert cached(complete(url, ALICE, prompt)) == 0
    assert cached(complete(url, ALICE_2, prompt)) == len(prompt) - 1
    assert cached(complete(url, BOB, prompt)) == 0


@pytest.mark.parametrize(("number", "salt"), [*enumerate(["", "alice", "5:alice:", "alice-1", "3:bob:", "\x00"])])
def test_no_salt_of_a_clients_reaches_another_tenants_cache(url, number, salt):
    prompt = f"{number} secrets of alice's"
    assert cached(complete(url, ALICE, prompt, cache_salt=salt)) == 0
    for asked in {"", "alice", "5:alice:", f"5:alice:{salt}", salt}:
        assert cached(complete(url, BOB, prompt, cache_salt=asked, max_tokens=1)) == 0
    assert cached(complete(url, ALICE, prompt, cache_salt=salt)) == len(prompt) - 1


def test_another_tenants_prompt_is_no_diverging_neighbour(url):
    complete(url, ALICE, "the password is swordfish")
    reply = complete(url, BOB, "the password is unknown").json()
    (choice,) = reply["spolia"]["choices"]
    assert choice["reason"] != "diverged"
    assert choice["num_cached_tokens"] == 0


def test_what_one_tenant_keeps_is_not_there_for_another(url):
    body = {"model": "toy", "input": "mine", "max_output_tokens": 2}
    response = httpx.post(f"{url}/v1/responses", json=body, headers=bearer(ALICE)).json()["id"]
    stream = complete(url, ALICE, "mine", stream=True, resumable=True).headers["x-request-id"]
    session = httpx.post(f"{url}/v1/sessions", json={"model": "toy"}, headers=bearer(ALICE)).json()["id"]
    for path in (f"/v1/responses/{response}", f"/v1/streams/{stream}", f"/v1/sessions/{session}"):
        assert httpx.get(url + path, headers=bearer(ALICE_2)).status_code == 200, path
        assert httpx.get(url + path, headers=bearer(BOB)).status_code == 404, path
        assert httpx.get(url + path).status_code == 401, path
    body |= {"previous_response_id": response}
    refused = httpx.post(f"{url}/v1/responses", json=body, headers=bearer(BOB))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "previous_response_not_found")
    assert complete(url, BOB, "x", session=session).status_code == 404
    assert httpx.get(f"{url}/v1/sessions", headers=bearer(BOB)).json()["data"] == []


def test_another_tenants_session_is_unknown_whatever_is_asked_of_it(url):
    session = httpx.post(f"{url}/v1/sessions", json={"model": "toy"}, headers=bearer(ALICE), timeout=30).json()["id"]
    assert complete(url, ALICE, "a secret", session=session).status_code == 200
    asked = [
        ("GET", f"/v1/sessions/{session}", None),
        ("GET", f"/v1/sessions/{session}?cache_salt=alice", None),
        ("POST", f"/v1/sessions/{session}/append", {"model": "toy", "prompt": "x"}),
        ("POST", f"/v1/sessions/{session}/fork", {"model": "toy"}),
        ("POST", f"/v1/sessions/{session}/rewind", {"model": "toy", "turns": 1}),
        ("POST", "/v1/completions", {"model": "toy", "prompt": "x", "session": session}),
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "session": session}),
        ("DELETE", f"/v1/sessions/{session}", None),
    ]
    for method, path, body in asked:
        reply = httpx.request(method, url + path, json=body, headers=bearer(BOB), timeout=30)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "session_not_found"), (path, reply.text)
    listed = httpx.get(f"{url}/v1/sessions", headers=bearer(BOB), timeout=30).json()["data"]
    assert session not in [card["id"] for card in listed]
    card = httpx.get(f"{url}/v1/sessions/{session}", headers=bearer(ALICE_2), timeout=30).json()
    assert card["num_turns"] == 1  # it is there, as it was, for who may


def test_requests_are_limited_by_the_minute_and_come_back():
    clock = Clock()
    account = Account(KeySettings(name="k", requests_per_minute=2), clock)
    account.admit(1)
    account.admit(1)
    with pytest.raises(RateLimited, match="requests_per_minute, 2; try again in 30 s") as caught:
        account.admit(1)
    assert caught.value.retry_after_s == pytest.approx(30)
    clock.now_s += 30
    account.admit(1)


def test_tokens_are_paid_at_the_end_and_a_debt_is_waited_off():
    clock = Clock()
    account = Account(KeySettings(name="k", tokens_per_minute=600, tokens_per_day=100_000), clock)
    account.admit(100)
    account.settle(800)
    with pytest.raises(RateLimited, match="tokens_per_minute") as caught:
        account.admit(100)
    assert caught.value.retry_after_s == pytest.approx(40)
    clock.now_s += 40
    account.admit(100)
    account.settle(99_400)
    clock.now_s += 6 * 3600
    with pytest.raises(RateLimited, match="has used up its tokens_per_day"):
        account.admit(50_000)


def test_prompts_are_paid_when_they_are_sent_so_that_many_at_a_time_are_no_way_around():
    account = Account(KeySettings(name="k", tokens_per_minute=250), Clock())
    account.admit(100)
    account.admit(100)
    with pytest.raises(RateLimited, match="tokens_per_minute"):
        account.admit(100)
    account.settle(-100)  # it was refused for other reasons
    account.admit(100)


def test_a_request_larger_than_the_allowance_waits_for_all_of_it_and_not_for_ever():
    clock = Clock()
    account = Account(KeySettings(name="k", tokens_per_minute=100), clock)
    account.admit(5_000)
    account.settle(0)
    clock.now_s += 60 * 50
    account.admit(5_000)


def test_the_limits_are_told_as_429_with_a_time(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nname = "slow"\nkey = "{ALICE}"\nrequests_per_minute = 1\n')
    engine = chatty_engine()
    with serving({"toy": engine}, ServerConfig(keys=path)) as url:
        assert complete(url, ALICE, "x").status_code == 200
        reply = complete(url, ALICE, "x")
        assert reply.status_code == 429
        assert 50 <= int(reply.headers["retry-after"]) <= 60
        assert reply.json()["error"]["code"] == "rate_limit_exceeded"
        assert httpx.get(f"{url}/v1/models", headers=bearer(ALICE)).status_code == 200  # only answers cost
    asyncio.run(engine.aclose())


def told(reply: httpx.Response) -> str:
    """What limit a refusal names."""
    assert reply.status_code == 429, reply.text
    assert int(reply.headers["retry-after"]) >= 1
    message: str = reply.json()["error"]["message"]
    return message


def test_a_quota_of_tokens_counts_what_every_api_computes_and_a_larger_one_is_read_from_the_file(tmp_path):
    path = tmp_path / "keys.toml"

    def allow(tokens_per_day: int) -> None:
        path.write_text(f'[[keys]]\nname = "q"\nkey = "{ALICE}"\ntokens_per_day = {tokens_per_day}\n')

    allow(400)
    engine = chatty_engine(num_blocks=256, observer=Pace(step_s=0.005))
    with serving({"toy": engine}, ServerConfig(keys=path)) as url:
        assert complete(url, ALICE, "x" * 100, max_tokens=20, ignore_eos=True).status_code == 200
        assert "tokens_per_day, 400; try again in" in told(complete(url, ALICE, "y" * 300))  # 280 are left
        http = httpx.Client(base_url=url, headers=bearer(ALICE), timeout=30)
        embedded = http.post("/v1/embeddings", json={"input": "x" * 100})
        assert embedded.status_code == 200, embedded.text
        beams = {"prompt": "x" * 50, "num_beams": 2, "max_tokens": 4}
        assert http.post("/v1/completions", json=beams).status_code == 200
        # 126 are left at most. Who leaves before the end has paid for what was there, or nobody would wait for it.
        body = {"prompt": "z" * 50, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as reply:
            for line, _ in zip(filter(None, reply.iter_lines()), range(70), strict=False):
                assert "error" not in line
        eventually(lambda: engine.stats.num_running == 0)
        refused = told(complete(url, ALICE, "y" * 100))
        assert "tokens_per_day, 400" in refused
        allow(4_000)
        eventually(lambda: complete(url, ALICE, "y" * 100).status_code == 200)
        http.close()
    asyncio.run(engine.aclose())


def test_what_runs_on_a_key_that_is_taken_out_goes_on_to_its_end_and_nothing_new_begins(tmp_path):
    path = tmp_path / "keys.toml"
    root = f'[[keys]]\nname = "root"\nkey = "{ADMIN}"\nadmin = true\n'
    path.write_text(f'{root}[[keys]]\nname = "a"\nkey = "{ALICE}"\nmax_concurrent = 1\n')
    pace = Pace()
    engine = chatty_engine(num_blocks=256, observer=pace)
    with serving({"toy": engine}, ServerConfig(keys=path)) as url, httpx.Client(timeout=30) as http:
        session = http.post(f"{url}/v1/sessions", json={"model": "toy"}, headers=bearer(ALICE)).json()["id"]
        body = {"prompt": "x", "max_tokens": 40, "ignore_eos": True, "stream": True, "resumable": True}
        asked = http.stream("POST", f"{url}/v1/completions", json={**body, "session": session}, headers=bearer(ALICE))
        with ExitStack() as held, ExitStack() as asking:
            held.enter_context(pace.held())
            reply = asking.enter_context(asked)
            stream = reply.headers["x-request-id"]
            path.write_text(root)
            eventually(lambda: http.get(f"{url}/v1/models", headers=bearer(ALICE)).status_code == 401)
            assert http.get(f"{url}/v1/streams/{stream}", headers=bearer(ALICE)).status_code == 401
            assert http.get(f"{url}/metrics", headers=bearer(ADMIN)).status_code == 200
            held.close()
            events = [line for line in reply.iter_lines() if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2][6:])["choices"][0]["finish_reason"] == "length"
        path.write_text(f'{root}[[keys]]\nname = "a"\nkey = "{ALICE}"\nmax_concurrent = 1\n')
        eventually(lambda: http.get(f"{url}/v1/models", headers=bearer(ALICE)).status_code == 200)
        told_again = http.get(f"{url}/v1/streams/{stream}", headers=bearer(ALICE)).text  # what is kept is the tenant's
        assert told_again.count("data: ") == len(events)
        assert http.get(f"{url}/v1/sessions/{session}", headers=bearer(ALICE)).json()["num_turns"] == 1
        assert complete(url, ALICE, "y", session=session).status_code == 200
    asyncio.run(engine.aclose())


class _SlowExecutable(ToyExecutable):
    def run(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.05)
        super().run(*args, **kwargs)


def test_embeddings_that_are_broken_off_cost_what_was_computed_and_no_more(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nname = "q"\nkey = "{ALICE}"\ntokens_per_day = 4000\n')
    engine = chatty_engine(num_blocks=256, executable=_SlowExecutable(), max_batch_tokens=64)
    with serving({"toy": engine}, ServerConfig(keys=path, request_timeout_s=0.5)) as url:
        inputs = [chr(65 + i) * 100 for i in range(40)]  # some sixty steps
        reply = httpx.post(f"{url}/v1/embeddings", json={"input": inputs}, headers=bearer(ALICE), timeout=30)
        assert reply.status_code == 504
        assert complete(url, ALICE, "x" * 10, max_tokens=1).status_code == 200  # not all of the 4,000 are gone
        reply = httpx.post(f"{url}/v1/embeddings", json={"input": inputs}, headers=bearer(ALICE), timeout=30)
        assert "tokens_per_day, 4000" in told(reply)  # and not none
    asyncio.run(engine.aclose())


def test_a_file_that_changes_lets_in_and_shuts_out_while_the_server_runs(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nname = "a"\nkey = "{ALICE}"\n')
    engine = chatty_engine()
    with serving({"toy": engine}, ServerConfig(keys=path)) as url:
        assert complete(url, ALICE, "x").status_code == 200
        assert complete(url, BOB, "x").status_code == 401
        path.write_text(f'[[keys]]\nname = "b"\nkey = "{BOB}"\nadmin = true\n')
        eventually(lambda: complete(url, BOB, "x").status_code == 200)
        assert complete(url, ALICE, "x").status_code == 401
        path.write_text("[[keys]]\nname = ")  # half-way through being saved
        assert complete(url, BOB, "x").status_code == 200
        path.write_text(f'[[keys]]\nname = "b"\nkey = "{BOB}"\n')
        eventually(lambda: httpx.get(f"{url}/metrics", headers=bearer(BOB)).status_code == 403)
    asyncio.run(engine.aclose())


def test_the_kv_of_a_key_with_more_priority_outlasts_that_of_one_with_less(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(
        f'[[keys]]\nname = "low"\nkey = "{BOB}"\npriority = 10\n'
        f'[[keys]]\nname = "high"\nkey = "{ALICE}"\npriority = 90\n'
        f'[[keys]]\nname = "other"\nkey = "{ADMIN}"\npriority = 10\n'
    )
    engine = chatty_engine(num_blocks=24, max_context=120)
    with serving({"toy": engine}, ServerConfig(keys=path)) as url:
        prompt = "p" * 64
        complete(url, ALICE, prompt)
        complete(url, BOB, prompt, priority=100)  # more than its key may ask for: it gets 10
        for number in range(8):
            complete(url, ADMIN, f"{number}" * 64)
        assert cached(complete(url, ALICE, prompt)) == 63
        assert cached(complete(url, BOB, prompt)) == 0
    asyncio.run(engine.aclose())


def test_a_tenant_over_its_quota_of_kv_gives_up_its_own_and_nobody_elses(tmp_path):
    block_bytes = 128
    path = tmp_path / "keys.toml"
    path.write_text(
        f'[[keys]]\nname = "small"\nkey = "{BOB}"\nkv_quota = {6 * block_bytes}\n'
        f'[[keys]]\nname = "a"\nkey = "{ALICE}"\n'
    )
    engine = chatty_engine(num_blocks=256, max_context=120)
    with serving({"toy": engine}, ServerConfig(keys=path)) as url:
        prompt = "p" * 64
        complete(url, ALICE, prompt)
        for number in range(10):
            complete(url, BOB, f"{number}" * 64)
        assert cached(complete(url, BOB, "9" * 64)) == 63
        assert cached(complete(url, BOB, "0" * 64)) == 0
        assert cached(complete(url, ALICE, prompt)) == 63
    asyncio.run(engine.aclose())


def test_requests_at_a_time_are_limited_and_given_back_when_a_client_leaves(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nname = "one"\nkey = "{ALICE}"\nmax_concurrent = 1\n')
    engine = chatty_engine(observer=Pace(step_s=0.01))
    with serving({"toy": engine}, ServerConfig(keys=path)) as url:
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=bearer(ALICE)) as response:
            lines = response.iter_lines()
            next(lines)
            assert complete(url, ALICE, "y").status_code == 429
        eventually(lambda: complete(url, ALICE, "y").status_code == 200)
        for _ in range(3):  # what is refused for other reasons is not counted for ever
            assert complete(url, ALICE, "y", stop_token_ids=[9999]).status_code == 400
        assert complete(url, ALICE, "y").status_code == 200
    asyncio.run(engine.aclose())


def test_an_answer_that_takes_too_long_is_ended():
    engine = chatty_engine(observer=Pace(step_s=0.02))
    with serving({"toy": engine}, ServerConfig(request_timeout_s=0.3)) as url:
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=30).json()
        assert reply["choices"][0]["finish_reason"] == "length"  # a word that every client knows
        assert reply["choices"][0]["stop_reason"] == "request_timeout"
        assert 0 < reply["usage"]["completion_tokens"] < 100
        assert metric(url, "spolia_requests_finished_total", reason="length") == 1
    asyncio.run(engine.aclose())


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_never_began_in_its_time_is_an_error_and_not_an_empty_answer(stream):
    engine = chatty_engine(observer=Pace(step_s=0.2))
    with serving({"toy": engine}, ServerConfig(request_timeout_s=0.01)) as url:
        body = {"prompt": "x" * 480, "max_tokens": 4, "stream": stream}  # 15 steps
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
        error = json.loads(reply.text.removeprefix("data: "))["error"]
        assert reply.status_code == (200 if stream else 504)
        assert error["code"] == "request_timeout"
        assert "0.01 s" in error["message"]
    asyncio.run(engine.aclose())


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(tmp_path, caplog):
    clock, path = Clock(), tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nname = "a"\nkey = "{ALICE}"\nrequests_per_minute = 5\n')
    ring = KeyRing(path, clock)
    first = ring.find(ALICE)
    assert first is not None
    assert ring.find(BOB) is None
    path.write_text(path.read_text() + f'[[keys]]\nname = "b"\nkey = "{BOB}"\n')
    assert ring.find(BOB) is None  # not looked at more than once a second
    clock.now_s += 1
    assert ring.find(BOB) is not None
    path.write_text("[[keys]]\nname = 5")
    clock.now_s += 1
    assert ring.find(ALICE) is not None
    assert "the keys stay as they were" in caplog.text
    path.write_text(f'[[keys]]\nname = "a"\nkey = "{ALICE}"\nrequests_per_minute = 6\n')
    clock.now_s += 1
    assert ring.find(BOB) is None
    changed = ring.find(ALICE)
    assert changed is not None
    assert changed.settings.requests_per_minute == 6
    os.unlink(path)
    clock.now_s += 1
    assert ring.find(ALICE) is not None


def test_a_key_whose_settings_change_has_used_what_it_has_used(tmp_path):
    clock, path = Clock(), tmp_path / "keys.toml"

    def account(**limits: int) -> Account:
        lines = [f"{name} = {value}" for name, value in limits.items()]
        path.write_text("\n".join(['[[keys]]\nname = "a"', f'key = "{ALICE}"', *lines, ""]))
        clock.now_s += 1
        found = ring.find(ALICE)
        assert found is not None
        return found

    path.write_text(f'[[keys]]\nname = "a"\nkey = "{ALICE}"\ntokens_per_day = 1000\nmax_concurrent = 1\n')
    ring = KeyRing(path, clock)
    first = ring.find(ALICE)
    assert first is not None
    first.admit(900)
    with pytest.raises(RateLimited, match="1 requests running"):
        account(tokens_per_day=1000, max_concurrent=1, priority=10).admit(1)
    first.settle(0)  # by the account as it was
    with pytest.raises(RateLimited, match="tokens_per_day, 1000"):
        account(tokens_per_day=1000, priority=10).admit(200)
    with pytest.raises(RateLimited, match="tokens_per_day, 500"):
        account(tokens_per_day=500).admit(1)
    account(tokens_per_day=1200).admit(200)


BAD_FILES = [
    ("", "keys"),
    ("keys = 5", "keys"),
    ("[[keys]", "key file"),
    ('[[keys]]\nname = "a"', "give either key or key_sha256"),
    (f'[[keys]]\nname = "a"\nkey = "{ALICE}"\nkey_sha256 = "{"0" * 64}"', "give either"),
    ('[[keys]]\nname = "a"\nkey = "short"', "5 characters"),
    ('[[keys]]\nname = "a"\nkey_sha256 = "abc"', "64 hexadecimal digits"),
    (f'[[keys]]\nname = ""\nkey = "{ALICE}"', "empty name"),
    (f'[[keys]]\nname = "a"\nkey = "{ALICE}"\nrequests = 5', "requests"),
    (f'[[keys]]\nname = "a"\nkey = "{ALICE}"\nrequests_per_minute = 0', "requests_per_minute is 0"),
    (f'[[keys]]\nname = "a"\nkey = "{ALICE}"\npriority = 101', "priority is 101"),
    (f'[[keys]]\nname = "a"\nkey = "{ALICE}"\n[[keys]]\nname = "b"\nkey = "{ALICE}"', "a key is there twice"),
]


@pytest.mark.parametrize(("text", "words"), BAD_FILES, ids=[words for _, words in BAD_FILES])
def test_a_wrong_file_is_refused_in_words_without_the_key(tmp_path, text, words):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match="key file") as caught:
        read_keys(path)
    assert words in str(caught.value)
    assert ALICE not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="No such file"):
        KeyRing(tmp_path / "none.toml", Clock())


def test_serve_speaks_https_asks_for_keys_and_logs_json(tmp_path: Path, smollm2_path: Path):
    cert, key, keys = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "keys.toml"
    keys.write_text(KEYS)
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command, *names], check=True, capture_output=True)
    flags = ["--tls-cert", str(cert), "--tls-key", str(key), "--keys", str(keys), "--log-format", "json"]
    small = ["--name", "toy", "--kv-memory", "64MiB", "--threads", "1"]
    with server_process(smollm2_path, *flags, *small) as process:
        eventually(lambda: process.find('"event": "ready"') is not None, timeout_s=60)
        found = process.find(r'"url": "(https://[^"]+)/v1"')
        assert found is not None
        with httpx.Client(base_url=found[1], verify=ssl.create_default_context(cafile=cert), timeout=30) as http:
            body = {"prompt": "Hi", "max_tokens": 2}
            assert http.post("/v1/completions", json=body).status_code == 401
            headers = {**bearer(BOB), "x-request-id": "mine-7"}
            assert http.post("/v1/completions", json=body, headers=headers).status_code == 200
        eventually(lambda: process.find('"event": "answered"') is not None)
        (line,) = [line for line in process.log if '"answered"' in line]
        fields = httpx.Response(200, content=line).json()
        assert (fields["key"], fields["tenant"], fields["client_request"]) == ("bob", "bob", "mine-7")
        assert (fields["model"], fields["finish"], fields["level"]) == ("toy", "length", "info")
        assert BOB not in "".join(process.log)


@pytest.mark.parametrize("field", [{"tls_cert": Path("x")}, {"tls_cert": Path("/no"), "tls_key": Path("/no")}])
def test_half_a_certificate_is_refused_at_birth(field):
    with pytest.raises(ValueError, match="tls_"):
        ServerConfig(**field)


@contextmanager
def fresh_server(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "keys.toml").write_text(KEYS)
    engine = chatty_engine(num_blocks=256)
    with serving({"toy": engine}, ServerConfig(keys=tmp_path / "keys.toml")) as url:
        yield url
    asyncio.run(engine.aclose())


@pytest.mark.parametrize("limit", [{"_MAX_STORED": 4}, {"_MAX_STORED_BYTES": 15_000}])
def test_who_keeps_many_responses_pushes_out_nobody_elses(tmp_path, monkeypatch, limit):
    for name, value in limit.items():
        monkeypatch.setattr(endpoints, name, value)
    body = {"model": "toy", "input": "x", "max_output_tokens": 4, "metadata": {"long": "x" * 2000}}
    with fresh_server(tmp_path) as url:

        def answer(whose: str) -> str:
            reply = httpx.post(f"{url}/v1/responses", json=body, headers=bearer(whose)).raise_for_status()
            return str(reply.json()["id"])

        def kept(whose: str, ids: list[str]) -> list[bool]:
            paths = [f"{url}/v1/responses/{id_}" for id_ in ids]
            return [httpx.get(path, headers=bearer(whose)).status_code == 200 for path in paths]

        bobs = [answer(BOB)]
        alices = [answer(ALICE) for _ in range(8)]
        assert kept(BOB, bobs) == [True]
        there = kept(ALICE, alices)
        assert there == sorted(there)
        assert set(there) == {False, True}
        bobs.append(answer(BOB))
        answer(ALICE)
        assert kept(BOB, bobs) == [True, True]


def test_who_keeps_many_streams_makes_room_for_those_with_fewer(tmp_path, monkeypatch):
    monkeypatch.setattr(ResumableStreams.__init__, "__defaults__", (300.0, 4))
    body = {"prompt": [5], "max_tokens": 4, "stream": True, "resumable": True}
    with fresh_server(tmp_path) as url:

        def ask(whose: str) -> httpx.Response:
            return httpx.post(f"{url}/v1/completions", json=body, headers=bearer(whose))

        def kept(whose: str, id_: str) -> bool:
            return httpx.get(f"{url}/v1/streams/{id_}", headers=bearer(whose)).status_code == 200

        alices = [ask(ALICE).headers["x-request-id"] for _ in range(4)]
        assert ask(ALICE_2).status_code == 429  # of the tenant that has them all
        bobs = [ask(BOB).raise_for_status().headers["x-request-id"] for _ in range(2)]
        assert ask(BOB).status_code == 429  # half are theirs
        assert [kept(ALICE, id_) for id_ in alices] == [False, False, True, True]
        assert [kept(BOB, id_) for id_ in bobs] == [True, True]


def test_no_tenant_deletes_anothers_response_or_its_stream(url):
    body = {"model": "toy", "input": "x", "max_output_tokens": 4, "stream": True, "resumable": True}
    answer = httpx.post(f"{url}/v1/responses", json=body, headers=bearer(ALICE))
    id_ = answer.headers["x-request-id"]
    assert httpx.delete(f"{url}/v1/responses/{id_}", headers=bearer(BOB)).status_code == 404
    assert httpx.get(f"{url}/v1/streams/{id_}", headers=bearer(ALICE)).text == answer.text
    assert httpx.delete(f"{url}/v1/responses/{id_}", headers=bearer(ALICE_2)).status_code == 200
    assert httpx.get(f"{url}/v1/streams/{id_}", headers=bearer(ALICE)).status_code == 404
