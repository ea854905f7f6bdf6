"""Short prompts and long ones: neither waits for the other longer than it must."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spolia.engine import SamplingParams, Tenant
from spolia.engine.fairness import Prompt, divide
from spolia.engine.scheduler import LOOKAHEAD, MAX_PASSED_OVER

from .toy import run, submit, toy_answer, toy_engine

ONE = SamplingParams(temperature=0.0, max_tokens=1)
BUDGET = 64


def prompt(rng: random.Random, size: int) -> list[int]:
    return [rng.randrange(250) for _ in range(size)]


def engine_of(**options):
    return toy_engine(**{"num_blocks": 600, "max_batch_tokens": BUDGET, "max_context": 4096} | options)


def first_tokens(engine, wanted: int, each_step=lambda step: None) -> dict[str, int]:
    """The step in which each request had its first token, until so many have."""
    steps: dict[str, int] = {}
    for step in range(10_000):
        each_step(step)
        for request_id, delta in engine.core.step():
            if delta.token_ids:
                steps.setdefault(request_id, step)
        if len(steps) >= wanted:
            return steps
    raise AssertionError(f"{len(steps)} of {wanted} had a token")


def test_a_short_prompt_does_not_wait_for_a_long_one():
    rng = random.Random(1)
    engine = engine_of()
    long = submit(engine, prompt(rng, 3000), ONE)
    engine.core.step()
    short = submit(engine, prompt(rng, 40), ONE)
    steps = first_tokens(engine, 2)
    assert steps[short.request_id] <= 40 // (BUDGET // 4)
    assert steps[long.request_id] <= 3000 // BUDGET + 1  # nothing was lost by it


def test_a_short_prompt_does_not_wait_for_long_ones_that_came_before_it():
    rng = random.Random(2)
    engine = engine_of(max_sequences=4)
    for _ in range(5):
        submit(engine, prompt(rng, 1500), ONE)
    engine.core.step()
    short = submit(engine, prompt(rng, 30), ONE)
    steps = first_tokens(engine, 1)
    assert steps == {short.request_id: pytest.approx(1, abs=1)}
    assert engine.core.stats.num_running == 1  # the other long ones keep no lane for crumbs


def test_a_long_prompt_is_read_at_three_quarters_of_the_speed_at_worst():
    rng = random.Random(3)
    engine = engine_of()
    long = submit(engine, prompt(rng, 3000), ONE)
    engine.core.step()

    def another(step: int) -> None:
        submit(engine, prompt(rng, 70), ONE)

    alone = -(-3000 // BUDGET)
    num_streams = 7  # of the eight lanes, each of which has a token of its own
    steps = 0
    while steps < 2 * alone:
        another(steps)
        steps += 1
        if any(request_id == long.request_id for request_id, _ in engine.core.step()):
            break
    assert steps <= 3000 / (3 / 4 * (BUDGET - num_streams)) + 2


def test_a_short_prompt_does_not_wait_for_one_that_is_cached_in_part_and_longer_than_what_runs():
    """That one is first in the order of admission; the short one is admitted before it all the same."""
    rng = random.Random(8)
    engine = engine_of()
    known = prompt(rng, 1500)
    submit(engine, known, ONE)
    run(engine)
    submit(engine, prompt(rng, 600), ONE)
    engine.core.step()
    submit(engine, [*known, *prompt(rng, 700)], ONE)
    short = submit(engine, prompt(rng, 12), ONE)
    assert first_tokens(engine, 1) == {short.request_id: 0}


def test_few_are_looked_up_in_a_step_however_many_wait():
    rng = random.Random(9)
    engine = engine_of(num_blocks=64)
    submit(engine, prompt(rng, 400), ONE)
    engine.core.step()
    for _ in range(300):
        submit(engine, prompt(rng, 420), ONE)
    num_probed, probe = 0, engine.core.cache.probe

    def counted(*arguments):
        nonlocal num_probed
        num_probed += 1
        return probe(*arguments)

    engine.core.cache.probe = counted
    engine.core.step()
    assert 0 < num_probed <= LOOKAHEAD


def test_equals_are_served_in_order_of_arrival():
    rng = random.Random(4)
    engine = engine_of()
    requests = [submit(engine, prompt(rng, 300), ONE) for _ in range(5)]
    steps = first_tokens(engine, 5)
    assert [steps[request.request_id] for request in requests] == sorted(steps.values())
    assert steps[requests[0].request_id] == 300 // BUDGET


def test_a_long_prompt_among_short_ones_has_its_turn():
    """One lane: it cannot run beside them, so ageing has to help it."""
    rng = random.Random(5)
    engine = engine_of(max_sequences=1)
    submit(engine, prompt(rng, 30), ONE)
    engine.core.step()
    long = submit(engine, prompt(rng, 1000), ONE)
    finished = []
    for _ in range(200):
        submit(engine, prompt(rng, 30), ONE)
        finished += [request_id for request_id, delta in engine.core.step() if delta.output]
        if long.request_id in finished:
            break
    assert long.request_id in finished
    assert finished.index(long.request_id) <= MAX_PASSED_OVER + 1


def test_a_stream_that_gave_way_comes_back_while_a_long_prompt_is_read():
    rng = random.Random(6)
    engine = engine_of(num_blocks=100, max_sequences=4, max_context=1600)
    long_prompt = prompt(rng, 1000)
    talker = submit(engine, prompt(rng, 20), SamplingParams(temperature=0.0, max_tokens=60))
    engine.core.step()
    long = submit(engine, long_prompt, ONE)
    engine.core.step()
    scheduler = engine.core._scheduler
    (sequence,) = [one for one in scheduler.running if one.request.request_id == talker.request_id]
    scheduler.restart(sequence, lambda: None)
    steps = first_tokens(engine, 1)
    assert talker.request_id in steps
    outputs = run(engine)
    assert list(outputs[long.request_id].token_ids) == toy_answer(long_prompt, 1)


def test_no_token_of_the_budget_is_wasted_on_who_finds_no_room():
    """What was left for a newcomer that does not fit goes to who runs."""
    rng = random.Random(7)
    engine = engine_of(num_blocks=40, max_context=600)
    first = submit(engine, prompt(rng, 560), ONE)
    engine.core.step()

    def another(step: int) -> None:
        submit(engine, prompt(rng, 100), ONE)

    steps = first_tokens(engine, 1, another)
    assert steps == {first.request_id: -(-560 // BUDGET) - 2}


prompts = st.lists(
    st.builds(
        Prompt,
        st.sampled_from([Tenant(), Tenant("a"), Tenant("b", 3.0), Tenant("c", 0.01)]),
        st.integers(1, 500),
        st.booleans(),
    ),
    max_size=12,
)


@given(prompts, st.integers(0, 512))
def test_divided_tokens(prompts, budget):
    granted = divide(budget, prompts)
    assert all(0 <= tokens <= prompt.num_left for tokens, prompt in zip(granted, prompts, strict=True))
    assert sum(granted) == min(budget, sum(prompt.num_left for prompt in prompts))
    by_tenant: dict[Tenant, list[tuple[int, Prompt]]] = {}
    for tokens, one in zip(granted, prompts, strict=True):
        by_tenant.setdefault(one.tenant, []).append((tokens, one))
    for mine in by_tenant.values():
        tokens, oldest = mine[0]
        assert tokens == oldest.num_left or tokens >= 3 / 4 * sum(tokens for tokens, _ in mine)


def test_a_quarter_goes_to_the_least_and_the_rest_to_the_oldest():
    tenant = Tenant()
    assert divide(256, [Prompt(tenant, size) for size in (30_000, 40_000, 56)]) == [200, 0, 56]
    assert divide(256, [Prompt(tenant, size) for size in (30_000, 9_000, 56, 12_000)]) == [192, 8, 56, 0]
    assert divide(256, [Prompt(tenant, size) for size in (30_000, 9_000, 70, 60)]) == [192, 0, 4, 60]
    assert divide(256, [Prompt(tenant, size) for size in (100, 9_000, 9_000)]) == [100, 156, 0]
    assert divide(256, [Prompt(tenant, 100), Prompt(tenant, 9_000, has_aged=True)]) == [100, 156]
