"""How attention's kernels store KV in a block (`src/attend_kv.h`), for numpy.

layer   [num_kv_heads] x { K, V }
K       [depth / pack][16 tokens][pack]     depth: head_dim, padded to an even number
V       [16 / pack][width][pack tokens]     width: head_dim, padded to a multiple of 16
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spolia.kernels.kv_types import STORAGE, to_float32, to_storage
from spolia.kernels.program import BLOCK_SIZE, CacheLayer, KvDtype

__all__ = ["KvLayout"]


class KvLayout:
    """One layer's part of a block: views of its K and V by token, whatever their order in memory."""

    def __init__(self, layer: CacheLayer, kv_dtype: KvDtype) -> None:
        self._layer = layer
        self._kv_dtype: KvDtype = kv_dtype
        self._pack = 2 if kv_dtype == "bf16" else 1
        self._depth = -(-layer.head_dim // 2) * 2
        self._width = -(-layer.head_dim // BLOCK_SIZE) * BLOCK_SIZE
        item_bytes = np.dtype(STORAGE[kv_dtype]).itemsize
        self.num_bytes = layer.num_kv_heads * BLOCK_SIZE * (self._depth + self._width) * item_bytes

    def load(self, part: NDArray[np.uint8]) -> NDArray[np.float32]:
        """float32 `[2, num_kv_heads, 16, head_dim]` of the layer's `num_bytes` bytes."""
        k, v = self._views(part)
        size = self._layer.head_dim
        heads = self._layer.num_kv_heads
        both = np.empty((2, heads, BLOCK_SIZE, size), STORAGE[self._kv_dtype])
        both[0] = k.transpose(0, 2, 1, 3).reshape(heads, BLOCK_SIZE, -1)[..., :size]
        both[1] = v.transpose(0, 1, 3, 2).reshape(heads, BLOCK_SIZE, -1)[..., :size]
        return to_float32(both, self._kv_dtype)

    def store(self, kv: NDArray[np.float32], part: NDArray[np.uint8]) -> None:
        """The other way round; padding of K becomes 0, of V whatever."""
        k, v = self._views(part)
        heads, pack = self._layer.num_kv_heads, self._pack
        stored = to_storage(kv, self._kv_dtype)
        padded = np.zeros((heads, BLOCK_SIZE, max(self._depth, self._width)), stored.dtype)
        padded[..., : self._layer.head_dim] = stored[0]
        k[:] = padded[..., : self._depth].reshape(heads, BLOCK_SIZE, -1, pack).transpose(0, 2, 1, 3)
        padded[..., : self._layer.head_dim] = stored[1]
        v[:] = padded[..., : self._width].reshape(heads, -1, pack, self._width).transpose(0, 1, 3, 2)

    def _views(self, part: NDArray[np.uint8]) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
        heads = part.view(STORAGE[self._kv_dtype]).reshape(self._layer.num_kv_heads, -1)
        k, v = heads[:, : BLOCK_SIZE * self._depth], heads[:, BLOCK_SIZE * self._depth :]
        return (
            k.reshape(len(heads), -1, BLOCK_SIZE, self._pack),
            v.reshape(len(heads), -1, self._width, self._pack),
        )
