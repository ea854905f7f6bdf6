"""Speculation changes no answer: the same tokens, the same log-probabilities, whatever was guessed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from spolia.engine import SamplingParams
from spolia.generation import MAX_DRAFTS, DraftPace, prompt_lookup

from .toy import VOCAB_SIZE, answer, run, submit, toy_answer, toy_engine

KINDS = ["prompt", "tree", "auto"]


def essence(output):
    return output.token_ids, output.text, output.logprobs, output.finish_reason, output.stop_reason


def requests(rng):
    """Some asked again and again, which is what the tree foresees; some that favour few tokens, so that they repeat."""
    asked = []
    for index in range(12):
        prompt = [rng.randrange(4) for _ in range(rng.randrange(1, 40))]
        options = rng.choice(
            [
                {"temperature": 0.0},
                {"temperature": 1.0, "top_p": 0.9},
                {"temperature": 0.0, "allowed_token_ids": [1, 2]},
                {"temperature": 0.7, "logit_bias": {1: 6, 2: 6}, "repetition_penalty": 1.1},
                {"temperature": 0.0, "structured_outputs": {"regex": "(abcd){8,20}e"}},
                {"temperature": 1.0, "mirostat": 2, "min_tokens": 10},
                {"temperature": 0.0, "stop_token_ids": (5, 6, 7, 8), "logprobs": 3},
            ]
        )
        params = SamplingParams(max_tokens=rng.randrange(10, 60), seed=index, **options)
        asked += [(prompt, params)] * rng.randrange(1, 4)
    form = SamplingParams(max_tokens=60, temperature=0.0, structured_outputs={"regex": "(abcd){8,20}e"})
    asked += [([1, 2, 3], form)] * 2
    rng.shuffle(asked)
    return asked


@pytest.mark.parametrize("windows", [(None,), (20, None)])
@pytest.mark.parametrize("speculation", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_answers_are_the_same_with_speculation_and_without(speculation, seed, windows):
    rng = random.Random(seed)
    asked = requests(rng)
    engine = toy_engine(
        speculation=speculation,
        windows=windows,
        num_blocks=rng.choice([14, 40, 200]),
        max_batch_tokens=rng.choice([8, 40]),
    )
    outputs = {}
    waiting = list(asked)
    names = {}
    while waiting or engine.core.has_work:
        while waiting and (not engine.core.has_work or rng.random() < 0.3):
            prompt, params = waiting.pop()
            names[submit(engine, prompt, params).request_id] = (prompt, params)
        for request_id, delta in engine.core.step():
            if delta.output is not None:
                outputs[request_id] = delta.output
    assert sum(output.num_accepted_tokens for output in outputs.values()) > 10
    for request_id, (prompt, params) in names.items():
        assert essence(outputs[request_id]) == essence(answer(toy_engine(windows=windows), prompt, params))


def test_an_answer_that_is_asked_for_again_takes_a_fraction_of_the_steps():
    engine = toy_engine(speculation="tree", max_batch_tokens=64)
    params = SamplingParams(temperature=0.0, max_tokens=100)
    first = answer(engine, [1, 2, 3], params)
    num_steps = engine.core.stats.counters.num_steps
    again = answer(engine, [1, 2, 3], params)
    assert engine.core.stats.counters.num_steps - num_steps < 25
    assert again.token_ids == first.token_ids == tuple(toy_answer([1, 2, 3], 100))
    assert again.num_accepted_tokens > 70


@pytest.mark.parametrize("speculation", KINDS)
def test_what_a_form_forces_takes_a_step_together(speculation):
    schema = {"const": {"a rather long name": 1, "and another one": 2}}
    params = SamplingParams(temperature=0.0, max_tokens=100, structured_outputs={"json": schema})
    plain = toy_engine(max_batch_tokens=64)
    expected = answer(plain, [1, 2, 3], params)
    engine = toy_engine(speculation=speculation, max_batch_tokens=64)
    output = answer(engine, [1, 2, 3], params)
    assert essence(output) == essence(expected)
    assert engine.core.stats.counters.num_steps < plain.core.stats.counters.num_steps / 2


def test_the_tree_tells_nothing_to_another_tenant():
    engine = toy_engine(speculation="tree")
    params = SamplingParams(temperature=0.0, max_tokens=40)
    answer(engine, [1, 2, 3], params)
    request = submit(engine, [1, 2, 3], params, cache_salt="other")
    assert run(engine)[request.request_id].num_drafted_tokens == 0


def test_deltas_of_several_tokens_in_a_step_are_the_answer():
    engine = toy_engine(speculation="tree", max_batch_tokens=64)
    params = SamplingParams(temperature=0.0, max_tokens=50)
    expected = answer(engine, [1, 2, 3], params)
    submit(engine, [1, 2, 3], params)
    deltas = []
    while engine.core.has_work:
        deltas += [delta for _, delta in engine.core.step()]
    assert sum((delta.token_ids for delta in deltas), ()) == expected.token_ids
    assert "".join(delta.text for delta in deltas) == expected.text
    assert [delta.output is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]


def test_drafts_take_no_cached_block():
    """With pools that are just large enough, what others have cached stays as long as it would without drafts."""
    params = SamplingParams(temperature=0.0, max_tokens=90)
    kept = {}
    for speculation in ("off", "auto"):
        engine = toy_engine(speculation=speculation, num_blocks=14)
        for prompt in ([1] * 30, [2] * 30, [3] * 30, [1] * 30, [2] * 30):
            answer(engine, prompt, params)
        kept[speculation] = engine.core.cache.stats.num_reused_tokens
    assert kept["auto"] >= kept["off"]


def naive_lookup(ids, wanted, min_match):
    for length in range(8, min_match - 1, -1):
        for end in range(len(ids) - 1, length - 1, -1):
            if ids[end - length : end] == ids[len(ids) - length :]:
                return ids[end : end + wanted]
    return []


def test_prompt_lookup_is_the_longest_then_latest_repetition():
    rng = random.Random(0)
    for _ in range(500):
        ids = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
        found = prompt_lookup(np.array(ids, np.int32), 5).tolist()
        assert found == naive_lookup(ids, 5, 3)


def test_the_pace_follows_what_is_accepted_and_stops_where_nothing_is():
    pace = DraftPace()
    lengths = []
    for _ in range(4):
        lengths.append(pace.next_length())
        pace.learn(lengths[-1], lengths[-1])
    assert lengths == [4, 8, 16, MAX_DRAFTS]
    num_drafted = 0
    for _ in range(1_000):
        if length := pace.next_length():
            num_drafted += length
            pace.learn(length, 0)
    assert num_drafted < 100


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("speculation", ["off", "auto"])
def test_prompt_logprobs_are_right_also_when_the_prompt_is_cached(cached, speculation):
    from .toy import toy_logits

    prompt = [random.Random(3).randrange(VOCAB_SIZE) for _ in range(150)]
    engine = toy_engine(speculation=speculation, max_batch_tokens=20)
    if cached:
        answer(engine, prompt)
    others = [submit(engine, [i], SamplingParams(max_tokens=30)) for i in range(4)]
    request = submit(engine, prompt, SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=2))
    outputs = run(engine)
    output = outputs[request.request_id]
    assert output.token_ids == tuple(toy_answer(prompt, 5))
    assert [entry.token_id for entry in output.prompt_logprobs] == prompt[1:]
    for position, entry in enumerate(output.prompt_logprobs):
        x = toy_logits(prompt[: position + 1]).astype(np.float64)
        exact = x - np.log(np.exp(x).sum())
        assert entry.logprob == pytest.approx(exact[prompt[position + 1]], abs=1e-5)
        assert [token_id for token_id, _ in entry.top] == np.argsort(-exact)[:2].tolist()
    assert all(len(outputs[other.request_id].token_ids) == 30 for other in others)
    assert outputs[others[0].request_id].prompt_logprobs is None


def test_prompt_logprobs_survive_preemption():
    prompt = list(range(100))
    alone = answer(toy_engine(), prompt, SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1))
    engine = toy_engine(num_blocks=12, max_batch_tokens=8)
    submit(engine, [1], SamplingParams(temperature=0.0, max_tokens=120))
    submit(engine, [2], SamplingParams(temperature=0.0, max_tokens=60))
    request = submit(engine, prompt, SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1))
    output = run(engine)[request.request_id]
    assert output.prompt_logprobs == alone.prompt_logprobs
    assert output.token_ids == alone.token_ids


def test_a_prompt_of_one_token_has_no_logprobs():
    assert answer(toy_engine(), [7], SamplingParams(max_tokens=1, prompt_logprobs=0)).prompt_logprobs == ()
