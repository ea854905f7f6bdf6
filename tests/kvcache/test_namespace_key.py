"""Namespace keys: equal exactly when every name, type and value is."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spolia.kvcache import namespace_key

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)
FIELDS = st.dictionaries(st.sampled_from(["a", "ab", "abc", "b"]), VALUES, max_size=3)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"x": ("ab", "c")}, {"x": ("a", "bc")}),
        ({"a": "bc"}, {"ab": "c"}),
        ({"adapter": "red"}, {"tenant": "red"}),
        ({"x": 1}, {"x": "1"}),
        ({"x": 1}, {"x": True}),
        ({"x": 1}, {"x": 1.0}),
        ({"x": "a"}, {"x": b"a"}),
        ({"x": None}, {"x": ""}),
        ({"x": None}, {}),
        ({"x": ("a", "b")}, {"x": (("a", "b"),)}),
        ({"x": ()}, {"x": ((),)}),
        ({"x": ("a", "b")}, {"x": ("asb",)}),  # the frames, not the type marks between, keep these apart
        ({"a": "x", "b": "y"}, {"a": "xnbsy"}),
    ],
)
def test_fields_cannot_be_taken_for_others(one, other):
    assert namespace_key(**one) != namespace_key(**other)


def typed(value):
    return tuple(map(typed, value)) if isinstance(value, tuple) else (type(value), repr(value))


@settings(deadline=None)
@given(FIELDS, FIELDS)
def test_keys_are_equal_exactly_when_the_fields_are(one, other):
    same = {k: typed(v) for k, v in one.items()} == {k: typed(v) for k, v in other.items()}
    assert (namespace_key(**one) == namespace_key(**other)) == same


def test_the_order_of_fields_does_not_matter():
    assert namespace_key(a=1, b=2) == namespace_key(b=2, a=1)


def test_two_processes_give_the_same_key():
    program = (
        "from spolia.kvcache import namespace_key as k; print(k(model=b'w', tenant='t', window=(512, None)).hex())"
    )
    keys = {
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()
        for _ in range(2)
    }
    assert keys == {namespace_key(model=b"w", tenant="t", window=(512, None)).hex()}


def test_a_value_without_stable_bytes_is_refused():
    with pytest.raises(TypeError, match="'x' is a set"):
        namespace_key(x={1})
