"""Every prompt token has a source, and each that was computed one reason of a closed list, with evidence."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import httpx
import pytest

from engine.toy import ToyCodec
from spolia.engine import MissReason
from spolia.tiers import FolderBackend, Tier

from .harness import ChattyToy, Pace, PlainTemplate, chatty_engine, metric, scripted_engine, serving


def test_what_a_tier_kept_in_fewer_bits_is_told_in_usage_explanation_and_metrics(tmp_path):
    def engine():
        return chatty_engine(tiers=[Tier("disk", FolderBackend(tmp_path), stall_s=60)], codec=ToyCodec())

    body = {"model": "toy", "prompt": "a" * 100, "max_tokens": 4, "temperature": 0}
    first = engine()
    with serving({"toy": first}) as url:
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
    asyncio.run(first.aclose())
    second = engine()
    with serving({"toy": second}) as url:
        client = Client(url)
        choice = client.complete(body["prompt"])
        assert choice["num_rounded_tokens"] == {"int8": 96}
        usage = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 99, "rounded_tokens": {"int8": 96}}
        assert metric(url, "spolia_rounded_tokens_total", kind="int8") == 2 * 96
        assert client.complete(body["prompt"], exact_kv=True)["num_cached_tokens"] == 0
        usage = httpx.post(f"{url}/v1/completions", json={**body, "exact_kv": True}, timeout=60).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 99}
    asyncio.run(second.aclose())


class Client:
    """Asks, and looks up the explanation of each answer."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = httpx.post(f"{self.url}{path}", json={"max_tokens": 4, "temperature": 0, **body}, timeout=60)
        assert reply.status_code == 200, reply.text
        found = httpx.get(f"{self.url}/v1/cache/explain/{reply.headers['x-request-id']}", timeout=60).json()
        (choice,) = found["choices"]
        assert found["id"] == reply.json()["id"]
        assert_covers(choice)
        return {**choice, "text": reply.json()["choices"][0].get("message", {}).get("content")}

    def complete(self, prompt: object, **fields: object) -> dict[str, Any]:
        return self.ask("/v1/completions", {"prompt": prompt, **fields})

    def chat(self, *messages: dict[str, Any], **fields: object) -> dict[str, Any]:
        return self.ask("/v1/chat/completions", {"messages": list(messages), **fields})


def assert_covers(choice: dict[str, Any]) -> None:
    """The ranges are the prompt, without gap or overlap; what was computed has a reason, what was not has none."""
    position = 0
    for part in choice["ranges"]:
        assert part["start"] == position < part["stop"]
        assert (part["source"] == "computed") == ("reason" in part)
        position = part["stop"]
    assert position == choice["num_prompt_tokens"]
    reused = sum(part["stop"] - part["start"] for part in choice["ranges"] if "reason" not in part)
    assert reused == choice["num_cached_tokens"]


def reasons(choice: dict[str, Any]) -> list[tuple[str, int]]:
    return [(part["reason"], part["stop"] - part["start"]) for part in choice["ranges"] if "reason" in part]


@pytest.fixture
def small():
    """A cache of 12 blocks."""
    engine = chatty_engine(num_blocks=12)
    with serving({"toy": engine}) as url:
        yield Client(url)
    asyncio.run(engine.aclose())


@pytest.fixture
def roomy():
    engine = chatty_engine(num_blocks=256)
    with serving({"toy": engine}) as url:
        yield Client(url)
    asyncio.run(engine.aclose())


def test_new_text_known_text_and_a_difference_are_told_with_the_text_around(roomy):
    assert reasons(roomy.complete("The capital of France is Paris.")) == [("never_seen", 31)]
    again = roomy.complete("The capital of France is Paris.")
    assert reasons(again) == [("full", 1)]
    other = roomy.complete("The capital of Poland is Warsaw.")
    assert reasons(other) == [("diverged", 17)]
    assert other["divergence"] == 15
    assert "of Poland" in other["text_around"]
    assert other["text_after"].startswith("Poland")


def test_what_was_evicted_says_when_by_what_and_for_whom(small):
    small.complete([1] * 64)
    hog = httpx.post(f"{small.url}/v1/completions", json={"prompt": [2] * 170, "max_tokens": 1}).json()["id"]
    choice = small.complete([1] * 64 + [3] * 20)
    (first, num_evicted), (second, num_new) = reasons(choice)
    assert (first, second) == ("evicted", "never_seen")
    assert 16 <= num_new <= 20  # what the first answer added after its prompt was evicted as well
    assert num_evicted + num_new + choice["num_cached_tokens"] == 84
    assert choice["evicted_by"] == "lru"
    assert choice["evicted_s_ago"] > 0
    assert choice["evicted_for"] == f"{hog}-0"


def test_another_tenants_request_is_not_named(small):
    small.complete([1] * 64)
    small.complete([2] * 170, cache_salt="theirs")
    assert small.complete([1] * 64)["evicted_for"] == "another tenant's request"


def test_what_expired_says_so(small):
    small.complete([1] * 64, ttl=0)
    small.complete([2] * 170)
    assert reasons(small.complete([1] * 64))[0][0] == "expired"


def test_what_another_running_request_holds_is_shared_and_not_just_cached():
    engine = chatty_engine(num_blocks=256, observer=Pace(step_s=0.02))
    with serving({"toy": engine}) as url:
        prompt = list(range(80))
        body = {"prompt": prompt, "max_tokens": 400, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            choice = Client(url).complete([*prompt, 200, 201])
        assert choice["ranges"][0]["source"] == "shared"
        assert choice["ranges"][0]["stop"] >= 64
    asyncio.run(engine.aclose())


def test_windows_that_are_gone_are_told():
    engine = chatty_engine(windows=(None, 32), num_blocks=(256, 14))
    with serving({"toy": engine}) as url:
        client = Client(url)
        client.complete([1] * 100)
        client.complete([2] * 200)
        choice = client.complete([1] * 60 + [3] * 10)
        assert reasons(choice)[0][0] == "outside_window"
        assert reasons(choice)[-1] == ("diverged", 10)
    asyncio.run(engine.aclose())


SYSTEM = {"role": "system", "content": "session=4711 You help."}
ASK = {"role": "user", "content": "What is the weather?"}


def test_a_nonce_in_the_system_message_is_named_by_message_and_field(roomy):
    roomy.chat(SYSTEM, ASK)
    choice = roomy.chat({**SYSTEM, "content": "session=4712 You help."}, ASK)
    assert choice["message"] == {"index": 0, "role": "system", "field": "content", "kind": "changed", "character": 11}
    assert "4712" in choice["text_around"]
    assert choice["reason"] == "diverged"


def test_a_choice_that_ends_after_another_names_the_request_before_and_not_its_sister(roomy):
    url = f"{roomy.url}/v1/chat/completions"
    first = httpx.post(url, json={"messages": [SYSTEM, ASK], "max_tokens": 4}, timeout=60).json()
    messages = [{**SYSTEM, "content": "session=4712 You help."}, ASK]
    drawn = {"n": 2, "seed": 3, "temperature": 1.0, "max_tokens": 60, "stop": ["a", "e", "t", " "]}
    reply = httpx.post(url, json={"messages": messages, **drawn}, timeout=60).json()
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["length", "stop"]
    told, sister = httpx.get(f"{roomy.url}/v1/cache/explain/{reply['id']}", timeout=60).json()["choices"]
    assert (told["reason"], sister["reason"]) == ("diverged", "full")
    assert told["earlier_request"] == f"{first['id']}-0"
    assert told["message"]["character"] == 11


def test_other_tools_are_named(roomy):
    tool = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {}}}
    roomy.chat(ASK, tools=[tool])
    choice = roomy.chat(ASK, tools=[{**tool, "function": {**tool["function"], "name": "whether"}}])
    assert choice["message"] == {"field": "tools[0].function.name", "kind": "changed", "character": 1}


def test_a_reply_that_the_client_changed_is_named(roomy):
    first = roomy.chat(SYSTEM, ASK, max_tokens=12)
    reply = {"role": "assistant", "content": "No: " + first["text"]}
    choice = roomy.chat(SYSTEM, ASK, reply, ASK)
    assert choice["message"]["index"] == 2
    assert choice["message"]["field"] == "content"


class StrippingTemplate(PlainTemplate):
    """Renders a reply in upper case when it is history: what was generated was not."""

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        def shown(message: dict[str, Any]) -> dict[str, Any]:
            content = message["content"]
            return {**message, "content": f"[{content}]" if message["role"] == "assistant" else content}

        return super().render([shown(message) for message in messages], **options)


def test_history_that_the_template_renders_otherwise_is_template_drift():
    engine = chatty_engine(ChattyToy(chat_template=StrippingTemplate()), num_blocks=256)
    with serving({"toy": engine}) as url:
        client = Client(url)
        first = client.chat(SYSTEM, ASK, max_tokens=12)
        reply = {"role": "assistant", "content": first["text"]}
        choice = client.chat(SYSTEM, ASK, reply, ASK)
        assert choice["reason"] == "template_drift"
        assert "message" not in choice
        assert reasons(choice)[0][0] == "template_drift"
        assert metric(url, "spolia_missed_prompt_tokens_total", reason="template_drift") == reasons(choice)[0][1]
        assert metric(url, "spolia_missed_prompt_tokens_total", reason="diverged") == 0
    asyncio.run(engine.aclose())


class ExactTemplate(PlainTemplate):
    """Renders a reply just as it was generated."""

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        lines = "".join(f"{message['role']}:{message['content']}\n" for message in messages)
        return lines + ("assistant:" if options.get("add_generation_prompt") else "")


BEAMS = {"num_beams": 3}
CONTRASTIVE = {"penalty_alpha": 0.6, "top_k": 3}
ASK_ON = {"role": "user", "content": "And then?"}
SCRIPT = {"user:What is the weather?": "sunny today", "user:And then?": "rain", "user:And now?": "sun"}


@pytest.mark.parametrize("first", [{}, BEAMS])
@pytest.mark.parametrize("second", [{}, BEAMS])
def test_a_chat_that_goes_on_is_new_text_though_other_beams_went_on_otherwise(first, second):
    engine = scripted_engine(SCRIPT, ChattyToy(chat_template=ExactTemplate()), num_blocks=256)
    with serving({"toy": engine}) as url:
        client = Client(url)
        reply = client.chat(SYSTEM, ASK, max_tokens=20, temperature=0, **first)["text"]
        assert reply == "sunny today"
        choice = client.chat(SYSTEM, ASK, {"role": "assistant", "content": reply}, ASK_ON, temperature=0, **second)
        assert "message" not in choice
        assert [reason for reason, _ in reasons(choice)] == ["never_seen"]
        assert choice["text_after"].startswith("\nuser:")
        edited = {"role": "user", "content": "And now?"}
        other = client.chat(SYSTEM, ASK, {"role": "assistant", "content": reply}, edited, temperature=0, **second)
        assert (other["reason"], other["message"]["index"]) == ("diverged", 3)
    asyncio.run(engine.aclose())


@pytest.mark.parametrize(("first", "second"), [({}, BEAMS), (BEAMS, {}), (CONTRASTIVE, CONTRASTIVE)])
def test_searches_tell_template_drift_and_the_message_that_changed(first, second):
    engine = chatty_engine(ChattyToy(chat_template=StrippingTemplate()), num_blocks=256)
    with serving({"toy": engine}) as url:
        client = Client(url)
        reply = client.chat(SYSTEM, ASK, max_tokens=20, temperature=0, **first)["text"]
        choice = client.chat(SYSTEM, ASK, {"role": "assistant", "content": reply}, ASK_ON, temperature=0, **second)
        assert reasons(choice)[-1][0] == "template_drift"
        assert "message" not in choice
        choice = client.chat({**SYSTEM, "content": "session=4712 You help."}, ASK, temperature=0, **second)
        if choice["reason"] != "results_wanted":  # of contrastive search, whose prompt is computed in any case
            assert choice["message"]["field"] == "content"
        assert reasons(choice)[-1][0] == "diverged"
    asyncio.run(engine.aclose())


def test_every_prompt_token_of_random_traffic_is_counted_once(small):
    rng = random.Random(5)
    trunk = [rng.randrange(250) for _ in range(60)]
    told: Counter[str] = Counter()
    num_prompt = 0
    for _ in range(60):
        prompt = trunk[: rng.randrange(1, 60)] + [rng.randrange(250) for _ in range(rng.randrange(60))]
        choice = small.complete(prompt, cache_salt=rng.choice(["", "b"]), ttl=rng.choice([None, 0, 100]))
        num_prompt += len(prompt)
        for part in choice["ranges"]:
            told[part.get("reason", part["source"])] += part["stop"] - part["start"]
    assert sum(told.values()) == num_prompt
    for reason in MissReason:
        counted = metric(small.url, "spolia_missed_prompt_tokens_total", reason=reason.value)
        assert counted == told[reason.value], reason
    assert metric(small.url, "spolia_prompt_tokens_total", source="device") == told["device"]
    assert {"never_seen", "diverged", "evicted", "full", "expired"} <= set(told)


def test_an_unknown_request_is_404_and_says_what_to_give(roomy):
    reply = httpx.get(f"{roomy.url}/v1/cache/explain/cmpl-none")
    assert reply.status_code == 404
    assert "x-request-id" in reply.json()["error"]["message"]


def test_the_command_shows_it(roomy):
    roomy.chat(SYSTEM, ASK)
    changed = {**SYSTEM, "content": "session=4712 You help."}
    id_ = httpx.post(
        f"{roomy.url}/v1/chat/completions", json={"messages": [changed, ASK], "max_tokens": 1}, timeout=60
    ).json()["id"]
    command = [sys.executable, "-m", "spolia", "cache", "explain"]
    done = subprocess.run([*command, id_, "--url", roomy.url], capture_output=True, text=True, check=True)
    assert re.search(r"0 \.\. \d+ +device", done.stdout)
    assert "diverged" in done.stdout
    assert "messages[0], system: content changed" in done.stdout
    done = subprocess.run([*command, "nobody", "--url", roomy.url], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nobody" in done.stderr
