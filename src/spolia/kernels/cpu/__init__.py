"""The CPU backend: a program lowered to stages (`lowering`) that C++ runs in one call a step (`src/`).

Weights are packed once, 16 output columns side by side, in their own storage type. Activations meet integer types as
int8 with one scale per 32 values (16 bits at the head), the others as bf16 or as float32. The kernels are compiled
for each ISA level; the best that the CPU has is chosen at run time, or the one that the environment's SPOLIA_ISA
names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from spolia.kernels import quants
from spolia.kernels.cpu import _cpu
from spolia.kernels.cpu.kv_layout import KvLayout
from spolia.kernels.cpu.lowering import lower, part_names
from spolia.kernels.program import KvDtype, Program, StepInputs

__all__ = ["CpuExecutable", "levels"]

levels = _cpu.levels

_NUMERICS_VERSION = 2
"""Grows with every change that moves a bit of any result."""


class CpuExecutable:
    """A program on the CPU; see `program.Executable` for the promises.

    Args:
        program: what to run. Its embedding tables are read where they lie; all other weights are copied.
        kv_dtype: of the KV blocks.
        num_threads: including the caller of `run`. They spin for some tens of microseconds between ops, then sleep.
        level: ISA level, one of `levels()`; None for the one that SPOLIA_ISA names, else the best.

    Attributes:
        plan: the program as lowered, for those who count what it costs (`roofline`).

    Raises:
        ValueError: the CPU lacks the level, or the system starts no such number of threads.
    """

    def __init__(self, program: Program, *, kv_dtype: KvDtype, num_threads: int, level: str | None = None) -> None:
        def row_format(weight_type: str, k: int, precise: bool) -> tuple[int, int]:
            return _cpu.row_format(level or "", quants.TYPES[weight_type].ggml_id, k, precise)

        self._vocab_size = program.vocab_size
        self.plan = lower(program, kv_dtype, row_format)  # holds the embedding tables, which each step reads
        self._native = _cpu.Executable(self.plan, level or "", program.vocab_size, num_threads)
        self._layer_runs = [program.layer_runs(group) for group in range(len(program.cache_groups))]
        self.set_kv_dtype(kv_dtype)

    @property
    def level(self) -> str:
        """The ISA level in use."""
        return self._native.level

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def hidden_size(self) -> int:
        return self.plan.hidden_size

    @property
    def num_layers(self) -> int:
        return self.plan.num_layers

    @property
    def num_threads(self) -> int:
        return self._native.num_threads

    @property
    def numerics(self) -> str:
        return f"cpu/{self.level}/{_NUMERICS_VERSION}"

    @property
    def packed_bytes(self) -> int:
        """Memory that the packed weights take."""
        return self._native.packed_bytes

    def set_num_threads(self, num_threads: int) -> None:
        self._native.set_num_threads(num_threads)

    def block_bytes(self, group: int) -> int:
        return self._native.block_bytes(group)

    def set_kv_dtype(self, kv_dtype: KvDtype) -> None:
        self._native.set_kv_dtype(kv_dtype)
        self._pools: tuple[NDArray[np.uint8], ...] = ()
        self._layouts = [
            [KvLayout(layer, num_layers, kv_dtype) for layer, num_layers in runs] for runs in self._layer_runs
        ]

    def bind_kv(self, pools: Sequence[NDArray[np.uint8]]) -> None:
        self._native.bind_kv(pools)
        self._pools = tuple(pools)

    def load_kv(self, group: int, block: NDArray[np.uint8]) -> list[NDArray[np.float32]]:
        return [layout.load(part) for layout, part in self._parts(group, block)]

    def store_kv(self, group: int, runs: list[NDArray[np.float32]], block: NDArray[np.uint8]) -> None:
        for (layout, part), kv in zip(self._parts(group, block), runs, strict=True):
            layout.store(kv, part)

    def _parts(self, group: int, block: NDArray[np.uint8]) -> Iterator[tuple[KvLayout, NDArray[np.uint8]]]:
        begin = 0
        for layout in self._layouts[group]:
            end = begin + layout.num_bytes
            yield layout, block[begin:end]
            begin = end

    def run(
        self,
        step: StepInputs,
        logits: NDArray[np.float32] | None,
        hidden: NDArray[np.float32] | None = None,
        layers: NDArray[np.float32] | None = None,
    ) -> None:
        if layers is not None:
            self._native.run(step, logits, hidden, layers)
        else:
            self._native.run(step, logits, hidden)

    def head(self, hidden: NDArray[np.float32], logits: NDArray[np.float32]) -> None:
        self._native.head(hidden, logits)

    def argmax(self, rows: NDArray[np.float32]) -> NDArray[np.int64]:
        best = np.empty(len(rows), np.int64)
        self._native.argmax(rows, best)
        return best

    @contextmanager
    def profile(self) -> Iterator[dict[str, float]]:
        """Times the steps run inside: seconds by kind of work, waiting included, filled in at the end.

        with executable.profile() as seconds:
            executable.run(step, logits)
        print(seconds)  # {"rms_norm prepare": 0.0001, "attn_q.weight attn_k.weight attn_v.weight": 0.0007, ...}
        """
        seconds: dict[str, float] = {}
        self._native.take_profile()
        self._native.profiling = True
        try:
            yield seconds
        finally:
            self._native.profiling = False
            for name, part in zip(part_names(self.plan), self._native.take_profile(), strict=True):
                seconds[name] = seconds.get(name, 0.0) + part
