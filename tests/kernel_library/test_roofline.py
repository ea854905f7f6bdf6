"""What a step is said to cost is what its shapes say, and no limit is above what was measured here."""

from __future__ import annotations

import pytest

from spolia.kernels.cpu import CpuExecutable
from spolia.kernels.cpu.roofline import StepShape, measure_machine, measure_step

from .programs import HIDDEN, PROGRAMS, VOCAB_SIZE

HEAD = VOCAB_SIZE * HIDDEN
LAYERS = 3 * ((128 + 32 + 32) * HIDDEN + HIDDEN * 128 + 2 * 160 * HIDDEN + HIDDEN * 160)


def cost_of(weight_type: str, shape: StepShape):
    program = PROGRAMS["gemma"](weight_type)
    executable = CpuExecutable(program, kv_dtype="bf16", num_threads=2)
    return measure_step(executable, program, shape, seconds=0.0), executable


@pytest.mark.parametrize("num_sequences", [1, 5])
def test_products_are_counted_by_their_shapes(num_sequences):
    shape = StepShape("decode", num_sequences, 1, 40)
    cost, _ = cost_of("Q8_0", shape)
    # The head's rows have 16 bits: twice the products of 8.
    assert sum(part.num_int8_ops for part in cost.parts) == 2 * num_sequences * (LAYERS + 2 * HEAD)
    cost, _ = cost_of("F32", shape)
    products = [part for part in cost.parts if "attend" not in part.name]
    assert sum(part.num_float_ops for part in products) == 2 * num_sequences * (LAYERS + HEAD)


def test_attention_reads_what_its_windows_reach():
    cost, _ = cost_of("Q8_0", StepShape("", num_sequences=2, num_rows=3, context=40))
    attention = {part.name: part for part in cost.parts if part.name.startswith("attend")}
    token_bytes = 2 * 32 * 2  # K and V, one head of 32, bf16
    token_ops = 4 * 4 * 32  # two products, a multiplication and an addition each, 4 heads of 32
    full, windowed = attention["attend window=0"], attention["attend window=21"]
    assert full.num_bytes == 2 * 43 * token_bytes
    assert full.num_float_ops == 2 * (41 + 42 + 43) * token_ops
    assert windowed.num_bytes == 2 * (2 * 23 * token_bytes), "three rows reach 21 tokens each, 23 together; two layers"
    assert windowed.num_float_ops == 2 * (2 * 3 * 21 * token_ops)


def test_limits_are_measured():
    cost, executable = cost_of("Q4_0", StepShape("", 1, 1, 0))
    machine = measure_machine(executable)
    assert machine.num_threads == 2
    assert min(machine.bytes_per_s, machine.int8_ops_per_s, machine.float_ops_per_s) > 1e8
    assert 0 < cost.least_seconds(machine) < 1e-3
    assert cost.num_bytes == sum(part.num_bytes for part in cost.parts) > HEAD / 2
