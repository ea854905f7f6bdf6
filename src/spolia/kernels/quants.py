"""Storage types of weights: how many bytes, and which float32 values they stand for.

A row of a matrix is cut into blocks of `block_values` consecutive values; each block is `block_bytes` bytes, decoded on
its own. "K" types hold super-blocks of 256 values in 8 groups of 32 (Q6_K: 16 of 16) with small integer scales of their
own.

`dequantize` is the definition that every kernel is tested against. `quantize` is its inverse by plain rounding: good
enough to make test weights and tiny models, without the error-minimising searches of the tools that publish models.

Source: the block layouts of ggml, the format that llama.cpp defines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spolia.kernels.program import Weight

__all__ = ["TYPES", "QuantType", "bytes_per_row", "dequantize", "quantize"]

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class QuantType:
    """One storage type.

    Attributes:
        name: as files and people spell it, the key in `TYPES`.
        ggml_id: its number in a GGUF file.
        block_values: values of a block; a row holds a multiple of them.
        block_bytes: bytes of a block.
    """

    name: str
    ggml_id: int
    block_values: int
    block_bytes: int


TYPES: dict[str, QuantType] = {
    kind.name: kind
    for kind in (
        QuantType("F32", 0, 1, 4),
        QuantType("F16", 1, 1, 2),
        QuantType("BF16", 30, 1, 2),
        QuantType("Q4_0", 2, 32, 18),
        QuantType("Q4_1", 3, 32, 20),
        QuantType("Q5_0", 6, 32, 22),
        QuantType("Q5_1", 7, 32, 24),
        QuantType("Q8_0", 8, 32, 34),
        QuantType("Q4_K", 12, 256, 144),
        QuantType("Q5_K", 13, 256, 176),
        QuantType("Q6_K", 14, 256, 210),
    )
}


def bytes_per_row(type_name: str, num_values: int) -> int:
    """Bytes of a row of `num_values` values.

    Raises:
        ValueError: the row is not a whole number of blocks.
    """
    kind = TYPES[type_name]
    if num_values % kind.block_values:
        raise ValueError(f"a row of {num_values} values is no multiple of {type_name}'s blocks of {kind.block_values}")
    return num_values // kind.block_values * kind.block_bytes


def dequantize(weight: Weight) -> Floats:
    """The values of `weight` as a new float32 array of `weight.shape`."""
    kind = TYPES[weight.type]
    blocks = np.ascontiguousarray(weight.data).reshape(-1, kind.block_bytes)
    return _DECODERS[weight.type](blocks).reshape(weight.shape)


def quantize(values: ArrayLike, type_name: str, name: str = "weight") -> Weight:
    """`values` rounded to the nearest that `type_name` can hold: matrix `[rows, columns]` or vector `[columns]`.

    Raises:
        ValueError: a row is not a whole number of blocks.
    """
    array = np.asarray(values, dtype=np.float32)
    row_bytes = bytes_per_row(type_name, array.shape[-1])
    blocks = _ENCODERS[type_name](array.reshape(-1, TYPES[type_name].block_values))
    data = np.ascontiguousarray(blocks).view(np.uint8).reshape(math.prod(array.shape[:-1]), row_bytes)
    return Weight(name, type_name, array.shape, data)


# Decoders: uint8 [num_blocks, block_bytes] -> float32 [num_blocks, block_values].


def _halves(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte `start` of each block, as float32 `[num_blocks, 1]`."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """`[..., n]` bytes to `[..., 2n]` values: all low nibbles, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(blocks: Bytes, start: int) -> Bytes:
    """The 32 bits at byte `start` of each block, as 0 or 16 `[num_blocks, 32]`."""
    return np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little") << np.uint8(4)


def _decode_f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4").astype(np.float32)


def _decode_f16(blocks: Bytes) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _decode_bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _decode_q4_0(blocks: Bytes) -> Floats:
    return _halves(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _decode_q4_1(blocks: Bytes) -> Floats:
    return _halves(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _halves(blocks, 2)


def _decode_q5_0(blocks: Bytes) -> Floats:
    q = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _halves(blocks, 0) * (q.astype(np.float32) - 16)


def _decode_q5_1(blocks: Bytes) -> Floats:
    q = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _halves(blocks, 0) * q.astype(np.float32) + _halves(blocks, 2)


def _decode_q8_0(blocks: Bytes) -> Floats:
    return _halves(blocks, 0) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """Twelve bytes of 6-bit numbers `[n, 12]` to scales and minimums of 8 groups, float32 `[n, 8, 1]` each."""
    s, m, x = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([s & 63, (x & 15) | (s >> 6 << 4)], axis=1)
    minimums = np.concatenate([m & 63, (x >> 4) | (m >> 6 << 4)], axis=1)
    return scales.astype(np.float32)[:, :, None], minimums.astype(np.float32)[:, :, None]


def _decode_k(blocks: Bytes, q: Bytes) -> Floats:
    """Q4_K and Q5_K: `q` `[n, 8, 32]` times its group's scale, minus its group's minimum."""
    scales, minimums = _k_scales(blocks[:, 4:16])
    d, dmin = _halves(blocks, 0)[:, :, None], _halves(blocks, 2)[:, :, None]
    return ((d * scales) * q.astype(np.float32) - dmin * minimums).reshape(-1, 256)


def _decode_q4_k(blocks: Bytes) -> Floats:
    return _decode_k(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _decode_q5_k(blocks: Bytes) -> Floats:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None]) & np.uint8(1)
    return _decode_k(blocks, low | high << np.uint8(4))


def _decode_q6_k(blocks: Bytes) -> Floats:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    q = (low.reshape(-1, 16, 16) | high.reshape(-1, 16, 16) << 4).astype(np.float32) - 32
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return ((_halves(blocks, 208) * scales)[:, :, None] * q).reshape(-1, 256)


_DECODERS: dict[str, Callable[[Bytes], Floats]] = {
    "F32": _decode_f32,
    "F16": _decode_f16,
    "BF16": _decode_bf16,
    "Q4_0": _decode_q4_0,
    "Q4_1": _decode_q4_1,
    "Q5_0": _decode_q5_0,
    "Q5_1": _decode_q5_1,
    "Q8_0": _decode_q8_0,
    "Q4_K": _decode_q4_k,
    "Q5_K": _decode_q5_k,
    "Q6_K": _decode_q6_k,
}


# Encoders: float32 [num_blocks, block_values] -> the blocks' bytes, as a view of any dtype.


def _as_half(scale: Floats) -> tuple[Floats, Bytes]:
    """A scale as the float16 that will be stored: its value, to round with, and its bytes `[n, 2]`."""
    stored = scale.astype("<f2")
    return stored.astype(np.float32), stored.reshape(-1, 1).view(np.uint8)


def _rounded(x: Floats, scale: Floats, low: int, high: int) -> Bytes:
    """x / scale to the nearest integer in [low, high], moved to start at 0; the value 0 where the scale is 0."""
    quotient = np.divide(x, scale, out=np.zeros_like(x), where=scale != 0)
    return (np.clip(np.rint(quotient), low, high) - low).astype(np.uint8)


def _pack_nibbles(q: Bytes) -> Bytes:
    """Inverse of `_nibbles`."""
    half = q.shape[-1] // 2
    return (q[..., :half] & np.uint8(15)) | q[..., half:] << np.uint8(4)  # the fifth bits fall off at the top


def _pack_fifth_bits(q: Bytes) -> Bytes:
    return np.packbits(q >> np.uint8(4), axis=1, bitorder="little")


def _signed_scale(x: Floats, lowest: int) -> tuple[Floats, Bytes]:
    """The scale that maps the value of greatest magnitude to `lowest`, the one integer without an opposite."""
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    return _as_half(extreme / np.float32(lowest))


def _range_scale(x: Floats, levels: int) -> tuple[Floats, Bytes, Floats, Bytes]:
    """Scale and minimum that map [min, max] to [0, levels]."""
    low = x.min(axis=1, keepdims=True)
    return *_as_half((x.max(axis=1, keepdims=True) - low) / levels), *_as_half(low)


def _encode_bf16(x: Floats) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")  # round half to even


def _encode_q4_0(x: Floats) -> Bytes:
    d, d_bytes = _signed_scale(x, -8)
    return np.hstack([d_bytes, _pack_nibbles(_rounded(x, d, -8, 7))])


def _encode_q4_1(x: Floats) -> Bytes:
    d, d_bytes, m, m_bytes = _range_scale(x, 15)
    return np.hstack([d_bytes, m_bytes, _pack_nibbles(_rounded(x - m, d, 0, 15))])


def _encode_q5_0(x: Floats) -> Bytes:
    d, d_bytes = _signed_scale(x, -16)
    q = _rounded(x, d, -16, 15)
    return np.hstack([d_bytes, _pack_fifth_bits(q), _pack_nibbles(q)])


def _encode_q5_1(x: Floats) -> Bytes:
    d, d_bytes, m, m_bytes = _range_scale(x, 31)
    q = _rounded(x - m, d, 0, 31)
    return np.hstack([d_bytes, m_bytes, _pack_fifth_bits(q), _pack_nibbles(q)])


def _encode_q8_0(x: Floats) -> Bytes:
    d, d_bytes = _as_half(np.abs(x).max(axis=1, keepdims=True) / 127)
    return np.hstack([d_bytes, _rounded(x, d, -127, 127) - 127])  # wraps to two's complement


def _encode_k(x: Floats, levels: int) -> tuple[Bytes, Bytes]:
    """Header (d, dmin, scales) `[n, 16]` and integers `[n, 8, 32]` of Q4_K and Q5_K."""
    groups = x.reshape(-1, 8, 32)
    minimums = np.maximum(-groups.min(axis=2), 0)  # stored negated and unsigned: a group's range always includes 0
    scales = (np.maximum(groups.max(axis=2), 0) + minimums) / levels
    d, d_bytes = _as_half(scales.max(axis=1, keepdims=True) / 63)
    dmin, dmin_bytes = _as_half(minimums.max(axis=1, keepdims=True) / 63)
    sc, mn = _rounded(scales, d, 0, 63), _rounded(minimums, dmin, 0, 63)
    packed = [
        sc[:, :4] | sc[:, 4:] >> 4 << 6,
        mn[:, :4] | mn[:, 4:] >> 4 << 6,
        (sc[:, 4:] & 15) | (mn[:, 4:] & 15) << 4,
    ]
    q = _rounded(groups + (dmin * mn)[:, :, None], (d * sc)[:, :, None], 0, levels)
    return np.hstack([d_bytes, dmin_bytes, *packed]), q


def _encode_q4_k(x: Floats) -> Bytes:
    header, q = _encode_k(x, 15)
    return np.hstack([header, _pack_nibbles(q.reshape(-1, 4, 64)).reshape(-1, 128)])


def _encode_q5_k(x: Floats) -> Bytes:
    header, q = _encode_k(x, 31)
    high = np.bitwise_or.reduce((q >> 4) << np.arange(8, dtype=np.uint8)[None, :, None], axis=1)
    return np.hstack([header, high, _pack_nibbles(q.reshape(-1, 4, 64)).reshape(-1, 128)])


def _encode_q6_k(x: Floats) -> Bytes:
    groups = x.reshape(-1, 16, 16)
    scales = np.abs(groups).max(axis=2) / 31
    d, d_bytes = _as_half(scales.max(axis=1, keepdims=True) / 127)
    sc = _rounded(scales, d, 0, 127)
    q = _rounded(groups, (d * sc)[:, :, None], -32, 31)
    low = _pack_nibbles(q.reshape(-1, 2, 128)).reshape(-1, 128)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]
    high = np.bitwise_or.reduce((q >> 4).reshape(-1, 2, 4, 32) << shifts, axis=2).reshape(-1, 64)
    return np.hstack([low, high, sc, d_bytes])


_ENCODERS: dict[str, Callable[[Floats], NDArray[np.generic]]] = {
    "F32": lambda x: x.astype("<f4"),
    "F16": lambda x: x.astype("<f2"),
    "BF16": _encode_bf16,
    "Q4_0": _encode_q4_0,
    "Q4_1": _encode_q4_1,
    "Q5_0": _encode_q5_0,
    "Q5_1": _encode_q5_1,
    "Q8_0": _encode_q8_0,
    "Q4_K": _encode_q4_k,
    "Q5_K": _encode_q5_k,
    "Q6_K": _encode_q6_k,
}
