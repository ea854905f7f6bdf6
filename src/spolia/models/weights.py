"""A model's tensors by name, handed out to an architecture file with their shapes checked.

Names are GGUF's whatever the file's format (`blk.3.attn_q.weight`). What an architecture never asked for is told by
`unused`: a tensor that nobody multiplies by is a model that we would get wrong, so `load` refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spolia.errors import ModelError
from spolia.kernels.program import Weight
from spolia.kernels.quants import dequantize, quantize

__all__ = ["Weights"]


class Weights:
    """Tensors of the model at `path`, each marked as used when it is asked for.

    Args:
        spelt: from GGUF's name of a tensor to that in the file, for messages.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Weight], *, spelt: Callable[[str], str] = str) -> None:
        self.path = path
        self._spelt = spelt
        self._tensors = dict(tensors)
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def matrix(self, name: str, rows: int, columns: int) -> Weight:
        """The matrix `(rows, columns)` of that name, as it is stored.

        Raises:
            ModelError: there is none, or it has another shape.
        """
        return self._take(name, (rows, columns))

    def vector(self, name: str, size: int) -> Weight:
        """The vector of that name, in float32 whatever the file's type: norms and biases are too small to matter.

        Raises:
            ModelError: there is none, or it has another shape.
        """
        weight = self._take(name, (size,))
        return weight if weight.type == "F32" else quantize(dequantize(weight), "F32", name)

    def optional_vector(self, name: str, size: int) -> Weight | None:
        """`vector`, or None where the file has no such tensor: a bias that only some models have."""
        return self.vector(name, size) if name in self._tensors else None

    def num_rows(self, name: str) -> int:
        """Rows of the matrix of that name: how many tokens an embedding table has.

        Raises:
            ModelError: there is no such matrix.
        """
        weight = self._tensors.get(name)
        if weight is None or len(weight.shape) != 2:
            raise ModelError(f"{self.path}: matrix {name!r} is missing")
        return weight.shape[0]

    def reorder_rows(self, name: str, order: NDArray[np.intp]) -> None:
        """Row i of the matrix, or value i of the vector, becomes what `order[i]` was. An absent tensor stays absent.

        Raises:
            ModelError: the tensor has another number of rows.
        """
        weight = self._tensors.get(name)
        if weight is None:
            return
        if weight.shape[0] != len(order):
            raise ModelError(f"{self.path}: tensor {name!r} has {weight.shape[0]} rows, expected {len(order)}")
        rows = weight.data.reshape(len(order), -1)[order]
        self._tensors[name] = Weight(name, weight.type, weight.shape, rows.reshape(weight.data.shape))

    def unused(self) -> list[str]:
        """Names in the file of what was never asked for."""
        return [weight.name for name, weight in self._tensors.items() if name not in self._used]

    def _take(self, name: str, shape: tuple[int, ...]) -> Weight:
        weight = self._tensors.get(name)
        if weight is None:
            raise ModelError(f"{self.path}: tensor {self._spelt(name)!r} of shape {list(shape)} is missing")
        if weight.shape != shape:
            raise ModelError(
                f"{self.path}: tensor {weight.name!r} has shape {list(weight.shape)}, expected {list(shape)}"
            )
        self._used.add(name)
        return weight
