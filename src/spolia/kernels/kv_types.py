"""The types that pools keep KV in, for numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spolia.kernels.program import KvDtype

__all__ = ["STORAGE", "to_float32", "to_storage"]

STORAGE: dict[KvDtype, type[np.generic]] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}
"""What numpy takes an element for; bf16 as its bits."""


def to_storage(x: NDArray[np.float32], kv_dtype: KvDtype) -> NDArray[np.generic]:
    """Rounded to nearest, ties to even."""
    if kv_dtype == "bf16":
        bits = np.ascontiguousarray(x).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return x.astype(STORAGE[kv_dtype])


def to_float32(stored: NDArray[np.generic], kv_dtype: KvDtype) -> NDArray[np.float32]:
    if kv_dtype == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)
