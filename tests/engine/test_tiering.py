"""Offload and restore on the toy, whose KV is its tokens: a wrong, late or torn block changes the answer."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest

from spolia.engine import Engine, SamplingParams
from spolia.errors import StorageUnavailable
from spolia.kernels import BLOCK_SIZE
from spolia.kvcache import namespace_key
from spolia.tiers import AesGcm, FolderBackend, HostBackend, KeyChain, StorageBackend, Tier, TierState, TierUse
from tiers.faults import FaultyBackend

from .toy import ROUNDED, ToyCodec, answer, run, submit, toy_answer, toy_engine, until


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


CONVERSATION = tokens(300, seed=0)
EXACT_NAMESPACE = namespace_key(model="toy", salt="")


def on_tier(backend: StorageBackend | Path, **settings) -> Engine:
    """An engine with one tier; its clock is the real one."""
    if isinstance(backend, Path):
        backend = FolderBackend(backend)
    # A machine that stops for a while is not to look like a tier that hangs.
    return toy_engine(tiers=[Tier("disk", backend, stall_s=60)], clock=time.monotonic, **settings)


def saved(engine: Engine) -> Engine:
    """Wait until all is written."""
    engine.core.close()
    return engine


def assert_right(output, prompt: Sequence[int], windows=(None,)) -> None:
    assert list(output.token_ids) == toy_answer(prompt, len(output.token_ids), windows)


@pytest.mark.parametrize("windows", [(None,), (None, 40), (40,), (None, 40, 100)])
def test_a_new_engine_finds_what_the_one_before_computed(tmp_path, windows):
    first = on_tier(tmp_path, windows=windows)
    output = answer(first, CONVERSATION)
    assert_right(output, CONVERSATION, windows)
    saved(first)

    second = on_tier(tmp_path, windows=windows)
    turn = [*CONVERSATION, *output.token_ids, *range(20)]
    warm = answer(second, turn)
    assert_right(warm, turn, windows)
    # All whole blocks of prompt and answer; the last token of an answer has no KV.
    whole = (len(CONVERSATION) + len(output.token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert warm.num_cached_tokens == whole
    assert warm.num_restored_tokens == {"disk": whole}
    assert warm.ranges[0] == (0, whole, "disk", None)
    assert [part.source for part in warm.ranges] == ["disk", "computed"]
    assert second.core.executable.num_computed_tokens == len(turn) - whole + len(warm.token_ids) - 1
    saved(second)


def test_what_was_evicted_comes_back_from_the_tier(tmp_path):
    engine = on_tier(tmp_path, num_blocks=24)
    answer(engine, CONVERSATION)
    for seed in range(3):
        answer(engine, tokens(300, 100 + seed))
    settle(engine)  # what is still on its way down is not found below
    again = answer(engine, CONVERSATION)
    assert_right(again, CONVERSATION)
    assert again.num_restored_tokens == {"disk": 288}
    saved(engine)


def test_a_fully_restored_prompt_computes_only_its_last_tokens(tmp_path):
    prompt = CONVERSATION[: 10 * BLOCK_SIZE]
    saved(answer_on(tmp_path, prompt))
    engine = on_tier(tmp_path)
    output = answer(engine, prompt)
    assert_right(output, prompt)
    assert output.num_cached_tokens == 9 * BLOCK_SIZE  # the last token is computed, so its block is not restored
    saved(engine)


def answer_on(folder, prompt) -> Engine:
    engine = on_tier(folder)
    assert_right(answer(engine, prompt), prompt)
    return engine


def test_a_short_prompt_asks_no_tier(tmp_path):
    backend = FaultyBackend()
    engine = on_tier(backend)
    assert_right(answer(engine, CONVERSATION[:16]), CONVERSATION[:16])
    assert "exists" not in backend.calls
    saved(engine)


def test_two_requests_of_one_prefix_bring_it_up_once(tmp_path):
    saved(answer_on(tmp_path, CONVERSATION))
    engine = on_tier(tmp_path)
    one, other = CONVERSATION, [*CONVERSATION[:200], *range(50)]
    requests = [submit(engine, prompt) for prompt in (one, other)]
    outputs = run(engine)
    for request, prompt in zip(requests, (one, other), strict=True):
        assert_right(outputs[request.request_id], prompt)
        assert outputs[request.request_id].num_cached_tokens >= 192
    (tier,) = engine.core.stats.tiers
    assert tier.num_hits == 288 // BLOCK_SIZE
    saved(engine)


def test_what_an_operator_waits_for_comes_up_while_requests_run(tmp_path):
    saved(answer_on(tmp_path, CONVERSATION))
    engine = on_tier(tmp_path)
    namespace = submit(engine, [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=200)).namespace
    engine.core.step()
    transfers = engine.core.tiering.transfers
    guess, wish = transfers.bring(namespace, CONVERSATION), transfers.bring(namespace, CONVERSATION, may_evict=True)

    def go_on() -> None:
        assert not guess.done()
        if not engine.core.stats.num_running:
            submit(engine, [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=200))
        engine.core.step()

    until(wish.done, go_on)
    assert wish.result(0) == 288
    saved(engine)


def bring(engine: Engine, namespace: bytes, prompt: Sequence[int], outputs: dict | None = None) -> int:
    """As an operator's `move device`; the tokens that are there then. `outputs` gets those of requests that end."""
    done = engine.core.tiering.transfers.bring(namespace, prompt, may_evict=True)
    deadline_s = time.monotonic() + 60
    while not done.done():
        assert time.monotonic() < deadline_s
        for request_id, delta in engine.core.step():
            if outputs is not None and delta.output is not None:
                outputs[request_id] = delta.output
    return done.result()


def test_what_an_operator_asks_for_comes_up_whatever_reading_costs(tmp_path):
    """Right after a restart, with a first run that was read slowly: nobody waits for this, so nobody computes it."""
    saved(answer_on(tmp_path, CONVERSATION))
    engine = on_tier(tmp_path, fetch="planned")
    tiering = engine.core.tiering
    tiering.tiers.mover._run_blocks = 4
    tiering.note_step(1_000, 1e-6)
    (tier,) = tiering.tiers.mover.tiers
    tier._read_bytes_per_s = 1.0
    assert bring(engine, EXACT_NAMESPACE, CONVERSATION) == 288
    saved(engine)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_between_tiers_that_hand_over_to_each_other(tmp_path, seed):
    """Restores of the same blocks for requests and operators, evictions and drops cross, with delays at random."""
    rng = random.Random(seed)

    class Late(HostBackend):
        def get_into(self, keys, buffers):
            time.sleep(rng.choice([0, 0.003]))
            return super().get_into(keys, buffers)

        def delete(self, keys):
            time.sleep(rng.choice([0, 0.003]))
            super().delete(keys)

    disk = Tier("disk", FolderBackend(tmp_path), stall_s=60)
    host = TierUse(Tier("host", Late(1 << 20), stall_s=60), "write_back", is_exclusive=True)
    engine = toy_engine(tiers=[host, TierUse(disk)], clock=time.monotonic, num_blocks=40)
    engine.core.tiering.tiers.mover._run_blocks = 2
    prompts = [tokens(192, seed=number) for number in range(4)]
    for prompt in prompts:
        answer(engine, prompt)
    engine.core.tiering.tiers.mover.flush(60)
    for _ in range(12):
        prompt = rng.choice(prompts)
        others = [submit(engine, rng.choice(prompts)) for _ in range(rng.randrange(3))]
        outputs = run(engine) if rng.random() < 0.3 else {}
        assert bring(engine, EXACT_NAMESPACE, prompt, outputs) == 192
        if rng.random() < 0.3:
            engine.core.cache.clear()
        outputs |= run(engine)
        for other in others:
            assert_right(outputs[other.request_id], other.prompt_token_ids)
    saved(engine)


def test_another_namespace_never_finds_it(tmp_path):
    saved(answer_on(tmp_path, CONVERSATION))
    engine = on_tier(tmp_path)
    output = answer(engine, CONVERSATION, cache_salt="someone else")
    assert_right(output, CONVERSATION)
    assert output.num_cached_tokens == 0
    saved(engine)


def test_a_gap_ends_the_restore_where_it_is(tmp_path):
    saved(answer_on(tmp_path, CONVERSATION))
    files = sorted(tmp_path.rglob("*.kv"), key=lambda path: path.stat().st_mtime_ns, reverse=True)  # head first
    files[5].unlink()
    engine = on_tier(tmp_path)
    output = answer(engine, CONVERSATION)
    assert_right(output, CONVERSATION)
    assert output.num_cached_tokens == 5 * BLOCK_SIZE
    saved(engine)
    # The gap was computed again, and so it was filled.
    engine = on_tier(tmp_path)
    assert answer(engine, CONVERSATION).num_cached_tokens == 288
    saved(engine)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "emptied"])
def test_damaged_files_are_misses_and_never_answers(tmp_path, damage):
    saved(answer_on(tmp_path, CONVERSATION))
    rng = random.Random(damage)
    for path in rng.sample(sorted(tmp_path.rglob("*.kv")), 6):
        data = bytearray(path.read_bytes())
        match damage:
            case "truncated":
                del data[rng.randrange(len(data)) :]
            case "flipped":
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case "emptied":
                data.clear()
        path.write_bytes(data)
    engine = on_tier(tmp_path)
    output = answer(engine, CONVERSATION)
    assert_right(output, CONVERSATION)
    assert output.num_cached_tokens < 288
    assert engine.core.stats.tiers[0].num_refused >= 1
    saved(engine)


def with_stored_conversation() -> FaultyBackend:
    backend = FaultyBackend()
    engine = on_tier(backend)
    answer(engine, CONVERSATION)
    saved(engine)
    backend.calls.clear()
    return backend


@pytest.mark.parametrize("error", [StorageUnavailable("no"), ConnectionResetError("gone"), MemoryError()])
def test_a_tier_that_fails_costs_a_restore_and_no_answer(error):
    backend = with_stored_conversation()
    engine = on_tier(backend)
    backend.error = error
    output = answer(engine, CONVERSATION)
    assert_right(output, CONVERSATION)
    assert output.num_cached_tokens == 0
    assert engine.core.stats.tiers[0].state is TierState.DOWN
    saved(engine)


def test_a_tier_that_hangs_delays_a_request_for_a_while_and_the_next_not_at_all():
    backend = with_stored_conversation()
    engine = toy_engine(tiers=[Tier("disk", backend, stall_s=0.3)], clock=time.monotonic)
    backend.hang()
    started_s = time.monotonic()
    assert_right(answer(engine, CONVERSATION), CONVERSATION)
    assert time.monotonic() - started_s < 10
    assert engine.core.stats.tiers[0].state is TierState.STALLED
    num_calls = backend.calls.count("exists")
    other = CONVERSATION[::-1]
    assert_right(answer(engine, other), other)
    assert backend.calls.count("exists") == num_calls
    backend.resume()
    saved(engine)


def test_a_slow_tier_does_not_hold_up_others(tmp_path):
    backend = with_stored_conversation()
    backend.delay_s = 0.3
    engine = on_tier(backend)
    slow = submit(engine, CONVERSATION)
    quick = submit(engine, [1, 2, 3])
    order = []
    while engine.core.has_work:
        order += [request_id for request_id, delta in engine.core.step() if delta.output is not None]
    assert order == [quick.request_id, slow.request_id]
    saved(engine)


def test_aborting_while_a_restore_is_under_way_leaves_nothing_behind():
    backend = with_stored_conversation()
    engine = on_tier(backend)
    backend.hang()
    request = submit(engine, CONVERSATION)
    engine.core.abort(request.request_id)
    ((_, delta),) = engine.core.step()
    assert delta.output.finish_reason == "abort"
    assert not engine.core.has_work
    backend.resume()
    (tier,) = engine.core.tiering.tiers.mover.tiers
    until(lambda: not tier._calls)  # what was read has arrived, and nobody wants it
    engine.core.step()
    assert engine.core.stats.num_waiting == 0
    assert engine.core.cache.ledger()[0].leased == 0
    assert_right(answer(engine, CONVERSATION), CONVERSATION)
    saved(engine)


def test_writes_that_find_no_room_wait_their_turn_and_are_written_in_the_end(tmp_path):
    backend = FaultyBackend()
    backend.delay_s = 0.01
    engine = on_tier(backend)
    lane_of(engine).buffers._max_bytes = 1_000  # a few blocks at a time
    answer(engine, CONVERSATION)
    assert engine.core.idle_s is None or engine.core.tiering.tiers.offloader.num_waiting
    saved(engine)
    assert len(backend.values) == (len(CONVERSATION) + 7) // BLOCK_SIZE


def lane_of(engine: Engine):
    (lane,) = engine.core.tiering.tiers.mover._lanes.values()
    return lane


def test_a_tier_that_hangs_holds_up_no_other_and_a_prompt_that_is_asked_again_waits_once():
    hanging, other = FaultyBackend(), FaultyBackend()
    tiers = [Tier(name, each, stall_s=600) for name, each in (("remote", hanging), ("disk", other))]
    engine = toy_engine(tiers=tiers, clock=time.monotonic, fetch="best_effort")
    for lane in engine.core.tiering.tiers.mover._lanes.values():
        lane.buffers._max_bytes = 1  # a block at a time
    hanging.hang()
    for _ in range(3):
        answer(engine, CONVERSATION)
    num_blocks = (len(CONVERSATION) + 7) // BLOCK_SIZE
    until(lambda: len(other.values) == num_blocks, engine.core.step)
    assert engine.core.tiering.tiers.offloader.num_waiting <= num_blocks
    hanging.resume()
    saved(engine)
    assert len(hanging.values) == num_blocks


def test_what_is_evicted_before_it_could_be_written_is_counted():
    backend = FaultyBackend()
    engine = on_tier(backend, num_blocks=24)
    lane_of(engine).buffers._max_bytes = 1_000
    engine.core.tiering.tiers.mover.tiers[0]._stall_s = 0.2
    backend.hang()
    for seed in range(4):
        prompt = tokens(300, 2_000 + seed)
        assert_right(answer(engine, prompt), prompt)
    assert engine.core.stats.counters.num_lost_blocks > 0
    backend.resume()
    saved(engine)


def random_traffic(
    seed: int,
    folder: Path,
    windows: tuple[int | None, ...],
    codecs: Sequence[ToyCodec | None] = (None,),
    after: Callable[[Engine], object] = lambda engine: None,
) -> int:
    """Engines that come and go over one folder, with pools that evict and files that vanish; restored tokens."""
    rng = random.Random(seed)
    trunks = [[rng.randrange(4) for _ in range(200)] for _ in range(3)]
    num_restored = 0
    for life in range(6):
        engine = toy_engine(
            windows=windows,
            num_blocks=rng.choice([20, 30]),
            tiers=[Tier("disk", FolderBackend(folder, rng.choice([None, 40_000])))],
            clock=time.monotonic,
            max_batch_tokens=rng.choice([16, 40, 200]),
            codec=codecs[life % len(codecs)],
        )
        prompts = {}
        for _ in range(12):
            prompt = rng.choice(trunks)[: rng.randrange(1, 200)] + [rng.randrange(4) for _ in range(rng.randrange(20))]
            num_tokens, wants_exact = rng.randrange(1, 30), len(codecs) > 1 and rng.random() < 0.5
            params = SamplingParams(temperature=0.0, max_tokens=num_tokens, exact_kv=wants_exact)
            request = submit(engine, prompt, params)
            prompts[request.request_id] = prompt
            if rng.random() < 0.1:
                engine.core.abort(rng.choice(list(prompts)))
            if rng.random() < 0.1:
                engine.core.cache.clear()
            for _ in range(rng.randrange(8)):
                for request_id, delta in engine.core.step():
                    if delta.output is not None:
                        num_restored += check(delta.output, prompts[request_id], windows)
        for request_id, output in run(engine).items():
            num_restored += check(output, prompts[request_id], windows)
        after(engine)
        if rng.random() < 0.5:
            engine.core.close()
        else:
            engine.core.tiering.tiers.mover.close()  # what waits to be copied is lost
        files = sorted(folder.rglob("*.kv"))
        for path in rng.sample(files, min(3, len(files))):
            path.unlink(missing_ok=True)
    return num_restored


def check(output, prompt, windows) -> int:
    assert_right(output, prompt, windows)
    num_rounded = sum(output.num_rounded_tokens.values())
    assert num_rounded <= (0 if output.namespace == EXACT_NAMESPACE else output.num_cached_tokens)
    return sum(output.num_restored_tokens.values())


def assert_marked(engine: Engine) -> int:
    """What is marked as rounded is just what is so, and none of it is in the exact namespace; how many slots are."""
    num_marked = 0
    cache, pools = engine.core.cache, engine.core.executable.pools
    for node in cache._tree.nodes():
        for group, pool in enumerate(pools):
            ids = np.repeat(node.blocks[group].view, BLOCK_SIZE)
            slots = np.tile(np.arange(BLOCK_SIZE), len(ids) // BLOCK_SIZE)
            first = node.start - node.start // BLOCK_SIZE * BLOCK_SIZE
            kept = np.arange(first, first + node.end - node.start)
            kept = kept[ids[kept] >= 0]
            is_rounded = pool["token"][ids[kept], slots[kept]] >= ROUNDED
            marks = cache._pools[group].rounded(ids[kept])[np.arange(len(kept)), slots[kept]]
            assert (is_rounded == marks).all()
            assert node.namespace != EXACT_NAMESPACE or not is_rounded.any()
            num_marked += int(np.count_nonzero(is_rounded))
    return num_marked


@pytest.mark.parametrize("windows", [(None,), (None, 40)])
def test_engines_that_round_and_that_do_not_share_a_folder_and_give_nobody_the_others_kv(tmp_path, windows):
    marked: list[int] = []
    for seed in range(20):  # what has been written when an engine ends, and can come back, is up to the machine
        codecs = (ToyCodec(), None)
        random_traffic(seed, tmp_path, windows, codecs, after=lambda engine: marked.append(assert_marked(engine)))
        if max(marked) > 0:
            break
    assert max(marked) > 0


@pytest.mark.parametrize("windows", [(None,), (None, 24), (40,)])
def test_no_history_of_restarts_evictions_and_losses_changes_an_answer(tmp_path, windows):
    assert sum(random_traffic(seed, tmp_path / str(seed), windows) for seed in range(6)) > 1_000


def host_tier(capacity_bytes: int) -> TierUse:
    return TierUse(Tier("host", HostBackend(capacity_bytes)), "write_back", is_exclusive=True)


def strangers(engine: Engine, count: int, length: int = 300) -> None:
    """Other conversations, to push out what is there."""
    for seed in range(count):
        prompt = tokens(length, 1_000 + seed)
        assert_right(answer(engine, prompt), prompt)


def settle(engine: Engine) -> None:
    """Wait until all writes are done."""
    assert engine.core.tiering.tiers.mover.flush(20)


def test_what_memory_gives_up_the_host_tier_keeps_and_gives_back_once(tmp_path):
    engine = toy_engine(tiers=[host_tier(100_000)], clock=time.monotonic, num_blocks=24)
    answer(engine, CONVERSATION)
    strangers(engine, 2)
    settle(engine)
    output = answer(engine, CONVERSATION)
    assert_right(output, CONVERSATION)
    restored = output.num_restored_tokens["host"]
    assert restored >= 256
    assert output.num_cached_tokens == 288
    settle(engine)
    # Exclusive: the pools have it now, so the host tier does not.
    host = engine.core.tiering.tiers.mover.tiers[0].backend
    keys = engine.core.tiering.blocks.keys(chain_of(CONVERSATION))
    assert not any(host.exists(keys[: restored // BLOCK_SIZE]))
    strangers(engine, 2)
    settle(engine)
    assert answer(engine, CONVERSATION).num_restored_tokens["host"] >= 256
    saved(engine)


def chain_of(ids) -> list[bytes]:
    chain = KeyChain(namespace_key(model="toy", salt=""))
    chain.extend(np.array(ids, np.int32))
    return chain.digests


def test_what_the_host_tier_gives_up_goes_to_the_one_below(tmp_path):
    disk = TierUse(Tier("disk", FolderBackend(tmp_path)), "write_back")
    engine = toy_engine(tiers=[host_tier(5_000), disk], clock=time.monotonic, num_blocks=24)
    answer(engine, CONVERSATION)
    assert not list(tmp_path.rglob("*.kv"))
    for _ in range(3):
        strangers(engine, 2)
        settle(engine)
    output = answer(engine, CONVERSATION)
    assert_right(output, CONVERSATION)
    assert output.num_restored_tokens["disk"] > 100
    saved(engine)


def test_what_a_full_folder_gives_up_goes_to_the_tier_below_sealed_anew(tmp_path):
    key = AesGcm(bytes(32))
    disk = TierUse(Tier("disk", FolderBackend(tmp_path / "disk", 5_000), sealer=key), "write_back")
    remote = TierUse(Tier("remote", FolderBackend(tmp_path / "remote"), sealer=key), "write_back")
    engine = toy_engine(tiers=[disk, remote], clock=time.monotonic, num_blocks=24)
    answer(engine, CONVERSATION)
    for _ in range(3):
        strangers(engine, 2)
        settle(engine)
    output = answer(engine, CONVERSATION)
    assert_right(output, CONVERSATION)
    assert output.num_restored_tokens["remote"] > 100
    assert (remote.tier.stats.num_refused, disk.tier.stats.num_refused) == (0, 0)
    saved(engine)


def test_what_comes_and_goes_below_a_tier_is_what_it_hands_down_to(tmp_path):
    def use(name: str) -> TierUse:
        return TierUse(Tier(name, FolderBackend(tmp_path / name)), "write_back")

    def given_up() -> int:
        before = sum(1 for _ in tmp_path.rglob("*.kv"))
        for seed in islice(seeds, 4):
            answer(engine, tokens(300, seed))
        settle(engine)
        return sum(1 for _ in tmp_path.rglob("*.kv")) - before

    seeds = count()
    engine = toy_engine(tiers=[host_tier(5_000)], clock=time.monotonic, num_blocks=24)
    tiering = engine.core.tiering
    assert given_up() == 0
    tiering.tiers.attach(use("later"))
    assert given_up() > 30
    later, index = tiering.tiers.retire("later")
    assert given_up() == 0
    tiering.tiers.reinstate(later, index)
    assert given_up() > 30
    tiering.tiers.detach(tiering.tiers.retire("later")[0])
    tiering.tiers.attach(use("last"))
    assert given_up() > 30
    assert list((tmp_path / "last").rglob("*.kv"))
    saved(engine)


def test_a_selective_tier_takes_what_was_used_often_enough(tmp_path):
    use = TierUse(Tier("disk", FolderBackend(tmp_path)), "selective", min_uses=3)
    engine = toy_engine(tiers=[use], clock=time.monotonic)
    for turn in range(4):
        answer(engine, [*CONVERSATION[:100], *tokens(100, turn)])
        settle(engine)
        engine.core.tiering.tiers.offloader.pump(engine.core.cache, None)
        settle(engine)
        assert len(list(tmp_path.rglob("*.kv"))) == (0 if turn < 2 else 100 // BLOCK_SIZE)
    saved(engine)


def test_best_effort_never_waits():
    backend = with_stored_conversation()
    engine = toy_engine(tiers=[Tier("disk", backend)], fetch="best_effort", clock=time.monotonic)
    backend.hang()
    request = submit(engine, CONVERSATION)
    steps = 0
    while engine.core.has_work:
        assert engine.core.idle_s == 0
        engine.core.step()
        steps += 1
    assert steps < 30
    assert engine.core.stats.counters.num_cached_tokens == 0, request
    backend.resume()
    saved(engine)


def test_best_effort_uses_what_arrived_while_the_request_queued():
    backend = with_stored_conversation()
    engine = toy_engine(tiers=[Tier("disk", backend)], fetch="best_effort", clock=time.monotonic, max_sequences=1)
    submit(engine, [9] * 40, SamplingParams(temperature=0.0, max_tokens=200))
    engine.core.step()
    request = submit(engine, CONVERSATION)
    restore = engine.core.tiering.restores._held[request.request_id].restore
    assert restore is not None
    until(lambda: restore.is_done)
    output = run(engine)[request.request_id]
    assert_right(output, CONVERSATION)
    assert output.num_restored_tokens == {"disk": 288}
    saved(engine)


def test_a_timeout_bounds_the_wait_and_keeps_what_arrived():
    backend = with_stored_conversation()
    backend.bytes_per_s = 20_000  # some 50 blocks a second
    engine = toy_engine(tiers=[Tier("disk", backend)], fetch="timeout", fetch_timeout_s=0.15, clock=time.monotonic)
    engine.core.tiering.tiers.mover._run_blocks = 2
    output = answer(engine, CONVERSATION)
    assert_right(output, CONVERSATION)
    assert 0 < output.num_cached_tokens < 288
    assert output.timings.queue_s < 5
    saved(engine)


def test_waiting_takes_as_long_as_it_takes():
    backend = with_stored_conversation()
    backend.bytes_per_s = 20_000
    engine = on_tier(backend, fetch="wait")
    assert answer(engine, CONVERSATION).num_cached_tokens == 288
    saved(engine)


def test_the_planner_computes_what_a_slow_tier_would_take_longer_to_bring():
    backend = with_stored_conversation()
    backend.bytes_per_s = 3_000  # a block in a tenth of a second; the toy computes 32 tokens in about a millisecond
    engine = toy_engine(tiers=[Tier("disk", backend)], fetch="planned", clock=time.monotonic)
    engine.core.tiering.tiers.mover._run_blocks = 1
    other = CONVERSATION[::-1]
    assert_right(answer(engine, other), other)  # it learns how fast prompts are computed
    output = answer(engine, CONVERSATION)
    assert_right(output, CONVERSATION)
    assert output.num_cached_tokens < 288
    until(lambda: engine.core.stats.tiers[0].read_bytes_per_s is not None)  # the run that came too late
    num_reads = backend.calls.count("get_into")
    engine.core.cache.clear()
    assert_right(answer(engine, CONVERSATION), CONVERSATION)
    assert backend.calls.count("get_into") <= num_reads, "by now it knows better than to ask"
    saved(engine)


def test_with_a_key_nothing_readable_reaches_the_disk_and_another_key_reads_nothing(tmp_path):
    def engine_with(key: bytes) -> Engine:
        return toy_engine(tiers=[Tier("disk", FolderBackend(tmp_path), sealer=AesGcm(key))], clock=time.monotonic)

    engine = engine_with(bytes(32))
    answer(engine, CONVERSATION)
    saved(engine)
    slot = np.array([CONVERSATION[20], 20], "<i4").tobytes()  # what the toy keeps as KV
    assert not any(slot in path.read_bytes() for path in tmp_path.rglob("*.kv"))
    again = engine_with(bytes(32))
    assert answer(again, CONVERSATION).num_restored_tokens == {"disk": 288}
    saved(again)
    stranger = engine_with(bytes([1] * 32))
    output = answer(stranger, CONVERSATION)
    assert_right(output, CONVERSATION)
    assert output.num_cached_tokens == 0
    saved(stranger)


def test_what_goes_between_the_check_and_the_read_ends_the_restore_there():
    backend = with_stored_conversation()
    keys = list(backend.values)
    exists = backend.exists

    def check_then_lose(asked: Sequence[bytes]) -> list[bool]:
        found = exists(asked)
        backend.values.pop(keys[7], None)
        return found

    backend.exists = check_then_lose  # type: ignore[method-assign]
    engine = on_tier(backend)
    output = answer(engine, CONVERSATION)
    assert_right(output, CONVERSATION)
    assert output.num_cached_tokens == 7 * BLOCK_SIZE
    saved(engine)


def test_prompts_whose_tokens_are_scored_are_computed_and_not_restored():
    backend = with_stored_conversation()
    engine = on_tier(backend)
    output = answer(engine, CONVERSATION, SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=0))
    assert_right(output, CONVERSATION)
    assert output.num_cached_tokens == 0
    assert "get_into" not in backend.calls
    saved(engine)


def test_a_block_that_only_guesses_completed_is_kept_too(tmp_path):
    """The last step of an answer may accept drafts across the end of a block, and end the answer in the same breath."""
    forced = {"const": "a text that is long enough to end in many places"}
    for max_tokens in range(12, 52):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, structured_outputs={"json": forced})
        folder = tmp_path / str(max_tokens)
        prompt = CONVERSATION[:20]
        first = on_tier(folder, speculation="auto", max_batch_tokens=64)
        output = answer(first, prompt, params)
        saved(first)
        turn = [*prompt, *output.token_ids, 1, 2]
        again = on_tier(folder)
        whole = (len(prompt) + len(output.token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert answer(again, turn).num_cached_tokens == whole, max_tokens
        saved(again)
