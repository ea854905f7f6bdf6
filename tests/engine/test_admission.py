"""What can never be answered is refused at submission, with the value, the limit and the remedy."""

from __future__ import annotations

import numpy as np
import pytest

from spolia.engine import SamplingParams
from spolia.errors import InvalidRequest

from .toy import EOS, VOCAB_SIZE, answer, toy_engine


def refusal(engine, prompt, params=None):
    with pytest.raises(InvalidRequest) as caught:
        engine.admission.admit(prompt, params)
    return caught.value


@pytest.mark.parametrize("prompt", ["", [], np.empty(0, np.int32)])
def test_an_empty_prompt_is_refused(prompt):
    assert refusal(toy_engine(), prompt).param == "prompt"


@pytest.mark.parametrize("wrong", [-1, VOCAB_SIZE, 2**31, 2**40, 2**70])
def test_a_token_id_out_of_range_is_refused(wrong):
    error = refusal(toy_engine(), [1, 2, wrong])
    assert error.param == "prompt"


@pytest.mark.parametrize("prompt", [None, 5, 1.5, b"abc", [1.5], [[1, 2], [3]], [None], {"a": 1}])
def test_what_is_neither_text_nor_token_ids_is_refused(prompt):
    error = refusal(toy_engine(), prompt)
    assert error.param == "prompt"
    assert "neither text nor a list" in str(error)


def test_parameters_of_another_kind_are_refused():
    error = refusal(toy_engine(), [1, 2], {"max_tokens": 5})
    assert error.param == "params"
    assert "SamplingParams" in str(error)


def test_the_message_names_the_token_and_the_range():
    assert "token 2 of the prompt has id 999" in str(refusal(toy_engine(), [1, 2, 999]))
    assert "0 to 256" in str(refusal(toy_engine(), [1, 2, 999]))


@pytest.mark.parametrize("prompt", [[1.5, 2.0], ["a"], [[1], [2]], [[1], [2, 3]], [None]])
def test_a_prompt_that_is_no_list_of_integers_is_refused(prompt):
    assert refusal(toy_engine(), prompt).param == "prompt"


def test_a_request_beyond_the_context_is_refused_with_its_numbers():
    error = refusal(toy_engine(max_context=100), [1] * 60, SamplingParams(max_tokens=41))
    assert error.code == "context_length_exceeded"
    assert all(number in str(error) for number in ("60", "41", "101", "100"))
    assert refusal(toy_engine(max_context=100), [1] * 100).code == "context_length_exceeded"


def test_a_request_that_fits_the_context_exactly_is_answered_to_its_end():
    output = answer(toy_engine(max_context=100), [1] * 60, SamplingParams(max_tokens=40))
    assert len(output.token_ids) == 40


def test_max_tokens_left_open_is_what_fits():
    engine = toy_engine(max_context=100)
    assert engine.admission.admit([1] * 60).max_tokens == 40
    assert len(answer(engine, [1] * 60, SamplingParams()).token_ids) == 40


@pytest.mark.parametrize("windows", [(None,), (None, 24), (24,)])
def test_a_request_that_no_pool_could_hold_is_refused_and_the_longest_that_fits_is_answered(windows):
    engine = toy_engine(windows=windows, num_blocks=4, max_batch_tokens=16, max_sequences=2, max_context=512)
    limit = engine.admission.fitting_tokens
    if limit >= 512:  # a window group slides, and goes on for ever
        assert windows == (24,)
        limit = 512
    else:
        error = refusal(engine, [1] * 20, SamplingParams(max_tokens=limit - 20 + 1))
        assert error.code == "context_length_exceeded"
        assert str(limit) in str(error)
        assert "kv_memory" in str(error)
    output = answer(engine, [1] * 20, SamplingParams(max_tokens=limit - 20))
    assert len(output.token_ids) == limit - 20


def test_stop_ids_must_be_in_the_vocabulary():
    assert refusal(toy_engine(), [1], SamplingParams(stop_token_ids=(VOCAB_SIZE,))).param == "stop_token_ids"


def test_min_tokens_with_every_id_a_stop_id_is_refused():
    params = SamplingParams(stop_token_ids=tuple(range(VOCAB_SIZE)), min_tokens=1)
    assert refusal(toy_engine(), [1], params).param == "stop_token_ids"


def test_a_request_without_a_seed_gets_one_and_reports_it():
    engine = toy_engine()
    first = answer(engine, [1, 2], SamplingParams(max_tokens=20))
    again = answer(engine, [1, 2], SamplingParams(max_tokens=20, seed=first.seed))
    other = answer(engine, [1, 2], SamplingParams(max_tokens=20))
    assert again.token_ids == first.token_ids
    assert other.token_ids != first.token_ids


def test_text_is_encoded():
    assert engine_ids("hé") == list("hé".encode())


def engine_ids(text):
    return toy_engine().admission.admit(text).prompt_token_ids.tolist()


def test_the_end_of_text_token_is_final_unless_ignored():
    engine = toy_engine(eos_token_ids=[EOS])
    assert engine.admission.admit([1]).final_ids == {EOS}
    assert engine.admission.admit([1], SamplingParams(ignore_eos=True)).final_ids == frozenset()
