"""Chats with tools, strict tools, forms and sessions, and completions, 32 at a time: each as it is alone and cold."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.test_mixed_batch import BATCHES
from engine.toy import EOS, ToyExecutable

from .harness import chatty_engine, serving
from .test_mixed_requests import NUM_REQUESTS, Shy, bodies
from .test_mixed_requests import SETTINGS as COMPLETION_SETTINGS
from .test_mixed_requests import ask as ask_completion

# A row's tokens are bytes, so schemas are short.
_ON = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
PLAIN = {"type": "function", "function": {"name": "f", "parameters": _ON}}
STRICT = {"type": "function", "function": {"name": "g", "parameters": _ON, "strict": True}}
BOTH = [PLAIN, STRICT]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": _ON}}
KINDS: dict[str, list[dict[str, Any]]] = {
    "plain": [{}],
    "tools": [{"tools": [PLAIN]}, {"tools": BOTH, "tool_choice": "none"}],
    "strict": [{"tools": [STRICT]}, {"tools": BOTH, "parallel_tool_calls": False}],
    "required": [
        {"tools": BOTH, "tool_choice": "required", "max_tokens": 60},
        {"tools": BOTH, "tool_choice": {"type": "function", "function": {"name": "g"}}, "max_tokens": 60},
    ],
    "form": [
        {"response_format": SCHEMA, "max_tokens": 40},
        {"response_format": {"type": "json_object"}, "max_tokens": 12},
        {"structured_outputs": {"choice": ["yes", "yellow", "no"]}},
    ],
    "form or call": [{"response_format": SCHEMA, "tools": BOTH, "max_tokens": 60}],
}
# Neither those that a session refuses, nor those that name a form or leave one no way to its end.
SETTINGS = {
    name: strategy
    for name, strategy in COMPLETION_SETTINGS.items()
    if name not in ("context_shift", "token_healing", "logprobs", "truncate", "truncate_prompt_tokens")
}


@st.composite
def chats(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(sorted(KINDS)))
    says = st.text("abc", min_size=1, max_size=9)
    names = draw(st.lists(st.sampled_from(sorted(SETTINGS)), max_size=3, unique=True))
    chosen = {name: draw(SETTINGS[name]) for name in names}
    if "dola_layers" in chosen:
        chosen.pop("guidance_scale", None)
    if chosen.get("guidance_scale", 1.0) != 1.0:
        chosen["negative_prompt"] = draw(says)
    return {
        "kind": kind,
        "turns": [draw(says), draw(says)],  # of a session; without one, the same is asked twice
        "in_session": draw(st.booleans()),
        "messages": [{"role": "system", "content": draw(st.sampled_from(["abab", "abac"]))}],
        "max_tokens": draw(st.integers(4, 8)),
        "seed": draw(st.integers(0, 99)),
        "stream": draw(st.booleans()),
        "return_token_ids": True,
        **chosen,
        **draw(st.sampled_from([{}, {"logprobs": True, "top_logprobs": 2}])),
        **draw(st.sampled_from(KINDS[kind])),
    }


async def ask_chat(client: httpx.AsyncClient, chat: dict[str, Any], session: str | None, turn: int) -> Any:
    """What must not depend on the others, put together if it streams. Ids of calls are drawn anew."""
    body = {name: value for name, value in chat.items() if name not in ("kind", "turns", "in_session")}
    said = {"role": "user", "content": chat["turns"][turn if session else 0]}
    body["messages"] = [said] if session and turn else [*chat["messages"], said]
    reply = await client.post("/v1/chat/completions", json=body | ({"session": session} if session else {}))
    is_stream = reply.headers["content-type"].startswith("text/event-stream")
    events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    whole: dict[str, Any] = {"content": "", "reasoning_content": "", "token_ids": [], "logprobs": [], "calls": {}}
    for part in map(json.loads, events if is_stream else [reply.text]):
        if "error" in part:
            return part["error"]["message"]
        for choice in part["choices"]:
            message = choice["delta"] if is_stream else choice["message"]
            for name in ("content", "reasoning_content"):
                whole[name] += message.get(name) or ""
            for index, call in enumerate(message.get("tool_calls") or ()):
                made = whole["calls"].setdefault(call.get("index", index), {"name": "", "arguments": ""})
                for name in made:
                    made[name] += call["function"].get(name) or ""
            whole["token_ids"] += choice.get("token_ids") or ()
            whole["logprobs"] += (choice.get("logprobs") or {}).get("content") or ()
            whole |= {name: choice[name] for name in ("finish_reason", "stop_reason") if choice.get(name) is not None}
    return whole


async def open_session(client: httpx.AsyncClient, salt: str | None) -> str:
    reply = await client.post("/v1/sessions", json={"ttl": 1_000} | ({"cache_salt": salt} if salt else {}))
    return str(reply.json()["id"])


async def ask_twice(client: httpx.AsyncClient, request: dict[str, Any], salt: str | None = None) -> list[Any]:
    """Both turns of a session; or the same twice, of which the second finds what the first left."""
    salted = request | ({"cache_salt": salt} if salt else {})
    if "kind" not in request:
        return [await ask_completion(client, salted) for _ in range(2)]
    session = await open_session(client, salt) if request["in_session"] else None
    return [await ask_chat(client, salted, session, turn) for turn in range(2)]


async def ask_all(url: str, batch: list[dict[str, Any]]) -> list[list[Any]]:
    limits = httpx.Limits(max_connections=NUM_REQUESTS)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        return list(await asyncio.gather(*(ask_twice(client, request) for request in batch)))


async def ask_alone(url: str, request: dict[str, Any]) -> list[Any]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        return await ask_twice(client, {**request, "stream": False}, salt=json.dumps(request))


def test_each_of_32_chats_and_completions_is_answered_as_if_it_were_alone():
    """On a server with little room that speculates, at once with the others; and on one that does not, one by one."""
    common = {"eos_token_ids": [EOS], "processors": {"shy": Shy}, "max_context": 240}
    crowded = chatty_engine(num_blocks=24, max_batch_tokens=24, speculation="auto", draft=ToyExecutable(), **common)
    quiet = chatty_engine(num_blocks=200, **common)
    happened: Counter[str] = Counter()
    with serving({"toy": crowded}) as url, serving({"toy": quiet}) as quiet_url:

        @settings(BATCHES, max_examples=4)
        @given(batch=st.lists(st.one_of(chats(), chats(), bodies()), min_size=NUM_REQUESTS, max_size=NUM_REQUESTS))
        def check(batch):
            together = asyncio.run(ask_all(url, batch))
            for request, answers in zip(batch, together, strict=True):
                alone = asyncio.run(ask_alone(quiet_url, request))
                assert answers == alone, request
                note(request, alone)

        def note(request: dict[str, Any], alone: list[Any]) -> None:
            kind = request.get("kind", "completion")
            happened[f"{kind}, {'refused' if isinstance(alone[0], str) else 'answered'}"] += 1
            if kind == "completion" or isinstance(alone[0], str):
                return
            happened["streamed"] += request["stream"]
            happened["in a session"] += request["in_session"] and not isinstance(alone[1], str)
            happened["called"] += bool(alone[0]["calls"])

        check()
    asyncio.run(crowded.aclose())
    asyncio.run(quiet.aclose())
    assert all(happened[f"{kind}, answered"] for kind in (*KINDS, "completion")), happened
    assert min(happened["streamed"], happened["in a session"], happened["called"]) > 2, happened
    assert sum(count for what, count in happened.items() if what.endswith("refused")) < 25, happened
    assert crowded.cache_stats.num_evicted_tokens > 0
    assert sum(count.num_accepted for count in crowded.stats.counters.drafts.values()) > 0
