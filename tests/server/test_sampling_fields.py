"""Sampling fields over HTTP do what `SamplingParams` says, under the names of OpenAI, vLLM and llama.cpp."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.toy import answer, toy_engine, toy_logits
from spolia.engine import EngineConfig, SamplingParams
from spolia.generation import History, import_processor
from spolia.generation.processors import Logits
from spolia.server.sampling import _ALIASES
from spolia.server.schema import CompletionRequest

from .harness import chatty_engine, metric, serving

PROMPT = [5, 6, 7, 5, 6, 7]


def complete(url: str, **body: Any) -> httpx.Response:
    return httpx.post(
        f"{url}/v1/completions",
        json={"prompt": PROMPT, "max_tokens": 10, "seed": 3, "return_token_ids": True, **body},
        timeout=60,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "repetition_penalty": 0.01},
        {"temperature": 0, "presence_penalty": -3, "frequency_penalty": -0.5},
        {"temperature": 0, "logit_bias": {"65": 5, "66": 4.5}},
        {"temperature": 0, "encoder_repetition_penalty": 90, "dry_multiplier": 0.8, "no_repeat_ngram_size": 3},
        {"temperature": 0.8, "typical_p": 0.8},
        {"top_n_sigma": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05},
        {"mirostat": 2, "mirostat_tau": 3.0},
        {"temperature": 0, "dola_layers": "high"},
        {"temperature": 0, "dola_layers": [1, 4]},
        {"allowed_token_ids": [65, 66, 67], "dynatemp_range": 0.5},
        {"watermarking_config": {"greenlist_ratio": 0.5, "bias": 5.0, "seeding_scheme": "selfhash"}},
        {"watermark": {"key": 5}, "sequence_bias": [[[65], 3.0]], "bad_words": ["A"]},
        {"filter_order": ["top_p", "temperature"], "temperature": 2.0, "top_p": 0.7},
    ],
    ids=str,
)
def test_a_field_does_over_http_what_it_does_in_python(toy_url, fields):
    reply = complete(toy_url, **fields)
    assert reply.status_code == 200, reply.text
    expected = answer(toy_engine(), PROMPT, SamplingParams(max_tokens=10, seed=3, **fields))
    assert tuple(reply.json()["choices"][0]["token_ids"]) == expected.token_ids
    plain = answer(
        toy_engine(), PROMPT, SamplingParams(max_tokens=10, seed=3, temperature=fields.get("temperature", 1))
    )
    assert plain.token_ids != expected.token_ids  # or the field would have gone unheard


def test_an_answer_goes_on_beyond_the_context_if_that_is_asked_for():
    engine = chatty_engine(max_context=64)
    with serving({"toy": engine}) as url:
        reply = complete(url, max_tokens=100, context_shift={"sinks": 2}, ignore_eos=True).json()
        assert len(reply["choices"][0]["token_ids"]) == 100
        assert reply["usage"]["shifted_tokens"] == 62
        refused = complete(url, max_tokens=100, ignore_eos=True)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert "shifted_tokens" not in complete(url, max_tokens=50, context_shift={}).json()["usage"]
        session = complete(url, context_shift={}, session="s1")
        assert session.json()["error"]["param"] == "context_shift"
    asyncio.run(engine.aclose())


def test_llama_cpps_names_are_understood(toy_url):
    ours = complete(
        toy_url, repetition_penalty=1.5, typical_p=0.9, filter_order=["top_p", "typical_p", "temperature"], top_p=0.9
    )
    theirs = complete(
        toy_url,
        repeat_penalty=1.5,
        typ_p=0.9,
        samplers=["penalties", "dry", "top_p", "typ_p", "temperature"],
        top_p=0.9,
    )
    assert theirs.status_code == 200, theirs.text
    assert theirs.json()["choices"][0]["token_ids"] == ours.json()["choices"][0]["token_ids"]
    never = complete(toy_url, temperature=0, logit_bias=[[int(toy_logits(PROMPT).argmax()), False]], max_tokens=1)
    assert never.json()["choices"][0]["token_ids"] == [int(toy_logits(PROMPT).argsort()[-2])]


class Only:
    """A processor as users write them: one token is left."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        left = logits[:, self._token_id].copy()
        logits[:] = -float("inf")
        logits[:, self._token_id] = left


class Raising:
    """Fails at the third token."""

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        if rows[0].num_generated_tokens == 2:
            raise KeyError("colour")


def test_a_processor_by_import_path_is_for_the_server_to_choose_and_its_failures_are_told(tmp_path, monkeypatch):
    """What `--processor` names is imported at the start; a request names no path, and fails alone."""
    (tmp_path / "my_words.py").write_text("from server.test_sampling_fields import Only, Raising\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = EngineConfig(processors=("only=my_words:Only", "raising=my_words:Raising"))
    known = {name: import_processor(path) for name, _, path in (entry.partition("=") for entry in config.processors)}
    engine = chatty_engine(processors=known)
    with serving({"toy": engine}) as url:
        only = [{"name": "only", "args": {"token_id": 66}}]
        assert complete(url, logits_processors=only, max_tokens=3).json()["choices"][0]["text"] == "BBB"
        failed = complete(url, logits_processors=["raising"])
        assert failed.status_code == 400
        assert "Raising failed: KeyError: 'colour'" in failed.json()["error"]["message"]
        refused = complete(url, logits_processors=["my_words:Only"])
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "logits_processors"
        assert "'my_words:Only'" in refused.json()["error"]["message"]
        assert "--processor" in refused.json()["error"]["message"]
        streamed = complete(url, logits_processors=["raising"], stream=True, stream_options={"include_usage": True})
        assert "KeyError: 'colour'" in streamed.text
        assert complete(url, max_tokens=3).status_code == 200
    asyncio.run(engine.aclose())


def test_an_own_processor_is_used_by_the_name_that_the_server_knows_it_by():
    engine = chatty_engine(processors={"only": Only})
    with serving({"toy": engine}) as url:
        reply = complete(url, logits_processors=[{"name": "only", "args": {"token_id": 66}}], max_tokens=3)
        assert reply.json()["choices"][0]["text"] == "BBB"
        refused = complete(url, logits_processors=[{"name": "only", "args": {"colour": 66}}])
        assert refused.status_code == 400
        assert "colour" in refused.json()["error"]["message"]
        assert "only" in complete(url, logits_processors=["lonely"]).json()["error"]["message"]
    asyncio.run(engine.aclose())


def test_a_request_that_forbids_every_token_is_400():
    engine = chatty_engine()
    with serving({"toy": engine}) as url:
        reply = complete(url, allowed_token_ids=[5], suppress_tokens=[5])
        assert reply.status_code == 400
        assert "no token" in reply.json()["error"]["message"]
    asyncio.run(engine.aclose())


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(-5, 300), st.text(max_size=2), st.floats(0, 1)), max_size=3),
    st.dictionaries(st.text(max_size=3), st.one_of(st.integers(), st.floats(0, 1), st.text(max_size=2)), max_size=2),
    st.lists(st.lists(st.integers(-1, 300), max_size=3), max_size=2),
)


# All that says how an answer is made, whatever is added: of the schema's fields, only those that say what to answer, to
# whom, and at what length are left out.
FUZZED = sorted({*CompletionRequest.__struct_fields__} - {"model", "prompt", "stream", "resumable", "max_tokens"})


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(st.dictionaries(st.sampled_from(FUZZED), ODD, min_size=1, max_size=3))
def test_whatever_a_field_holds_the_answer_is_200_or_a_400_that_names_it(toy_url, fields):
    # `max_time` and lengths are bounded elsewhere; what is asked here is that no value breaks the server.
    reply = complete(toy_url, **{"max_tokens": 3, **fields})
    absent = (404,) if isinstance(fields.get("session"), str) else ()
    assert reply.status_code in (200, 400, *absent), (fields, reply.text)
    if reply.status_code == 400:
        error = reply.json()["error"]
        known = {*fields, *(_ALIASES.get(name, name) for name in fields), "prompt", "max_tokens", None}
        assert error["param"] is None or error["param"].split("[")[0].split(".")[0] in known, (fields, error)


@pytest.mark.parametrize("logprobs", [None, 0])
def test_best_of_gives_the_answers_with_the_highest_logprob_a_token(toy_url, logprobs):
    fields = {"seed": 1, "max_tokens": 6, "temperature": 1.5}
    every = complete(toy_url, n=5, logprobs=0, **fields).json()["choices"]
    ranked = sorted(every, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    reply = complete(toy_url, n=2, best_of=5, logprobs=logprobs, **fields).json()
    assert [choice["token_ids"] for choice in reply["choices"]] == [choice["token_ids"] for choice in ranked[:2]]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert (reply["choices"][0]["logprobs"] is None) == (logprobs is None)
    assert reply["usage"]["completion_tokens"] == 30  # all that were computed


def test_n_choices_compute_their_prompt_once(toy_url):
    prompt = [9] * 100
    before = metric(toy_url, "spolia_prefix_cache_hits_total")
    complete(toy_url, prompt=prompt, n=4, max_tokens=2, temperature=1.0)
    assert metric(toy_url, "spolia_prefix_cache_hits_total") - before >= 3 * 96


def test_decisions_are_explained_on_request(toy_url):
    reply = complete(toy_url, explain=True, explain_candidates=2, temperature=0, logit_bias={"65": 50}, max_tokens=2)
    tokens = reply.json()["spolia"]["choices"][0]["tokens"]
    assert [token["token"] for token in tokens] == ["A", "A"]
    model, bias = tokens[0]["stages"]
    assert (model["name"], bias["name"]) == ("model", "logit_bias")
    assert bias["top"][0]["token"] == "A"
    assert bias["top"][0]["probability"] > 0.99 > model["top"][0]["probability"]
    assert {token["chosen"] for token in tokens} == {"greedy"}
    assert "form" not in bias
    assert "tokens" not in complete(toy_url, explain=True).json()["spolia"]["choices"][0]


def test_the_place_in_the_form_is_explained(toy_url):
    """After "ab" the answer may end; "cd" has a second half that no choice is left about."""
    reply = complete(toy_url, explain=True, explain_candidates=2, guided_regex="ab(x|cd)?", seed=1, max_tokens=8)
    tokens = reply.json()["spolia"]["choices"][0]["tokens"]
    assert {token["chosen"] for token in tokens} == {"sampled"}
    forms = [token["stages"][1]["form"] for token in tokens]
    assert [token["stages"][1]["name"] for token in tokens] == ["structured_outputs"] * len(tokens)
    assert forms[0]["may_end"] is False
    assert forms[0]["num_forced"] > 0
    assert forms[2] == {"may_end": True, "num_forced": 0}
