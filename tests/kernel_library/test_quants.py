"""The storage types against the `gguf` package's own decoders."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from spolia.kernels import quants

# The step of the coarsest value grid of a type, relative to the largest magnitude of a block.
RELATIVE_STEP = {
    "F32": 1e-9, "F16": 1e-3, "BF16": 1e-2, "Q4_0": 1 / 8, "Q4_1": 2 / 15, "Q5_0": 1 / 16, "Q5_1": 2 / 31,
    "Q8_0": 1 / 127, "Q4_K": 2.2 / 15, "Q5_K": 2.2 / 31, "Q6_K": 1.1 / 31,
}  # fmt: skip


def oracle(data: np.ndarray, type_name: str) -> np.ndarray:
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[type_name])


def test_the_table_agrees_with_the_format():
    for name, kind in quants.TYPES.items():
        ggml_type = gguf.GGMLQuantizationType[name]
        assert (kind.name, kind.ggml_id) == (name, ggml_type.value)
        assert (kind.block_values, kind.block_bytes) == gguf.GGML_QUANT_SIZES[ggml_type]


@pytest.mark.parametrize("type_name", quants.TYPES)
def test_any_bytes_decode_as_the_format_says(type_name):
    rng = np.random.default_rng(1)
    row_bytes = quants.bytes_per_row(type_name, 512)
    data = rng.integers(0, 256, (64, row_bytes), dtype=np.uint8)
    weight = quants.Weight("w", type_name, (64, 512), data)

    with np.errstate(all="ignore"):  # random scales hold infinities and NaNs too
        ours, theirs = quants.dequantize(weight), oracle(data, type_name)

    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("type_name", quants.TYPES)
def test_quantising_moves_no_value_further_than_a_step(type_name):
    values = np.random.default_rng(2).standard_normal((8, 512)).astype(np.float32)
    weight = quants.quantize(values, type_name)

    error = np.abs(quants.dequantize(weight) - values)

    assert weight.shape == (8, 512)
    assert weight.data.shape == (8, quants.bytes_per_row(type_name, 512))
    assert error.max() <= RELATIVE_STEP[type_name] * np.abs(values).max()


@pytest.mark.parametrize("type_name", quants.TYPES)
def test_what_was_decoded_is_encoded_without_further_loss(type_name):
    values = np.random.default_rng(3).standard_normal((4, 256)).astype(np.float32)
    once = quants.dequantize(quants.quantize(values, type_name))
    twice = quants.dequantize(quants.quantize(once, type_name))
    assert np.abs(twice - once).max() <= 0.5 * RELATIVE_STEP[type_name] * np.abs(values).max()


@pytest.mark.parametrize("type_name", quants.TYPES)
def test_zeros_stay_zeros(type_name):
    assert not quants.dequantize(quants.quantize(np.zeros((2, 256)), type_name)).any()


def test_a_vector_is_one_row():
    weight = quants.quantize(np.arange(5), "F32", "norm")
    assert weight.data.shape == (1, 20)
    np.testing.assert_array_equal(quants.dequantize(weight), np.arange(5, dtype=np.float32))


def test_rows_of_a_weight_are_its_values_rows():
    weight = quants.quantize(np.random.default_rng(4).standard_normal((6, 64)), "Q5_1")
    np.testing.assert_array_equal(quants.dequantize(weight.rows(2, 5)), quants.dequantize(weight)[2:5])


def test_a_row_that_is_no_whole_number_of_blocks_is_refused():
    with pytest.raises(ValueError, match="48 values is no multiple of Q8_0's blocks of 32"):
        quants.bytes_per_row("Q8_0", 48)
