"""Forms in the engine: neighbours do not matter, and the end of the form is the end of the answer."""

from __future__ import annotations

import json
import re

import pytest

from spolia.engine import SamplingParams
from spolia.errors import InvalidRequest, SpoliaError

from .toy import EOS, answer, run, submit, toy_engine

PROMPT = [5, 6, 7]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def form(max_tokens=200, **options):
    return SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0} | options)


def test_an_answer_ends_where_its_form_does_without_another_token():
    output = answer(toy_engine(eos_token_ids=[EOS]), PROMPT, form(structured_outputs={"choice": ["abc"]}))
    assert output.text == "abc"
    assert output.token_ids == tuple(b"abc")
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_a_form_that_ends_with_the_last_token_allowed_is_not_cut():
    output = answer(toy_engine(), PROMPT, form(3, structured_outputs={"choice": ["abc"]}))
    assert output.finish_reason == "stop"
    cut = answer(toy_engine(), PROMPT, form(2, structured_outputs={"choice": ["abc"]}))
    assert (cut.text, cut.finish_reason) == ("ab", "length")


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 100}])
def test_a_form_ends_the_answer_whatever_else_would_go_on(options):
    output = answer(
        toy_engine(eos_token_ids=[EOS]), PROMPT, form(structured_outputs={"choice": ["yes", "no"]}, **options)
    )
    assert output.text in ("yes", "no")


def test_forms_in_a_batch_are_what_they_are_alone():
    forms = [{"json": SCHEMA}, {"regex": "[a-z]{5,9}"}, {"choice": ["a", "ab", "abc"]}, None, {"json_object": True}]
    asked = [form(30, structured_outputs=forms[i % 5], temperature=(0.0, 1.0)[i % 2], seed=i) for i in range(15)]
    together = toy_engine(eos_token_ids=[EOS], max_sequences=4)
    requests = [submit(together, [i, 1], one) for i, one in enumerate(asked)]
    outputs = run(together)
    for i, one in enumerate(asked):
        assert (
            answer(toy_engine(eos_token_ids=[EOS]), [i, 1], one).token_ids == outputs[requests[i].request_id].token_ids
        )


def test_a_preempted_request_keeps_its_place_in_the_form():
    params = form(60, structured_outputs={"regex": "(ab|cd){30}"}, logprobs=0)
    alone = answer(toy_engine(), [1], params)
    small = toy_engine(num_blocks=9, max_sequences=4)
    requests = [submit(small, [1, i], form(60, structured_outputs={"regex": "(ab|cd){30}"})) for i in range(4)]
    request = submit(small, [1], params)
    outputs = run(small)
    assert small.core.stats.counters.num_preemptions > 0
    assert outputs[request.request_id].text == alone.text
    assert all(len(outputs[other.request_id].text) == 60 for other in requests)


def test_processors_and_a_form_go_together():
    favoured = form(60, structured_outputs={"json": SCHEMA}, logit_bias={ord("7"): 50, ord("}"): -5}, temperature=1.0)
    output = answer(toy_engine(), PROMPT, favoured)
    assert "777" in output.text
    done = answer(toy_engine(), PROMPT, form(60, structured_outputs={"json": SCHEMA}, logit_bias={ord("}"): 50}))
    assert set(json.loads(done.text)) == {"n"}


@pytest.mark.parametrize(
    "large",
    [
        {"json": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(500)}}},
        {"choice": [f"choice number {i}" for i in range(2_000)]},
    ],
    ids=["500 properties", "2,000 choices"],
)
def test_large_forms_are_followed(large):
    output = answer(toy_engine(eos_token_ids=[EOS], num_blocks=64), PROMPT, form(500, structured_outputs=large))
    assert output.finish_reason == "stop"
    if "choice" in large:
        assert output.text in large["choice"]
    else:
        assert set(json.loads(output.text)) <= set(large["json"]["properties"])


def test_a_form_that_is_too_large_is_told_as_what_it_is():
    choices = [f"choice number {i}" for i in range(25_000)]
    engine = toy_engine(eos_token_ids=[EOS])
    submit(engine, PROMPT, form(40, structured_outputs={"choice": choices}))
    ends = []
    while not ends:
        ends = [delta for _, delta in engine.core.step() if isinstance(delta, SpoliaError)]
    assert isinstance(ends[0], InvalidRequest)
    assert re.search(r"after \d+ tokens of the answer: the form goes no further: .*25001 items", str(ends[0]))
