"""When and how an answer ends."""

from __future__ import annotations

import re

import numpy as np
import pytest
import transformers

from spolia.engine import SamplingParams
from spolia.errors import InvalidRequest
from spolia.generation import PatternTextStream, RowSampling, Sampler, StopPattern

from .toy import EOS, VOCAB_SIZE, answer, run, submit, toy_answer, toy_engine, toy_logits

PROMPT = [5, 6, 7]


def greedy(**options):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 40} | options)


def test_the_end_of_text_token_ends_the_answer_without_text():
    reply = toy_answer(PROMPT, 10)
    output = answer(toy_engine(eos_token_ids=[reply[4]]), PROMPT, greedy())
    end = reply.index(reply[4]) + 1
    assert list(output.token_ids) == reply[:end]
    assert output.finish_reason == "stop"
    assert output.stop_reason is None
    assert output.text.encode() == bytes(reply[: end - 1]).decode(errors="replace").encode()


def test_ignore_eos_goes_on():
    reply = toy_answer(PROMPT, 40)
    output = answer(toy_engine(eos_token_ids=[reply[4]]), PROMPT, greedy(ignore_eos=True))
    assert list(output.token_ids) == reply
    assert output.finish_reason == "length"


def test_a_stop_id_ends_the_answer_and_is_reported():
    reply = toy_answer(PROMPT, 10)
    output = answer(toy_engine(), PROMPT, greedy(stop_token_ids=(reply[6],)))
    assert list(output.token_ids) == reply[: reply.index(reply[6]) + 1]
    assert output.stop_reason == reply[6]


def test_below_min_tokens_final_ids_are_not_even_drawn():
    reply = toy_answer(PROMPT, 10)
    output = answer(toy_engine(eos_token_ids=[reply[2]]), PROMPT, greedy(min_tokens=20))
    assert reply[2] not in output.token_ids[:20]
    assert len(output.token_ids) >= 20


def test_min_tokens_is_exact():
    """Every id but one is final: without min_tokens the answer has one token, with it one more than that."""
    stop = tuple(i for i in range(257) if i != 9)
    assert len(answer(toy_engine(), PROMPT, greedy(stop_token_ids=stop, min_tokens=7)).token_ids) == 8


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_string_across_tokens_cuts_the_text_and_keeps_the_ids(keep):
    reply = toy_answer(PROMPT, 40)
    text = bytes(t for t in reply if t < 256).decode(errors="replace")
    stop = text[10:13]
    start = text.find(stop)
    output = answer(toy_engine(), PROMPT, greedy(stop=(stop,), include_stop_str_in_output=keep))
    assert output.finish_reason == "stop"
    assert output.stop_reason == stop
    assert output.text == text[: start + len(stop) * keep]
    assert list(output.token_ids) == reply[: len(output.token_ids)]


def test_deltas_joined_are_the_output():
    engine = toy_engine(eos_token_ids=[EOS])
    request = submit(engine, PROMPT, greedy(stop=("zzzz",), logprobs=2))
    deltas = []
    while engine.core.has_work:
        deltas += [delta for _, delta in engine.core.step()]
    output = deltas[-1].output
    assert output is not None
    assert output.request_id == request.request_id
    assert all(delta.output is None for delta in deltas[:-1])
    assert "".join(delta.text for delta in deltas) == output.text
    assert sum((delta.token_ids for delta in deltas), ()) == output.token_ids
    assert sum((delta.logprobs for delta in deltas), ()) == output.logprobs
    assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)


def test_text_held_back_is_released_at_the_end():
    """A reply cut by length in the middle of what might have been a stop string loses nothing."""
    reply = toy_answer(PROMPT, 12)
    text = bytes(reply).decode(errors="replace")
    output = answer(toy_engine(), PROMPT, greedy(max_tokens=12, stop=(text[-1] + "never",)))
    assert output.text == text


def test_an_aborted_request_reports_what_it_had():
    engine = toy_engine()
    request = submit(engine, PROMPT, greedy())
    for _ in range(5):
        engine.core.step()
    engine.core.abort(request.request_id)
    output = run(engine)[request.request_id]
    assert output.finish_reason == "abort"
    assert list(output.token_ids) == toy_answer(PROMPT, 5)


def test_a_request_aborted_before_it_ran_has_no_explanation_and_no_tokens():
    engine = toy_engine()
    request = submit(engine, PROMPT)
    engine.core.abort(request.request_id)
    output = run(engine)[request.request_id]
    assert output.token_ids == ()
    assert output.explanation is None
    assert output.timings.queue_s is None
    assert output.timings.first_token_s is None


def test_sampled_answers_do_not_depend_on_the_batch():
    params = [
        SamplingParams(
            max_tokens=12, seed=i, temperature=0.5 + i / 4, top_k=(0, 30)[i % 2], top_p=(1.0, 0.9)[i // 2 % 2]
        )
        for i in range(8)
    ]
    together = toy_engine()
    requests = [submit(together, [i], one) for i, one in enumerate(params)]
    outputs = run(together)
    for i, one in enumerate(params):
        assert answer(toy_engine(), [i], one).token_ids == outputs[requests[i].request_id].token_ids


def test_timings_are_in_order():
    timings = answer(toy_engine(), PROMPT, greedy()).timings
    assert 0 < timings.queue_s < timings.first_token_s < timings.total_s


def test_a_regular_expression_ends_the_answer_after_its_first_match():
    reply = toy_answer(PROMPT, 40)
    text = bytes(t for t in reply if t < 256).decode(errors="replace")
    third = re.escape(text[9])
    output = answer(toy_engine(), PROMPT, greedy(stop_regex=f"{re.escape(text[7])}.{third}"))
    assert output.text == text[:10]
    assert output.finish_reason == "stop"
    assert output.stop_reason == f"{re.escape(text[7])}.{third}"


def test_a_match_in_the_middle_of_a_token_cuts_the_text_there():
    pattern = StopPattern("[0-9]{2}")
    stream = PatternTextStream({0: b"abc1", 1: b"2de"}.__getitem__, pattern=pattern)
    assert stream.feed(0).text == "abc1"
    assert stream.feed(1) == ("2", "[0-9]{2}")


def test_below_min_tokens_a_match_does_not_end_the_answer():
    output = answer(toy_engine(), PROMPT, greedy(stop_regex="(?s:.)", min_tokens=5))
    assert len(output.token_ids) > 5


@pytest.mark.parametrize(
    ("pattern", "place"),
    [("ab(c", "at character 3, '(c': unclosed group"), ("a/[b", "at character 3, '[b': unclosed character class")],
)
def test_an_expression_that_is_none_is_refused_with_the_place_in_it(pattern, place):
    with pytest.raises(InvalidRequest, match=f"stop_regex cannot be compiled: {re.escape(place)}$"):
        submit(toy_engine(), PROMPT, greedy(stop_regex=pattern))


def test_an_expression_that_would_drown_a_backtracking_matcher_does_not_hold_up_the_engine():
    stream = PatternTextStream(lambda _: b"a" * 40, pattern=StopPattern("(a+)+b"))
    for _ in range(50):
        assert stream.feed(0).stop is None


def test_an_answer_ends_when_its_time_is_up():
    """The toy's clock moves a millisecond at each look."""
    output = answer(toy_engine(), PROMPT, greedy(max_time=0.02, max_tokens=400))
    assert 0 < len(output.token_ids) < 20
    assert (output.finish_reason, output.stop_reason) == ("length", "max_time")


def test_a_function_of_ones_own_ends_the_answer():
    def four_tokens(ids):
        return len(ids) == len(PROMPT) + 4

    output = answer(toy_engine(), PROMPT, greedy(stopping_criteria=[lambda ids: False, four_tokens]))
    assert (len(output.token_ids), output.finish_reason, output.stop_reason) == (4, "stop", "four_tokens")
    later = answer(toy_engine(), PROMPT, greedy(stopping_criteria=[lambda ids: True], min_tokens=3))
    assert len(later.token_ids) == 4


def test_transformers_stopping_criteria_are_taken_as_they_are():
    criteria = transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(len(PROMPT) + 5)])
    output = answer(toy_engine(), PROMPT, greedy(stopping_criteria=criteria))
    assert (len(output.token_ids), output.stop_reason) == (5, "MaxLengthCriteria")


def test_a_criterion_that_raises_ends_its_own_answer_and_says_so():
    output = answer(toy_engine(), PROMPT, greedy(stopping_criteria=[lambda ids: ids[99]]))
    assert len(output.token_ids) == 1
    assert "IndexError" in output.stop_reason


def test_the_last_token_of_a_prompt_is_healed():
    """Its text is written anew by whatever tokens the model prefers, and not shown again."""
    healed = answer(toy_engine(), [5, 6, 97], greedy(token_healing=True))
    assert healed.prompt_token_ids == (5, 6)
    assert healed.token_ids[0] == 97  # the toy's vocabulary has one token that begins with this byte
    plain = answer(toy_engine(), [5, 6, 97], greedy())
    assert healed.token_ids[1:40] == plain.token_ids[:39]
    assert healed.text == bytes(t for t in healed.token_ids[1:] if t < 256).decode(errors="replace")


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"truncate": "head"}, list(range(52, 100))),
        ({"truncate": "middle"}, [*range(24), *range(76, 100)]),
        ({"truncate_prompt_tokens": 10}, list(range(90, 100))),
        ({"truncate_prompt_tokens": 200, "truncate": "head"}, list(range(52, 100))),
    ],
)
def test_a_prompt_that_is_too_long_is_cut_as_asked_and_the_answer_says_so(options, kept):
    engine = toy_engine(max_context=64)
    output = answer(engine, list(range(100)), greedy(max_tokens=16, **options))
    assert list(output.prompt_token_ids) == kept
    assert output.num_truncated_tokens == 100 - len(kept)
    assert list(output.token_ids) == toy_answer(kept, 16)


def test_a_prompt_that_fits_is_not_cut():
    output = answer(toy_engine(), PROMPT, greedy(truncate="middle", truncate_prompt_tokens=3))
    assert output.num_truncated_tokens == 0


def shifted(prompt, params, limit):
    """The answer on bare logits, and how many tokens were dropped."""
    ids, said, sinks, num_dropped = list(prompt), [], min(params.context_shift["sinks"], len(prompt)), 0
    sampler = Sampler(VOCAB_SIZE)
    while len(said) < params.max_tokens:
        row = RowSampling(params, params.seed, len(ids) + num_dropped, np.empty(0, np.int32))
        (token_id,) = sampler.sample(toy_logits(ids)[None].copy(), [row]).token_ids
        said.append(token_id)
        ids.append(token_id)
        if len(ids) == limit and len(said) < params.max_tokens:
            dropped = (len(ids) - sinks) // 2
            del ids[sinks : sinks + dropped]
            num_dropped += dropped
    return tuple(said), num_dropped


@pytest.mark.parametrize("speculation", ["off", "auto"])
@pytest.mark.parametrize(("num_blocks", "max_batch_tokens"), [(64, 32), (7, 8)])
def test_an_answer_goes_on_beyond_the_context(num_blocks, max_batch_tokens, speculation):
    """Beside others whose answers are what they are without it, preempted or not."""
    engine = toy_engine(
        num_blocks=num_blocks, max_batch_tokens=max_batch_tokens, max_context=64, speculation=speculation
    )
    limit = min(64, engine.admission.fitting_tokens)
    expected = {}
    for index, sinks in enumerate([4, 0, 16, 30]):
        prompt = list(range(10 * index, 10 * index + 9 + 10 * (index % 2)))
        params = SamplingParams(
            max_tokens=150, seed=index, temperature=0.7 * (index % 2), ignore_eos=True, context_shift={"sinks": sinks}
        )
        expected[submit(engine, prompt, params).request_id] = shifted(prompt, params, limit)
        plain = submit(engine, prompt, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
        expected[plain.request_id] = tuple(toy_answer(prompt, 20)), 0
    outputs = run(engine)
    assert {id_: (output.token_ids, output.num_shifted_tokens) for id_, output in outputs.items()} == expected
    assert all(output.text == text_of(output.token_ids) for output in outputs.values())
    assert all(ledger.leased == 0 for ledger in engine.core.cache.ledger())


def text_of(ids):
    return bytes(token_id for token_id in ids if token_id < 256).decode(errors="replace")


def test_processors_and_forms_go_on_across_a_shift():
    engine = toy_engine(max_context=48, num_blocks=64)
    options = {"max_tokens": 120, "context_shift": {}, "temperature": 0.0}
    form = submit(engine, list(range(9)), SamplingParams(structured_outputs={"regex": "(abc){30}"}, **options))
    last = submit(engine, list(range(9)), SamplingParams(forced_eos_token_id=65, ignore_eos=True, **options))
    outputs = run(engine)
    assert outputs[form.request_id].text == "abc" * 30
    assert outputs[form.request_id].num_shifted_tokens > 60
    assert outputs[last.request_id].token_ids[-1] == 65
    assert 65 not in set(outputs[last.request_id].token_ids[-20:-1])


@pytest.mark.parametrize(
    "fields",
    [
        {"context_shift": {"sinks": -1}},
        {"context_shift": {"sink": 1}},
        {"context_shift": 4},
        {"context_shift": {"sinks": 40}},
        {"context_shift": {}, "max_tokens": None},
        {"context_shift": {}, "guidance_scale": 2.0},
    ],
    ids=str,
)
def test_a_shift_that_cannot_be_is_refused(fields):
    with pytest.raises(InvalidRequest) as caught:
        submit(toy_engine(max_context=64), [1, 2, 3], SamplingParams(**{"max_tokens": 100, **fields}))
    assert caught.value.param == "context_shift"
