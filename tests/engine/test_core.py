"""The step loop with the toy model: schedules change nothing, and nothing is computed twice or leaked."""

from __future__ import annotations

import random

import pytest

from spolia.engine import MissReason, SamplingParams

from .toy import GREEDY, answer, run, submit, toy_answer, toy_engine

WINDOWS = [(None,), (None, 40), (24,)]


def prompt_of(rng, length):
    return [rng.randrange(256) for _ in range(length)]


def test_an_answer_is_the_models():
    engine = toy_engine()
    output = answer(engine, [1, 2, 3])
    assert list(output.token_ids) == toy_answer([1, 2, 3], 8)
    assert output.finish_reason == "length"


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("seed", range(12))
def test_answers_under_any_schedule_are_those_of_solo_runs(windows, seed):
    """Shared prefixes, small pools, small budgets, aborts: whoever finishes has the answer it would have had alone."""
    rng = random.Random(seed)
    engine = toy_engine(
        windows=windows,
        num_blocks=rng.choice([14, 24, 64]),
        max_batch_tokens=rng.choice([8, 16, 40]),
        max_sequences=rng.choice([2, 5, 8]),
        max_context=160,
    )
    trunks = [prompt_of(rng, rng.randrange(1, 100)) for _ in range(3)]
    requests, outputs = {}, {}
    for _ in range(400):
        if rng.random() < 0.15:
            trunk = rng.choice(trunks)
            prompt = trunk[: rng.randrange(1, len(trunk) + 1)] + prompt_of(rng, rng.randrange(0, 20))
            params = SamplingParams(temperature=0.0, max_tokens=rng.randrange(1, 30))
            request = submit(engine, prompt, params)
            requests[request.request_id] = (prompt, params.max_tokens)
        if requests and rng.random() < 0.03:
            engine.core.abort(rng.choice(list(requests)))
        for request_id, delta in engine.core.step():
            if delta.output:
                outputs[request_id] = delta.output
    outputs |= run(engine)
    assert outputs.keys() == requests.keys()
    for request_id, (prompt, max_tokens) in requests.items():
        output = outputs[request_id]
        expected = toy_answer(prompt, len(output.token_ids), windows)
        assert list(output.token_ids) == expected
        assert len(output.token_ids) == max_tokens or output.finish_reason == "abort"
    assert all(ledger.leased == 0 for ledger in engine.core.stats.ledger)


def test_two_requests_with_one_prefix_that_arrive_together_compute_it_once():
    engine = toy_engine(max_batch_tokens=16)
    trunk = list(range(100))
    first, second = submit(engine, [*trunk, 200]), submit(engine, [*trunk, 201])
    outputs = run(engine)
    assert outputs[first.request_id].num_cached_tokens == 0
    assert outputs[second.request_id].num_cached_tokens == 100
    assert engine.core.stats.counters.num_computed_tokens == 101 + 1 + 2 * 7


def test_four_branches_of_one_trunk_compute_it_once():
    engine = toy_engine(num_blocks=200, max_batch_tokens=64)
    trunk = [i % 256 for i in range(300)]
    requests = [submit(engine, [*trunk, branch, branch]) for branch in range(4)]
    outputs = run(engine)
    assert sorted(outputs[r.request_id].num_cached_tokens for r in requests) == [0, 300, 300, 300]
    assert engine.core.stats.counters.num_computed_tokens == 300 + 4 * 2 + 4 * 7


def test_a_fully_cached_prompt_computes_exactly_one_token():
    engine = toy_engine()
    prompt = list(range(50))
    params = SamplingParams(temperature=0.0, max_tokens=1)
    answer(engine, prompt, params)
    before = engine.core.stats.counters.num_computed_tokens
    output = answer(engine, prompt, params)
    assert engine.core.stats.counters.num_computed_tokens == before + 1
    assert output.num_cached_tokens == 49
    assert output.explanation is not None
    assert output.explanation.reason is MissReason.FULL


def test_the_next_turn_reuses_the_generated_tokens():
    engine = toy_engine()
    prompt = list(range(30))
    reply = list(answer(engine, prompt, SamplingParams(temperature=0.0, max_tokens=20)).token_ids)
    output = answer(engine, [*prompt, *reply, 7, 8, 9])
    assert output.num_cached_tokens == 30 + 19  # the last token of an answer never went through the model


def test_salts_keep_apart():
    engine = toy_engine()
    prompt = list(range(40))
    answer(engine, prompt, cache_salt="a")
    assert answer(engine, prompt, cache_salt="b").num_cached_tokens == 0
    assert answer(engine, prompt, cache_salt="a").num_cached_tokens == 39


@pytest.mark.parametrize("windows", [(None, 40), (24,)])
@pytest.mark.parametrize(("num_windows", "extra"), [(1, -1), (1, 0), (1, 1), (3, 0)])
def test_the_same_prompt_again_is_a_hit_at_any_distance_from_the_window(windows, num_windows, extra):
    prompt = list(range(num_windows * windows[-1] + extra))
    engine = toy_engine(windows=windows)
    cold, warm = answer(engine, prompt), answer(engine, prompt)
    assert list(cold.token_ids) == list(warm.token_ids) == toy_answer(prompt, 8, windows)
    assert warm.num_cached_tokens == len(prompt) - 1


@pytest.mark.parametrize("windows", WINDOWS)
def test_a_preemption_storm_passes_and_changes_no_answer(windows):
    """Eight answers of 80 tokens in a pool that holds three: all end, right, and the work done twice is bounded."""
    engine = toy_engine(windows=windows, num_blocks=20, max_context=128)
    requests = [submit(engine, [i] * 8, SamplingParams(temperature=0.0, max_tokens=80)) for i in range(8)]
    outputs = run(engine)
    for i, request in enumerate(requests):
        assert list(outputs[request.request_id].token_ids) == toy_answer([i] * 8, 80, windows)
    counters = engine.core.stats.counters
    assert counters.num_recomputed_tokens <= 8 * 88
    assert counters.num_computed_tokens == 8 * 87 + counters.num_recomputed_tokens
    assert all(ledger.leased == 0 for ledger in engine.core.stats.ledger)


def test_a_storm_did_happen():
    engine = toy_engine(num_blocks=20, max_context=128)
    for i in range(8):
        submit(engine, [i] * 8, SamplingParams(temperature=0.0, max_tokens=80))
    run(engine)
    assert engine.core.stats.counters.num_preemptions > 0


@pytest.mark.parametrize("num_steps", [0, 1, 3, 9], ids=["waiting", "first chunk", "mid prefill", "decoding"])
def test_an_abort_gives_back_all_blocks_at_once(num_steps):
    engine = toy_engine(max_batch_tokens=16)
    victim = submit(engine, list(range(100)), SamplingParams(temperature=0.0, max_tokens=50))
    for _ in range(num_steps):
        engine.core.step()
    engine.core.abort(victim.request_id)
    assert engine.core.stats.ledger[0].leased == 0
    (output,) = run(engine).values()
    assert output.finish_reason == "abort"
    assert not engine.core.has_work


def test_an_abort_keeps_what_was_computed():
    """A client times out in its prefill and retries: the retry goes on from there."""
    engine = toy_engine(max_batch_tokens=16)
    prompt = list(range(100))
    victim = submit(engine, prompt)
    for _ in range(4):
        engine.core.step()
    engine.core.abort(victim.request_id)
    run(engine)
    assert answer(engine, prompt).num_cached_tokens == 64


def test_a_cold_request_is_not_starved_by_hot_ones():
    """One lane, and always a waiting request with a longer cached prefix: the cold one still has its turn."""
    engine = toy_engine(max_sequences=1, max_batch_tokens=64)
    hot = list(range(64))
    params = SamplingParams(temperature=0.0, max_tokens=1)
    answer(engine, hot, params)
    submit(engine, [*hot, 1], params)
    cold = submit(engine, [255] * 10, params)
    num_hot_before = None
    for num_hot in range(100):
        submit(engine, [*hot, 2, num_hot], params)
        if any(request_id == cold.request_id for request_id, _ in engine.core.step()):
            num_hot_before = num_hot
            break
    assert num_hot_before is not None
    assert 2 < num_hot_before <= 20  # others did go first, but not for ever


def test_longer_cached_prefixes_go_first():
    engine = toy_engine(max_sequences=1)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    hot = list(range(60))
    answer(engine, hot, params)
    cold, warm, hottest = (
        submit(engine, [9] * 40, params),
        submit(engine, hot[:20], params),
        submit(engine, hot, params),
    )
    order = list(run(engine))
    assert order == [hottest.request_id, warm.request_id, cold.request_id]


def test_a_long_prompt_does_not_stop_who_is_generating():
    engine = toy_engine(max_batch_tokens=16, num_blocks=100)
    talker = submit(engine, [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=40))
    engine.core.step()
    submit(engine, list(range(200)))
    for _ in range(12):
        assert talker.request_id in [request_id for request_id, _ in engine.core.step()]


def test_the_oldest_generates_on_while_a_newer_one_waits_for_room():
    engine = toy_engine(num_blocks=8, max_context=128)
    submit(engine, [1] * 60, SamplingParams(temperature=0.0, max_tokens=60))
    submit(engine, [2] * 60, SamplingParams(temperature=0.0, max_tokens=60))
    assert len(run(engine)) == 2


def test_waiting_for_room_costs_one_look_and_is_no_miss():
    """The cache is not asked again each step, so its counters stay those of requests."""
    engine = toy_engine(num_blocks=8, max_context=128)
    for first in range(2):
        submit(engine, [first] * 60, SamplingParams(temperature=0.0, max_tokens=50))
    run(engine)
    assert engine.core.cache.stats.num_opened <= 4


def test_a_request_that_had_to_wait_for_room_is_asked_for_once():
    """However often it was looked up, so that hits have an honest denominator."""
    engine = toy_engine(num_blocks=20)
    rng = random.Random(3)
    for number in range(24):
        prompt = [rng.randrange(250) for _ in range(60)]
        submit(engine, prompt, SamplingParams(temperature=0.0, max_tokens=20 + number))
    run(engine)
    stats, counters = engine.core.cache.stats, engine.core.stats.counters
    assert stats.num_opened == 24
    assert stats.num_asked_tokens == counters.num_prompt_tokens == 24 * 60
    assert stats.num_reused_tokens == counters.num_cached_tokens
    assert sum(stats.num_missed_tokens.values()) == sum(counters.num_missed_tokens.values())


def test_counters_add_up():
    engine = toy_engine()
    prompt = list(range(40))
    answer(engine, prompt, GREEDY)
    answer(engine, prompt, GREEDY)
    counters = engine.core.stats.counters
    assert counters.num_prompt_tokens == 80
    assert counters.num_cached_tokens == 39
    assert counters.num_generated_tokens == 16
    assert counters.num_computed_tokens == (40 + 7) + (1 + 7)
    assert counters.num_finished == {"length": 2}
