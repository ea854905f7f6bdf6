"""Time to first token against a tier's speed: within 15 % of the better of restoring and computing, at each point.

The engine, its planner and the threads that read are the real ones; only time is not: it moves on when the model
computes or when the engine has nothing to do, and a read returns when its bytes are due.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import pytest

from spolia.engine import Engine, SamplingParams
from spolia.engine.calibration import NUM_TOKENS as NUM_CALIBRATED
from spolia.kernels import BLOCK_SIZE
from spolia.tiers import FetchPolicy, Restore, Tier
from tiers.faults import FaultyBackend

from .toy import submit, toy_engine

KV_BYTES = 23_040
"""A token's, of SmolLM2."""

RUN_BLOCKS = (4 << 20) // (KV_BYTES * BLOCK_SIZE)
STEP_TOKENS = 256
SLACK_S = 0.02
"""No tier is given up in less than 30 ms, which is more than a tenth of computing the shortest prompt."""

ONE = SamplingParams(temperature=0.0, max_tokens=1)


class World:
    """Simulated time, and the reads that wait in it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.restores: list[Restore] = []
        self._changed = threading.Condition()
        self._reads: list[float] = []  # when each is due
        self._free_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def read(self, duration_s: float) -> None:
        """On a reader's thread: one read at a time, each for so long."""
        with self._changed:
            due_s = self._free_s = max(self._free_s, self.now_s) + duration_s
            self._reads.append(due_s)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: due_s not in self._reads, 60)

    def settle(self) -> None:
        """Until each restore is done or waits for its tier."""
        deadline_s = time.monotonic() + 60
        while sum(not restore.is_done for restore in self.restores) != len(self._reads):
            assert time.monotonic() < deadline_s
            time.sleep(0.0002)

    def advance(self, stop_s: float | None) -> None:
        """To that time, or to the next read that is due, if None."""
        self.settle()
        stop_s = min(self._reads) if stop_s is None else stop_s
        while self._reads and min(self._reads) <= stop_s:
            with self._changed:
                self.now_s = min(self._reads)
                self._reads.remove(self.now_s)
                self._changed.notify_all()
            self.settle()
        self.now_s = max(self.now_s, stop_s)

    def wait(self, longest_s: float | None) -> None:
        """Until a read is due, or for so long."""
        due_s = min(self._reads, default=None)
        ends_s = [end for end in (due_s, None if longest_s is None else self.now_s + longest_s) if end is not None]
        self.advance(min(ends_s))


class SimulatedBackend(FaultyBackend):
    """Takes its time in a world."""

    world: World
    token_s = 0.0
    """For a token's KV."""

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int | None]:
        self.world.read(len(keys) * BLOCK_SIZE * self.token_s)
        return super().get_into(keys, buffers)


def prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(num_tokens)]


def engine_in(world: World, tokens_per_s: float, fetch: FetchPolicy, backend: FaultyBackend | None) -> Engine:
    """An engine that knows how fast it computes, and not how fast its tier is."""
    engine = toy_engine(
        tiers=[] if backend is None else [Tier("disk", backend, stall_s=1e6, clock=world)],
        fetch=fetch,
        clock=world,
        num_blocks=600,
        max_context=4_100,
        max_batch_tokens=STEP_TOKENS,
    )
    executable, tiering = engine.core.executable, engine.core.tiering
    run, begin = executable.run, tiering.tiers.mover.fetch

    def timed_run(step, *outputs):
        run(step, *outputs)
        world.advance(world.now_s + len(step.token_ids) / tokens_per_s)

    def noted_fetch(*arguments, **settings):
        world.restores.append(restore := begin(*arguments, **settings))
        return restore

    executable.run, tiering.tiers.mover.fetch = timed_run, noted_fetch
    tiering.tiers.mover._run_blocks = RUN_BLOCKS
    tiering.note_step(NUM_CALIBRATED, NUM_CALIBRATED / tokens_per_s)
    return engine


def first_token_s(engine: Engine, world: World, prompt: list[int]) -> float:
    begun_s = world.now_s
    submit(engine, prompt, ONE)
    while engine.core.has_work:
        world.settle()
        idle_s = engine.core.idle_s
        if idle_s != 0:
            world.wait(idle_s)
        engine.core.step()
    return world.now_s - begun_s


def store(num_tokens: int) -> SimulatedBackend:
    """Has the KV of prompts 0 and 1."""
    backend = SimulatedBackend()
    backend.world = World()
    engine = engine_in(backend.world, 1e6, "wait", backend)
    for seed in range(2):
        first_token_s(engine, backend.world, prompt(seed, num_tokens))
    engine.core.close()
    return backend


@pytest.fixture(scope="module")
def stores() -> dict[int, SimulatedBackend]:
    return {num_tokens: store(num_tokens) for num_tokens in (600, 2_000)}


def asked(backend: SimulatedBackend, fetch: FetchPolicy, tokens_per_s: float, num_tokens: int, *seeds: int) -> float:
    """Seconds to the first token of the last of these prompts, in an engine that has just been made."""
    backend.world = world = World()
    engine = engine_in(world, tokens_per_s, fetch, backend)
    times_s = [first_token_s(engine, world, prompt(seed, num_tokens)) for seed in seeds]
    while not all(restore.is_done for restore in world.restores):
        world.wait(None)
    engine.core.close()
    return times_s[-1]


@pytest.mark.parametrize("mb_per_s", [10, 30, 100, 300, 1_000, 2_000])
@pytest.mark.parametrize("tokens_per_s", [400, 1_500, 6_000])
@pytest.mark.parametrize("num_tokens", [600, 2_000])
@pytest.mark.parametrize("seeds", [(0,), (1, 0)], ids=["never read", "measured"])
def test_the_wait_is_that_of_the_better_choice(stores, mb_per_s, tokens_per_s, num_tokens, seeds):
    backend = stores[num_tokens]
    backend.token_s = KV_BYTES / (mb_per_s * 1e6)
    restored_s = asked(backend, "wait", tokens_per_s, num_tokens, 0)
    computed_s = num_tokens / tokens_per_s
    planned_s = asked(backend, "planned", tokens_per_s, num_tokens, *seeds)
    assert planned_s <= 1.15 * min(restored_s, computed_s) + SLACK_S
