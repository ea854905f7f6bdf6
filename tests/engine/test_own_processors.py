"""Processors of one's own, by import path: what they do, and what is said where they cannot do it."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import transformers

from spolia.engine import LLM, SamplingParams
from spolia.errors import InvalidRequest
from spolia.generation import History

from .toy import VOCAB_SIZE, answer, toy_answer, toy_engine

PROMPT = [5, 6, 7]
MODULE = '''
"""As a user writes it, with nothing of Spolia imported."""
import numpy as np

CONSTANT = 3


class Only:
    def __init__(self, token_id, after=0):
        self.token_id, self.after, self.num_calls = token_id, after, 0

    def process(self, logits, rows):
        self.num_calls += 1
        if self.num_calls > self.after:
            left = logits[:, self.token_id].copy()
            logits[:] = -np.inf
            logits[:, self.token_id] = left


ALWAYS_B = Only(66)


def only_c():
    return Only(67)


class Raising:
    def process(self, logits, rows):
        raise KeyError("colour")


class Broken:
    def __init__(self):
        raise RuntimeError("no such file: words.txt")


class Idle:
    """Has no method `process`."""
'''


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory):
    """`my_processors`, and `my_broken`, which fails when it is imported."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "my_processors.py").write_text(MODULE)
    (folder / "my_broken.py").write_text("1 / 0\n")
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    sys.modules.pop("my_processors", None)


def said(entry, **options):
    params = SamplingParams(temperature=0.0, max_tokens=4, logits_processors=[entry], **options)
    return list(answer(toy_engine(), PROMPT, params).token_ids)


def test_a_class_a_function_and_an_object_by_import_path():
    assert said({"name": "my_processors:Only", "args": {"token_id": 65}}) == [65] * 4
    assert said("my_processors:only_c") == [67] * 4
    assert said("my_processors:ALWAYS_B") == [66] * 4


def test_each_request_has_a_processor_of_its_own():
    """Its state would show in the second answer."""
    entry = {"name": "my_processors:Only", "args": {"token_id": 65, "after": 2}}
    expected = [*toy_answer(PROMPT, 2), 65, 65]
    engine = toy_engine()
    for _ in range(2):
        params = SamplingParams(temperature=0.0, max_tokens=4, logits_processors=[entry])
        assert list(answer(engine, PROMPT, params).token_ids) == expected


def test_a_class_of_transformers_by_import_path():
    entry = {"name": "transformers:NoRepeatNGramLogitsProcessor", "args": {"ngram_size": 1}}
    with_ours = answer(toy_engine(), PROMPT, SamplingParams(temperature=0.0, max_tokens=30, no_repeat_ngram_size=1))
    with_theirs = answer(
        toy_engine(), PROMPT, SamplingParams(temperature=0.0, max_tokens=30, logits_processors=[entry])
    )
    assert with_theirs.token_ids == with_ours.token_ids
    assert isinstance(transformers.NoRepeatNGramLogitsProcessor(1), transformers.LogitsProcessor)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("no_such_module:Only", ["'no_such_module:Only'", "cannot be imported", "No module named 'no_such_module'"]),
        ("my_processors:Onyl", ["'my_processors:Onyl'", "cannot be imported", "has no attribute 'Onyl'"]),
        ("my_processors:", ["'my_processors:'", "cannot be imported"]),
        (":Only", ["':Only'", "cannot be imported"]),
        ("my_broken:Only", ["'my_broken:Only'", "cannot be imported", "ZeroDivisionError"]),
        ("my_processors:Idle", ["'my_processors:Idle'", "no processor", "`process`"]),
        ("my_processors:CONSTANT", ["'my_processors:CONSTANT'", "makes 3", "no processor"]),
        ("my_processors:Broken", ["'my_processors:Broken'", "RuntimeError", "words.txt"]),
        ("my_processors:Only", ["'my_processors:Only'", "{}", "token_id"]),
        ({"name": "my_processors:Only", "args": {"colour": 1}}, ["'my_processors:Only'", "colour"]),
        ({"name": "my_processors:ALWAYS_B", "args": {"token_id": 1}}, ["no class", "token_id"]),
        ({"name": "my_processors:Only", "args": [1]}, ["args"]),
        ({"args": {}}, ["name"]),
        ("Only", ["'Only'", "not known", "knows none"]),
        (7, ["7", "no processor"]),
    ],
    ids=str,
)
def test_what_is_no_processor_is_refused_and_the_message_says_why(entry, words):
    with pytest.raises(InvalidRequest) as caught:
        said(entry)
    assert caught.value.param == "logits_processors"
    assert [word for word in words if word not in str(caught.value)] == []


def test_one_that_raises_fails_its_request_and_is_named():
    with LLM(toy_engine()) as llm, pytest.raises(InvalidRequest, match="Raising failed: KeyError: 'colour'"):
        llm.generate(PROMPT, SamplingParams(max_tokens=4, logits_processors=["my_processors:Raising"]))


def test_rows_are_the_histories_of_one_request():
    seen = []

    class Spy:
        def process(self, logits, rows):
            assert logits.dtype == np.float32
            assert logits.shape == (len(rows), VOCAB_SIZE)
            assert all(isinstance(row, History) for row in rows)
            seen.extend(row.ids.tolist() for row in rows)

    ids = said(Spy())
    assert seen == [[*PROMPT, *ids[:n]] for n in range(4)]
