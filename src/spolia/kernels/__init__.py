"""The ops: what a model computes (`program`), numpy's slow truth (`reference`) and C++ (`cpu`).

Imports no other room. A backend prepares a `Program` once and runs it step by step; `reference` is the oracle of tests.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from spolia.kernels import quants
from spolia.kernels.kv_codec import KvCodec, KvRounding
from spolia.kernels.program import *  # noqa: F403 - its __all__ is the room's
from spolia.kernels.program import Backend, Executable, KvDtype, Program
from spolia.kernels.program import __all__ as _program_all

__all__ = [
    *_program_all,
    "BACKENDS",
    "KvCodec",
    "KvRounding",
    "allocate_pool",
    "get_backend",
    "quants",
    "release_blocks",
]


def _cpu(program: Program, *, kv_dtype: KvDtype, num_threads: int) -> Executable:
    from spolia.kernels.cpu import CpuExecutable

    return CpuExecutable(program, kv_dtype=kv_dtype, num_threads=num_threads)


def _reference(program: Program, *, kv_dtype: KvDtype, num_threads: int) -> Executable:
    from spolia.kernels.reference import ReferenceExecutable

    return ReferenceExecutable(program, kv_dtype=kv_dtype, num_threads=num_threads)


BACKENDS: dict[str, Backend] = {"cpu": _cpu, "reference": _reference}
"""By name; a backend's code is imported when it is first used."""


def get_backend(name: str) -> Backend:
    """
    Raises:
        ValueError: no backend has that name.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r}: there are {', '.join(BACKENDS)}")
    return BACKENDS[name]


def allocate_pool(num_blocks: int, block_bytes: int) -> NDArray[np.uint8]:
    """Zeroed uint8 `[num_blocks, block_bytes]`, page-aligned; memory is committed as it is first written."""
    if num_blocks * block_bytes == 0:
        return np.zeros((num_blocks, block_bytes), np.uint8)
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0)  # what is never written to is not to count
    memory = mmap.mmap(-1, num_blocks * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8).reshape(num_blocks, block_bytes)


def release_blocks(pool: NDArray[np.uint8], block_ids: NDArray[np.int32]) -> None:
    """Give the memory of these blocks of an `allocate_pool` back to the system; they read as zeros, or as they were."""
    memory: object = pool
    while isinstance(memory, np.ndarray):
        memory = memory.base
    if not isinstance(memory, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    size = pool.shape[1]
    for run in np.split(np.sort(block_ids), np.flatnonzero(np.diff(np.sort(block_ids)) != 1) + 1):
        if len(run):
            start = -(-int(run[0]) * size // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = (int(run[-1]) + 1) * size // mmap.PAGESIZE * mmap.PAGESIZE
            if start < stop:
                memory.madvise(mmap.MADV_DONTNEED, start, stop - start)
