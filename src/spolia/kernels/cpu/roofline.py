"""How near a step comes to what the machine can do: per kind of work, its time beside the least that it could take.

A product reads its weights once and multiplies them with every row; attention reads the keys and values of each
sequence. Neither can be faster than memory delivers those bytes, nor than the cores can multiply: the roofline of
Williams, Waterman and Patterson (CACM 2009), with both limits measured here and now. What is small beside these, such
as norms, rotations and the rounding of rows, has a time and no limit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spolia.kernels import allocate_pool, quants
from spolia.kernels.cpu import CpuExecutable, _cpu
from spolia.kernels.cpu.lowering import Domain, Layer, Plan, Stage, part_names
from spolia.kernels.program import BLOCK_SIZE, Program, StepInputs

__all__ = ["Machine", "PartCost", "StepCost", "StepShape", "measure_machine", "measure_step"]

_KV_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "int8": 1}
_PREFILL_ROWS = 256
_ROWS_OF_16_BITS = 3  # RowKind::Q16 of linear.h: to the cores, each is two rows of 8 bits


@dataclass(frozen=True, slots=True)
class Machine:
    """Limits of all threads together, a second; float operations are float32's."""

    num_threads: int
    bytes_per_s: float
    int8_ops_per_s: float
    float_ops_per_s: float


@dataclass(frozen=True, slots=True)
class StepShape:
    """`num_rows` new tokens of each of `num_sequences` that have `context` tokens already, shared with nobody."""

    name: str
    num_sequences: int
    num_rows: int
    context: int


@dataclass(slots=True)
class PartCost:
    """One kind of work in a step, in all layers that are alike.

    Attributes:
        seconds: measured, the wait for the slowest thread included.
        num_bytes: of weights, or of keys and values, each once.
        num_int8_ops, num_float_ops: additions and multiplications.
    """

    name: str
    seconds: float = 0.0
    num_bytes: int = 0
    num_int8_ops: int = 0
    num_float_ops: int = 0

    def least_seconds(self, machine: Machine) -> float:
        """The longer of what memory and what the cores need."""
        compute = self.num_int8_ops / machine.int8_ops_per_s + self.num_float_ops / machine.float_ops_per_s
        return max(self.num_bytes / machine.bytes_per_s, compute)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Attributes:
    seconds: of a whole step: the median of the tries, without profiling.
    parts: longest first.
    """

    shape: StepShape
    seconds: float
    parts: tuple[PartCost, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def least_seconds(self, machine: Machine) -> float:
        return sum(part.least_seconds(machine) for part in self.parts)


def measure_machine(executable: CpuExecutable) -> Machine:
    """What this machine's memory and cores do at most, on the executable's threads and ISA level. Half a second."""
    return Machine(executable.num_threads, *_cpu.machine_limits(executable.level, executable.num_threads))


def measure_step(executable: CpuExecutable, program: Program, shape: StepShape, *, seconds: float = 1.0) -> StepCost:
    """Time steps of `shape` for about so long. Binds pools of its own: an engine's executable must not be used."""
    runner = _Steps(executable, program, shape)
    times: list[float] = []
    deadline_s = time.perf_counter() + seconds
    while time.perf_counter() < deadline_s or len(times) < 3:
        start_s = time.perf_counter()
        runner.run()
        times.append(time.perf_counter() - start_s)
    num_profiled = min(len(times), 20)
    with executable.profile() as profile:
        for _ in range(num_profiled):
            runner.run()
    parts = {name: PartCost(name, total / num_profiled) for name, total in profile.items()}
    _count(parts, executable, shape)
    ordered = sorted(parts.values(), key=lambda part: -part.seconds)
    return StepCost(shape, sorted(times)[len(times) // 2], tuple(ordered))


class _Steps:
    """One step of a shape, again and again, on random tokens."""

    def __init__(self, executable: CpuExecutable, program: Program, shape: StepShape) -> None:
        num_blocks = -(-(shape.context + shape.num_rows) // BLOCK_SIZE)
        num_groups = len(program.cache_groups)
        pools = [
            allocate_pool(num_blocks * shape.num_sequences, executable.block_bytes(group))
            for group in range(num_groups)
        ]
        executable.bind_kv(pools)
        rng = np.random.default_rng(0)
        order = rng.permutation(num_blocks * shape.num_sequences).astype(np.int32)
        self._executable = executable
        self._vocab_size = program.vocab_size
        self._shape = shape
        self._rng = rng
        self._tables = (order.reshape(shape.num_sequences, num_blocks),) * num_groups
        self._logits: NDArray[np.float32] = np.empty((shape.num_sequences, program.vocab_size), np.float32)
        for start in range(0, shape.context, _PREFILL_ROWS):
            self._step(start, min(_PREFILL_ROWS, shape.context - start))
        self._inputs = self._inputs_of(shape.context, shape.num_rows)

    def run(self) -> None:
        self._executable.run(self._inputs, self._logits)

    def _step(self, start: int, num_rows: int) -> None:
        self._executable.run(self._inputs_of(start, num_rows), self._logits)

    def _inputs_of(self, start: int, num_rows: int) -> StepInputs:
        total = num_rows * self._shape.num_sequences
        return StepInputs(
            token_ids=self._rng.integers(0, self._vocab_size, total, dtype=np.int32),
            positions=np.tile(np.arange(start, start + num_rows, dtype=np.int32), self._shape.num_sequences),
            row_starts=np.arange(0, total + 1, num_rows, dtype=np.int32),
            block_tables=self._tables,
            logit_rows=np.arange(num_rows - 1, total, num_rows, dtype=np.int32),
        )


def _count(parts: dict[str, PartCost], executable: CpuExecutable, shape: StepShape) -> None:
    """Add bytes and operations of every stage's heavy part to the part of its name."""
    plan = executable.plan
    heavy_names: Sequence[str] = part_names(plan)[1::2]
    for stage, name in zip(plan.stages, heavy_names, strict=True):
        part = parts[name]
        _count_products(part, plan, stage, executable.level, shape)
        for index in stage.attends:
            _count_attention(part, plan.layers[index], plan.kv_dtype, shape)


def _count_products(part: PartCost, plan: Plan, stage: Stage, level: str, shape: StepShape) -> None:
    num_rows = shape.num_sequences * (1 if stage.domain is Domain.LOGITS else shape.num_rows)
    for matmul in stage.matmuls:
        for index in (matmul.matrix, matmul.gate):
            if index < 0:
                continue
            weight = plan.matrices[index]
            n, k = weight.shape
            part.num_bytes += _cpu.raw_linear_packed_bytes(level, quants.TYPES[weight.type].ggml_id, n, k)
            num_ops = 2 * num_rows * n * k
            if weight.type in ("F32", "F16", "BF16"):
                part.num_float_ops += num_ops
            else:
                part.num_int8_ops += num_ops * (2 if matmul.row_kind == _ROWS_OF_16_BITS else 1)


def _count_attention(part: PartCost, layer: Layer, kv_dtype: str, shape: StepShape) -> None:
    lengths = np.arange(shape.context + 1, shape.context + shape.num_rows + 1)
    seen = np.minimum(lengths, layer.window) if layer.window else lengths
    reach = int(lengths[-1]) - (int(lengths[0]) - int(seen[0]))  # tokens that some row attends to
    kv_width = 2 * layer.num_kv_heads * layer.head_dim
    part.num_bytes += shape.num_sequences * reach * kv_width * _KV_BYTES[kv_dtype]
    part.num_float_ops += shape.num_sequences * int(seen.sum()) * 4 * layer.num_heads * layer.head_dim
