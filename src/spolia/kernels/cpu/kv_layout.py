"""How attention's kernels store KV in a block (`src/attend_kv.h`), for numpy.

layer   [num_kv_heads] x { K, V }
K       [depth / pack][16 tokens][pack]     depth: head_dim, padded to an even number
V       [16 / pack][width][pack tokens]     width: head_dim, padded to a multiple of 16

int8 has the scales of K's tokens and of V's behind V: [2][16], two bytes each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spolia.kernels.kv_types import STORAGE, stored_width, to_float32, to_storage
from spolia.kernels.program import BLOCK_SIZE, CacheLayer, KvDtype

__all__ = ["KvLayout"]


class KvLayout:
    """The part of a block that layers of one shape take which follow each other."""

    def __init__(self, layer: CacheLayer, num_layers: int, kv_dtype: KvDtype) -> None:
        self._shape = (num_layers, 2, layer.num_kv_heads, BLOCK_SIZE, layer.head_dim)
        self._kv_dtype: KvDtype = kv_dtype
        self._pack = 2 if kv_dtype in ("bf16", "int8") else 1
        even = 4 if kv_dtype == "int8" else 2
        self._depth = -(-layer.head_dim // even) * even
        self._width = -(-layer.head_dim // BLOCK_SIZE) * BLOCK_SIZE
        item_bytes = np.dtype(STORAGE[kv_dtype]).itemsize
        self._scale_width = stored_width(layer.head_dim, kv_dtype) - layer.head_dim
        self._token_width = self._depth + self._width + 2 * self._scale_width
        self.num_bytes = num_layers * layer.num_kv_heads * BLOCK_SIZE * self._token_width * item_bytes

    def load(self, part: NDArray[np.uint8]) -> NDArray[np.float32]:
        """float32 `[num_layers, 2, num_kv_heads, 16, head_dim]` of `num_bytes` bytes."""
        k, v, scales = self._views(part)
        num_layers, _, num_heads, _, head_dim = self._shape
        both = np.empty((*self._shape[:-1], head_dim + self._scale_width), STORAGE[self._kv_dtype])
        both[..., head_dim:] = scales
        both[:, 0, ..., :head_dim] = k.transpose(0, 1, 3, 2, 4).reshape(num_layers, num_heads, BLOCK_SIZE, -1)[
            ..., :head_dim
        ]
        both[:, 1, ..., :head_dim] = v.transpose(0, 1, 2, 4, 3).reshape(num_layers, num_heads, BLOCK_SIZE, -1)[
            ..., :head_dim
        ]
        return to_float32(both, self._kv_dtype)

    def store(self, kv: NDArray[np.float32], part: NDArray[np.uint8]) -> None:
        """The other way round; what pads becomes 0."""
        k, v, scales = self._views(part)
        heads = (self._shape[0], self._shape[2])
        stored = to_storage(kv, self._kv_dtype)
        scales[:] = stored[..., self._shape[-1] :]
        stored = stored[..., : self._shape[-1]]
        keys = self._padded(stored[:, 0], self._depth).reshape(*heads, BLOCK_SIZE, -1, self._pack)
        values = self._padded(stored[:, 1], self._width).reshape(*heads, -1, self._pack, self._width)
        k[:] = keys.transpose(0, 1, 3, 2, 4)
        v[:] = values.transpose(0, 1, 2, 4, 3)

    def _padded(self, x: NDArray[np.generic], width: int) -> NDArray[np.generic]:
        if x.shape[-1] == width:
            return x
        padded = np.zeros((*x.shape[:-1], width), x.dtype)
        padded[..., : x.shape[-1]] = x
        return padded

    def _views(self, part: NDArray[np.uint8]) -> tuple[NDArray[np.generic], NDArray[np.generic], NDArray[np.generic]]:
        heads = (self._shape[0], self._shape[2])
        elements = part.view(STORAGE[self._kv_dtype]).reshape(*heads, -1)
        ends = [BLOCK_SIZE * self._depth, BLOCK_SIZE * (self._depth + self._width)]
        k, v, scales = elements[..., : ends[0]], elements[..., ends[0] : ends[1]], elements[..., ends[1] :]
        return (
            k.reshape(*heads, -1, BLOCK_SIZE, self._pack),
            v.reshape(*heads, -1, self._width, self._pack),
            scales.reshape(*heads, 2, BLOCK_SIZE, self._scale_width).swapaxes(1, 2),
        )
