"""A smaller model that writes ahead changes no answer, however wrong it is, and is asked only where that pays."""

from __future__ import annotations

import random

import numpy as np
import pytest

from spolia.engine import LLM, EngineConfig, SamplingParams
from spolia.errors import InvalidRequest

from .test_speculation import RowClock, RowTimedToy, essence, requests
from .toy import answer, run, submit, toy_answer, toy_engine


class FallibleToy(RowTimedToy):
    """As the model that answers, but for a share of the places, where it is wrong."""

    def __init__(self, wrong, *, clock=None, row_cost=0.0, step_s=0.0, windows=(None,)):
        super().__init__(clock or RowClock(), row_cost)
        self.windows = tuple(windows)
        self.wrong = wrong
        self.step_s = step_s
        self.num_steps = 0

    def run(self, step, logits):
        now_s = self.clock.now_s
        super().run(step, logits)
        self.clock.now_s = now_s + self.step_s
        self.num_steps += 1

    def logits_of(self, views):
        logits = super().logits_of(views)
        if random.Random(views[0].tobytes()).random() < self.wrong:
            logits = np.roll(logits, 1)
        return logits


def timed_engine(draft_wrong=0.0, *, draft_s=0.2, row_cost=0.05, **settings):
    clock = RowClock()
    draft = FallibleToy(draft_wrong, clock=clock, step_s=draft_s)
    engine = toy_engine(
        speculation="auto",
        executable=RowTimedToy(clock, row_cost),
        draft=draft,
        clock=clock,
        max_batch_tokens=64,
        **settings,
    )
    return engine, draft, clock


@pytest.mark.parametrize("windows", [(None,), (20, None)])
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(2))
def test_answers_are_the_same_with_a_draft_model_and_without(wrong, seed, windows):
    rng = random.Random(seed)
    asked = requests(rng)
    engine = toy_engine(
        speculation="auto",
        draft=FallibleToy(wrong, windows=windows),
        num_draft_blocks=rng.choice([4, 12, 200]),
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
        if names and rng.random() < 0.01:
            engine.core.abort(rng.choice(list(names)))
        for request_id, delta in engine.core.step():
            if delta.output is not None:
                outputs[request_id] = delta.output
    for request_id, (prompt, params) in names.items():
        if outputs[request_id].finish_reason != "abort":
            assert essence(outputs[request_id]) == essence(answer(toy_engine(windows=windows), prompt, params))


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}])
def test_a_draft_model_that_is_always_right_is_accepted_whole(options):
    """Also when tokens are drawn: it draws with the same random numbers. Were its KV wrong, so would it be."""
    engine, draft, clock = timed_engine()
    params = SamplingParams(max_tokens=100, seed=1, **options)
    output = answer(engine, [1, 2, 3], params)
    plain = toy_engine()
    assert output.token_ids == answer(plain, [1, 2, 3], params).token_ids
    count = output.drafts["model"]
    assert count.num_accepted == count.num_drafted > 60
    assert clock.now_s < 60
    assert draft.num_steps <= count.num_drafted + 5


def test_no_draft_goes_beyond_the_answer_or_the_context():
    engine, _, _ = timed_engine(max_context=80, draft_s=0.01)
    num_drafted = 0
    for num_tokens in [*range(1, 30), 77]:
        output = answer(engine, [num_tokens, 2, 3], SamplingParams(max_tokens=num_tokens, temperature=0.0))
        assert list(output.token_ids) == toy_answer([num_tokens, 2, 3], num_tokens)
        num_drafted += output.num_drafted_tokens
    assert num_drafted > 200


def test_a_draft_model_that_is_never_right_is_hardly_asked():
    engine, draft, clock = timed_engine(draft_wrong=1.0)
    plain_s = 0
    for seed in range(3):
        answer(engine, [seed, 2, 3], SamplingParams(max_tokens=300, temperature=0.0))
        plain_s += 300
    assert draft.num_steps < 60
    assert clock.now_s < 1.03 * plain_s


def test_a_draft_model_that_takes_as_long_as_the_model_is_hardly_asked():
    engine, draft, clock = timed_engine(draft_s=1.0)
    answer(engine, [1, 2, 3], SamplingParams(max_tokens=400, temperature=0.0))
    assert draft.num_steps < 20
    assert clock.now_s < 1.03 * 400


def test_many_sequences_are_drafted_for_together():
    engine, draft, _ = timed_engine(row_cost=0.01, num_draft_blocks=200, num_blocks=200)
    asked = [submit(engine, [i, 2, 3], SamplingParams(max_tokens=60, temperature=0.0)) for i in range(6)]
    outputs = run(engine)
    for i, request in enumerate(asked):
        assert list(outputs[request.request_id].token_ids) == toy_answer([i, 2, 3], 60)
    assert draft.num_steps < 100  # of 360 tokens


def test_the_draft_models_cache_has_the_next_turn():
    engine, draft, _ = timed_engine()
    prompt = [random.Random(0).randrange(256) for _ in range(100)]
    first = answer(engine, prompt, SamplingParams(max_tokens=50, temperature=0.0))
    num_computed = draft.num_computed_tokens
    answer(engine, [*prompt, *first.token_ids, 7, 7], SamplingParams(max_tokens=30, temperature=0.0))
    assert draft.num_computed_tokens - num_computed < 90


def test_a_cleared_cache_is_the_draft_models_too():
    engine, draft, _ = timed_engine()
    answer(engine, [1] * 50, SamplingParams(max_tokens=50, temperature=0.0))
    assert draft.num_computed_tokens > 50
    engine.core.cache.clear()
    num_computed = draft.num_computed_tokens
    answer(engine, [1] * 50, SamplingParams(max_tokens=10, temperature=0.0))
    assert draft.num_computed_tokens - num_computed > 50


def test_a_model_that_drafts_for_itself_is_right():
    prompt = "The three largest rivers of the world are"
    params = SamplingParams(temperature=0.0, max_tokens=40, speculation=False)
    with LLM("smollm2", speculation="auto", draft_model="smollm2", max_context=512) as llm:
        plain = llm.generate(prompt, params)
        fast = llm.generate(prompt + ",", SamplingParams(temperature=0.0, max_tokens=40))
        assert llm.generate(prompt + ",", params).token_ids == fast.token_ids
        assert plain.drafts == {}


def test_a_draft_model_with_other_tokens_is_refused():
    with pytest.raises(InvalidRequest, match="the same tokens"):
        LLM("smollm2", speculation="auto", draft_model="qwen2.5-coder:0.5b")
    with pytest.raises(InvalidRequest, match="speculation is off"):
        EngineConfig(draft_model="smollm2")
