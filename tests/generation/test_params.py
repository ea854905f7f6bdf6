"""Parameters are checked at birth, and an error names the one at fault."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spolia.errors import InvalidRequest
from spolia.generation import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", 2**31),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_k", -2),
        ("top_k", 3.0),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("top_p", math.nan),
        ("min_p", 2),
        ("min_p", math.nan),
        ("seed", 2**64),
        ("seed", "x"),
        ("stop", ("",)),
        ("stop", (3,)),
        ("stop", 3),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("a",)),
        ("stop_token_ids", 5),
        ("ignore_eos", 1),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("include_stop_str_in_output", "yes"),
        ("repetition_penalty", 0),
        ("presence_penalty", 1e9),
        ("dry_base", -1),
        ("mirostat", 1),
        ("mirostat", True),
        ("logit_bias", 5),
        ("logit_bias", [(5, 1.0, 2)]),
        ("logit_bias", {5: math.nan}),
        ("sequence_bias", [((), 1.0)]),
        ("sequence_bias", [5]),
        ("bad_words_ids", [[]]),
        ("bad_words_ids", 7),
        ("allowed_token_ids", ()),
        ("forced_eos_token_id", ()),
        ("forced_eos_token_id", "x"),
        ("exponential_decay_length_penalty", (3,)),
        ("exponential_decay_length_penalty", (3, 0.5)),
        ("prefix_allowed_tokens_fn", 5),
        ("filter_order", ("top_q",)),
        ("filter_order", ("top_p", "top_p")),
        ("watermark", {"ratio": 0}),
        ("watermark", {"context_width": 0}),
        ("watermark", 5),
        ("logits_processors", 5),
    ],
)
def test_an_impossible_value_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(-5, 5), st.text(max_size=2), st.floats(), st.lists(st.integers(), max_size=2))),
    st.dictionaries(st.text(max_size=3), st.one_of(st.integers(), st.floats()), max_size=3),
)


@settings(max_examples=2_000, deadline=None)
@given(st.sampled_from([field.name for field in fields(SamplingParams)]), ODD)
def test_any_value_of_any_parameter_is_taken_or_refused_by_name(name, value):
    refusal = None
    try:
        SamplingParams(**{name: value})
    except InvalidRequest as error:
        refusal = error
    assert refusal is None or (refusal.param == name and name in str(refusal))


def test_min_tokens_may_not_exceed_max_tokens():
    with pytest.raises(InvalidRequest, match="min_tokens is 5"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_one_stop_string_may_stand_alone():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_ends_of_ranges_are_allowed():
    SamplingParams(temperature=0, top_k=-1, top_p=0, min_p=1, seed=2**64 - 1, logprobs=20, min_tokens=3, max_tokens=3)
    SamplingParams(seed=-(2**63), top_p=1, logprobs=0)


@pytest.mark.parametrize("name", ["repetition_penalty", "encoder_repetition_penalty", "dry_base", "mirostat_tau"])
def test_what_is_divided_by_is_not_next_to_nothing(name):
    with pytest.raises(InvalidRequest, match=f"{name} is 1e-320; it must be from 0.001 to 100"):
        SamplingParams(**{name: 1e-320})


def test_breakers_of_repetitions_are_not_without_number():
    assert len(SamplingParams(dry_sequence_breakers=["a"] * 256).dry_sequence_breakers) == 256
    with pytest.raises(InvalidRequest, match="dry_sequence_breakers has 257 entries; allowed are 256"):
        SamplingParams(dry_sequence_breakers=["a"] * 257)
