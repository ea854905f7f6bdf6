"""What users of other engines reported of their KV caches, one test a case, named after it.

The faults: wrong answers, memory lost, hits that were not, standing still, strangers. What concerns tiers, drafts and
the server's own endpoints is in those rooms' tests.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest

from engine.toy import GREEDY, answer, run, submit, toy_answer, toy_engine
from spolia.engine import SamplingParams, Tenant
from spolia.errors import BlockNotHeldError, Bug, InvalidRequest, LeaseError
from spolia.kvcache import BlockPool, GroupSpec, KVCache, MissReason, namespace_key


def prompt(size: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(250) for _ in range(size)]


def free_blocks(engine) -> list[int]:
    engine.core.cache.clear()
    return [ledger.free for ledger in engine.core.cache.ledger()]


# -- Wrong answers -----------------------------------------------------------------------------------------------------


def test_the_same_prompt_cold_then_warm_then_among_strangers_then_after_preemption_gives_the_same_text():
    engine = toy_engine(num_blocks=30, max_batch_tokens=40, max_sequences=16)
    ids = prompt(60)
    params = SamplingParams(temperature=0, max_tokens=40)
    expected = toy_answer(ids, 40)
    assert list(answer(engine, ids, params).token_ids) == expected  # cold
    assert list(answer(engine, ids, params).token_ids) == expected  # warm
    mine = submit(engine, ids, params)
    for stranger in range(15):
        submit(engine, prompt(20, stranger + 1), params)
    assert list(run(engine)[mine.request_id].token_ids) == expected
    assert engine.core.stats.counters.num_preemptions > 0  # 16 x 100 tokens do not fit into 480
    assert list(answer(engine, ids, params).token_ids) == expected


def test_prefill_resumed_at_any_split_point_is_prefill_in_one_piece():
    ids = prompt(200)
    expected = toy_answer(ids, 4)
    for split in range(1, 200):
        engine = toy_engine(max_batch_tokens=256)
        answer(engine, ids[:split], SamplingParams(temperature=0, max_tokens=1))
        output = answer(engine, ids, SamplingParams(temperature=0, max_tokens=4))
        assert output.num_cached_tokens == split
        assert list(output.token_ids) == expected


def test_a_reference_to_blocks_that_were_given_back_is_an_error_and_not_an_answer():
    cache = KVCache([GroupSpec(8)], clock=lambda: 0.0)
    lease = cache.open(b"ns", np.arange(20))
    cache.grow(lease, 20)
    lease.close()
    for use in (lambda: lease.block_table(0), lambda: cache.grow(lease, 30), lambda: cache.commit(lease, [1])):
        with pytest.raises(LeaseError, match="released"):
            use()


def test_an_adapters_name_that_equals_another_tenants_salt_shares_nothing_with_it():
    assert namespace_key(adapter="x", salt="") != namespace_key(adapter="", salt="x")
    assert namespace_key(adapter="x") != namespace_key(salt="x")
    assert namespace_key(a="bc") != namespace_key(ab="c")
    assert namespace_key(layout=1) != namespace_key(layout="1")


def test_prompt_logprobs_of_a_warm_prefix_are_those_of_a_cold_one_and_say_what_they_cost():
    ids = prompt(100)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
    cold = answer(toy_engine(), ids, params)
    engine = toy_engine()
    answer(engine, ids[:70])
    warm = answer(engine, ids, params)
    assert [entry.token_id for entry in warm.prompt_logprobs] == ids[1:]
    assert warm.prompt_logprobs == cold.prompt_logprobs
    # What was cached was computed again for its results, and is told apart from what was new.
    assert [(part.start, part.stop, part.reason) for part in warm.ranges] == [
        (0, 70, MissReason.RESULTS_WANTED),
        (70, 100, MissReason.DIVERGED),
    ]


@pytest.mark.parametrize("length", [31, 32, 33, 96])
def test_a_warm_prompt_whose_window_blocks_were_freed_is_no_full_hit_and_the_second_time_is_one(length):
    engine = toy_engine(windows=(None, 32), num_blocks=(64, 16))
    ids = prompt(length)
    expected = toy_answer(ids, 8, windows=(None, 32))
    assert list(answer(engine, ids).token_ids) == expected
    assert answer(engine, ids).num_cached_tokens == length - 1
    answer(engine, prompt(240, 5))  # takes the window's blocks
    output = answer(engine, ids)
    assert list(output.token_ids) == expected
    assert answer(engine, ids).num_cached_tokens == length - 1


# -- Lost or leaked memory ---------------------------------------------------------------------------------------------


def test_tokens_that_are_gone_are_missed_at_the_step_that_lost_them():
    pool = BlockPool(8)
    pool.take(3)
    pool.num_free -= 1  # what a leak does
    with pytest.raises(Bug, match="does not balance: 4 free"):
        pool.ledger()


def test_an_admission_that_fails_half_way_gives_back_everything():
    cache = KVCache([GroupSpec(16), GroupSpec(4, window=32)], clock=lambda: 0.0)
    hog = cache.open(b"ns", np.arange(10))
    cache.grow(hog, 48)
    before = cache.ledger()
    newcomer = cache.open(b"ns", np.arange(100, 200))
    assert cache.grow(newcomer, 100) is None  # the first group has room, the second has not
    assert cache.ledger() == before
    newcomer.close()
    cache.check()


def test_a_thousand_aborts_at_random_moments_leave_the_pool_as_it_was_found():
    rng = random.Random(9)
    engine = toy_engine(num_blocks=48, max_sequences=6)
    waiting: list[str] = []
    for number in range(1_000):
        ids = prompt(rng.randrange(1, 120), rng.randrange(20))
        waiting.append(submit(engine, ids, SamplingParams(temperature=0, max_tokens=30)).request_id)
        for _ in range(rng.randrange(3)):
            engine.core.step()
        if rng.random() < 0.95 or number > 990:
            engine.core.abort(waiting.pop(rng.randrange(len(waiting))))
    run(engine)
    assert all(ledger.leased == 0 for ledger in engine.core.cache.ledger())
    assert free_blocks(engine) == [48]


def test_blocks_cannot_be_released_by_a_boundary_only_by_their_lease_and_once():
    cache = KVCache([GroupSpec(8)], clock=lambda: 0.0)
    lease = cache.open(b"ns", np.arange(20))
    cache.grow(lease, 20)
    lease.close()
    with pytest.raises(LeaseError):
        lease.close()
    pool = BlockPool(4)
    ids = pool.take(2)
    pool.release(ids)
    with pytest.raises(BlockNotHeldError, match="freed twice"):
        pool.release(ids)


def test_drafts_that_are_wrong_are_neither_cached_nor_freed_twice():
    """What is guessed is never so: after each step the tree holds what was asked and said, and nothing else."""
    engine = toy_engine(speculation="auto", max_batch_tokens=64)
    ids = prompt(30)
    said = toy_answer(ids, 60)
    wrong = [(token + 1) % 250 if place % 5 == 4 else token for place, token in enumerate(said)]
    submit(engine, ids, SamplingParams(temperature=0, max_tokens=60, prediction=tuple(wrong)))
    true = [*ids, *said]
    while engine.core.has_work:
        deltas = engine.core.step()  # the ledger and each holder are recounted after it
        for node in engine.core.cache.snapshot().stored:
            assert node.token_ids.tolist() == true[node.start : node.start + len(node.token_ids)]
    output = deltas[-1][1].output
    assert 0 < output.num_accepted_tokens < output.num_drafted_tokens
    assert free_blocks(engine) == [64]


def test_a_full_pool_is_reaped_without_new_work():
    """Who waits for room gets it when a request that holds it is given up, though nothing new arrives."""
    engine = toy_engine(num_blocks=10, max_sequences=4)
    hog = submit(engine, prompt(100), SamplingParams(temperature=0, max_tokens=50))
    for _ in range(6):
        engine.core.step()
    waiting = submit(engine, prompt(90, 1))
    engine.core.step()
    assert engine.core.stats.num_waiting == 1
    assert engine.core.cache.ledger()[0].free < 6
    engine.core.abort(hog.request_id)
    assert list(run(engine, max_steps=50)[waiting.request_id].token_ids) == toy_answer(prompt(90, 1), 8)


def test_a_request_that_can_never_fit_fails_at_once_and_names_its_need_and_the_limit():
    engine = toy_engine(num_blocks=8)
    with pytest.raises(InvalidRequest, match=r"308 in all; the context holds 129"):
        engine.admission.admit(prompt(300), GREEDY)


def test_the_request_that_cannot_fit_takes_nobody_with_it():
    engine = toy_engine(num_blocks=8)
    mine = submit(engine, prompt(40))
    with pytest.raises(InvalidRequest):
        submit(engine, prompt(300))
    assert list(run(engine)[mine.request_id].token_ids) == toy_answer(prompt(40), 8)


def test_after_a_storm_of_preemptions_throughput_recovers():
    engine = toy_engine(num_blocks=20, max_batch_tokens=64, max_sequences=8)
    params = SamplingParams(temperature=0, max_tokens=100)
    for seed in range(24):
        submit(engine, prompt(30, seed), params)
    preemptions = []
    while engine.core.has_work:
        engine.core.step()
        preemptions.append(engine.core.stats.counters.num_preemptions)
    total = preemptions[-1]
    assert total > 0
    assert total - preemptions[len(preemptions) // 2] <= max(3, total // 3)  # most of them came early
    counters = engine.core.stats.counters
    assert counters.num_recomputed_tokens < counters.num_computed_tokens / 2


# -- Hits that should have been, and are not ---------------------------------------------------------------------------


def test_a_long_prompt_that_differs_in_its_last_token_is_reused_to_the_token_and_says_why_not_more():
    engine = toy_engine(num_blocks=128, max_context=1_100)
    ids = prompt(1_000)
    answer(engine, ids)
    output = answer(engine, [*ids[:-1], 255])
    assert output.num_cached_tokens == 999
    output = answer(engine, [*ids[:240], 255, *ids[241:300]])
    assert output.num_cached_tokens == 240
    assert (output.explanation.reason, output.explanation.divergence) == (MissReason.DIVERGED, 240)


def test_the_reply_is_kept_and_not_only_the_prompt():
    engine = toy_engine()
    first = answer(engine, prompt(50), SamplingParams(temperature=0, max_tokens=40))
    second = answer(engine, [*prompt(50), *first.token_ids, 1, 2, 3])
    assert second.num_cached_tokens == 50 + 39  # the last token of the reply was never computed


def test_two_requests_with_the_same_long_prefix_that_arrive_together_compute_it_once():
    engine = toy_engine(num_blocks=600, max_batch_tokens=256, max_context=4_200)
    trunk = prompt(4_000)
    for tail in ([1], [2]):
        submit(engine, [*trunk, *tail], SamplingParams(temperature=0, max_tokens=1))
    run(engine)
    assert engine.core.stats.counters.num_computed_tokens <= 4_000 + 16 + 2


def test_four_branches_of_one_trunk_that_arrive_at_once_compute_the_trunk_once():
    engine = toy_engine(num_blocks=600, max_batch_tokens=256, max_context=7_600)
    trunk = prompt(7_400)
    for branch in range(4):
        submit(engine, [*trunk, *prompt(20, branch + 1)], SamplingParams(temperature=0, max_tokens=1))
    run(engine)
    assert engine.core.stats.counters.num_computed_tokens <= 7_400 + 4 * (20 + 16)


def test_drafting_never_lowers_the_hit_rate():
    reused = {}
    for speculation in ("off", "prompt", "tree", "auto"):
        engine = toy_engine(speculation=speculation, num_blocks=40)
        for turn in range(3):
            for seed in range(4):
                output = answer(engine, [*prompt(40 + 20 * turn, seed)], SamplingParams(temperature=0, max_tokens=30))
                assert list(output.token_ids) == toy_answer(prompt(40 + 20 * turn, seed), 30)
        reused[speculation] = engine.core.cache.stats.num_reused_tokens
    assert all(count >= reused["off"] > 0 for count in reused.values()), reused


def test_keys_are_the_same_in_another_process_whatever_its_hash_seed():
    script = "from spolia.kvcache import namespace_key; print(namespace_key(model=b'm', salt='s', layout=16).hex())"
    keys = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", script]
        keys.add(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)
    assert keys == {namespace_key(model=b"m", salt="s", layout=16).hex() + "\n"}


def test_a_client_that_times_out_in_its_prefill_and_retries_goes_on_from_there():
    engine = toy_engine(num_blocks=128, max_batch_tokens=32, max_context=1_100)
    ids = prompt(1_000)
    request = submit(engine, ids)
    for _ in range(20):
        engine.core.step()
    engine.core.abort(request.request_id)
    assert answer(engine, ids).num_cached_tokens >= 600


def test_a_short_request_that_matches_a_tenth_does_not_take_over_the_long_conversations_place():
    engine = toy_engine(num_blocks=64)
    long = prompt(500)
    answer(engine, long)
    for seed in range(10):
        answer(engine, [*long[:50], *prompt(10, seed + 1)])
    assert answer(engine, long).num_cached_tokens == 499


def test_one_kind_of_layer_that_holds_little_does_not_void_the_others():
    engine = toy_engine(windows=(None, 16), num_blocks=(64, 10))
    ids = prompt(200)
    answer(engine, ids)
    answer(engine, prompt(100, 3))
    output = answer(engine, [*ids, 1, 2])
    assert output.num_cached_tokens >= 200  # the end of the conversation is what its window needs


def test_what_is_found_again_after_a_preemption_is_no_hit_and_hits_have_a_denominator():
    engine = toy_engine(num_blocks=20, max_sequences=8)
    for seed in range(12):
        submit(engine, prompt(30, seed), SamplingParams(temperature=0, max_tokens=100))
    run(engine)
    counters, stats = engine.core.stats.counters, engine.core.cache.stats
    assert counters.num_preemptions > 0
    assert counters.num_prompt_tokens == 12 * 30
    assert counters.num_cached_tokens <= counters.num_prompt_tokens
    assert stats.num_resumed_opened > 0
    assert stats.num_asked_tokens == stats.num_reused_tokens + sum(stats.num_missed_tokens.values())


# -- Stuck -------------------------------------------------------------------------------------------------------------


def test_two_requests_first_in_the_queue_that_could_wait_for_each_others_prefix_both_go_on():
    engine = toy_engine(num_blocks=12, max_batch_tokens=16, max_sequences=2)
    ids = prompt(90)
    requests = [submit(engine, ids), submit(engine, [*ids[:60], *prompt(30, 1)]), submit(engine, ids)]
    outputs = run(engine, max_steps=500)
    assert list(outputs[requests[0].request_id].token_ids) == toy_answer(ids, 8)
    assert len(outputs) == 3


# -- Strangers ---------------------------------------------------------------------------------------------------------


def test_a_tenants_first_token_tells_nothing_of_another_tenants_prompts():
    """As many tokens are computed whether another tenant has asked the same or not."""
    engine = toy_engine()
    ids = prompt(100)
    answer(engine, ids, cache_salt="theirs")
    before = engine.core.stats.counters.num_computed_tokens
    output = answer(engine, ids, cache_salt="mine")
    assert engine.core.stats.counters.num_computed_tokens - before == 100 + 7
    assert output.explanation.reason is MissReason.NEVER_SEEN


def test_a_tenant_that_floods_the_cache_does_not_touch_its_neighbours():
    engine = toy_engine(num_blocks=64)
    mine = prompt(200)
    answer(engine, mine, tenant=Tenant("me"), cache_salt="me")
    flood = Tenant("flood", kv_quota=8 * 400)
    for seed in range(40):
        answer(engine, prompt(150, seed + 1), tenant=flood, cache_salt="flood")
    assert answer(engine, mine, tenant=Tenant("me"), cache_salt="me").num_cached_tokens == 199
