"""Time to first token against a tier's speed: within 15 % of the better of restoring and computing, at each point."""

from __future__ import annotations

import random
import time

import pytest

from spolia.engine import Engine, SamplingParams
from spolia.engine.calibration import NUM_TOKENS as NUM_CALIBRATED
from spolia.engine.calibration import measure_step_s
from spolia.kernels import BLOCK_SIZE
from spolia.tiers import FetchPolicy, Tier
from tiers.faults import FaultyBackend

from .toy import answer, toy_engine

NUM_TOKENS = 2_000
TOKENS_PER_S = 3_000
ONE = SamplingParams(temperature=0.0, max_tokens=1)
SLACK_S = 0.15
"""For what does not scale: threads that are woken, and a machine that does other things."""


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(NUM_TOKENS)]


def engine_on(backend: FaultyBackend, fetch: FetchPolicy) -> Engine:
    """Computes `TOKENS_PER_S`; runs are cut so that there are as many as a long prompt of a real model has."""
    engine = toy_engine(
        tiers=[Tier("disk", backend, stall_s=60)],
        fetch=fetch,
        clock=time.monotonic,
        num_blocks=400,
        max_context=NUM_TOKENS + 16,
        max_batch_tokens=64,
    )
    run = engine.core.executable.run

    def paced_run(step, logits):
        begun_s = time.monotonic()
        run(step, logits)
        time.sleep(max(0.0, len(step.token_ids) / TOKENS_PER_S - (time.monotonic() - begun_s)))

    engine.core.executable.run = paced_run
    engine.core._tiering.mover._run_blocks = 6
    return engine


@pytest.fixture(scope="module")
def backend() -> FaultyBackend:
    """Has the KV of prompt 0."""
    backend = FaultyBackend()
    engine = engine_on(backend, "wait")
    answer(engine, prompt(0), ONE)
    engine.core.close()
    return backend


def first_token_s(backend: FaultyBackend, fetch: FetchPolicy) -> float:
    """Of an engine that knows how fast it computes, and not how fast the tier is."""
    engine = engine_on(backend, fetch)
    step_s = measure_step_s(engine.core.executable, engine.core.cache, time.monotonic)
    engine.core._tiering.note_step(NUM_CALIBRATED, step_s)
    timings = answer(engine, prompt(0), ONE).timings
    engine.core._tiering.mover.close()
    return timings.first_token_s


@pytest.mark.parametrize("speed", [0.1, 0.5, 0.9, 1.2, 3.0, 20.0])
def test_the_wait_is_that_of_the_better_choice(backend, speed):
    """`speed`: of reading, relative to computing the same tokens."""
    size = len(next(iter(backend.values.values())))
    backend.bytes_per_s = speed * TOKENS_PER_S * size / BLOCK_SIZE
    choices_s = [first_token_s(FaultyBackend(), "wait") for _ in range(2)]
    if speed > 1:  # else it is the worse choice anyway
        choices_s += [first_token_s(backend, "wait") for _ in range(2)]
    # The least of some: other programs only ever add to it.
    assert min(first_token_s(backend, "planned") for _ in range(3)) <= 1.15 * min(choices_s) + SLACK_S
    backend.bytes_per_s = None
