"""Blocks in fewer bits, and the layouts that they are read from and written to."""

from __future__ import annotations

import numpy as np
import pytest

from spolia.kernels import BLOCK_SIZE, CacheLayer, Executable, KvCodec, KvDtype, Program, get_backend
from spolia.kernels.kv_types import hadamard, to_float32, to_storage

from .programs import PROGRAMS, Session, random_tokens

BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])
KINDS = pytest.mark.parametrize("kind", ["int8", "int4"])


class Values:
    """A store whose blocks are float32 as they come: K and V of one layer, `[2, num_kv_heads, 16, head_dim]`."""

    def __init__(self, num_kv_heads: int, head_dim: int) -> None:
        self.shape = (2, num_kv_heads, BLOCK_SIZE, head_dim)
        layers = (CacheLayer(num_kv_heads, head_dim),)
        self.program = Program((), 0, layers, 0)

    def load_kv(self, group, block):
        return [block.view(np.float32).reshape(1, *self.shape)]

    def store_kv(self, group, runs, block) -> None:
        block[:] = runs[0].ravel().view(np.uint8)

    def there_and_back(self, kind: str, kv: np.ndarray) -> np.ndarray:
        codec = KvCodec(self.program, self, kind)
        payload = codec.encode(0, kv.ravel().view(np.uint8))
        assert payload.nbytes == codec.payload_bytes(0)
        out = np.empty(kv.nbytes, np.uint8)
        codec.decode(0, payload, out)
        return out.view(np.float32).reshape(self.shape)


def written(backend: str, name: str, kv_dtype: KvDtype = "bf16") -> tuple[Executable, Program, Session]:
    """An executable, and a session that has computed 40 tokens."""
    program = PROGRAMS[name]("Q8_0")
    executable = get_backend(backend)(program, kv_dtype=kv_dtype, num_threads=1)
    session = Session(executable, program)
    for pool in session.pools:
        pool[:] = 0
    sequence = session.open(random_tokens(40))
    session.step([(sequence, 40)])
    return executable, program, session


@pytest.mark.parametrize("kv_dtype", ["bf16", "f16", "f32", "int8"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_both_backends_find_the_same_kv_in_their_blocks(name, kv_dtype):
    """The CPU's layout is told from the oracle's: what attention wrote is read where it lies."""
    found = []
    for backend in ("cpu", "reference"):
        executable, _, session = written(backend, name, kv_dtype)
        used = [np.flatnonzero(pool.any(axis=1)) for pool in session.pools]
        assert all(len(ids) == 3 for ids in used)
        blocks = [sorted(ids.tolist()) for ids in used]
        found.append([executable.load_kv(g, session.pools[g][block]) for g, ids in enumerate(blocks) for block in ids])
    for ours, oracles in zip(*found, strict=True):
        for kv, expected in zip(ours, oracles, strict=True):
            np.testing.assert_allclose(kv, expected, atol=0.1 * np.abs(expected).max() + 1e-6)


@BACKENDS
@pytest.mark.parametrize("kv_dtype", ["bf16", "f16", "f32", "int8"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_block_that_is_read_and_written_is_the_same_block(backend, name, kv_dtype):
    executable, _, session = written(backend, name, kv_dtype)
    for group, pool in enumerate(session.pools):
        for block in pool[pool.any(axis=1)]:
            copy = np.zeros_like(block)
            executable.store_kv(group, executable.load_kv(group, block), copy)
            assert (copy == block).all()


@KINDS
@BACKENDS
def test_what_comes_back_is_near(backend, kind):
    executable, program, session = written(backend, "gemma")
    codec = KvCodec(program, executable, kind)
    for group, pool in enumerate(session.pools):
        for block in pool[pool.any(axis=1)]:
            payload, back = codec.encode(group, block), np.zeros_like(block)
            codec.decode(group, payload, back)
            for kv, expected in zip(executable.load_kv(group, back), executable.load_kv(group, block), strict=True):
                error = np.sqrt(np.square(kv - expected).mean() / np.square(expected).mean())
                assert error < {"int8": 0.01, "int4": 0.12}[kind]


@KINDS
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_large_channels_of_k_and_single_values_of_v_do_not_swamp_the_others(head_dim, kind):
    rng = np.random.default_rng(head_dim)
    kv = rng.standard_normal((2, 3, BLOCK_SIZE, head_dim)).astype(np.float32)
    kv[0, :, :, 5] += 200
    kv[1, :, 3, 7] = 30
    back = Values(3, head_dim).there_and_back(kind, kv)
    others = np.delete(back[0] - kv[0], 5, axis=-1)
    assert np.sqrt(np.square(others).mean()) < {"int8": 0.3, "int4": 0.12}[kind]
    calm = np.delete(back[1] - kv[1], 3, axis=1)
    assert np.sqrt(np.square(calm).mean()) < {"int8": 0.01, "int4": 0.15}[kind]


@KINDS
def test_zeros_and_constants_come_back_as_they_were(kind):
    kv = np.zeros((2, 1, BLOCK_SIZE, 32), np.float32)
    kv[:, :, 8:] = 2.0
    kv[0, 0, :8, 3] = -1.0
    np.testing.assert_allclose(Values(1, 32).there_and_back(kind, kv), kv, atol=0.1)
    assert not Values(1, 32).there_and_back(kind, np.zeros_like(kv)).any()


@KINDS
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_what_does_not_fit_is_not_written(value, kind):
    kv = np.ones((2, 2, BLOCK_SIZE, 16), np.float32)
    kv[1, 1, 3, 3] = value
    store = Values(2, 16)
    assert KvCodec(store.program, store, kind).encode(0, kv.ravel().view(np.uint8)) is None


@KINDS
def test_coming_and_going_again_loses_hardly_more(kind):
    rng = np.random.default_rng(0)
    kv = (rng.standard_normal((2, 4, BLOCK_SIZE, 64)) * rng.lognormal(size=(2, 4, 1, 64))).astype(np.float32)
    store = Values(4, 64)
    once = store.there_and_back(kind, kv)
    again = once
    for _ in range(20):
        again = store.there_and_back(kind, to_float32(to_storage(again, "bf16"), "bf16"))
    error, later = (np.sqrt(np.square(x - kv).mean()) for x in (once, again))
    assert later < 1.2 * error + 0.01


def test_sizes():
    store = Values(8, 128)
    exact = 2 * 2 * 8 * BLOCK_SIZE * 128  # bf16
    assert exact / KvCodec(store.program, store, "int8").payload_bytes(0) > 1.95
    assert exact / KvCodec(store.program, store, "int4").payload_bytes(0) > 3.0


def test_a_hadamard_matrix_is_its_own_inverse():
    for size in (1, 2, 21, 64, 80, 96):
        np.testing.assert_allclose(hadamard(size) @ hadamard(size), np.eye(size), atol=1e-6)


def test_kinds_are_checked():
    store = Values(1, 16)
    with pytest.raises(ValueError, match=r"int3.*int8, int4"):
        KvCodec(store.program, store, "int3")  # type: ignore[arg-type]
