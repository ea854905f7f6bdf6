"""Both ends meeting in the middle: the front is computed while the end is read, and nobody can tell by the answer."""

from __future__ import annotations

import random
import time

import pytest

from spolia.engine import Engine, SamplingParams
from spolia.errors import StorageUnavailable
from spolia.tiers import Tier
from tiers.faults import FaultyBackend

from .toy import GREEDY, answer, run, submit, toy_answer, toy_engine, until

rng = random.Random(5)
PROMPT = [rng.randrange(256) for _ in range(290)]  # 18 whole blocks and 2 tokens
NUM_WHOLE = 288
STEP = 32


def stored(windows=(None,)) -> FaultyBackend:
    """Has the prompt's KV."""
    backend = FaultyBackend()
    engine = toy_engine(tiers=[Tier("disk", backend)], windows=windows)
    answer(engine, PROMPT, SamplingParams(temperature=0.0, max_tokens=1))
    engine.core.close()
    return backend


def slow(backend: FaultyBackend, windows=(None,), run_blocks=2, reading=5.0, **settings) -> Engine:
    """An engine that believes its tier to take `reading` times as long as computing."""
    engine = toy_engine(
        tiers=[Tier("disk", backend)], fetch="planned", windows=windows, clock=time.monotonic, **settings
    )
    tiering = engine.core.tiering
    for _ in range(50):
        tiering.note_step(1_000, 1.0)
    tiering.note_step = lambda *_: None
    (tier,) = tiering.tiers.mover.tiers
    tier._read_bytes_per_s = 1_000 * sum(tiering.blocks.usual.payload_bytes) / 16 / reading
    tier._note_read = lambda *_: None
    tiering.tiers.mover._run_blocks = run_blocks
    return engine


def begin(engine: Engine, prompt=PROMPT, params=GREEDY):
    """Submit, and step until the first part is computed; the request and its meeting."""
    request = submit(engine, prompt, params)
    tiering = engine.core.tiering
    until(lambda: request.request_id in tiering.meetings._meetings, engine.core.step)
    return request, tiering.meetings._meetings[request.request_id]


def wait_until_read(meeting) -> None:
    until(lambda: meeting.restore.is_done)


@pytest.mark.parametrize("windows", [(None,), (None, 40)])
def test_what_was_read_meanwhile_is_not_computed_and_the_answer_is_the_same(windows):
    engine = slow(stored(windows), windows)
    request, meeting = begin(engine)
    wait_until_read(meeting)
    output = run(engine)[request.request_id]
    assert list(output.token_ids) == toy_answer(PROMPT, 8, windows)
    assert output.num_restored_tokens == {"disk": NUM_WHOLE - STEP}
    assert output.num_cached_tokens == NUM_WHOLE - STEP
    assert [tuple(part[:3]) for part in output.ranges if part.source == "computed"] == [
        (0, STEP, "computed"),
        (NUM_WHOLE, len(PROMPT), "computed"),
    ]
    assert engine.core.executable.num_computed_tokens == STEP + len(PROMPT) - NUM_WHOLE + 7
    counters = engine.core.stats.counters
    assert (counters.num_cached_tokens, counters.num_restored_tokens) == (NUM_WHOLE - STEP, {"disk": NUM_WHOLE - STEP})
    engine.core.close()


def test_computing_stops_where_both_ends_meet():
    """Half of the end is there when the front has come so far: what is in between is computed, and no more."""
    backend = stored()
    engine = slow(backend, run_blocks=1)
    request, meeting = begin(engine)
    wait_until_read(meeting)
    kept = []
    while (block := meeting.restore.take_run()) is not None:
        kept.append(block)
    meeting.restore._arrived.extend(kept[:9])  # blocks 9 to 17
    output = run(engine)[request.request_id]
    assert list(output.token_ids) == toy_answer(PROMPT, 8)
    assert output.num_restored_tokens == {"disk": 9 * 16}
    assert engine.core.executable.num_computed_tokens == 9 * 16 + 2 + 7
    for block in kept[9:]:
        engine.core.tiering.tiers.mover.give_back(block)
    engine.core.close()


def test_what_arrives_after_the_front_has_passed_it_is_written_nowhere():
    """By then its blocks are committed, and those of a window may be let go of: their entry is no block at all."""
    engine = slow(stored((None, 40)), (None, 40), run_blocks=1)
    request, meeting = begin(engine)
    wait_until_read(meeting)
    late = []
    while (block := meeting.restore.take_run()) is not None:
        late.append(block)
    meeting.restore.is_done = False  # as long as these are on their way
    while meeting.sequence.num_computed_tokens < 200:
        engine.core.step()
    meeting.restore._arrived.extend(late[-4:])  # the lowest of them, which the window has passed
    assert request.request_id in engine.core.tiering.meetings._meetings
    pools = engine.core.tiering.blocks.pools
    before = [pool.copy() for pool in pools]
    engine.core.tiering.poll(is_busy=True)
    for pool, as_it_was in zip(pools, before, strict=True):
        assert (pool == as_it_was).all()
    meeting.restore.is_done = True
    assert list(run(engine)[request.request_id].token_ids) == toy_answer(PROMPT, 8, (None, 40))
    for block in late[:-4]:
        engine.core.tiering.tiers.mover.give_back(block)
    engine.core.close()


def test_a_gap_in_the_middle_is_computed_and_what_lies_behind_it_is_read():
    backend = stored()
    (lost,) = list(backend.values)[6:7]  # keys in the order in which they were written
    engine = slow(backend, reading=0.1, run_blocks=1)  # reading is sooner by far: from the front, up to the gap
    value = backend.values[lost]
    backend.values[lost] = value[:40] + bytes([value[40] ^ 1]) + value[41:]  # found by its seal only
    request, meeting = begin(engine)
    assert meeting.sequence.restored[-1][1] == 6 * 16
    wait_until_read(meeting)
    output = run(engine)[request.request_id]
    assert list(output.token_ids) == toy_answer(PROMPT, 8)
    assert output.num_restored_tokens == {"disk": NUM_WHOLE - STEP}  # the step computed the gap and the block after it
    engine.core.close()


@pytest.mark.parametrize("when", ["before anything arrived", "with its end in place"])
def test_an_abort_gives_everything_back(when):
    backend = stored()
    engine = slow(backend)
    request, meeting = begin(engine)
    wait_until_read(meeting)
    if when == "with its end in place":
        runs = []
        while (block := meeting.restore.take_run()) is not None:
            runs.append(block)
        meeting.restore._arrived.append(runs[0])
        engine.core.step()
        assert meeting.ranges
        for block in runs[1:]:
            engine.core.tiering.tiers.mover.give_back(block)
    engine.core.abort(request.request_id)
    run(engine)
    (ledger,) = engine.core.stats.ledger
    assert ledger.leased == 0
    assert engine.core.tiering.meetings._meetings == {}
    assert engine.core.tiering.tiers.mover._reads.has_room(1 << 62)  # only if nothing is lent
    assert list(answer(engine, PROMPT).token_ids) == toy_answer(PROMPT, 8)
    engine.core.close()


def test_a_tier_that_fails_meanwhile_costs_nothing_but_its_help():
    backend = stored()
    engine = slow(backend)
    backend.delay_s = 0.02
    request, _ = begin(engine)
    backend.error = StorageUnavailable("gone")
    output = run(engine)[request.request_id]
    assert list(output.token_ids) == toy_answer(PROMPT, 8)
    engine.core.close()


def test_strangers_in_the_batch_and_preemptions_change_nothing():
    engine = slow(stored(), num_blocks=44, max_sequences=4)
    others = [[rng.randrange(256) for _ in range(250)] for _ in range(3)]
    requests = {submit(engine, prompt, GREEDY).request_id: prompt for prompt in (PROMPT, *others)}
    outputs = run(engine)
    for request_id, prompt in requests.items():
        assert list(outputs[request_id].token_ids) == toy_answer(prompt, 8)
    (ledger,) = engine.core.stats.ledger
    assert ledger.leased == 0
    engine.core.close()


def test_scores_of_the_prompt_are_all_computed():
    engine = slow(stored())
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1)
    output = answer(engine, PROMPT, params)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(PROMPT) - 1
    assert output.num_cached_tokens == 0
    engine.core.close()
