"""Blocks of KV in 8 or 4 bits a value, for where they wait. See `KvCodec`.

In 8 bits, K and V are rotated (a Hadamard matrix over the head spreads what stands out) and each token of a head has
a scale. 4 bits are too few for that: some channels of K are large in every token (Qwen's biases make hundreds), and
rotated they swamp the others. So K's channels each have a range of their own over a block's 16 tokens, and V is rotated
and has a range a token.

    int8   scales of K and V [2, heads, 16], float16 | integers [2, heads, 16, head_dim]
    int4   low ends of K [heads, head_dim], steps alike, of V [heads, 16], alike, float16 | K, V, two integers a byte

Source: Ashkboos et al. 2024, QuaRot (arXiv:2404.00456); Liu et al. 2024, KIVI (arXiv:2402.02750).
"""

from __future__ import annotations

from functools import cache
from typing import Literal, Protocol, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from spolia.kernels.program import BLOCK_SIZE, CacheLayer, Program

__all__ = ["KvCodec", "KvRounding", "KvStore", "hadamard"]

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]

KvRounding = Literal["int8", "int4"]

_LARGEST = float(np.finfo(np.float16).max)
_INT8_MAX, _INT4_MAX = 127, 15


class KvStore(Protocol):
    """Who knows how a block lies in its pool."""

    def load_kv(self, group: int, block: Bytes) -> list[Floats]:
        """A block's values by layer, float32 `[2, num_kv_heads, 16, head_dim]`: K, then V."""

    def store_kv(self, group: int, layers: list[Floats], block: Bytes) -> None:
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
        self._layers = [[program.cache_layers[i] for i in group.layers] for group in program.cache_groups]

    def payload_bytes(self, group: int) -> int:
        return sum(map(self._layer_bytes, self._layers[group]))

    def encode(self, group: int, block: Bytes) -> Bytes | None:
        layers = self._store.load_kv(group, block)
        # A rotation makes a value at most so much larger. NaN is not within the limit either.
        if not all(np.abs(kv).max() * np.sqrt(kv.shape[-1]) <= _LARGEST for kv in layers):
            return None
        encode = _encode_int8 if self.name == "int8" else _encode_int4
        return np.concatenate([encode(kv) for kv in layers])

    def decode(self, group: int, payload: Bytes, block: Bytes) -> None:
        decode = _decode_int8 if self.name == "int8" else _decode_int4
        layers, begin = [], 0
        for layer in self._layers[group]:
            end = begin + self._layer_bytes(layer)
            layers.append(decode(payload[begin:end], layer))
            begin = end
        self._store.store_kv(group, layers, block)

    def _layer_bytes(self, layer: CacheLayer) -> int:
        num_values = 2 * layer.num_kv_heads * BLOCK_SIZE * layer.head_dim
        if self.name == "int8":
            return 2 * 2 * layer.num_kv_heads * BLOCK_SIZE + num_values
        return 2 * 2 * layer.num_kv_heads * (layer.head_dim + BLOCK_SIZE) + num_values // 2


@cache
def hadamard(size: int) -> Floats:
    """An orthonormal, symmetric matrix `[size, size]`, its own inverse: as large powers of two as divide `size`."""
    part = np.ones((1, 1), np.float32)
    while size % (2 * len(part)) == 0:
        part = np.block([[part, part], [part, -part]])
    matrix: Floats = np.kron(np.eye(size // len(part), dtype=np.float32), part / np.float32(np.sqrt(len(part))))
    return matrix


def _encode_int8(kv: Floats) -> Bytes:
    turned = kv @ hadamard(kv.shape[-1])
    scales = _half(np.abs(turned).max(-1, keepdims=True) / np.float32(_INT8_MAX))
    integers = np.clip(np.rint(turned / _nonzero(scales)), -_INT8_MAX, _INT8_MAX).astype(np.int8)
    return np.concatenate([_bytes(scales.astype(np.float16)), _bytes(integers)])


def _decode_int8(payload: Bytes, layer: CacheLayer) -> Floats:
    num_scales = 2 * layer.num_kv_heads * BLOCK_SIZE
    scales = _floats(payload[: 2 * num_scales])
    integers = payload[2 * num_scales :].view(np.int8).astype(np.float32)
    shape = (2, layer.num_kv_heads, BLOCK_SIZE, layer.head_dim)
    turned: Floats = integers.reshape(shape) * scales.reshape(*shape[:3], 1)
    return turned @ hadamard(layer.head_dim)


def _encode_int4(kv: Floats) -> Bytes:
    k, v = kv[0], kv[1] @ hadamard(kv.shape[-1])
    parts = [_to_int4(k, axis=1), _to_int4(v, axis=2)]
    return np.concatenate([ranges for ranges, _ in parts] + [packed for _, packed in parts])


def _decode_int4(payload: Bytes, layer: CacheLayer) -> Floats:
    shape = (layer.num_kv_heads, BLOCK_SIZE, layer.head_dim)
    k_end = 2 * 2 * layer.num_kv_heads * layer.head_dim
    v_end = k_end + 2 * 2 * layer.num_kv_heads * BLOCK_SIZE
    k_ranges = _floats(payload[:k_end]).reshape(2, layer.num_kv_heads, 1, layer.head_dim)
    v_ranges = _floats(payload[k_end:v_end]).reshape(2, layer.num_kv_heads, BLOCK_SIZE, 1)
    packed = payload[v_end:]
    integers = np.empty((2, packed.size), np.uint8)  # even places, odd places
    np.bitwise_and(packed, 15, out=integers[0])
    np.right_shift(packed, 4, out=integers[1])
    k, v = integers.T.astype(np.float32).reshape(2, *shape)
    out = np.empty((2, *shape), np.float32)
    out[0] = k * k_ranges[1] + k_ranges[0]
    out[1] = (v * v_ranges[1] + v_ranges[0]) @ hadamard(layer.head_dim)
    return out


def _to_int4(x: Floats, axis: int) -> tuple[Bytes, Bytes]:
    """(low ends and steps, two integers a byte) of values whose range is taken along an axis."""
    low = _half(x.min(axis, keepdims=True))
    step = _half((x.max(axis, keepdims=True) - low) / np.float32(_INT4_MAX))
    integers = np.clip(np.rint((x - low) / _nonzero(step)), 0, _INT4_MAX).astype(np.uint8).ravel()
    ranges = np.concatenate([_bytes(low.astype(np.float16)), _bytes(step.astype(np.float16))])
    return ranges, integers[0::2] | (integers[1::2] << np.uint8(4))


def _half(x: Floats) -> Floats:
    """As float16 has it, so that integers refer to the number that is stored."""
    return x.astype(np.float16).astype(np.float32)


def _nonzero(x: Floats) -> Floats:
    return np.where(x == 0, np.float32(1), x)


def _bytes(x: NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(x).ravel().view(np.uint8)


def _floats(halves: Bytes) -> Floats:
    return np.frombuffer(halves.tobytes(), np.float16).astype(np.float32)
