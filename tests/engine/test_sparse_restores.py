"""Tiers that lack what a sliding window has passed: what the next token looks at is enough, and comes as a whole."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np
import pytest

from spolia.engine import Engine, SamplingParams
from spolia.kernels import BLOCK_SIZE
from spolia.tiers import KeyChain, Tier, TierUse, block_key
from tiers.faults import FaultyBackend

from .test_tiering import CONVERSATION, EXACT_NAMESPACE, assert_right, saved, tokens
from .toy import answer, run, submit, toy_engine

WINDOWS = [(None, 40), (40,), (100, None, 40)]
NUM_BLOCKS = len(CONVERSATION) // BLOCK_SIZE
WHOLE = NUM_BLOCKS * BLOCK_SIZE
CHAIN = KeyChain(EXACT_NAMESPACE)
CHAIN.extend(np.array(CONVERSATION, np.int32))


def engine_over(backends: Sequence[FaultyBackend], windows, **settings) -> Engine:
    names = ("host", "disk")
    tiers = [Tier(name, backend, stall_s=60) for name, backend in zip(names, backends, strict=False)]
    return toy_engine(windows=windows, tiers=tiers, clock=time.monotonic, **settings)


def sparse(windows) -> FaultyBackend:
    """All of the conversation but what the windows have passed."""
    backend = FaultyBackend()
    engine = saved_after(engine_over([backend], windows))
    kept = {
        key_of(index, group)
        for group in range(len(windows))
        for index in range(engine.core.cache.first_needed_block(group, WHOLE), NUM_BLOCKS)
    }
    assert kept < backend.values.keys()
    backend.values = {key: value for key, value in backend.values.items() if key in kept}
    return backend


def saved_after(engine: Engine) -> Engine:
    answer(engine, CONVERSATION)
    return saved(engine)


def key_of(index: int, group: int) -> bytes:
    return block_key(CHAIN.digests[index], group)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("fetch", ["wait", "planned", "best_effort"])
def test_what_the_next_token_looks_at_is_restored_though_the_rest_is_gone(windows, fetch):
    backend = sparse(windows)
    engine = engine_over([backend], windows, fetch=fetch)
    output = answer(engine, CONVERSATION)
    assert_right(output, CONVERSATION, windows)
    if fetch == "wait":
        assert output.num_restored_tokens == {"host": WHOLE}
        assert engine.core.executable.num_computed_tokens == len(CONVERSATION) - WHOLE + len(output.token_ids) - 1
    again = answer(engine, [*CONVERSATION, *output.token_ids, *range(20)])
    assert_right(again, [*CONVERSATION, *output.token_ids, *range(20)], windows)
    saved(engine)


@pytest.mark.parametrize("windows", WINDOWS)
def test_it_goes_on_from_what_is_on_the_device(windows):
    backend = sparse(windows)
    engine = engine_over([backend], windows)
    answer(engine, CONVERSATION[:70])
    output = answer(engine, CONVERSATION)
    assert_right(output, CONVERSATION, windows)
    assert output.num_cached_tokens == WHOLE
    assert sum(output.num_restored_tokens.values()) == WHOLE - 64
    saved(engine)


@pytest.mark.parametrize("windows", WINDOWS)
def test_a_part_of_it_may_be_in_each_tier(windows):
    slow, fast, rng = sparse(windows), FaultyBackend(), random.Random(0)
    for key in rng.sample(sorted(slow.values), len(slow.values) // 2):
        fast.values[key] = slow.values.pop(key)
    engine = engine_over([fast, slow], windows)
    output = answer(engine, CONVERSATION)
    assert_right(output, CONVERSATION, windows)
    assert output.num_restored_tokens.keys() == {"host", "disk"}
    assert sum(output.num_restored_tokens.values()) == WHOLE
    saved(engine)


def test_an_exclusive_tier_lets_go_of_what_was_read_and_of_nothing_else():
    windows, backend = (None, 40), FaultyBackend()
    saved_after(engine_over([backend], windows))
    del backend.values[key_of(3, 1)]  # the window has passed it
    before = set(backend.values)
    host = TierUse(Tier("host", backend, stall_s=60), "write_back", is_exclusive=True)
    engine = toy_engine(windows=windows, tiers=[host], clock=time.monotonic)
    assert answer(engine, CONVERSATION).num_restored_tokens == {"host": WHOLE}
    assert engine.core.tiering.tiers.mover.flush(20)
    first = engine.core.cache.first_needed_block(1, WHOLE)
    read = {key_of(index, 0) for index in range(NUM_BLOCKS)} | {key_of(index, 1) for index in range(first, NUM_BLOCKS)}
    assert set(backend.values) & before == before - read
    saved(engine)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("fetch", ["wait", "planned"])
def test_it_is_restored_whole_or_not_at_all(windows, fetch):
    """A needed block that goes between the look and the read costs the restore, and no answer."""

    class Vanishing(FaultyBackend):
        def get_into(self, keys, buffers):
            self.values.pop(lost, None)
            return super().get_into(keys, buffers)

    lost = key_of(NUM_BLOCKS - 1, len(windows) - 1)
    backend = Vanishing()
    backend.values = sparse(windows).values
    engine = engine_over([backend], windows, fetch=fetch)
    output = answer(engine, CONVERSATION)
    assert_right(output, CONVERSATION, windows)
    assert sum(output.num_restored_tokens.values()) < WHOLE
    saved(engine)


def test_the_windows_pool_need_not_hold_what_the_window_has_passed():
    windows = (None, 40)
    backend = sparse(windows)
    engine = engine_over([backend], windows, num_blocks=[64, 8], max_batch_tokens=16)
    output = answer(engine, CONVERSATION)
    assert_right(output, CONVERSATION, windows)
    assert output.num_restored_tokens == {"host": WHOLE}
    saved(engine)


@pytest.mark.parametrize("seed", range(6))
def test_no_gaps_anywhere_change_an_answer(seed):
    rng = random.Random(seed)
    windows = rng.choice(WINDOWS)
    backends = [FaultyBackend(), FaultyBackend()]
    trunks = [tokens(200, seed=rng.randrange(100)) for _ in range(2)]
    for _ in range(5):
        engine = engine_over(
            backends,
            windows,
            num_blocks=[64 if window is None else rng.choice([16, 30]) for window in windows],
            fetch=rng.choice(["wait", "planned", "best_effort", "timeout"]),
            max_batch_tokens=rng.choice([16, 64]),
        )
        prompts = {}
        for _ in range(6):
            prompt = rng.choice(trunks)[: rng.randrange(40, 200)] + tokens(rng.randrange(20), seed=rng.randrange(3))
            request = submit(engine, prompt, SamplingParams(temperature=0.0, max_tokens=rng.randrange(1, 8)))
            prompts[request.request_id] = prompt
        for request_id, output in run(engine).items():
            assert_right(output, prompts[request_id], windows)
        saved(engine)
        for backend in backends:
            for key in [key for key in backend.values if rng.random() < (0.3 if key[-1] else 0.02)]:
                del backend.values[key]
