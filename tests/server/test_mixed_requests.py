"""32 requests at a time, each in its own way, streamed or not, cached or not: each answered as it is alone and cold."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import fields
from typing import Any

import httpx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.test_mixed_batch import BATCHES, IN_PYTHON
from engine.test_mixed_batch import SETTINGS as SAMPLING
from engine.toy import EOS, ToyExecutable
from spolia.engine import SamplingParams
from spolia.generation import NOT_WITH_BEAMS, NOT_WITH_CONTRASTIVE
from spolia.server.beams import DRAWING

from .harness import chatty_engine, serving

NUM_REQUESTS = 32
FORMS: list[dict[str, Any]] = [
    {"guided_regex": "[ab]{3}|c+"},
    {"guided_choice": ["yes", "yellow", "no"]},
    {"grammar": 'root ::= "a" root | "b"'},
    {"json_schema": {"enum": [1, 25, "x"]}},
    {"response_format": {"type": "json_object"}},
]
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    **SAMPLING,
    "bad_words_ids": st.just([[5, 6], [7]]),
    "stop": st.sampled_from(["a", ["e", "zz"]]),
    "stop_regex": st.just("[x-z]"),
    "stop_token_ids": st.just([9, 40, 99]),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "prompt_logprobs": st.integers(0, 2),
    "token_healing": st.just(True),
    "context_shift": st.just({"sinks": 2}),
    "thinking_budget": st.integers(0, 3),
    "reasoning_tags": st.just(["<", ">"]),
    "speculation": st.booleans(),
    "prediction": st.text("abc", min_size=1, max_size=9),
    "logits_processors": st.sampled_from([["shy"], [{"name": "shy", "args": {"penalty": 4.0}}]]),
    "explain_candidates": st.just(2),
}
BEAMS: list[dict[str, Any]] = [
    {"num_beams": 3, "n": 2},
    {"use_beam_search": True, "n": 2, "best_of": 4, "length_penalty": 0.3, "early_stopping": True},
    {"num_beams": 4, "n": 3, "num_beam_groups": 2, "diversity_penalty": 2.0},
    {"num_beams": 3, "force_words_ids": [[70, 71]]},
    {"num_beams": 3, "n": 3, "do_sample": True},
]


class Shy:
    """A user's processor with state: what was likeliest before becomes less likely."""

    def __init__(self, penalty: float = 2.0) -> None:
        self._penalty = np.float32(penalty)
        self._before: int | None = None

    def process(self, logits, rows):
        best = int(logits[0].argmax())
        if self._before is not None:
            logits[:, self._before] -= self._penalty
        self._before = best


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Any request; some are refused, which depends on them alone, too."""
    body: dict[str, Any] = {
        "prompt": draw(st.lists(st.integers(97, 99), min_size=1, max_size=40)),  # prompts share beginnings
        "max_tokens": draw(st.integers(4, 8)),
        "seed": draw(st.integers(0, 99)),
        "stream": draw(st.booleans()),
        "return_token_ids": True,
    }
    kind = draw(st.sampled_from(["beams", "beams", "n", "best_of", "form", "contrastive", "one", "one", "one"]))
    names = draw(st.lists(st.sampled_from(sorted(SETTINGS)), max_size=5, unique=True))
    if kind == "n":
        body["n"] = draw(st.integers(2, 4))
    elif kind == "best_of":
        body |= {"n": 2, "best_of": 4}
    elif kind == "form":
        body |= draw(st.sampled_from(FORMS))
    elif kind == "beams":
        body |= draw(st.sampled_from(BEAMS))
        body |= draw(st.sampled_from([{}, {}, *FORMS]))
        names = [name for name in names if name not in (*NOT_WITH_BEAMS, *(() if "do_sample" in body else DRAWING))]
    elif kind == "contrastive":
        body |= {"penalty_alpha": draw(st.sampled_from([0.2, 0.6])), "top_k": draw(st.integers(2, 5))}
        body |= draw(st.sampled_from([{}, {}, *FORMS]))
        names = [name for name in names if name not in (*NOT_WITH_CONTRASTIVE, "temperature")]
    chosen = {name: draw(SETTINGS[name]) for name in names}
    if "dola_layers" in chosen or "context_shift" in chosen:
        chosen.pop("guidance_scale", None)
    if chosen.get("guidance_scale", 1.0) != 1.0:
        chosen["negative_prompt"] = draw(st.text("abc", min_size=1, max_size=5))
    return body | {name: value for name, value in chosen.items() if name not in body}


def kind_of(body: dict[str, Any]) -> str:
    if any(body.items() >= beams.items() for beams in BEAMS):
        return "beams"
    searches = [name for name in ("penalty_alpha", "best_of", "n") if name in body]
    has_form = any(body.items() >= form.items() for form in FORMS)
    return searches[0] if searches else "form" if has_form else "stream" if body["stream"] else "one"


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
    """What must not depend on the others: the answer, put together if it streams, or why there is none."""
    reply = await client.post("/v1/completions", json=body)
    is_stream = reply.headers["content-type"].startswith("text/event-stream")
    events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    parts = [json.loads(part) for part in (events if is_stream else [reply.text])]
    choices: dict[int, dict[str, Any]] = {}
    for part in parts:
        if "error" in part:
            return part["error"]["message"]
        for piece in part["choices"]:
            whole = choices.setdefault(piece["index"], {"text": "", "token_ids": [], "logprobs": []})
            whole["text"] += piece["text"]
            whole["token_ids"] += piece["token_ids"]
            if columns := piece.get("logprobs"):
                columns = [columns[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")]
                whole["logprobs"] += zip(*columns, strict=True)
            whole |= {name: piece[name] for name in ("finish_reason", "stop_reason") if piece.get(name) is not None}
            if piece.get("prompt_logprobs") is not None:
                whole["prompt_logprobs"] = piece["prompt_logprobs"]
    return choices, [beam["score"] for beam in parts[-1].get("spolia", {}).get("beams", ())]


async def ask_all(url: str, batch: list[dict[str, Any]]) -> list[Any]:
    limits = httpx.Limits(max_connections=NUM_REQUESTS)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        return list(await asyncio.gather(*(ask(client, body) for body in batch)))


def test_every_parameter_is_in_the_mix():
    elsewhere = {"max_tokens", "negative_prompt"}  # always there; there with guidance_scale
    names = {field.name for field in fields(SamplingParams)} - {"max_time"}  # how long it takes depends on the others
    assert names == {*SETTINGS, *IN_PYTHON} | elsewhere


def test_each_of_32_requests_is_answered_as_if_it_were_alone():
    """On a server with little room that speculates, beside the others, cold and cached; and on one that does not."""
    common = {"eos_token_ids": [EOS], "processors": {"shy": Shy}, "max_context": 120}
    crowded = chatty_engine(num_blocks=14, max_batch_tokens=24, speculation="auto", draft=ToyExecutable(), **common)
    quiet = chatty_engine(num_blocks=200, **common)
    happened: Counter[str] = Counter()
    with serving({"toy": crowded}) as url, serving({"toy": quiet}) as quiet_url:

        @settings(BATCHES, max_examples=5)
        @given(batch=st.lists(bodies(), min_size=NUM_REQUESTS, max_size=NUM_REQUESTS))
        def check(batch):
            together = asyncio.run(ask_all(url, batch))
            again = asyncio.run(ask_all(url, batch))  # what there is room for is cached now
            for index, body in enumerate(batch):
                (alone,) = asyncio.run(ask_all(quiet_url, [{**body, "stream": False, "cache_salt": json.dumps(body)}]))
                happened[f"{kind_of(body)}, {'refused' if isinstance(alone, str) else 'answered'}"] += 1
                assert together[index] == alone, body
                assert again[index] == alone, body

        check()
    counters = crowded.stats.counters
    asyncio.run(crowded.aclose())
    asyncio.run(quiet.aclose())
    kinds = ("one", "stream", "n", "best_of", "form", "beams", "penalty_alpha")
    assert all(happened[f"{kind}, answered"] for kind in kinds), happened
    assert sum(count for what, count in happened.items() if what.endswith("refused")) < 20, happened
    assert crowded.cache_stats.num_evicted_tokens > 0
    assert counters.num_cached_tokens > 1_000
    assert sum(count.num_accepted for count in counters.drafts.values()) > 0
