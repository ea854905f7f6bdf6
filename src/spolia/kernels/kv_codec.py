"""Blocks of KV in 8 or 4 bits a value, for where they wait. See `KvCodec`.

In 8 bits, K and V are rotated (a Hadamard matrix over the head spreads what stands out) and each token of a head has
a scale. 4 bits are too few for that: some channels of K are large in every token (Qwen's biases make hundreds), and
rotated they swamp the others. So K's channels each have a range of their own over a block's 16 tokens, and V is rotated
and has a range a token.

    int8   scales [layers, 2, heads, 16], float16 | integers [layers, 2, heads, 16, head_dim]
    int4   low ends of K [layers, heads, head_dim], steps alike, of V [layers, heads, 16], alike, float16
           | integers of K [layers, heads, 16, head_dim], of V alike, two a byte

one run of layers that are alike after the other.

Source: Ashkboos et al. 2024, QuaRot (arXiv:2404.00456); Liu et al. 2024, KIVI (arXiv:2402.02750).
"""

from __future__ import annotations

import math
from typing import Literal, Protocol, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from spolia.kernels.kv_types import rotated
from spolia.kernels.program import BLOCK_SIZE, Program

__all__ = ["KvCodec", "KvRounding", "KvStore"]

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]
Shape: TypeAlias = tuple[int, int, int, int, int]

KvRounding = Literal["int8", "int4"]

_LARGEST = float(np.finfo(np.float16).max)
_INT8_MAX, _INT4_MAX = 127, 15


class KvStore(Protocol):
    """Who knows how a block lies in its pool."""

    def load_kv(self, group: int, block: Bytes) -> list[Floats]:
        """A block's values, float32 `[num_layers, 2, num_kv_heads, 16, head_dim]` (K, then V), by run of layers."""

    def store_kv(self, group: int, runs: list[Floats], block: Bytes) -> None:
        """Write a block, rounding to the pool's type. Bytes that only align are left as they are."""


class KvCodec:
    """Writes blocks of an executable's pools in fewer bits, and reads them back. Any thread may call.

    Args:
        kind: bits of a value.
    """

    def __init__(self, program: Program, store: KvStore, kind: KvRounding) -> None:
        if kind not in get_args(KvRounding):
            raise ValueError(f"KV in {kind}: there are {', '.join(get_args(KvRounding))}")
        self.name: str = kind
        self._store = store
        self._shapes = [
            [(count, 2, layer.num_kv_heads, BLOCK_SIZE, layer.head_dim) for layer, count in program.layer_runs(group)]
            for group in range(len(program.cache_groups))
        ]

    def payload_bytes(self, group: int) -> int:
        return sum(map(self._run_bytes, self._shapes[group]))

    def encode(self, group: int, block: Bytes) -> Bytes | None:
        runs = self._store.load_kv(group, block)
        # A rotation makes a value at most so much larger. NaN is not within the limit either.
        if not all(max(kv.max(), -kv.min()) * np.sqrt(kv.shape[-1]) <= _LARGEST for kv in runs):
            return None
        encode = _encode_int8 if self.name == "int8" else _encode_int4
        return np.concatenate([part for kv in runs for part in encode(kv)])

    def decode(self, group: int, payload: Bytes, block: Bytes) -> None:
        decode = _decode_int8 if self.name == "int8" else _decode_int4
        runs, begin = [], 0
        for shape in self._shapes[group]:
            end = begin + self._run_bytes(shape)
            runs.append(decode(payload[begin:end], shape))
            begin = end
        self._store.store_kv(group, runs, block)

    def _run_bytes(self, shape: Shape) -> int:
        num_layers, _, num_heads, _, head_dim = shape
        num_rows, num_values = math.prod(shape[:-1]), math.prod(shape)
        if self.name == "int8":
            return 2 * num_rows + num_values
        return 2 * 2 * num_layers * num_heads * (head_dim + BLOCK_SIZE) + num_values // 2


def _encode_int8(kv: Floats) -> list[Bytes]:
    turned = rotated(kv)
    largest = np.maximum(turned.max(-1, keepdims=True), -turned.min(-1, keepdims=True))
    scales = (largest / np.float32(_INT8_MAX)).astype(np.float16)
    turned *= _inverse(scales)
    np.rint(turned, out=turned)
    np.clip(turned, -_INT8_MAX, _INT8_MAX, out=turned)
    return [_bytes(scales), _bytes(turned.astype(np.int8))]


def _decode_int8(payload: Bytes, shape: Shape) -> Floats:
    scales, payload = _halves(payload, (*shape[:-1], 1))
    turned = payload.view(np.int8).reshape(shape).astype(np.float32)
    turned *= scales
    return rotated(turned)


def _encode_int4(kv: Floats) -> list[Bytes]:
    ranges, integers = [], []
    for x, axis in ((kv[:, 0], 2), (rotated(kv[:, 1]), 3)):
        low = x.min(axis, keepdims=True).astype(np.float16)
        from_low = x - low.astype(np.float32)
        steps = (from_low.max(axis, keepdims=True) / np.float32(_INT4_MAX)).astype(np.float16)
        from_low *= _inverse(steps)
        np.rint(from_low, out=from_low)
        np.clip(from_low, 0, _INT4_MAX, out=from_low)
        ranges += [_bytes(low), _bytes(steps)]
        whole = _bytes(from_low.astype(np.uint8))
        integers.append(whole[0::2] | (whole[1::2] << np.uint8(4)))
    return ranges + integers


def _decode_int4(payload: Bytes, shape: Shape) -> Floats:
    num_layers, _, num_heads, _, head_dim = shape
    k_low, payload = _halves(payload, (num_layers, num_heads, 1, head_dim))
    k_steps, payload = _halves(payload, (num_layers, num_heads, 1, head_dim))
    v_low, payload = _halves(payload, (num_layers, num_heads, BLOCK_SIZE, 1))
    v_steps, payload = _halves(payload, (num_layers, num_heads, BLOCK_SIZE, 1))
    integers = np.empty((payload.size, 2), np.uint8)
    np.bitwise_and(payload, 15, out=integers[:, 0])
    np.right_shift(payload, 4, out=integers[:, 1])
    k, v = integers.reshape(2, num_layers, num_heads, BLOCK_SIZE, head_dim).astype(np.float32)
    k *= k_steps
    k += k_low
    v *= v_steps
    v += v_low
    return np.stack([k, rotated(v)], axis=1)


def _inverse(steps: NDArray[np.float16]) -> Floats:
    """1 / steps, of the numbers that are stored; 0 for 0."""
    wide = steps.astype(np.float32)
    return np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide > 0)


def _bytes(x: NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(x).ravel().view(np.uint8)


def _halves(payload: Bytes, shape: tuple[int, ...]) -> tuple[Floats, Bytes]:
    """float16 values at the payload's beginning, and the rest of it."""
    num_bytes = 2 * math.prod(shape)
    values = np.frombuffer(payload[:num_bytes].tobytes(), np.float16).astype(np.float32)
    return values.reshape(shape), payload[num_bytes:]
