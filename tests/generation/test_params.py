"""Parameters are checked at birth, and an error names the one at fault."""

from __future__ import annotations

import math

import pytest

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
    ],
)
def test_an_impossible_value_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)


def test_min_tokens_may_not_exceed_max_tokens():
    with pytest.raises(InvalidRequest, match="min_tokens is 5"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_one_stop_string_may_stand_alone():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_ends_of_ranges_are_allowed():
    SamplingParams(temperature=0, top_k=-1, top_p=0, min_p=1, seed=2**64 - 1, logprobs=20, min_tokens=3, max_tokens=3)
    SamplingParams(seed=-(2**63), top_p=1, logprobs=0)
