"""The contract of `StorageBackend`, for each that there is."""

from __future__ import annotations

import random
import threading

import pytest

from spolia.tiers import find_headers

from .backends import BACKENDS, BOUNDED
from .samples import NAMESPACE, extent_of, headers

SIZE = len(extent_of(headers(1)[0]))


def keys_of(count, seed=0):
    return [header.key for header in headers(count, seed=seed)]


def values_of(count, seed=0):
    return [extent_of(header) for header in headers(count, seed=seed)]


def read(backend, keys, size=SIZE):
    """Values or None."""
    buffers = [memoryview(bytearray(size)) for _ in keys]
    sizes = backend.get_into(keys, buffers)
    return [None if n is None else bytes(buffer[:n]) for n, buffer in zip(sizes, buffers, strict=True)]


@pytest.fixture(params=BACKENDS)
def backend(request, tmp_path):
    with BACKENDS[request.param](tmp_path, None) as made:
        yield made
        made.close()


@pytest.fixture(params=BOUNDED)
def small_backend(request, tmp_path):
    """Room for four values."""
    with BACKENDS[request.param](tmp_path, 4 * SIZE + SIZE // 2) as made:
        yield made
        made.close()


def test_what_was_put_is_what_is_got(backend):
    keys, values = keys_of(5), values_of(5)
    assert backend.put(keys, values) == [True] * 5
    assert read(backend, keys) == [bytes(value) for value in values]
    assert backend.exists([*keys, b"\0" * 33]) == [True] * 5 + [False]


def test_a_miss_is_an_answer_also_among_hits(backend):
    keys, values = keys_of(3), values_of(3)
    backend.put(keys[::2], values[::2])
    assert read(backend, keys) == [bytes(values[0]), None, bytes(values[2])]


def test_a_value_larger_than_the_buffer_is_a_miss(backend):
    keys = keys_of(1)
    backend.put(keys, values_of(1))
    assert read(backend, keys, SIZE - 1) == [None]


def test_a_larger_buffer_is_filled_in_part(backend):
    keys, values = keys_of(1), values_of(1)
    backend.put(keys, values)
    assert read(backend, keys, SIZE + 100) == [bytes(values[0])]


def test_what_is_deleted_is_a_miss_and_deleting_again_is_nothing(backend):
    keys = keys_of(2)
    backend.put(keys, values_of(2))
    backend.delete(keys[:1])
    backend.delete(keys[:1])
    assert backend.exists(keys) == [False, True]
    assert read(backend, keys[:1]) == [None]


def test_buffers_are_not_kept(backend):
    keys, values = keys_of(1), values_of(1)
    kept = bytes(values[0])
    backend.put(keys, values)
    values[0][:] = bytes(SIZE)
    assert read(backend, keys) == [kept]


def test_touching_what_is_not_there_is_nothing(backend):
    assert len(backend.touch(keys_of(2))) == 2
    assert backend.exists(keys_of(2)) == [False, False]


def test_several_threads_may_call(backend):
    keys, values = keys_of(8), values_of(8)
    wrong = []

    def work(seed):
        rng = random.Random(seed)
        for _ in range(40):
            i = rng.randrange(8)
            match rng.randrange(4):
                case 0:
                    backend.put(keys[i : i + 1], values[i : i + 1])
                case 1:
                    backend.delete(keys[i : i + 1])
                case 2:
                    backend.touch(keys)
                case 3:
                    (value,) = read(backend, keys[i : i + 1])
                    if value is not None and value != values[i]:
                        wrong.append(i)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_capacity_is_never_exceeded_and_is_used(small_backend):
    for seed in range(10):
        assert small_backend.put(keys_of(1, seed), values_of(1, seed)) == [True]
        assert small_backend.health().num_bytes == min(seed + 1, 4) * SIZE


def test_the_least_recently_used_goes_first(small_backend):
    keys = [keys_of(1, seed)[0] for seed in range(5)]
    for seed in range(4):
        small_backend.put(keys[seed : seed + 1], values_of(1, seed))
    small_backend.touch(keys[:1])
    small_backend.put(keys[4:], values_of(1, 4))
    assert small_backend.exists(keys) == [True, False, True, True, True]


def test_of_a_chain_the_tail_goes_first(small_backend):
    chain = keys_of(4)
    small_backend.put(chain, values_of(4))
    small_backend.touch(chain)
    small_backend.put(keys_of(2, 9), values_of(2, 9))
    assert small_backend.exists(chain) == [True, True, False, False]


def test_a_value_that_can_never_fit_is_refused_and_drops_nothing(small_backend):
    keys = keys_of(4)
    small_backend.put(keys, values_of(4))
    assert small_backend.put(keys_of(1, 9), [memoryview(bytes(5 * SIZE))]) == [False]
    assert small_backend.exists(keys) == [True] * 4


def test_putting_again_takes_no_more_room(small_backend):
    for _ in range(3):
        assert small_backend.put(keys_of(4), values_of(4)) == [True] * 4
    assert small_backend.exists(keys_of(4)) == [True] * 4
    assert small_backend.health().num_bytes == 4 * SIZE


def test_it_can_say_what_it_holds_and_of_whom(backend):
    keys = keys_of(5)
    backend.put(keys, values_of(5))
    backend.put([b"\0" * 33], [memoryview(b"nothing that makes sense")])
    assert {entry.key for entry in backend.entries()} == {*keys, b"\0" * 33}
    found = [backend.read_header(key) for key in keys]
    assert [header and header.encode() for header in found] == [header.encode() for header in headers(5)]
    assert backend.read_header(b"\0" * 33) is None
    assert backend.read_header(b"\1" * 33) is None
    assert (find_headers(backend, {NAMESPACE}) or {}).keys() == set(keys)
    assert find_headers(backend, {bytes(32)}) == {}
    assert (find_headers(backend) or {}).keys() == {*keys, b"\0" * 33}
