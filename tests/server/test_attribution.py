"""Whatever traffic there is, every prompt token that was computed is counted under one reason, and only once."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from spolia.engine import MissReason
from spolia.tiers import HostBackend, Tier

from .harness import ChattyToy, Pace, chatty_engine, eventually, serving
from .test_explain import StrippingTemplate, assert_covers

ACTS = ("ask", "ask", "again", "say", "close", "talk", "search", "embed", "look", "pin", "clear")


class Traffic:
    """Asks, and adds up what the answers' explanations say."""

    def __init__(self, client: httpx.Client, rng: random.Random) -> None:
        self.client = client
        self.rng = rng
        self.prompts = [[7] * 40]
        self.sessions: list[str] = []
        self.talks: list[list[dict[str, str]]] = []
        self.told: Counter[str] = Counter()
        self.looked_up: set[str] = set()
        self.num_prompt = self.num_cached = 0

    def ask(self, number: int) -> None:
        """Some of what was asked before, and something else."""
        rng = self.rng
        tail = [rng.randrange(4) for _ in range(rng.randrange(60))]
        prompt = (self.prompts[number % len(self.prompts)][: rng.randrange(60)] + tail + [9])[:100]
        self.prompts.append(prompt)
        fields = {"n": rng.choice([1, 2]), "max_tokens": rng.randrange(1, 7), "cache_salt": rng.choice(["", "", "b"])}
        fields |= rng.choice([{}, {}, {"ttl": 0}, {"ttl": 0}, {"priority": 90}, {"prompt_logprobs": 1}])
        self.complete({"prompt": prompt, "temperature": 1, **fields})

    def again(self, number: int) -> None:
        """What was asked before, and a little more."""
        self.complete({"prompt": [*self.prompts[number % len(self.prompts)], number], "max_tokens": 2})

    def say(self, number: int) -> None:
        """The next turn of a session; a new one now and then."""
        if not self.sessions or number % 3 == 0:
            self.sessions.append(self.client.post("/v1/sessions", json={}).json()["id"])
        session = self.sessions[number % len(self.sessions)]
        self.complete({"prompt": [number] * 8, "session": session, "max_tokens": 3})

    def close(self, number: int) -> None:
        if self.sessions:
            session = self.sessions.pop(number % len(self.sessions))
            assert self.client.delete(f"/v1/sessions/{session}").status_code == 200

    def talk(self, number: int) -> None:
        """The next turn of a chat whose replies the template renders otherwise than they were generated."""
        if not self.talks or number % 3 == 0 or len(self.talks[-1]) > 3:
            self.talks.append([])
        talk = [*self.talks[-1], {"role": "user", "content": f"{number}?"}]
        reply = self.post("/v1/chat/completions", {"messages": talk, "max_tokens": 3}, 1)
        self.talks[-1] = [*talk, {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}]

    def search(self, number: int) -> None:
        """Beams, whose answers have one prompt, or the contrastive search."""
        how = {"penalty_alpha": 0.6, "top_k": 2} if number % 2 else {"num_beams": 2, "n": 2}
        prompt = [*self.prompts[number % len(self.prompts)][:50], number]
        self.post("/v1/completions", {"prompt": prompt, "max_tokens": 3, "temperature": 0, **how}, 1)

    def embed(self, number: int) -> None:
        inputs = [self.prompts[number % len(self.prompts)], [number, *self.prompts[-1]]]
        self.post("/v1/embeddings", {"input": inputs, "pooling": "mean" if number % 2 else "last"}, 2)

    def look(self, number: int) -> None:
        """What an operator is told; nobody's request."""
        body = {"prompt": self.prompts[number % len(self.prompts)], "cache_salt": self.rng.choice(["", "b"])}
        found = self.client.post("/v1/cache/lookup", json=body)
        assert found.status_code == 200, found.text
        self.looked_up.add(found.json()["reason"])

    def pin(self, number: int) -> None:
        body = {"prompt": self.prompts[number % len(self.prompts)], "ttl": 60}
        assert self.client.post("/v1/cache/pins", json=body).status_code in (200, 429)

    def clear(self, number: int) -> None:
        body = {"all": True} if number % 5 == 0 else {"prompt": self.prompts[-1], "cache_salt": "b"}
        assert self.client.post("/v1/cache/clear", json=body).status_code == 200

    def complete(self, body: dict[str, Any]) -> None:
        self.post("/v1/completions", body, body.get("n", 1))

    def post(self, path: str, body: dict[str, Any], num_prompts: int) -> Any:
        """Ask for something that computes so many prompts."""
        reply = self.client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        choices = self.client.get(f"/v1/cache/explain/{reply.headers['x-request-id']}").json()["choices"]
        for choice in choices:
            assert_covers(choice)
        for choice in choices[:num_prompts]:
            self.num_prompt += choice["num_prompt_tokens"]
            self.num_cached += choice["num_cached_tokens"]
            for part in choice["ranges"]:
                self.told[part.get("reason", part["source"])] += part["stop"] - part["start"]
        return reply.json()


def counted(url: str, name: str, label: str) -> Counter[str]:
    """What `/metrics` has under a name, by a label, without zeros."""
    found = re.findall(rf'^{name}_total{{.*{label}="([^"]+)".*}} (\S+)', httpx.get(f"{url}/metrics").text, re.MULTILINE)
    return Counter({value: int(float(count)) for value, count in found if float(count)})


@contextlib.contextmanager
def traffic_on(
    windows: tuple[int | None, ...], num_blocks: int, has_tier: bool, seed: int
) -> Iterator[tuple[Traffic, str]]:
    tiers = [Tier("host", HostBackend(1 << 20), stall_s=60)] if has_tier else []
    counts = [num_blocks, 14][: len(windows)]
    engine = chatty_engine(
        ChattyToy(chat_template=StrippingTemplate()), windows=windows, num_blocks=counts, tiers=tiers
    )
    try:
        with serving({"toy": engine}) as url, httpx.Client(base_url=url, timeout=60) as client:
            yield Traffic(client, random.Random(seed)), url
    finally:
        asyncio.run(engine.aclose())


def test_the_reasons_add_up_to_what_was_computed_and_each_of_them_occurs():
    seen: set[str] = set()
    looked_up: set[str] = set()
    for seed, windows in enumerate([(None,), (None, 20), (None,), (None, 40)] * 2):
        with traffic_on(windows, 16, has_tier=seed % 4 > 1, seed=seed) as (traffic, url):
            for _ in range(40):
                getattr(traffic, traffic.rng.choice(ACTS))(traffic.rng.randrange(60))
            told = traffic.told
            missed, sources = (
                counted(url, "spolia_missed_prompt_tokens", "reason"),
                counted(url, "spolia_prompt_tokens", "source"),
            )
            assert sources.pop("computed") == missed.total() == traffic.num_prompt - traffic.num_cached
            assert told == missed + sources
            seen.update(missed)
            looked_up.update(traffic.looked_up)
    # No request is told, nor counted, by what others have: only an operator who looks.
    assert "other_namespace" in looked_up
    assert seen == {reason.value for reason in MissReason} - {"other_namespace"}


@pytest.mark.parametrize("num_choices", [1, 3])
def test_the_prompt_of_a_stream_whose_client_leaves_is_counted_all_the_same(num_choices):
    engine = chatty_engine(num_blocks=256, observer=Pace(step_s=0.01))
    try:
        with serving({"toy": engine}) as url:
            body = {"prompt": [1] * 50, "max_tokens": 400, "stream": True, "ignore_eos": True, "n": num_choices}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
                next(response.iter_lines())
            eventually(lambda: counted(url, "spolia_prompt_tokens", "source").total() == 50 * num_choices)
            assert counted(url, "spolia_missed_prompt_tokens", "reason")["never_seen"] == 50
    finally:
        asyncio.run(engine.aclose())


def test_a_guided_answers_other_prompt_is_counted_too():
    engine = chatty_engine(num_blocks=256)
    try:
        with serving({"toy": engine}) as url:
            body = {"prompt": [1] * 50, "max_tokens": 2, "guidance_scale": 1.5, "negative_prompt": "x" * 30}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
            assert counted(url, "spolia_missed_prompt_tokens", "reason") == {"never_seen": 80}
    finally:
        asyncio.run(engine.aclose())
