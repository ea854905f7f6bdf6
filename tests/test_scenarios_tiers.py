"""What users of other engines reported of KV that leaves memory and comes back, one test a case, named after it.

See `test_scenarios_cache.py` for KV in memory. On the toy, whose KV is its tokens: a wrong, late or torn block is
another answer.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from engine.toy import GREEDY, answer, run, submit, toy_answer, toy_engine, until
from spolia.engine import Engine, SamplingParams, SessionStore, SessionTurn
from spolia.engine.kv_files import put_in, take_out
from spolia.engine.session_files import SessionFiles
from spolia.errors import InvalidRequest, StorageUnavailable
from spolia.kvcache import namespace_key
from spolia.tiers import (
    Checksum,
    FolderBackend,
    HostBackend,
    KeyChain,
    Tier,
    TierState,
    block_key,
    open_extent,
)
from spolia.tiers.keys import root_digest
from tiers.faults import FaultyBackend

rng = random.Random(11)
PROMPT = [rng.randrange(256) for _ in range(200)]
WHOLE = 192


def engine_on(backend, name: str = "disk", **settings) -> Engine:
    return toy_engine(tiers=[Tier(name, backend, stall_s=60)], clock=time.monotonic, **settings)


def stored(backend):
    """The backend, once it has the prompt's KV."""
    engine = engine_on(backend)
    answer(engine, PROMPT, SamplingParams(temperature=0.0, max_tokens=1))
    engine.core.close()
    return backend


def assert_right(output, prompt=PROMPT) -> None:
    assert list(output.token_ids) == toy_answer(prompt, len(output.token_ids))


def test_a_block_is_not_read_before_its_load_has_finished():
    """The backend gives bytes slowly, and others run meanwhile: nobody sees a block that is only half there."""
    backend = stored(FaultyBackend())
    backend.delay_s = 0.02
    engine = engine_on(backend)
    engine.core.tiering.tiers.mover._run_blocks = 1
    others = [[rng.randrange(256) for _ in range(60)] for _ in range(3)]
    requests = {submit(engine, prompt).request_id: prompt for prompt in (PROMPT, PROMPT, *others)}
    outputs = run(engine)
    for request_id, prompt in requests.items():
        assert_right(outputs[request_id], prompt)
    engine.core.close()


def test_a_load_does_not_overwrite_a_block_that_a_running_request_reads():
    """The pool is as large as the running request: what is brought up has to wait, or does not come."""
    backend = stored(FaultyBackend())
    engine = engine_on(backend, num_blocks=16, max_sequences=2)
    long = [rng.randrange(256) for _ in range(100)]
    running = submit(engine, long, replace(GREEDY, max_tokens=100))
    for _ in range(5):
        engine.core.step()
    second = submit(engine, PROMPT)
    outputs = run(engine)
    assert_right(outputs[running.request_id], long)
    assert_right(outputs[second.request_id])
    engine.core.close()


def test_the_length_used_is_what_was_loaded_and_not_what_was_said_to_be_there():
    """A block goes between the question whether it is there and its being read."""
    backend = stored(FaultyBackend())
    chain = KeyChain(namespace_key(model="toy", salt=""))
    chain.extend(np.array(PROMPT, np.int32))
    gone = block_key(chain.digests[5], 0)
    read = backend.get_into

    def get_into(keys, buffers):
        backend.values.pop(gone, None)
        return read(keys, buffers)

    backend.get_into = get_into  # type: ignore[method-assign]
    engine = engine_on(backend)
    output = answer(engine, PROMPT)
    assert_right(output)
    assert output.num_cached_tokens == 5 * 16
    engine.core.close()


@pytest.mark.parametrize("fault", ["error", "damage", "hang"])
def test_a_transfer_that_fails_costs_no_answer_and_yields_no_garbage(fault):
    backend = stored(FaultyBackend())
    engine = toy_engine(
        tiers=[Tier("disk", backend, stall_s=0.05)], clock=time.monotonic, fetch="timeout", fetch_timeout_s=0.1
    )
    if fault == "error":
        backend.error = ConnectionError("reset by peer")
    elif fault == "damage":
        backend.damage = True
    else:
        backend.hang()
    output = answer(engine, PROMPT)
    assert_right(output)
    assert output.num_cached_tokens == 0
    backend.resume()
    engine.core.close(0.1)


def test_what_a_key_leaves_out_nobody_shares():
    """Model, KV type, layout, adapter and tenant are all in the name of a block, in every tier."""
    fields = {"model": b"w", "kv_dtype": "bf16", "numerics": "avx512", "adapter": "", "salt": ""}
    others = [{**fields, name: value} for name, value in (
        ("model", b"v"), ("kv_dtype", "f32"), ("numerics", "avx2"), ("adapter", "a"), ("salt", "a"))]  # fmt: skip
    roots = {root_digest(namespace_key(**each)) for each in (fields, *others)}
    assert len(roots) == 1 + len(others)


def test_a_client_that_goes_while_its_restore_is_in_flight_gives_all_blocks_back():
    backend = stored(FaultyBackend())
    backend.delay_s = 0.05
    engine = engine_on(backend)
    for _ in range(5):
        request = submit(engine, PROMPT)
        engine.core.step()
        engine.core.abort(request.request_id)
        engine.core.step()
    until(lambda: engine.core.tiering.tiers.mover._reads.has_room(1 << 62))  # there is, only if nothing is lent
    (ledger,) = engine.core.cache.ledger()
    assert ledger.leased == 0
    backend.delay_s = 0.0
    assert_right(answer(engine, PROMPT))
    engine.core.close()


def test_clients_that_go_at_any_moment_of_their_restores_leave_nothing_behind():
    """A thousand, of a tier that takes its time, fails now and then, and lies: no block, no buffer, no wrong answer."""
    moments = random.Random(3)
    backend = stored(FaultyBackend())
    engine = toy_engine(tiers=[Tier("disk", backend, stall_s=60)], clock=time.monotonic, fetch="planned", num_blocks=40)
    engine.core.tiering.tiers.mover._run_blocks = 2
    asked: dict[str, list[int]] = {}

    def step() -> None:
        for request_id, delta in engine.core.step():
            if delta.output is not None and delta.output.finish_reason != "abort":
                assert_right(delta.output, asked[request_id])

    for number in range(1_000):
        backend.delay_s = moments.choice([0.0, 0.0, 0.001])
        backend.damage = moments.random() < 0.1
        prompt = [*PROMPT[: moments.randrange(1, 200)], *moments.choices(range(256), k=moments.randrange(1, 40))]
        request = submit(engine, prompt)
        asked[request.request_id] = prompt
        for _ in range(moments.randrange(4)):
            step()
        if number % 10:
            engine.core.abort(request.request_id)
        if moments.random() < 0.2:
            engine.core.cache.clear()
    backend.delay_s, backend.damage = 0.0, False
    until(lambda: not engine.core.has_work, step)
    until(lambda: engine.core.tiering.tiers.mover._reads.has_room(1 << 62))
    (ledger,) = engine.core.cache.ledger()
    assert ledger.leased == 0
    assert engine.core.tiering.restores.is_idle
    assert engine.core.stats.tiers[0].num_read_bytes > 0
    engine.core.close()


@pytest.mark.parametrize("kind", ["host", "folder"])
def test_a_limit_in_bytes_is_one_whatever_an_entry_weighs(kind, tmp_path):
    """Reserved before the copy, all of an extent counted, and in the status."""
    size = 10_000
    backend = HostBackend(size) if kind == "host" else FolderBackend(tmp_path, size)

    def held() -> int:
        if isinstance(backend, HostBackend):
            return sum(len(extent) for extent in list(backend._extents.values()))
        return sum(path.stat().st_size for path in tmp_path.rglob("*.*"))

    engine = engine_on(backend, kind, num_blocks=40)
    for seed in range(8):
        answer(engine, random.Random(seed).choices(range(256), k=200))
        assert engine.core.tiering.tiers.mover.flush(20)
        assert held() <= size
        assert engine.core.stats.tiers[0].health == backend.health()
        assert backend.health().num_bytes == held()
    assert held() > size // 2
    assert backend.put([b"k" * 33], [memoryview(bytes(size + 1))]) == [False]
    engine.core.close()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "swapped", "of an older version", "emptied"])
def test_a_file_in_the_folder_that_is_not_what_it_was_is_a_miss_counted_and_logged(tmp_path, damage, caplog):
    stored(FolderBackend(tmp_path))
    files = sorted(tmp_path.rglob("*.kv"))
    contents = [file.read_bytes() for file in files]
    for file, content, other in zip(files, contents, contents[1:] + contents[:1], strict=True):
        file.write_bytes({
            "truncated": content[:-1],
            "flipped": content[:-50] + bytes([content[-50] ^ 1]) + content[-49:],
            "swapped": other,
            "of an older version": content[:8] + b"\0\0" + content[10:],
            "emptied": b"",
        }[damage])  # fmt: skip
    engine = engine_on(FolderBackend(tmp_path))
    output = answer(engine, PROMPT)
    assert_right(output)
    assert output.num_cached_tokens == 0
    assert engine.core.stats.tiers[0].num_refused > 0
    assert "tier=disk dropped block" in caplog.text
    engine.core.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES], ids=errno.errorcode.get)
def test_a_file_that_cannot_be_read_fails_once_and_does_not_keep_the_folder_from_being_used(
    tmp_path, monkeypatch, error
):
    """A bad sector, say, or a file that somebody else's server has left."""
    stored(FolderBackend(tmp_path))
    chain = KeyChain(namespace_key(model="toy", salt=""))
    chain.extend(np.array(PROMPT, np.int32))
    bad = f"{block_key(chain.digests[5], 0).hex()}.kv"
    born_ns = next(tmp_path.rglob(bad)).stat().st_ctime_ns
    opened = os.open

    def open_(path, flags, *more):
        if str(path).endswith(bad) and os.path.exists(path) and os.stat(path).st_ctime_ns == born_ns:
            raise OSError(error, os.strerror(error))
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", open_)
    now = [0.0]
    tier = Tier("disk", FolderBackend(tmp_path), clock=lambda: now[0], stall_s=600)
    engine = toy_engine(tiers=[tier], clock=time.monotonic)
    assert_right(answer(engine, PROMPT))
    assert os.strerror(error) in tier.stats.reason
    for _ in range(2):
        now[0] += 120.0
        engine.core.tiering.tiers.mover.flush(20)
        engine.core.cache.clear()
        output = answer(engine, PROMPT)
        assert_right(output)
    assert output.num_restored_tokens == {"disk": WHOLE}
    assert (tier.state, tier.stats.num_failures) == (TierState.UP, 1)
    engine.core.close()


def test_a_store_that_went_away_is_asked_again_and_its_state_is_shown():
    backend = stored(FaultyBackend())
    now = [0.0]
    tier = Tier("disk", backend, clock=lambda: now[0])
    engine = toy_engine(tiers=[tier], clock=time.monotonic)
    backend.error = StorageUnavailable("connection lost")
    assert_right(answer(engine, PROMPT))
    assert tier.state is TierState.DOWN
    assert tier.stats.reason == "connection lost"
    backend.error = None
    engine.core.cache.clear()
    now[0] += 120.0
    output = answer(engine, PROMPT)
    assert_right(output)
    assert output.num_restored_tokens == {"disk": WHOLE}
    assert tier.state is TierState.UP
    engine.core.close()


def test_a_full_disk_costs_no_answer(tmp_path, monkeypatch):
    """The first blocks find room, then there is none for anybody, then somebody deletes what was in the way."""
    write, room = os.write, [5]

    def full(descriptor, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= 1
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    backend = FolderBackend(tmp_path)
    now = [0.0]
    tier = Tier("disk", backend, clock=lambda: now[0])
    engine = toy_engine(tiers=[tier], clock=time.monotonic, num_blocks=20)
    prompts = [random.Random(seed).choices(range(256), k=200) for seed in range(4)]
    for prompt in [*prompts, *prompts]:
        assert_right(answer(engine, prompt), prompt)
    engine.core.tiering.tiers.mover.flush(10)
    assert not list(tmp_path.rglob("*.part"))
    assert tier.stats.num_failures > 0
    assert "No space left" in (tier.stats.reason or "")
    monkeypatch.undo()
    now[0] += 120.0
    for prompt in prompts:
        assert_right(answer(engine, prompt), prompt)
    engine.core.close()
    assert tier.state is TierState.UP
    assert backend.health().num_entries > 0


def owned(engine: Engine, **fields) -> Engine:
    """The engine of a model that is told from others by these fields."""
    return replace(
        engine, admission=replace(engine.admission, namespace=lambda salt: namespace_key(**fields, salt=salt))
    )


def assert_found_only_by_its_own(tmp_path, own: dict[str, object], other: dict[str, object]) -> None:
    """In memory, and in a folder after a restart."""
    parts = engine_on(FolderBackend(tmp_path))
    answer(owned(parts, **own), PROMPT)
    assert answer(owned(parts, **other), PROMPT).num_cached_tokens == 0
    parts.core.tiering.tiers.mover.flush(10)
    parts.core.close()
    for fields, num_cached in ((other, WHOLE), (own, WHOLE)):  # both have computed it by now
        parts = engine_on(FolderBackend(tmp_path))
        output = answer(owned(parts, **fields), PROMPT)
        assert (output.num_cached_tokens, output.num_restored_tokens) == (num_cached, {"disk": num_cached})
        parts.core.close()
    parts = engine_on(FolderBackend(tmp_path))
    third = answer(owned(parts, **{**other, "model": b"a third"}), PROMPT)
    assert third.num_cached_tokens == 0
    assert_right(third)
    parts.core.close()


def test_weights_that_were_reloaded_do_not_find_the_old_weights_kv(tmp_path):
    assert_found_only_by_its_own(tmp_path, {"model": b"the old digest"}, {"model": b"the new digest"})


def test_an_adapter_that_was_reloaded_under_its_name_does_not_find_the_old_ones_kv(tmp_path):
    """A key has the digest of what an adapter is, beside its name."""
    fields = {"model": b"w", "adapter_name": "mine"}
    assert_found_only_by_its_own(tmp_path, {**fields, "adapter": b"before"}, {**fields, "adapter": b"after"})


def test_a_slot_file_for_which_there_is_no_room_is_told_to_be_restored_as_far_as_it_is():
    engine = engine_on(FaultyBackend())
    answer(engine, PROMPT)
    namespace = namespace_key(model="toy", salt="")
    parts = [_opened(each) for each in take_out(engine.core, namespace, PROMPT, engine.core.tiering.blocks.usual)]
    engine.core.close()
    small = engine_on(FaultyBackend(), num_blocks=8)
    _, num_restored = put_in(small.core, namespace, parts, small.core.tiering.blocks.usual)
    assert num_restored == 0
    assert small.core.cache.probe(namespace, PROMPT) == num_restored
    small.core.close()


def test_blocks_on_their_way_to_a_tier_that_are_evicted_meanwhile_arrive_all_the_same():
    """What is sent is copied before anybody can take its block; and who asks does not wait for what never comes."""
    backend = FaultyBackend()
    engine = engine_on(backend, num_blocks=20)
    goes_on, put = threading.Event(), backend.put

    def slow(keys, values):
        assert goes_on.wait(60)
        return put(keys, values)

    backend.put = slow  # type: ignore[method-assign]
    prompts = [random.Random(seed).choices(range(256), k=200) for seed in range(6)]
    for prompt in prompts:
        assert_right(answer(engine, prompt), prompt)  # each evicts the one before, whose writes hang
    goes_on.set()
    engine.core.close(60)
    engine = engine_on(backend)
    restored = 0
    for prompt in prompts:
        output = answer(engine, prompt)
        assert_right(output, prompt)
        restored += output.num_restored_tokens.get("disk", 0)
    assert restored > WHOLE
    engine.core.close()


def test_a_restore_that_is_tried_again_is_not_done_when_the_earlier_one_is():
    backend = stored(FaultyBackend())
    engine = engine_on(backend)
    backend.hang()
    first = submit(engine, PROMPT)
    engine.core.step()
    engine.core.abort(first.request_id)
    engine.core.step()
    again = submit(engine, PROMPT)
    engine.core.step()
    backend.resume()
    output = run(engine)[again.request_id]
    assert_right(output)
    assert output.num_restored_tokens == {"disk": WHOLE}
    assert output.num_cached_tokens == WHOLE
    engine.core.close()


def test_a_reply_that_a_template_would_render_otherwise_is_reused_in_a_session_after_a_restart(tmp_path):
    """Sessions keep token ids, on disk too: no template is asked what was said."""

    def store() -> SessionStore:
        sessions = SessionStore(clock=time.monotonic, files=SessionFiles(tmp_path, b"o" * 32, Checksum()))
        sessions.loaded.result(10)
        return sessions

    backend = FolderBackend(tmp_path)
    first = engine_on(backend)
    session = store().open("")
    turn = SessionTurn(session, PROMPT, [])
    turn.begin()
    output = answer(first, turn.prompt_ids)
    turn.finish(output.token_ids, output.text)
    session.saved.result(10)
    first.core.close()

    second = engine_on(FolderBackend(tmp_path))
    again = store().get(session.id, "")
    turn = SessionTurn(again, [1, 2, 3], [])
    output = answer(second, turn.prompt_ids)
    assert_right(output, turn.prompt_ids)
    assert output.num_cached_tokens == (turn.num_history_tokens - 1) // 16 * 16
    second.core.close()


def test_what_a_client_had_computed_before_it_gave_up_is_there_after_a_restart(tmp_path):
    """Its prefill is cut off in the midst, the server goes, and the retry goes on from there."""
    first = engine_on(FolderBackend(tmp_path))
    request = submit(first, PROMPT)
    while first.core.executable.num_computed_tokens < 100:
        first.core.step()
    num_computed = first.core.executable.num_computed_tokens
    assert num_computed < len(PROMPT)
    first.core.abort(request.request_id)
    first.core.step()
    first.core.close()
    second = engine_on(FolderBackend(tmp_path))
    output = answer(second, PROMPT)
    assert_right(output)
    assert output.num_restored_tokens == {"disk": num_computed // 16 * 16}
    second.core.close()


def test_four_branches_of_one_trunk_that_lies_in_a_tier_bring_it_up_once():
    backend = stored(FaultyBackend())
    backend.delay_s = 0.01
    engine = engine_on(backend)
    branches = [[*PROMPT, *random.Random(seed).choices(range(256), k=30)] for seed in range(4)]
    requests = {submit(engine, branch).request_id: branch for branch in branches}
    outputs = run(engine)
    for request_id, branch in requests.items():
        assert_right(outputs[request_id], branch)
        assert outputs[request_id].num_cached_tokens >= WHOLE
    assert engine.core.stats.tiers[0].num_hits == WHOLE // 16
    engine.core.close()


def test_who_waits_for_what_another_brings_up_goes_on_when_that_one_leaves():
    backend = stored(FaultyBackend())
    engine = engine_on(backend)
    backend.hang()
    first, second = submit(engine, PROMPT), submit(engine, PROMPT)
    engine.core.step()
    engine.core.abort(first.request_id)
    engine.core.step()
    backend.resume()
    output = run(engine)[second.request_id]
    assert_right(output)
    assert output.num_restored_tokens == {"disk": WHOLE}
    engine.core.close()


def test_a_session_file_of_another_model_is_not_taken_for_ones_own(tmp_path):
    files = SessionFiles(tmp_path, namespace_key(what="sessions", model=b"a"), Checksum())
    session = SessionStore(clock=time.monotonic, files=files).open("")
    session.append([1, 2, 3])
    session.saved.result(10)
    other = SessionFiles(tmp_path, namespace_key(what="sessions", model=b"b"), Checksum())
    assert other.load().result(10) == []


def test_an_import_whose_positions_do_not_follow_is_refused():
    engine = engine_on(FaultyBackend())
    answer(engine, PROMPT)
    core, encoding = engine.core, engine.core.tiering.blocks.usual
    namespace = namespace_key(model="toy", salt="")
    parts = [_opened(extent) for extent in take_out(core, namespace, PROMPT, encoding)]
    assert len(parts) == WHOLE // 16
    for wrong in (parts[1:], parts[:3] + parts[4:]):
        with pytest.raises(InvalidRequest, match="without gaps"):
            put_in(core, namespace, wrong, encoding)
    engine.core.cache.clear()
    assert put_in(core, namespace, parts, encoding)[1] == WHOLE
    output = answer(engine, PROMPT)
    assert_right(output)
    assert output.num_cached_tokens == WHOLE
    engine.core.close()


def _opened(extent: bytearray):
    Checksum().seal(memoryview(extent))
    return open_extent(memoryview(extent), Checksum())
