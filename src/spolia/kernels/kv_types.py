"""The types that pools keep KV in, for numpy.

int8 is a head of a token rotated (a Hadamard matrix spreads what stands out), as integers, and behind them their scale,
a bfloat16: two elements more. All of it depends on this head of this token alone.

Source: Ashkboos et al. 2024, QuaRot (arXiv:2404.00456).
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from spolia.kernels.program import KvDtype

__all__ = ["STORAGE", "hadamard", "rotated", "stored_width", "to_float32", "to_storage"]

STORAGE: dict[KvDtype, type[np.generic]] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "int8": np.int8}
"""What numpy takes an element for; bf16 as its bits."""

_SCALE_WIDTH = 2
_INT8_MAX = 127
_SMALLEST_SCALE = np.float32(2.0**-126)


def stored_width(head_dim: int, kv_dtype: KvDtype) -> int:
    """Elements that a head of a token takes."""
    return head_dim + _SCALE_WIDTH if kv_dtype == "int8" else head_dim


def to_storage(x: NDArray[np.float32], kv_dtype: KvDtype) -> NDArray[np.generic]:
    """`[..., stored_width(head_dim)]` of `[..., head_dim]`, rounded to nearest, ties to even."""
    if kv_dtype == "bf16":
        bits = np.ascontiguousarray(x).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    if kv_dtype == "int8":
        return _to_int8(x)
    return x.astype(STORAGE[kv_dtype])


def to_float32(stored: NDArray[np.generic], kv_dtype: KvDtype) -> NDArray[np.float32]:
    if kv_dtype == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    if kv_dtype == "int8":
        scales = np.ascontiguousarray(stored[..., -_SCALE_WIDTH:]).view(np.uint16)
        turned = stored[..., :-_SCALE_WIDTH].astype(np.float32)
        with np.errstate(invalid="ignore"):  # what nobody has written may be NaN
            return rotated(turned * to_float32(scales, "bf16"))
    return stored.astype(np.float32)


def _to_int8(x: NDArray[np.float32]) -> NDArray[np.generic]:
    turned = rotated(x)
    largest = np.abs(turned).max(-1, keepdims=True)
    scales = to_storage(np.where(np.isfinite(largest), largest / np.float32(_INT8_MAX), np.float32(np.nan)), "bf16")
    wide = to_float32(scales, "bf16")
    inverse = np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide > _SMALLEST_SCALE)
    integers = np.rint(np.clip(np.where(inverse == 0, 0, turned) * inverse, -_INT8_MAX, _INT8_MAX))
    return np.concatenate([integers.astype(np.int8), scales.view(np.int8)], axis=-1)


@cache
def hadamard(size: int) -> NDArray[np.float32]:
    """An orthonormal, symmetric matrix `[size, size]`, its own inverse: as large powers of two as divide `size`."""
    part = np.ones((1, 1), np.float32)
    while size % (2 * len(part)) == 0:
        part = np.block([[part, part], [part, -part]])
    matrix: NDArray[np.float32] = np.kron(
        np.eye(size // len(part), dtype=np.float32), part / np.float32(np.sqrt(len(part)))
    )
    return matrix


def rotated(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each last dimension times its Hadamard matrix; twice is nothing."""
    turned: NDArray[np.float32] = x.reshape(-1, x.shape[-1]) @ hadamard(x.shape[-1])
    return turned.reshape(x.shape)
