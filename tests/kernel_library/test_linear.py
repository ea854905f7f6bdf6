"""Matrix products at every ISA level: right against float64, and the same bits however rows and tiles are cut.

The oracle multiplies the weights as numpy dequantises them by the rows as the kernel prepared them, so the tolerance
is that of float32 sums alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from spolia.kernels import Weight
from spolia.kernels.cpu import _cpu
from spolia.kernels.quants import TYPES, dequantize, quantize

LEVELS = _cpu.levels()
FLOAT_TYPES = ("F32", "F16", "BF16")
TILE = 16

Array = NDArray[np.float32]


def random_weight(type_name: str, n: int, k: int, seed: int = 0) -> Weight:
    values = np.random.default_rng(seed).normal(size=(n, k)).astype(np.float32)
    return quantize(values, type_name, "w")


@dataclass(frozen=True)
class Product:
    """A weight matrix packed at one level."""

    level: str
    weight: Weight
    precise: bool = False

    @property
    def type_id(self) -> int:
        return TYPES[self.weight.type].ggml_id

    @property
    def num_tiles(self) -> int:
        return -(-self.weight.shape[0] // TILE)

    def pack(self, *cuts: int) -> NDArray[np.uint8]:
        """Packed in pieces that end at `cuts`."""
        n, k = self.weight.shape
        packed = np.full(_cpu.raw_linear_packed_bytes(self.level, self.type_id, n, k), 0xFF, np.uint8)
        for begin, end in zip((0, *cuts), (*cuts, self.num_tiles), strict=True):
            _cpu.raw_linear_pack(self.level, self.type_id, self.weight.data, k, begin, end, packed)
        return packed

    def prepare(self, x: Array) -> NDArray[np.uint8]:
        prepared = np.full(
            (len(x), _cpu.raw_linear_row_bytes(self.level, self.type_id, self.precise, x.shape[1])), 0xFF, np.uint8
        )
        _cpu.raw_linear_prepare(self.level, self.type_id, self.precise, x, prepared)
        return prepared

    def run(
        self,
        prepared: NDArray[np.uint8],
        *,
        packed: NDArray[np.uint8] | None = None,
        cuts: tuple[int, ...] = (),
        bias: Array | None = None,
        residual: Array | None = None,
    ) -> Array:
        """Out `[rows, n]`, tile ranges between `cuts` computed by calls of their own."""
        n, k = self.weight.shape
        packed = self.pack() if packed is None else packed
        out = np.full((len(prepared), n), np.nan, np.float32)
        for begin, end in zip((0, *cuts), (*cuts, self.num_tiles), strict=True):
            _cpu.raw_linear(
                self.level, self.type_id, self.precise, k, packed, prepared, out, bias, residual, begin, end
            )
        return out

    def as_prepared(self, x: Array, prepared: NDArray[np.uint8]) -> NDArray[np.float64]:
        """The rows that the kernel multiplies by: x rounded as it was prepared."""
        k = x.shape[1]
        if self.weight.type == "BF16":
            return (
                (prepared[:, : 2 * k].copy().view(np.uint16).astype(np.uint32) << 16)
                .view(np.float32)
                .astype(np.float64)
            )
        if self.weight.type in FLOAT_TYPES:
            return x.astype(np.float64)
        blocks = prepared.reshape(len(x), k // 32, 128 if self.precise else 64)
        scales = blocks[:, :, :4].copy().view(np.float32).astype(np.float64)
        q = blocks[:, :, 32:].view(np.int8).astype(np.float64)
        if self.precise:
            q = 254 * q[:, :, :32] + q[:, :, 32:64]
        return (q * scales).reshape(x.shape)


def assert_right(product: Product, x: Array) -> Array:
    """Run `x`, compare with float64, return the output."""
    prepared = product.prepare(x)
    out = product.run(prepared)
    weights, rows = dequantize(product.weight).astype(np.float64), product.as_prepared(x, prepared)
    assert (np.abs(out - rows @ weights.T) <= 2e-6 * (np.abs(rows) @ np.abs(weights).T) + 1e-30).all()
    return out


def shapes(type_name: str) -> list[tuple[int, int]]:
    sizes = {
        1: [(1, 32), (16, 33), (17, 576), (48, 7)],
        32: [(1, 32), (15, 64), (16, 576), (48, 256), (17, 1536)],
        256: [(1, 256), (15, 512), (17, 256), (48, 1536)],
    }
    return sizes[TYPES[type_name].block_values]


CASES = [
    (level, name, n, k, precise)
    for level in LEVELS
    for name in TYPES
    for n, k in shapes(name)
    for precise in ([False] if name in FLOAT_TYPES else [False, True])
]


@pytest.mark.parametrize(("level", "name", "n", "k", "precise"), CASES)
def test_product_is_right_and_each_row_is_as_if_alone(level: str, name: str, n: int, k: int, precise: bool) -> None:
    rng = np.random.default_rng(k)
    product = Product(level, random_weight(name, n, k), precise)
    x = rng.normal(size=(33, k)).astype(np.float32) * np.exp(rng.normal(size=(33, 1))).astype(np.float32)
    out = assert_right(product, x)
    prepared = product.prepare(x)
    for num_rows in (1, 2, 3, 5, 7, 8, 9, 16):
        for first in range(0, 33, num_rows):
            part = product.run(prepared[first : first + num_rows])
            np.testing.assert_array_equal(part.view(np.uint32), out[first : first + num_rows].view(np.uint32))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("name", "k"), [("Q4_1", 576), ("Q5_0", 576), ("Q8_0", 288), ("Q5_K", 512), ("Q6_K", 768)])
def test_hundreds_of_rows_are_each_as_if_alone(level: str, name: str, k: int) -> None:
    product = Product(level, random_weight(name, 17, k))
    x = np.random.default_rng(3).normal(size=(300, k)).astype(np.float32)
    out = assert_right(product, x)
    for first, stop in [(0, 1), (0, 256), (1, 300), (255, 258), (290, 300)]:
        np.testing.assert_array_equal(product.run(product.prepare(x[first:stop])), out[first:stop])


SCALE_OFFSETS = {  # of the float16 factors in a block
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", SCALE_OFFSETS)
@pytest.mark.parametrize("precise", [False, True])
def test_sums_hold_the_largest_weights_times_the_largest_rows(level: str, name: str, precise: bool) -> None:
    blocks = np.full((16, 2, TYPES[name].block_bytes), 0x80 if name == "Q8_0" else 0xFF, np.uint8)
    for offset in SCALE_OFFSETS[name]:
        blocks[:, :, offset : offset + 2] = np.array([1], np.float16).view(np.uint8)
    k = 2 * TYPES[name].block_values
    weight = Weight("w", name, (16, k), blocks.reshape(16, -1))
    x = np.ones((33, k), np.float32)
    x[1::3] = -1
    x[2::3, ::2] = -1
    assert_right(Product(level, weight, precise), x)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", [*SCALE_OFFSETS, "F16"])
def test_subnormal_scales_of_files_keep_their_value(level: str, name: str) -> None:
    values = np.random.default_rng(4).normal(size=(16, 256)).astype(np.float32)
    weight = quantize(values * np.float32(1e-5 if name == "F16" else 5e-3 if "K" in name else 1e-4), name, "w")
    if name != "F16":
        offset = SCALE_OFFSETS[name][0]
        scales = weight.data.reshape(-1, TYPES[name].block_bytes)[:, offset : offset + 2].copy().view(np.float16)
        assert ((scales != 0) & (np.abs(scales) < np.finfo(np.float16).smallest_normal)).mean() > 0.9
    assert_right(Product(level, weight), np.random.default_rng(5).normal(size=(33, 256)).astype(np.float32))
    row = np.empty(256, np.float32)
    _cpu.raw_dequantize_row(level, TYPES[name].ggml_id, weight.data[0], 1.0, row)
    np.testing.assert_allclose(row, dequantize(weight)[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", TYPES)
def test_tiles_may_be_packed_and_computed_in_any_pieces(level: str, name: str) -> None:
    product = Product(level, random_weight(name, 16 * 5 + 3, 256))
    prepared = product.prepare(np.random.default_rng(1).normal(size=(9, 256)).astype(np.float32))
    np.testing.assert_array_equal(product.pack(1, 4), product.pack())
    np.testing.assert_array_equal(product.run(prepared, cuts=(2, 3)), product.run(prepared))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("n", [15, 16, 40])
def test_bias_then_residual_are_added_and_the_residual_may_be_the_output(level: str, n: int) -> None:
    rng = np.random.default_rng(n)
    product = Product(level, random_weight("Q4_1", n, 64))
    prepared = product.prepare(rng.normal(size=(10, 64)).astype(np.float32))
    bias, residual = (rng.normal(size=shape).astype(np.float32) for shape in [(n,), (10, n)])
    expected = (product.run(prepared) + bias) + residual
    np.testing.assert_array_equal(product.run(prepared, bias=bias, residual=residual), expected)

    out = residual.copy()
    _cpu.raw_linear(level, product.type_id, False, 64, product.pack(), prepared, out, bias, out, 0, product.num_tiles)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("precise", "num_steps"), [(False, 127), (True, 254 * 127 + 127)])
def test_quantised_rows_are_the_nearest_of_their_steps(level: str, precise: bool, num_steps: int) -> None:
    x = np.random.default_rng(2).normal(size=(4, 96)).astype(np.float32)
    x[1, :32] = 0
    x[2, 5] = 1e4
    product = Product(level, random_weight("Q8_0", 16, 96), precise)
    rounded = product.as_prepared(x, product.prepare(x))
    steps = np.abs(x.reshape(4, 3, 32)).max(axis=2, keepdims=True) / num_steps
    assert (np.abs(rounded - x).reshape(4, 3, 32) <= 0.5001 * steps).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", [name for name in TYPES if name not in FLOAT_TYPES])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("num_rows", "precise"), [(3, False), (3, True), (40, False)])
def test_a_row_that_is_not_finite_gives_nan_and_no_other_row_does(
    level: str, name: str, poison: float, num_rows: int, precise: bool
) -> None:
    x = np.ones((num_rows, 256), np.float32)
    x[1, 77] = poison
    product = Product(level, random_weight(name, 16, 256), precise)
    out = product.run(product.prepare(x))
    assert np.isnan(out[1]).all()
    assert np.isfinite(np.delete(out, 1, axis=0)).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", TYPES)
def test_an_embedding_row_is_what_numpy_reads(level: str, name: str) -> None:
    weight = random_weight(name, 3, 512)
    for row, expected in zip(weight.data, dequantize(weight), strict=True):
        out = np.empty(512, np.float32)
        _cpu.raw_dequantize_row(level, TYPES[name].ggml_id, row, 1.0, out)
        np.testing.assert_allclose(out, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("name", "k"), [("Q4_0", 48), ("Q8_0", 33), ("Q6_K", 128)])
def test_a_width_that_is_no_whole_number_of_blocks_has_no_packed_form(level: str, name: str, k: int) -> None:
    assert _cpu.raw_linear_packed_bytes(level, TYPES[name].ggml_id, 16, k) == 0
