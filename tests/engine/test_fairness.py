"""Tenants: each gets its share of the prompts that are computed, and none another's place in the cache."""

from __future__ import annotations

import random

import pytest

from spolia.engine import SamplingParams, Tenant
from spolia.errors import InvalidRequest

from .toy import GREEDY, answer, run, submit, toy_answer, toy_engine

A, B = Tenant("a"), Tenant("b")


def prompt(rng: random.Random, size: int) -> list[int]:
    return [rng.randrange(250) for _ in range(size)]


def steps_to_first_token(engine, request_id: str, max_steps: int = 10_000) -> int:
    for step in range(1, max_steps):
        for other_id, delta in engine.core.step():
            if other_id == request_id and delta.token_ids:
                return step
    raise AssertionError("it was never answered")


def flooded(tenant: Tenant, newcomer: Tenant, num_requests: int = 60) -> int:
    """Steps until a newcomer's first token, while another waits for many long prompts."""
    rng = random.Random(1)
    engine = toy_engine(num_blocks=400, max_batch_tokens=64)
    for _ in range(num_requests):
        submit(engine, prompt(rng, 200), tenant=tenant)
    for _ in range(10):
        engine.core.step()
    request = submit(engine, prompt(rng, 120), tenant=newcomer)
    return steps_to_first_token(engine, request.request_id)


def test_a_neighbour_is_not_kept_waiting_by_a_flood():
    engine = toy_engine(num_blocks=400, max_batch_tokens=64)
    request = submit(engine, prompt(random.Random(2), 120))
    alone = steps_to_first_token(engine, request.request_id)
    assert flooded(A, B) <= 2 * alone + 2
    assert flooded(A, A) > 10 * alone  # which is what it would be without telling them apart


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_prompt_tokens_are_shared_by_weight(weight):
    rng = random.Random(3)
    engine = toy_engine(num_blocks=600, max_batch_tokens=64)
    tenants = {"a": Tenant("a", weight), "b": Tenant("b")}
    of = {}
    for _ in range(80):
        for name, tenant in tenants.items():
            request = submit(engine, prompt(rng, 150), SamplingParams(temperature=0, max_tokens=2), tenant=tenant)
            of[request.request_id] = name
    finished = {"a": 0, "b": 0}
    while sum(finished.values()) < 60:
        for request_id, delta in engine.core.step():
            if delta.output is not None:
                finished[of[request_id]] += 1
    assert finished["a"] / finished["b"] == pytest.approx(weight, rel=0.25)


def test_whoever_comes_back_has_not_saved_up_and_owes_nothing():
    rng = random.Random(4)
    engine = toy_engine(num_blocks=600, max_batch_tokens=64)
    for _ in range(30):
        submit(engine, prompt(rng, 150), tenant=A)
    for _ in range(40):
        engine.core.step()
    late = [submit(engine, prompt(rng, 150), tenant=B) for _ in range(30)]
    finished = {"a": 0, "b": 0}
    ids = {request.request_id for request in late}
    while sum(finished.values()) < 20:
        for request_id, delta in engine.core.step():
            if delta.output is not None:
                finished["b" if request_id in ids else "a"] += 1
    assert min(finished.values()) >= 6


def test_answers_do_not_depend_on_tenants():
    rng = random.Random(5)
    engine = toy_engine(num_blocks=40, max_batch_tokens=24)
    expected = {}
    for number in range(40):
        ids = prompt(rng, rng.randrange(1, 150))
        request = submit(engine, ids, tenant=[A, B, Tenant("c", 5.0, 2_000), Tenant()][number % 4])
        expected[request.request_id] = toy_answer(ids, 8)
    outputs = run(engine)
    assert {request_id: list(output.token_ids) for request_id, output in outputs.items()} == expected
    assert all(ledger.leased == 0 for ledger in engine.core.cache.ledger())


def quota(num_tokens: int) -> int:
    return 8 * num_tokens  # a token of the toy's has 8 bytes


def test_a_tenant_over_its_quota_gives_up_its_own_and_nobody_elses():
    rng = random.Random(6)
    engine = toy_engine(num_blocks=64)
    mine = prompt(rng, 200)
    answer(engine, mine, tenant=B)
    greedy = Tenant("a", kv_quota=quota(256))
    prompts = [prompt(rng, 100) for _ in range(20)]
    for ids in prompts:
        answer(engine, ids, tenant=greedy, cache_salt="a")
    (ledger,) = engine.core.cache.ledger()
    assert ledger.cached <= (208 + 256) // 16 + 4
    again = answer(engine, mine, tenant=B)
    assert again.num_cached_tokens == 199
    last = answer(engine, prompts[-1], tenant=greedy, cache_salt="a")
    assert last.num_cached_tokens == 99
    first = answer(engine, prompts[0], tenant=greedy, cache_salt="a")
    assert first.num_cached_tokens < 99
    assert first.explanation.evicted.cause == "quota of a"


def test_a_quota_is_one_for_all_of_a_tenants_salts():
    rng = random.Random(7)
    engine = toy_engine(num_blocks=64)
    tenant = Tenant("a", kv_quota=quota(160))
    for number in range(10):
        answer(engine, prompt(rng, 100), tenant=tenant, cache_salt=f"salt {number}")
    (ledger,) = engine.core.cache.ledger()
    assert ledger.cached <= 160 // 16 + 1


def test_a_request_larger_than_its_tenants_quota_is_answered_all_the_same():
    engine = toy_engine(num_blocks=64)
    ids = prompt(random.Random(8), 300)
    output = answer(engine, ids, GREEDY, tenant=Tenant("a", kv_quota=quota(64)))
    assert list(output.token_ids) == toy_answer(ids, 8)
    (ledger,) = engine.core.cache.ledger()
    assert ledger.cached <= 64 // 16 + 1


@pytest.mark.parametrize("fields", [{"weight": 0.0}, {"weight": float("inf")}, {"kv_quota": 0}])
def test_impossible_shares_are_refused(fields):
    with pytest.raises(InvalidRequest):
        Tenant("a", **fields)
