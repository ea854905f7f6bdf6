"""Lowering: any program, in any order of emission, computes what it says; the usual ones in few stages."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from spolia.kernels import Program, ProgramBuilder, RopeSpec, Value
from spolia.kernels.cpu import CpuExecutable
from spolia.kernels.cpu.lowering import Domain, Plan, lower, part_names
from spolia.kernels.reference import ReferenceExecutable

from .programs import HIDDEN, PROGRAMS, VOCAB_SIZE, Session, Weights, inv_freq, llama, random_tokens


def plan_of(program: Program) -> Plan:
    return lower(program, "bf16", lambda weight_type, k, precise: (2 + precise, (k + k // 32 * 8 + 63) // 64 * 64))


def random_program(seed: int) -> Program:
    """Ops on random earlier values, all of one width, some read many times and some never."""
    rng = np.random.default_rng(seed)
    w, b = Weights("F32", seed), ProgramBuilder()
    values = [b.embed(w.matrix(VOCAB_SIZE, HIDDEN))]

    def any_value() -> Value:
        return values[max(0, len(values) - 1 - int(rng.exponential(2)))]

    def normed() -> Value:
        return b.rms_norm(any_value(), w.vector(16 if rng.random() < 0.3 else HIDDEN, mean=1), 1e-5)

    for _ in range(rng.integers(3, 25)):
        bias = w.vector(HIDDEN) if rng.random() < 0.3 else None
        match rng.integers(9):
            case 0 | 1:
                values.append(b.linear(any_value(), w.matrix(HIDDEN, HIDDEN), bias))
            case 2:
                values.append(normed())
            case 3:
                values.append(b.layer_norm(any_value(), w.vector(HIDDEN, mean=1), bias, 1e-5))
            case 4:
                values.append(b.add(any_value(), any_value()))
            case 5:
                values.append(b.glu(any_value(), b.linear(normed(), w.matrix(HIDDEN, HIDDEN), bias), "silu"))
            case 6:
                x = normed()
                gate, up = (b.linear(x, w.matrix(HIDDEN, HIDDEN), bias) for _ in range(2))
                values.append(b.glu(gate, up, "gelu_tanh"))
            case 7:
                values.append(b.rope(any_value(), 16, RopeSpec(inv_freq(16, 1e4 if rng.random() < 0.5 else 1e3))))
            case 8:
                q, k, v = (normed() for _ in range(3))
                window = 7 if rng.random() < 0.5 else None
                values.append(b.attend(q, k, v, num_heads=4, num_kv_heads=4, scale=0.25, window=window))
    return b.logits(normed(), w.matrix(VOCAB_SIZE, HIDDEN))


@pytest.mark.parametrize("seed", range(60))
def test_any_program_computes_what_the_reference_does(seed: int) -> None:
    program = random_program(seed)
    reference = Session(ReferenceExecutable(program, kv_dtype="f32"), program)
    session = Session(CpuExecutable(program, kv_dtype="f32", num_threads=2), program)
    tokens = random_tokens(37, seed)
    expected = reference.step([(reference.open(tokens), 37)])
    got = session.step([(session.open(tokens), 37)])
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)
    # And only the last row's, in two pieces, to the bit.
    sequence = session.open(tokens)
    session.step([(sequence, 20)], all_logits=False)
    assert session.step([(sequence, 17)], all_logits=False).tobytes() == got[-1:].tobytes()


@pytest.mark.parametrize("seed", range(60))
def test_buffers_of_one_stage_never_overlap(seed: int) -> None:
    plan = plan_of(random_program(seed))
    for stage in plan.stages:
        touched = {index for op in stage.row_ops for index in (op.out, op.a, op.b)}
        touched |= {index for matmul in stage.matmuls for index in (matmul.rows, matmul.out, matmul.residual)}
        for layer in (plan.layers[i] for i in (*stage.stores, *stage.attends, *stage.merges)):
            touched |= {layer.q, layer.k, layer.v} if layer in (plan.layers[i] for i in stage.stores) else {layer.out}
        buffers = [plan.buffers[index] for index in touched if index >= 0]
        for a, b in combinations(buffers, 2):
            apart = a.offset + a.row_bytes <= b.offset or b.offset + b.row_bytes <= a.offset
            assert apart or a.domain != b.domain
        for buffer in buffers:
            assert buffer.offset + buffer.row_bytes <= plan.arena_row_bytes[buffer.domain]


def test_a_llama_layer_is_five_stages() -> None:
    names = part_names(plan_of(llama("Q8_0")))
    assert len(names) == 2 * (2 * 5 + 1)
    rows, heavy = names[0::2], names[1::2]
    assert rows[5:10] == ["rms_norm prepare", "rope store", "merge gather prepare", "rms_norm prepare", "prepare"]
    assert [len(part.split()) for part in heavy[5:10]] == [3, 2, 1, 2, 1]


def test_products_of_one_value_run_side_by_side_however_they_are_emitted() -> None:
    """q's norm and rope come before k's product is even emitted."""
    w, b = Weights("Q8_0"), ProgramBuilder()
    x = b.embed(w.matrix(VOCAB_SIZE, HIDDEN))
    h = b.rms_norm(x, w.vector(HIDDEN, mean=1), 1e-5)
    parts = []
    for _ in range(3):
        part = b.linear(h, w.matrix(HIDDEN, HIDDEN))
        parts.append(b.rope(b.rms_norm(part, w.vector(16), 1e-5), 16, RopeSpec(inv_freq(16))))
    a = b.attend(*parts, num_heads=4, num_kv_heads=4, scale=1.0)
    plan = plan_of(b.logits(a, w.matrix(VOCAB_SIZE, HIDDEN)))
    assert [len(stage.matmuls) for stage in plan.stages] == [3, 0, 1]
    assert sum(op.kind == "prepare" for op in plan.stages[0].row_ops) == 1


def test_after_the_last_attention_only_wanted_rows_go_on() -> None:
    plan = plan_of(llama("Q8_0"))
    domains = [stage.domain for stage in plan.stages]
    last_attend = max(i for i, stage in enumerate(plan.stages) if stage.attends)
    assert domains == [Domain.STEP] * (last_attend + 1) + [Domain.LOGITS] * (len(domains) - last_attend - 1)


def test_a_sum_is_the_epilogue_of_its_product_and_a_glu_of_its_pair() -> None:
    plan = plan_of(llama("Q8_0"))
    kinds = [op.kind for stage in plan.stages for op in stage.row_ops]
    assert "add" not in kinds
    assert "glu" not in kinds
    assert sum(matmul.residual >= 0 for stage in plan.stages for matmul in stage.matmuls) == 4
    assert sum(matmul.gate >= 0 for stage in plan.stages for matmul in stage.matmuls) == 2


@pytest.mark.parametrize("name", PROGRAMS)
def test_buffers_do_not_grow_with_the_number_of_layers(name: str) -> None:
    """Arena bytes a row stay below what one layer's values take several times over."""
    assert sum(plan_of(PROGRAMS[name]("Q8_0")).arena_row_bytes) < 8 * 1024
