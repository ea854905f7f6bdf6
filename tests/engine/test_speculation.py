"""Speculation changes no answer: the same tokens, the same log-probabilities, whatever was guessed."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from spolia.engine import SamplingParams
from spolia.engine.costs import StepCosts
from spolia.errors import InvalidRequest
from spolia.generation import SuffixIndex

from .toy import VOCAB_SIZE, ToyExecutable, answer, run, submit, toy_answer, toy_engine

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
    assert sum(output.num_accepted_tokens for output in outputs.values()) > 4
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


@pytest.mark.parametrize("speculation", ["off", *KINDS])
def test_what_a_form_forces_takes_a_step_together(speculation):
    schema = {"const": {"a rather long name": 1, "and another one": 2}}
    params = SamplingParams(temperature=0.0, max_tokens=100, structured_outputs={"json": schema})
    plain = toy_engine(max_batch_tokens=64)
    expected = answer(plain, [1, 2, 3], replace(params, speculation=False))
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


def naive_find(ids, most=16):
    """The longest of 1, 2, 4, 8 and 16 last tokens that were there before, where they were last, and what followed."""
    for size in (16, 8, 4, 2, 1):
        for end in range(len(ids) - 1, size - 1, -1):
            if ids[end - size : end] == ids[len(ids) - size :]:
                length = next((n for n in range(min(end, most)) if ids[end - 1 - n] != ids[-1 - n]), min(end, most))
                return end, length
    return None


@pytest.mark.parametrize("in_pieces", [False, True])
def test_the_index_finds_the_longest_then_latest_repetition(in_pieces):
    rng = random.Random(0)
    for alphabet in (2, 3, 10, 100_000):
        for _ in range(40):
            known = [rng.randrange(alphabet) for _ in range(rng.randrange(1, 60))]
            ids = np.array(known + known[: rng.randrange(len(known))], np.int32)
            index = SuffixIndex(num_slots=1 << 20)
            text = index.open(b"", ids)
            stop = 0
            while stop < len(ids):
                stop = min(len(ids), stop + rng.choice([1, 1, 2, 5, 30])) if in_pieces else len(ids)
                index.extend(text, stop)
            found = index.find(text)
            assert (found and (found.position, found.length)) == naive_find(ids.tolist())


def test_the_index_finds_in_texts_that_ended_until_there_are_too_many():
    rng = np.random.default_rng(0)
    index = SuffixIndex(max_tokens=1_000)
    texts = [rng.integers(0, 1_000_000, 300).astype(np.int32) for _ in range(6)]
    for ids in texts:
        text = index.open(b"us", ids)
        index.extend(text, 300)
        index.close(text)

    def found(owner, ids):
        asking = index.open(owner, ids[100:120].copy())
        index.extend(asking, 20)
        match = index.find(asking)
        index.drop(asking)
        return match is not None and match.text.ids[match.position] == ids[120]

    assert [found(b"us", ids) for ids in texts] == [False, False, False, True, True, True]
    assert not any(found(b"them", ids) for ids in texts)
    index.forget()
    assert not any(found(b"us", ids) for ids in texts)


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


class RowClock:
    """Time that only computing takes: a step of n rows takes 1 + `row_cost` * (n - 1)."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class RowTimedToy(ToyExecutable):
    def __init__(self, clock, row_cost):
        super().__init__()
        self.clock = clock
        self.row_cost = row_cost

    def run(self, step, logits):
        super().run(step, logits)
        self.clock.now_s += 1 + self.row_cost * (len(step.token_ids) - 1)


def time_of(speculation, prompts, row_cost, options, **settings):
    clock = RowClock()
    engine = toy_engine(
        speculation=speculation,
        executable=RowTimedToy(clock, row_cost),
        clock=clock,
        max_batch_tokens=64,
        num_blocks=400,
        **settings,
    )
    outputs = []
    for seed, prompt in enumerate(prompts):
        outputs.append(answer(engine, prompt, SamplingParams(max_tokens=200, seed=seed, **options)))
    return clock.now_s, outputs


@pytest.mark.parametrize("row_cost", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("favoured", [(), (1,), (1, 2, 3)])
def test_speculation_never_costs_more_than_a_hundredth(row_cost, favoured):
    """Answers of random tokens, of few, and of almost one: short matches are everywhere, and mostly wrong."""
    options = {"temperature": 1.0, "logit_bias": dict.fromkeys(favoured, 4.5)}
    prompts = [[random.Random(i).randrange(256) for _ in range(60)] for i in range(6)]
    plain_s, plain = time_of("off", prompts, row_cost, options)
    fast_s, fast = time_of("auto", prompts, row_cost, options)
    assert [output.token_ids for output in fast] == [output.token_ids for output in plain]
    assert fast_s < 1.01 * plain_s


def test_speculation_pays_where_an_answer_is_repeated():
    prompts = [[1, 2, 3]] * 4
    plain_s, _ = time_of("off", prompts, 0.1, {"temperature": 0.0})
    fast_s, outputs = time_of("auto", prompts, 0.1, {"temperature": 0.0})
    assert fast_s < 0.6 * plain_s  # one answer of four is new
    assert outputs[-1].num_accepted_tokens > 150


def test_nothing_is_lost_where_rows_cost_as_much_as_steps():
    plain_s, _ = time_of("off", [[1, 2, 3]] * 4, 1.0, {"temperature": 0.0})
    fast_s, _ = time_of("auto", [[1, 2, 3]] * 4, 1.0, {"temperature": 0.0})
    assert fast_s < 1.01 * plain_s


def test_costs_are_learnt_whatever_the_load_is():
    rng = random.Random(0)
    costs = StepCosts()
    for index in range(3_000):
        load = 1.0 if index % 1_000 < 500 else 3.0
        extra = rng.choice([0, 0, 0, 1, 3, 8, 15])
        costs.note(
            1, extra, load * 0.004 * (1 + 0.1 * extra) * rng.uniform(0.95, 1.05) * (20 if index % 97 == 0 else 1)
        )
    for extra in (1, 3, 8, 15):
        assert costs.ratio(1, extra) == pytest.approx(1 + 0.1 * extra, rel=0.12)


def test_lengths_are_those_of_the_highest_rate():
    rng = random.Random(1)
    costs = StepCosts()
    for _ in range(50):
        for extra in (0, 2, 4, 8, 15, 32):
            costs.note(3, extra, 0.01 * (1 + 0.02 * extra if extra < 5 else 1 + 0.12 * extra))
    for _ in range(100):
        chances = [list(np.cumprod([rng.uniform(0.3, 1) for _ in range(rng.randrange(6))])) for _ in range(3)]
        lengths = costs.lengths(3, chances)

        def rate(lengths, chances=chances):
            gained = sum(sum(of_one[:length]) for of_one, length in zip(chances, lengths, strict=True))
            return (3 + gained) / costs.ratio(3, sum(lengths))

        best = max(rate(each) for each in itertools.product(*(range(len(of_one) + 1) for of_one in chances)))
        assert rate(lengths) == pytest.approx(best) or (sum(lengths) == 0 and best < 3 * 1.04)


def test_a_prediction_is_drafted_and_taken_up_behind_what_differs():
    said = toy_answer([1, 2, 3], 100)
    predicted = list(said)
    for place in (20, 50, 51, 80):
        predicted[place] = 255 - predicted[place] if predicted[place] < 256 else 0
    del predicted[65:68]
    params = SamplingParams(temperature=0.0, max_tokens=100, prediction=tuple(predicted))
    engine = toy_engine(speculation="auto", max_batch_tokens=64)
    output = answer(engine, [1, 2, 3], params)
    assert list(output.token_ids) == said
    assert output.drafts["prediction"].num_accepted > 70
    assert engine.core.stats.counters.drafts == output.drafts
    assert len(output.foreseen) == output.num_accepted_tokens
    assert all(predicted.count(said[index]) for index, source in output.foreseen.items() if source == "prediction")
    assert engine.core.stats.counters.num_steps < 35


def test_a_request_may_do_without():
    engine = toy_engine(speculation="auto", max_batch_tokens=64)
    params = SamplingParams(temperature=0.0, max_tokens=40)
    expected = answer(engine, [1, 2, 3], params)
    without = answer(engine, [1, 2, 3], replace(params, speculation=False))
    assert without.drafts == {}
    assert answer(engine, [1, 2, 3], params).num_accepted_tokens > 10
    assert without.token_ids == expected.token_ids


def test_a_prediction_of_ids_that_the_model_lacks_is_refused():
    with pytest.raises(InvalidRequest, match="prediction holds 257"):
        answer(toy_engine(), [1], SamplingParams(prediction=(1, 257)))


def test_texts_of_the_same_tenant_are_guessed_from_until_the_cache_is_cleared():
    rng = random.Random(0)
    said = [rng.randrange(256) for _ in range(120)]
    forced = {"prefix_allowed_tokens_fn": lambda _, ids: [said[min(len(ids), 119)]]}

    def drafts(engine, salt, prompt):
        # What comes next depends on the place alone, so a prompt that begins otherwise has the same answer.
        request = submit(engine, prompt, SamplingParams(max_tokens=110, **forced), cache_salt=salt)
        return run(engine)[request.request_id].drafts

    engine = toy_engine(speculation="auto", max_batch_tokens=64)
    assert "cache" not in drafts(engine, "us", [1, 2, 3])
    assert drafts(engine, "us", [4, 5, 6])["cache"].num_accepted > 80
    assert "cache" not in drafts(engine, "them", [7, 8, 9])
    engine.core.cache.clear()
    assert "cache" not in drafts(engine, "us", [2, 2, 2])


def test_drawn_tokens_have_the_models_distribution():
    """2,000 answers of two tokens, with the likeliest as prediction: chi-square against the exact probabilities."""
    from .toy import toy_logits

    forms = {"temperature": 0.4, "logit_bias": dict.fromkeys(range(8, VOCAB_SIZE), -100.0)}
    probabilities = []
    for first in range(8):
        x = toy_logits([1, 2, 3])[:8].astype(np.float64) / 0.4
        y = toy_logits([1, 2, 3, first])[:8].astype(np.float64) / 0.4
        probabilities.append(np.exp(x)[first] / np.exp(x).sum() * np.exp(y) / np.exp(y).sum())
    expected = np.array(probabilities)
    predicted = np.unravel_index(expected.argmax(), expected.shape)
    clock = RowClock()
    settings = {"executable": RowTimedToy(clock, 0.1), "clock": clock, "max_batch_tokens": 64, "max_sequences": 1}
    engine = toy_engine(speculation="auto", **settings)
    requests = [
        submit(
            engine,
            [1, 2, 3],
            SamplingParams(max_tokens=3, seed=seed, **forms, prediction=(*map(int, predicted), 0)),
        )
        for seed in range(2_000)
    ]
    counts = np.zeros((8, 8))
    outputs = run(engine, max_steps=100_000)
    num_accepted = 0
    for request in requests:
        output = outputs[request.request_id]
        counts[output.token_ids[:2]] += 1
        num_accepted += output.num_accepted_tokens
    assert num_accepted > 1_000
    often = expected > 5 / 2_000  # the others make one class
    seen = np.array([*counts[often], counts[~often].sum()])
    foreseen = 2_000 * np.array([*expected[often], expected[~often].sum()])
    num_free = len(seen) - 1
    # More than four standard deviations above the mean comes about once in some thousands.
    assert ((seen - foreseen) ** 2 / foreseen).sum() < num_free + 4 * (2 * num_free) ** 0.5


@pytest.mark.parametrize("length", [19, 20, 21, 60])
@pytest.mark.parametrize("windows", [(20,), (20, None)])
def test_bursts_of_drafts_across_a_windows_edge_are_right_and_the_second_time_is_a_hit(length, windows):
    prompt = [random.Random(length).randrange(256) for _ in range(length)]
    said = toy_answer(prompt, 80, windows)
    engine = toy_engine(speculation="auto", windows=windows, max_batch_tokens=64)
    params = SamplingParams(temperature=0.0, max_tokens=80, prediction=tuple(said))
    for turn in range(2):
        output = answer(engine, prompt, params)
        assert list(output.token_ids) == said
        assert output.num_accepted_tokens > 55
        assert output.num_cached_tokens == (turn and length - 1)
