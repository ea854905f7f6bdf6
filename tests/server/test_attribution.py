"""Whatever traffic there is, every prompt token that was computed is counted under one reason, and only once."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spolia.engine import MissReason

from .harness import chatty_engine, metric, serving
from .test_explain import assert_covers

SMALL = st.integers(0, 60)
SALTS = st.sampled_from(["", "other"])
ASK = st.fixed_dictionaries(
    {
        "base": SMALL,
        "keep": SMALL,
        "tail": st.lists(st.integers(0, 3), max_size=60),
        "salt": SALTS,
        "fields": st.fixed_dictionaries(
            {"n": st.integers(1, 2), "max_tokens": st.integers(1, 6)},
            optional={"ttl": st.sampled_from([0, 100]), "priority": st.sampled_from([0, 90])},
        ),
    }
)
ACTS = st.one_of(
    st.tuples(st.just("ask"), ASK),
    st.tuples(st.just("ask"), ASK),
    st.tuples(st.just("say"), SMALL),
    st.tuples(st.just("close"), SMALL),
    st.tuples(st.just("pin"), SMALL),
    st.tuples(st.just("clear"), SALTS),
)


class Traffic:
    """Asks, and adds up what the answers' explanations say."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client
        self.prompts = [[7] * 40]
        self.sessions: list[str] = []
        self.told: dict[str, int] = {}
        self.num_prompt = self.num_cached = 0

    def ask(self, base: int, keep: int, tail: list[int], salt: str, fields: dict[str, Any]) -> None:
        prompt = (self.prompts[base % len(self.prompts)][:keep] + tail + [9])[:100]
        self.prompts.append(prompt)
        self.complete({"prompt": prompt, "cache_salt": salt, "temperature": 1, **fields})

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

    def pin(self, number: int) -> None:
        body = {"prompt": self.prompts[number % len(self.prompts)], "ttl": 60}
        assert self.client.post("/v1/cache/pins", json=body).status_code in (200, 429)

    def clear(self, salt: str) -> None:
        body = {"prompt": self.prompts[-1], "cache_salt": salt} if salt else {"all": True}
        assert self.client.post("/v1/cache/clear", json=body).status_code == 200

    def complete(self, body: dict[str, Any]) -> None:
        reply = self.client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        for choice in self.client.get(f"/v1/cache/explain/{reply.json()['id']}").json()["choices"]:
            assert_covers(choice)
            self.num_prompt += choice["num_prompt_tokens"]
            self.num_cached += choice["num_cached_tokens"]
            for part in choice["ranges"]:
                if "reason" in part:
                    self.told[part["reason"]] = self.told.get(part["reason"], 0) + part["stop"] - part["start"]


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(window=st.sampled_from([None, 20, 40]), acts=st.lists(ACTS, min_size=12, max_size=30))
def test_the_reasons_add_up_to_what_was_computed(window, acts):
    engine = chatty_engine(
        **({"num_blocks": 16} if window is None else {"windows": (None, window), "num_blocks": (16, 14)})
    )
    try:
        with serving({"toy": engine}) as url, httpx.Client(base_url=url, timeout=60) as client:
            traffic = Traffic(client)
            for act, value in acts:
                getattr(traffic, act)(**value) if act == "ask" else getattr(traffic, act)(value)
            counted = {
                reason.value: metric(url, "spolia_missed_prompt_tokens_total", reason=reason.value)
                for reason in MissReason
            }
            assert {reason: count for reason, count in counted.items() if count} == traffic.told
            assert sum(counted.values()) == traffic.num_prompt - traffic.num_cached
    finally:
        asyncio.run(engine.aclose())
