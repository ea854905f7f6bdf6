"""Paged attention at every ISA level: right against float64, and the same bits however the work is cut.

Pools start filled with NaN, so every test also shows that slots which hold no token of the sequence reach no result.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from spolia.kernels.cpu import _cpu

LEVELS = _cpu.levels()
ROUNDING_LEVELS = ("avx512_bf16", "avx512_amx")
"""These round q and the weights to bf16, where KV is."""
KV_TYPES = {"f32": 0, "f16": 1, "bf16": 2, "int8": 3}
BLOCK = 16
LAYER_GAP = 192
"""Bytes before and after the layer under test inside each block: other layers' memory."""

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Layer:
    """An attention layer at one level; the defaults are SmolLM2's."""

    level: str
    kv_dtype: str
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    window: int = 0
    softcap: float = 0.0

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def shape(self) -> _cpu.AttendShape:
        kv_type = KV_TYPES[self.kv_dtype]
        return _cpu.AttendShape(
            kv_type, self.num_heads, self.num_kv_heads, self.head_dim, self.window, self.scale, self.softcap
        )

    def pool(self, num_blocks: int, fill: int = 0xFF) -> NDArray[np.uint8]:
        """Blocks of NaN (0xff) in every type."""
        layer_bytes = _cpu.raw_attend_layer_bytes(self.level, self.shape)
        assert layer_bytes % 64 == 0
        return np.full((num_blocks, layer_bytes + 2 * LAYER_GAP), fill, np.uint8)


@dataclass(frozen=True)
class Tokens:
    """q, k and v `[num_tokens, heads * head_dim]` of one sequence, and the blocks it owns."""

    q: Array
    k: Array
    v: Array
    blocks: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.q)


def make_tokens(layer: Layer, num_tokens: int, seed: int, first_block: int = 0) -> Tokens:
    """A sequence whose blocks are [first_block, ...) in random order; some keys stand out, as they do in models."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((num_tokens, layer.num_heads * layer.head_dim), np.float32)
    k = rng.standard_normal((num_tokens, layer.num_kv_heads * layer.head_dim), np.float32)
    v = rng.standard_normal((num_tokens, layer.num_kv_heads * layer.head_dim), np.float32)
    k[rng.random(num_tokens) < 0.05] *= 3
    num_blocks = -(-num_tokens // BLOCK)
    return Tokens(q, k, v, (first_block + rng.permutation(num_blocks)).astype(np.int32))


def step(
    layer: Layer,
    pool: NDArray[np.uint8],
    chunks: Sequence[tuple[Tokens, int, int]],
    *,
    num_threads: int = 1,
    seed: int = 0,
) -> list[Array]:
    """Run one step over tokens [start, stop) of each sequence; their outputs. Blocks out of all rows' sight are -1."""
    tables = np.full((len(chunks), max(len(tokens.blocks) for tokens, _, _ in chunks)), -1, np.int32)
    for table, (tokens, start, stop) in zip(tables, chunks, strict=True):
        first = max(0, start - layer.window + 1) // BLOCK if layer.window else 0
        last = -(-stop // BLOCK)
        table[first:last] = tokens.blocks[first:last]
    counts = [stop - start for _, start, stop in chunks]
    row_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    positions = np.concatenate([np.arange(start, stop, dtype=np.int32) for _, start, stop in chunks])
    q, k, v = (np.concatenate([getattr(t, name)[start:stop] for t, start, stop in chunks]) for name in "qkv")
    out = np.full_like(q, np.nan)
    _cpu.raw_attend(
        layer.level, layer.shape, pool, [LAYER_GAP], tables, row_starts, positions, q, k, v, out, num_threads, seed
    )
    return np.split(out, row_starts[1:-1])


def prefill(layer: Layer, tokens: Tokens, cuts: Iterable[int] = (), pool: NDArray[np.uint8] | None = None) -> Array:
    """Outputs of all tokens, computed alone, by one thread, in one step or cut at `cuts`."""
    pool = layer.pool(int(tokens.blocks.max()) + 1) if pool is None else pool
    edges = [0, *cuts, len(tokens)]
    return np.concatenate([step(layer, pool, [(tokens, a, b)])[0] for a, b in itertools.pairwise(edges)])


def rotate(x: Array) -> Array:
    """Each row times a Hadamard matrix over its last power of two, in float32, in the order of a fast transform."""
    rows, n = x.shape
    size, half = n & -n, 1
    y = x.reshape(rows, -1, size)
    while half < size:
        pairs = y.reshape(rows, -1, 2, half)
        y = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
        half *= 2
    return y.reshape(rows, n) * (np.float32(1) / np.sqrt(np.float32(size)))


def round_to_int8(x: Array, head_dim: int) -> NDArray[np.float64]:
    """Each head of each token rotated, to 255 multiples of its largest magnitude / 127, and turned back."""
    turned = rotate(x.reshape(-1, head_dim))
    scales = round_to("bf16", np.abs(turned).max(-1, keepdims=True) / np.float32(127)).astype(np.float32)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    integers = np.rint(np.clip(turned * inverse, -127, 127))
    size = head_dim & -head_dim
    signs = [[(-1) ** (i & j).bit_count() for i in range(size)] for j in range(size)]
    matrix = np.kron(np.eye(head_dim // size), np.array(signs) / np.sqrt(size))
    return ((integers * scales).astype(np.float64) @ matrix).reshape(x.shape)


def round_to(kv_dtype: str, x: Array, head_dim: int = 256) -> NDArray[np.float64]:
    """To nearest, ties to even."""
    if kv_dtype == "int8":
        return round_to_int8(x, head_dim)
    if kv_dtype == "f16":
        return np.clip(x, -65504, 65504).astype(np.float16).astype(np.float64)
    if kv_dtype == "bf16":
        bits = x.view(np.uint32)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        return (rounded & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


def oracle(layer: Layer, tokens: Tokens, start: int = 0) -> NDArray[np.float64]:
    """Attention of tokens [start, ...) in float64 over rounded K and V."""
    n, d, group = len(tokens), layer.head_dim, layer.num_heads // layer.num_kv_heads
    q = tokens.q[start:].astype(np.float64).reshape(n - start, layer.num_heads, d)
    k = np.repeat(round_to(layer.kv_dtype, tokens.k, d).reshape(n, layer.num_kv_heads, d), group, axis=1)
    v = np.repeat(round_to(layer.kv_dtype, tokens.v, d).reshape(n, layer.num_kv_heads, d), group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k, optimize=True) * layer.scale
    if layer.softcap:
        scores = layer.softcap * np.tanh(scores / layer.softcap)
    back = np.arange(start, n)[:, None] - np.arange(n)[None, :]
    visible = (back >= 0) & (back < (layer.window or n))
    scores = np.where(visible, scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", p, v, optimize=True).reshape(n - start, -1)


def tolerance(layer: Layer) -> float:
    """Largest error allowed of outputs whose values have unit variance.

    With bf16 and int8 KV, AVX-512 rounds q and the weights to bf16 too (vdpbf16ps); all else is float32 throughout.
    """
    return 2.5e-2 if layer.level in ROUNDING_LEVELS and layer.kv_dtype in ("bf16", "int8") else 2e-5


def assert_close(layer: Layer, out: Array, tokens: Tokens, start: int = 0) -> None:
    wanted = oracle(layer, tokens, start)
    assert np.abs(out - wanted).max() < tolerance(layer)
    assert np.abs(out - wanted).mean() < tolerance(layer) / 20


def assert_same_bits(a: Array, b: Array) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=KV_TYPES)
def kv_dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def layer(level: str, kv_dtype: str) -> Layer:
    return Layer(level, kv_dtype)


@pytest.mark.parametrize("head_dim", [16, 32, 40, 48, 64, 80, 96, 128, 256])
def test_matches_float64_attention(level, kv_dtype, head_dim):
    for (num_heads, num_kv_heads), window, softcap in [
        *itertools.product([(2, 2), (4, 1), (7, 1), (6, 2)], [0], [0.0]),
        *itertools.product([(2, 1), (3, 3)], [0, 50], [0.0, 5.0]),
    ]:
        layer = Layer(level, kv_dtype, num_heads, num_kv_heads, head_dim, window, softcap)
        tokens = make_tokens(layer, 290, seed=head_dim)
        assert_close(layer, prefill(layer, tokens), tokens)


def test_matches_float64_attention_over_many_splits(layer):
    tokens = make_tokens(layer, 2_100, seed=0)
    pool = layer.pool(len(tokens.blocks))
    prefill(layer, replace_end(tokens, 2_080), pool=pool)
    assert_close(layer, step(layer, pool, [(tokens, 2_080, 2_100)])[0], tokens, start=2_080)


def replace_end(tokens: Tokens, end: int) -> Tokens:
    return Tokens(tokens.q[:end], tokens.k[:end], tokens.v[:end], tokens.blocks)


def test_an_odd_head_dim_and_more_heads_than_a_tile(level, kv_dtype):
    layer = Layer(level, kv_dtype, num_heads=37, num_kv_heads=1, head_dim=21)
    tokens = make_tokens(layer, 90, seed=0)
    assert_close(layer, prefill(layer, tokens), tokens)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33, 256, 300])
def test_a_window_ends_exactly_where_it_should(level, kv_dtype, window):
    layer = Layer(level, kv_dtype, num_heads=2, num_kv_heads=1, head_dim=32, window=window)
    for num_tokens in (window - 1, window, window + 1, 3 * window):
        if num_tokens < 1:
            continue
        tokens = make_tokens(layer, num_tokens, seed=window)
        out = prefill(layer, tokens)
        assert_close(layer, out, tokens)
        assert_same_bits(prefill(layer, tokens, cuts=range(1, num_tokens, 1 + num_tokens // 20)), out)


def test_extreme_scores_neither_overflow_nor_vanish(layer):
    tokens = make_tokens(layer, 300, seed=0)
    loud = Tokens(tokens.q * 30, tokens.k, tokens.v, tokens.blocks)  # scores to a few hundred
    out = prefill(layer, loud)
    assert np.isfinite(out).all()
    if tolerance(layer) < 1e-4:
        np.testing.assert_allclose(out, oracle(layer, loud), atol=2e-3)
    quiet = Tokens(tokens.q * 0, tokens.k, tokens.v, tokens.blocks)  # all weights equal: the mean
    assert_close(layer, prefill(layer, quiet), quiet)


@pytest.mark.parametrize("window", [0, 100])
def test_prefill_is_the_same_bits_at_every_split_point(layer, window):
    layer = replace(layer, num_heads=6, num_kv_heads=2, head_dim=32, window=window)
    tokens = make_tokens(layer, 280, seed=1)
    whole = prefill(layer, tokens)
    for cut in range(1, len(tokens)):
        assert_same_bits(prefill(layer, tokens, cuts=[cut]), whole)


@pytest.mark.parametrize("window", [0, 100])
def test_decoding_token_by_token_is_the_same_bits_as_prefill(layer, window):
    layer = replace(layer, window=window)
    tokens = make_tokens(layer, 530, seed=2)
    assert_same_bits(prefill(layer, tokens, cuts=range(1, len(tokens))), prefill(layer, tokens))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_and_order_of_items_do_not_change_bits(layer, num_threads):
    """Many threads also store neighbouring tokens of one block at once."""
    tokens = make_tokens(layer, 531, seed=3)
    whole = prefill(layer, tokens)
    for seed in range(1, 4):
        pool = layer.pool(len(tokens.blocks))
        head = step(layer, pool, [(tokens, 0, 500)], num_threads=num_threads, seed=seed)[0]
        tail = step(layer, pool, [(tokens, 500, 530)], num_threads=num_threads, seed=seed)[0]
        last = step(layer, pool, [(tokens, 530, 531)], num_threads=num_threads, seed=seed)[0]
        assert_same_bits(np.concatenate([head, tail, last]), whole)


@pytest.mark.parametrize("window", [0, 40])
def test_strangers_in_the_batch_do_not_change_bits(layer, window):
    layer = replace(layer, window=window)
    rng = np.random.default_rng(4)
    lengths = [1, 15, 16, 17, 100, 255, 256, 257, 600]
    crowd = []
    for i, n in enumerate(lengths):
        crowd.append(make_tokens(layer, n, seed=100 + i, first_block=sum(len(t.blocks) for t in crowd)))
    alone = [prefill(layer, tokens) for tokens in crowd]
    pool = layer.pool(sum(len(t.blocks) for t in crowd))
    computed = [0] * len(crowd)
    while any(done < len(t) for done, t in zip(computed, crowd, strict=True)):
        chunks = []
        for i in rng.permutation(len(crowd)):
            stop = min(len(crowd[i]), computed[i] + int(rng.choice([1, 7, 64, 200])))
            if stop > computed[i] and rng.random() < 0.7:
                chunks.append((i, computed[i], stop))
        if not chunks:
            continue
        outs = step(layer, pool, [(crowd[i], a, b) for i, a, b in chunks], num_threads=2, seed=int(rng.integers(1, 99)))
        for (i, a, b), out in zip(chunks, outs, strict=True):
            assert_same_bits(out, alone[i][a:b])
            computed[i] = b


def fork(layer: Layer, trunk: Tokens, shared: int, num_tokens: int, seed: int, first_block: int) -> Tokens:
    """A sequence that begins with the first `shared` tokens of `trunk`, in the same blocks."""
    own = make_tokens(layer, num_tokens - shared, seed, first_block)
    joined = (np.concatenate([getattr(trunk, name)[:shared], getattr(own, name)]) for name in "qkv")
    return Tokens(*joined, np.concatenate([trunk.blocks[: shared // BLOCK], own.blocks]))


@pytest.mark.parametrize("window", [0, 300])
def test_sequences_that_share_blocks_get_the_bits_they_get_alone(layer, window):
    """Whole splits shared by all, by some and by pairs; nested prefixes; lengths at and around the end of a split."""
    layer = replace(layer, num_heads=6, num_kv_heads=2, head_dim=32, window=window)
    family = [make_tokens(layer, 1_100, seed=20)]
    for parent, shared, num_tokens in [
        *[(0, 1_088, n) for n in (1_089, 1_100, 1_280)],
        *[(0, 512, n) for n in (512 + 256, 512 + 257, 700)],
        *[(4, 752, n) for n in (760, 800, 1_024)],
        (0, 240, 600),
        (0, 256, 257),
    ]:
        first_block = sum(len(t.blocks) for t in family)
        family.append(fork(layer, family[parent], shared, num_tokens, 20 + len(family), first_block))
    family.append(make_tokens(layer, 900, seed=50, first_block=sum(len(t.blocks) for t in family)))
    alone = [prefill(layer, tokens) for tokens in family]
    pool = layer.pool(sum(len(t.blocks) for t in family))
    for tokens in family:
        prefill(layer, replace_end(tokens, len(tokens) - 1), pool=pool)
    for chosen in (range(len(family)), range(len(family) - 1, -1, -1), [2, 7, 1], [3, 3, 3]):
        chunks = [(family[i], len(family[i]) - 1 - i % 3, len(family[i])) for i in chosen]
        for (tokens, start, _), i, out in zip(chunks, chosen, step(layer, pool, chunks, num_threads=2), strict=True):
            assert_same_bits(out, alone[i][start : len(tokens)])


@pytest.mark.parametrize("fill", [0x00, 0x7F, 0x80])
def test_what_a_stranger_left_in_the_blocks_does_not_change_bits(layer, fill):
    """0x7f is NaN or infinity or huge, by type; the default of all other tests is NaN."""
    tokens = make_tokens(layer, 70, seed=5)
    pool = layer.pool(len(tokens.blocks), fill)
    assert_same_bits(prefill(layer, tokens, cuts=[33, 34, 50], pool=pool), prefill(layer, tokens))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_poisoned_later_token_of_the_same_step_does_not_reach_earlier_rows(layer, poison):
    tokens = make_tokens(layer, 60, seed=6)
    clean = prefill(layer, tokens)
    for bad in (1, 30, 31, 32, 59):
        k, v = tokens.k.copy(), tokens.v.copy()
        k[bad] = v[bad] = poison
        out = prefill(layer, Tokens(tokens.q, k, v, tokens.blocks))
        assert_same_bits(out[:bad], clean[:bad])
        assert not np.isfinite(out[bad]).any()


def test_a_poisoned_token_behind_the_window_does_not_reach_later_rows(layer):
    layer = replace(layer, window=20)
    tokens = make_tokens(layer, 60, seed=6)
    clean = prefill(layer, tokens)
    k, v = tokens.k.copy(), tokens.v.copy()
    k[11] = v[11] = np.nan
    out = prefill(layer, Tokens(tokens.q, k, v, tokens.blocks))
    assert_same_bits(out[31:], clean[31:])


def test_other_layers_of_a_block_are_not_written(layer):
    tokens = make_tokens(layer, 40, seed=7)
    pool = layer.pool(len(tokens.blocks), fill=0xA5)
    prefill(layer, tokens, pool=pool)
    assert (pool[:, :LAYER_GAP] == 0xA5).all()
    assert (pool[:, -LAYER_GAP:] == 0xA5).all()


@pytest.mark.parametrize("num_tokens", range(1, BLOCK + 1))
def test_copy_on_write_copies_the_first_tokens_and_no_others(layer, num_tokens):
    """Block 0 of `ours` is written over the first tokens of block 0 of `theirs`: a mixture, as if stored so."""
    ours, theirs = make_tokens(layer, BLOCK, 8, first_block=0), make_tokens(layer, BLOCK, 9, first_block=1)
    pool = layer.pool(2)
    prefill(layer, ours, pool=pool)
    prefill(layer, theirs, pool=pool)
    before = pool.copy()
    _cpu.raw_attend_copy_tokens(layer.level, layer.shape, pool, LAYER_GAP, 0, 1, num_tokens)
    np.testing.assert_array_equal(pool[0], before[0])

    def mix(name: str) -> Array:
        return np.concatenate([getattr(ours, name)[:num_tokens], getattr(theirs, name)[num_tokens:]])

    mixture = Tokens(theirs.q, mix("k"), mix("v"), theirs.blocks)
    stored = layer.pool(2)
    prefill(layer, mixture, pool=stored)
    np.testing.assert_array_equal(pool[1], stored[1])


def test_kv_is_rounded_to_nearest_even(level, kv_dtype):
    """One token attends to itself alone with weight 1, so its output is its rounded v."""
    layer = Layer(level, kv_dtype, num_heads=1, num_kv_heads=1, head_dim=256)
    rng = np.random.default_rng(10)
    exponents = rng.integers(-30 if kv_dtype == "f16" else -100, 18, 256)
    v = (rng.standard_normal(256) * 2.0**exponents).astype(np.float32)
    v[:8] = [0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 3e-8, 65519.0]
    v[8:10] = [65520.0, -1e30] if kv_dtype == "f16" else [1.0, 1.0]
    tokens = Tokens(np.zeros((1, 256), np.float32), np.zeros((1, 256), np.float32), v[None], np.zeros(1, np.int32))
    if kv_dtype != "int8":
        np.testing.assert_array_equal(prefill(layer, tokens)[0], round_to(kv_dtype, v).astype(np.float32))
        return
    # There it is a sum over the head, whose last bits are its order's.
    tokens.v[0] = rng.integers(-8, 8, 256)
    expected = round_to(kv_dtype, tokens.v[0])
    atol = np.abs(expected).max() * (2**-7 if level in ROUNDING_LEVELS else 1e-6)
    np.testing.assert_allclose(prefill(layer, tokens)[0], expected, atol=atol)
