"""The ops: what a model computes (`program`), numpy's slow truth (`reference`) and C++ (`cpu`).

Imports no other room. A backend prepares a `Program` once and runs it step by step; `reference` is the oracle of every test.
"""

from __future__ import annotations

from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from spolia.kernels.program import *  # noqa: F403 - all of the contract is public
from spolia.kernels.program import Backend
from spolia.kernels.program import __all__ as _program_names

__all__ = ["BACKENDS", "allocate_pool", "get_backend", *_program_names]

BACKENDS = {"cpu": "spolia.kernels.cpu:CpuExecutable", "reference": "spolia.kernels.reference:ReferenceExecutable"}
"""Where each backend is; imported when it is asked for."""


def get_backend(name: str) -> Backend:
    """The backend of that name.

    Raises:
        ValueError: there is none; says which there are.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r} is unknown; there are {', '.join(BACKENDS)}")
    module, _, attribute = BACKENDS[name].partition(":")
    backend: Backend = getattr(import_module(module), attribute)
    return backend


def allocate_pool(num_blocks: int, block_bytes: int) -> NDArray[np.uint8]:
    """A zeroed KV pool, uint8 `[num_blocks, block_bytes]`, 64-byte aligned; memory is taken when it is first written."""
    data = np.zeros(num_blocks * block_bytes + 63, np.uint8)
    start = -data.ctypes.data % 64
    return data[start : start + num_blocks * block_bytes].reshape(num_blocks, block_bytes)
