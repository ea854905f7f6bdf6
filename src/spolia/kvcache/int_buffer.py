"""A growable array of int32: what edges, block lists and block tables are made of."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Ids", "IntBuffer"]

Ids: TypeAlias = NDArray[np.int32]
"""Token ids or block ids: one-dimensional int32."""


class IntBuffer:
    """Appends in amortised O(1), truncates in O(1), and is read through `view`.

        data  [ 7 3 9 | . . . . ]      size = 3
                view    spare room

    A view is valid until the next `extend`, which may move the data.
    """

    __slots__ = ("_data", "size")

    def __init__(self, values: Ids) -> None:
        """Starts with a copy of `values`."""
        self._data = np.array(values, np.int32)
        self.size = len(values)

    @property
    def view(self) -> Ids:
        """The values, without a copy: writing to it writes to the buffer."""
        return self._data[: self.size]

    def extend(self, values: Ids) -> None:
        size = self.size + len(values)
        if size > len(self._data):
            self._resize(2 * size)
        self._data[self.size : size] = values
        self.size = size

    def truncate(self, size: int) -> None:
        """Keep the first `size` values; memory follows when three quarters of it lie idle."""
        self.size = size
        if 4 * size < len(self._data):
            self._resize(size)

    def _resize(self, capacity: int) -> None:
        data = np.empty(capacity, np.int32)
        data[: self.size] = self._data[: self.size]
        self._data = data
