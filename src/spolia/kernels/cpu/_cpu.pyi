"""The extension module, built from `src/`."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spolia.kernels.cpu.lowering import Plan
from spolia.kernels.program import KvDtype, StepInputs

class Executable:
    def __init__(self, plan: Plan, level: str, vocab_size: int, num_threads: int) -> None:
        """Packs the weights. `level` "" is the one that SPOLIA_ISA names, else the best."""
    @property
    def level(self) -> str: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def packed_bytes(self) -> int: ...
    profiling: bool
    def set_num_threads(self, num_threads: int) -> None: ...
    def block_bytes(self, group: int) -> int: ...
    def set_kv_dtype(self, kv_dtype: KvDtype) -> None: ...
    def bind_kv(self, pools: Sequence[NDArray[np.uint8]]) -> None: ...
    def run(
        self,
        step: StepInputs,
        logits: NDArray[np.float32] | None,
        hidden: NDArray[np.float32] | None = None,
        layers: NDArray[np.float32] | None = None,
    ) -> None: ...
    def head(self, hidden: NDArray[np.float32], logits: NDArray[np.float32]) -> None: ...
    def argmax(self, rows: NDArray[np.float32], best: NDArray[np.int64]) -> None:
        """Where each row's largest value is, into `best`."""
    def take_profile(self) -> list[float]:
        """Seconds in each stage's row part and heavy part since the last call, two a stage; only while `profiling`."""

def levels() -> list[str]:
    """Names of the ISA levels that this CPU has, best first."""

def row_format(level: str, weight_type: int, k: int, precise: bool) -> tuple[int, int]:
    """How a row of `k` values is prepared for weights of a GGML type: (kind, bytes). `precise`: with 16 bits, not 8."""

def machine_limits(level: str, num_threads: int) -> tuple[float, float, float]:
    """Bytes read from memory, int8 operations and float32 operations, each a second. Takes half of one."""

def raw_linear_packed_bytes(level: str, ggml_id: int, n: int, k: int) -> int:
    """Bytes of a packed matrix `[n, k]` of a GGML type; 0 where k is no whole number of the type's blocks."""
