"""The CPU executable, at every ISA level: right against `reference`, and a row's bits its own (promise 1)."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from spolia.kernels import BACKENDS, BlockCopy, ProgramBuilder, StepInputs, get_backend
from spolia.kernels.cpu import CpuExecutable, levels
from spolia.kernels.program import KvDtype, Logits
from spolia.kernels.quants import dequantize
from spolia.kernels.reference import ReferenceExecutable

from .programs import HIDDEN, PROGRAMS, VOCAB_SIZE, Session, Weights, random_tokens

LEVELS = levels()
KV_DTYPES: tuple[KvDtype, ...] = ("f32", "f16", "bf16", "int8")
NUM_TOKENS = 70  # five blocks, three windows of gemma's


def cpu(
    name: str, weight_type: str = "Q8_0", *, level: str | None = None, kv_dtype: KvDtype = "bf16", num_threads: int = 2
) -> Session:
    program = PROGRAMS[name](weight_type)
    executable = CpuExecutable(program, kv_dtype=kv_dtype, num_threads=num_threads, level=level)
    return Session(executable, program)


def cold(session: Session, tokens: np.ndarray) -> np.ndarray:
    """Logits of every token, computed alone and in one step."""
    return session.step([(session.open(tokens), len(tokens))])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("weight_type", ["F32", "BF16", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_logits_are_the_references(level: str, name: str, weight_type: str) -> None:
    program = PROGRAMS[name](weight_type)
    reference = Session(ReferenceExecutable(program, kv_dtype="f32", activation_bits=8), program)
    expected = cold(reference, random_tokens(NUM_TOKENS))
    got = cold(cpu(name, weight_type, level=level, kv_dtype="f32"), random_tokens(NUM_TOKENS))
    # Rounding activations to 8 bits (or bfloat16) turns a last-bit difference into a whole step here and there.
    tolerance = 1e-5 if weight_type == "F32" else 0.02
    assert np.abs(got - expected).max() < tolerance * np.abs(expected).max()
    assert np.abs(got - expected).mean() < tolerance / 10 * np.abs(expected).max()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_narrow_kv_rounds_and_no_more(level: str, kv_dtype: KvDtype, name: str) -> None:
    program = PROGRAMS[name]("F32")
    reference = Session(ReferenceExecutable(program, kv_dtype=kv_dtype), program)
    expected = cold(reference, random_tokens(NUM_TOKENS))
    got = cold(cpu(name, "F32", level=level, kv_dtype=kv_dtype), random_tokens(NUM_TOKENS))
    tolerance = {"f32": 1e-5, "f16": 1e-3, "bf16": 1e-2, "int8": 1e-2}[kv_dtype]
    assert np.abs(got - expected).max() < tolerance * np.abs(expected).max()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("weight_type", ["Q4_1", "BF16"])
def test_a_prompt_split_anywhere_gives_the_same_bits(
    level: str, kv_dtype: KvDtype, name: str, weight_type: str
) -> None:
    tokens = random_tokens(NUM_TOKENS)
    session = cpu(name, weight_type, level=level, kv_dtype=kv_dtype)
    expected = cold(session, tokens)
    for split in range(1, NUM_TOKENS):
        sequence = session.open(tokens)
        first = session.step([(sequence, split)])
        second = session.step([(sequence, NUM_TOKENS - split)])
        assert np.concatenate([first, second]).tobytes() == expected.tobytes(), f"split at {split}"
        for free, blocks in zip(session.free, sequence.blocks, strict=True):
            free.extend(blocks)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_row_among_strangers_has_the_bits_it_has_alone(level: str, name: str) -> None:
    """Random batches of prefill pieces and single tokens, on one, two and three threads."""
    rng = np.random.default_rng(7)
    session = cpu(name, "Q4_0", level=level)
    prompts = [random_tokens(int(rng.integers(1, NUM_TOKENS)), seed=i) for i in range(12)]
    expected = [cold(session, tokens) for tokens in prompts]
    sequences = [session.open(tokens) for tokens in prompts]
    results: list[list[np.ndarray]] = [[] for _ in prompts]
    while open_ids := [i for i, s in enumerate(sequences) if s.num_computed < len(s.tokens)]:
        session.executable.set_num_threads(int(rng.integers(1, 4)))
        chosen = rng.permutation(open_ids)[: rng.integers(1, len(open_ids) + 1)]
        counts = [
            int(rng.choice([1, rng.integers(1, len(sequences[i].tokens) - sequences[i].num_computed + 1)]))
            for i in chosen
        ]
        logits = session.step([(sequences[i], count) for i, count in zip(chosen, counts, strict=True)])
        for i, part in zip(chosen, np.split(logits, np.cumsum(counts)[:-1]), strict=True):
            results[i].append(part)
    for parts, alone in zip(results, expected, strict=True):
        assert np.concatenate(parts).tobytes() == alone.tobytes()


@pytest.mark.parametrize("name", PROGRAMS)
def test_only_wanted_logits_are_written_and_they_are_the_same_bits(name: str) -> None:
    session = cpu(name)
    tokens = random_tokens(NUM_TOKENS)
    expected = cold(session, tokens)
    for wanted in ([], [0], [NUM_TOKENS - 1], [0, 1, 17, 40, 69]):
        inputs = replace(session.inputs([(session.open(tokens), NUM_TOKENS)]), logit_rows=np.array(wanted, np.int32))
        logits = np.full((len(wanted), VOCAB_SIZE), np.nan, np.float32)
        session.executable.run(inputs, logits)
        assert logits.tobytes() == expected[wanted].tobytes()


@pytest.mark.parametrize("name", PROGRAMS)
def test_hidden_states_are_what_the_head_reads_and_cost_the_logits_no_bit(name: str) -> None:
    program = PROGRAMS[name]("F32")
    head = program.ops[-1]
    assert isinstance(head, Logits)
    tokens, wanted = random_tokens(NUM_TOKENS), np.array([0, 17, NUM_TOKENS - 1], np.int32)
    results = []
    for backend in ("cpu", "reference"):
        session = Session(get_backend(backend)(program, kv_dtype="f32", num_threads=2), program)
        expected = cold(session, tokens)[wanted]
        inputs = replace(session.inputs([(session.open(tokens), NUM_TOKENS)]), logit_rows=wanted)
        hidden, alone = np.full((2, len(wanted), session.executable.hidden_size), np.nan, np.float32)
        logits = np.full((len(wanted), VOCAB_SIZE), np.nan, np.float32)
        session.executable.run(inputs, logits, hidden)
        session.executable.run(inputs, None, alone)
        if backend == "cpu":  # numpy may add in another order for fewer rows
            assert logits.tobytes() == expected.tobytes()
            assert alone.tobytes() == hidden.tobytes()
        np.testing.assert_allclose(alone, hidden, rtol=1e-4, atol=1e-4)
        product = hidden @ dequantize(head.weight).T + (0 if head.bias is None else dequantize(head.bias))
        product *= np.float32(head.scale)
        np.testing.assert_allclose(
            product if head.softcap is None else head.softcap * np.tanh(product / head.softcap), logits, atol=1e-3
        )
        results.append(hidden)
    np.testing.assert_allclose(*results, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_layers_read_is_the_references_and_costs_the_logits_no_bit(level: str, name: str) -> None:
    """Also for a few wanted rows of a step with several sequences; the head alone is what it is in a step."""
    tokens, wanted = random_tokens(NUM_TOKENS), np.array([3, 17, 2 * NUM_TOKENS - 1], np.int32)
    program = PROGRAMS[name]("F32")
    results = []
    for executable in (
        CpuExecutable(program, kv_dtype="f32", num_threads=2, level=level),
        ReferenceExecutable(program, kv_dtype="f32"),
    ):
        session = Session(executable, program)
        expected = session.step([(session.open(tokens), NUM_TOKENS), (session.open(tokens[::-1]), NUM_TOKENS)])[wanted]
        parts = [(session.open(tokens), NUM_TOKENS), (session.open(tokens[::-1]), NUM_TOKENS)]
        inputs = replace(session.inputs(parts), logit_rows=wanted)
        layers = np.full((executable.num_layers, len(wanted), HIDDEN), np.nan, np.float32)
        hidden = np.full((len(wanted), HIDDEN), np.nan, np.float32)
        logits, alone = np.full((2, len(wanted), VOCAB_SIZE), np.nan, np.float32)
        executable.run(inputs, logits, hidden, layers)
        executable.head(hidden, alone)
        if isinstance(executable, CpuExecutable):
            assert logits.tobytes() == expected.tobytes()
            assert alone.tobytes() == logits.tobytes()
            assert session.step(parts, all_logits=True)[wanted].tobytes() == expected.tobytes()
        results.append(layers)
    np.testing.assert_allclose(*results, rtol=1e-3, atol=1e-3)
    assert len(results[0]) == {"llama": 2, "gemma": 3, "parallel": 1}[name]
    table = program.ops[0].table  # type: ignore[union-attr]
    scale = program.ops[0].scale  # type: ignore[union-attr]
    ids = np.concatenate([tokens, tokens[::-1]])[wanted]
    np.testing.assert_allclose(results[0][0], dequantize(table)[ids] * np.float32(scale), rtol=1e-5)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_copied_block_continues_as_the_original(name: str, backend: str) -> None:
    program = PROGRAMS[name]("F32")
    session = Session(get_backend(backend)(program, kv_dtype="bf16", num_threads=2), program)
    tokens = random_tokens(40)
    original = session.open(tokens)
    session.step([(original, 21)])
    expected = session.step([(original, 19)])
    # The copy shares block 0 with the original and owns a copy of the first five tokens of block 1.
    copy = session.open(tokens)
    copies = []
    for group in range(len(session.groups)):
        copies.append(BlockCopy(group, int(original.blocks[group][1]), int(copy.blocks[group][1]), 5))
        copy.blocks[group][0] = original.blocks[group][0]
    copy.num_computed = 21
    inputs = replace(session.inputs([(copy, 19)]), copies=tuple(copies))
    logits = np.empty_like(expected)
    session.executable.run(inputs, logits)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=0 if backend == "cpu" else 1e-4)


def test_a_step_without_rows_only_copies() -> None:
    session = cpu("llama", num_threads=3)
    tokens = random_tokens(20)
    first, second = session.open(tokens), session.open(tokens)
    expected = session.step([(first, 20)])[12:]
    nothing, tables = np.array([], np.int32), (np.empty((0, 1), np.int32),)
    copies = (BlockCopy(0, int(first.blocks[0][0]), int(second.blocks[0][0]), 12),)
    step = StepInputs(nothing, nothing, np.array([0], np.int32), tables, nothing, copies)
    session.executable.run(step, np.empty((0, VOCAB_SIZE), np.float32))
    second.num_computed = 12
    assert session.step([(second, 8)]).tobytes() == expected.tobytes()


def test_a_program_without_attention_needs_no_pools() -> None:
    w, b = Weights("F32"), ProgramBuilder()
    x = b.embed(w.matrix(VOCAB_SIZE, HIDDEN))
    program = b.logits(b.add(x, b.linear(x, w.matrix(HIDDEN, HIDDEN))), w.matrix(VOCAB_SIZE, HIDDEN))
    ids = [np.array(values, np.int32) for values in ([3, 5], [0, 1], [0, 2], [1])]
    inputs = StepInputs(ids[0], ids[1], ids[2], (), ids[3])
    logits, expected = np.empty((2, 1, VOCAB_SIZE), np.float32)
    CpuExecutable(program, kv_dtype="bf16", num_threads=2).run(inputs, logits)
    ReferenceExecutable(program, kv_dtype="bf16").run(inputs, expected)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


def test_one_executable_may_be_run_from_one_thread_after_another() -> None:
    session = cpu("llama")
    tokens = random_tokens(33)
    expected = cold(session, tokens)
    results: list[np.ndarray] = []
    for _ in range(3):
        worker = threading.Thread(target=lambda: results.append(cold(session, tokens)))
        worker.start()
        worker.join()
    assert all(result.tobytes() == expected.tobytes() for result in results)
    assert len(results) == 3


def test_the_callers_float_mode_changes_nothing() -> None:
    """torch.set_flush_denormal sets the calling thread's mode: rows on other threads would differ from its own."""
    import torch  # here, so that the other tests run where torch is not: scripts/test-arm

    w, b = Weights("F32"), ProgramBuilder()
    x = b.scale(b.scale(b.embed(w.matrix(VOCAB_SIZE, HIDDEN)), 1e-25), 1e-14)  # subnormal
    x = b.scale(b.scale(x, 1e25), 1e14)
    q, k, v = (b.linear(x, w.matrix(HIDDEN, HIDDEN)) for _ in range(3))
    x = b.attend(q, k, v, num_heads=4, num_kv_heads=4, scale=0.25)
    program = b.logits(b.add(x, x), w.matrix(VOCAB_SIZE, HIDDEN))
    session = Session(CpuExecutable(program, kv_dtype="f32", num_threads=2), program)
    before = cold(session, random_tokens(40))
    assert torch.set_flush_denormal(True)
    try:
        during = cold(session, random_tokens(40))
    finally:
        torch.set_flush_denormal(False)
    assert before.tobytes() == during.tobytes()
    assert torch.tensor(1e-39) * 1 != 0  # and the caller's mode is as it was


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("token_ids", [0, 1, VOCAB_SIZE], r"token_ids\[2\] = 77 is not in \[0, 77\)"),
        ("token_ids", [0, -1, 2], r"token_ids\[1\] = -1"),
        ("token_ids", [0, 1], r"positions: shape \[3\], expected \[2\]"),
        ("positions", [0, 1, 3], r"positions\[2\] = 3 does not follow 1"),
        ("positions", [-1, 0, 1], r"positions\[0\] = -1 is negative"),
        ("positions", [78, 79, 80], r"has 5 blocks a sequence; position 80 needs more"),
        ("row_starts", [0, 2], "row_starts go from 0 to 2"),
        ("row_starts", [], "row_starts: empty"),
        ("logit_rows", [0, 3], r"logit_rows\[1\] = 3 is not in \[0, 3\)"),
        ("logit_rows", [1, 1], r"logit_rows\[1\] = 1 is not above"),
    ],
)
def test_inputs_out_of_range_are_refused_by_name(field: str, value: list[int], message: str) -> None:
    session = cpu("llama")
    inputs = replace(
        session.inputs([(session.open(random_tokens(NUM_TOKENS)), 3)]), **{field: np.array(value, np.int32)}
    )
    pools = [pool.copy() for pool in session.pools]
    with pytest.raises(ValueError, match=message):
        session.executable.run(inputs, np.empty((len(inputs.logit_rows), VOCAB_SIZE), np.float32))
    assert all((a == b).all() for a, b in zip(pools, session.pools, strict=True))


def test_arrays_of_the_wrong_kind_are_refused_by_name() -> None:
    session = cpu("gemma")
    sequence = session.open(random_tokens(NUM_TOKENS))
    good = session.inputs([(sequence, 3)])
    empty = replace(good, block_tables=tuple(np.repeat(table, 2, axis=0) for table in good.block_tables))
    logits = np.empty((3, VOCAB_SIZE), np.float32)
    for bad, message in [
        (replace(good, token_ids=good.token_ids.astype(np.int64)), "token_ids: wrong dtype"),
        (replace(good, positions=np.zeros(6, np.int32)[::2]), "positions: not C-contiguous"),
        (replace(empty, row_starts=np.array([0, 0, 3], np.int32)), r"row_starts\[1\] = 0 after 0"),
        (replace(good, block_tables=good.block_tables[:1]), "1 block tables for 2 cache groups"),
        (replace(good, block_tables=tuple(t - 1000 for t in good.block_tables)), r"block_tables\[0\]\[0\]\[0\] = -"),
        (replace(good, block_tables=tuple(t + 200 for t in good.block_tables)), r"is not in \[0, 200\)"),
        (replace(good, copies=(BlockCopy(0, 0, 200, 1),)), r"copies.dst\[0\] = 200 is not in \[0, 200\)"),
        (replace(good, copies=(BlockCopy(2, 0, 0, 1),)), r"copies.group\[0\] = 2"),
        (replace(good, copies=(BlockCopy(0, 0, 1, 17),)), r"copies.num_tokens\[0\] = 17"),
    ]:
        with pytest.raises(ValueError, match=message):
            session.executable.run(bad, logits)
    with pytest.raises(ValueError, match=r"logits: shape \[2, 77\], expected \[3, 77\]"):
        session.executable.run(good, logits[:2])
    logits.flags.writeable = False
    with pytest.raises(ValueError, match="logits: not a writable numpy array"):
        session.executable.run(good, logits)


def test_pools_that_do_not_fit_are_refused() -> None:
    session = cpu("gemma")
    with pytest.raises(ValueError, match="fewer pools"):
        session.executable.bind_kv(session.pools[:1])
    with pytest.raises(ValueError, match="more pools"):
        session.executable.bind_kv([*session.pools, session.pools[0]])
    with pytest.raises(ValueError, match=r"pools\[1\]: shape"):
        session.executable.bind_kv([session.pools[0], session.pools[1][:, :64].copy()])


def test_running_before_pools_are_bound_is_refused() -> None:
    session = cpu("llama")
    program = PROGRAMS["llama"]("Q8_0")
    fresh = CpuExecutable(program, kv_dtype="bf16", num_threads=1)
    with pytest.raises(ValueError, match="bind_kv"):
        fresh.run(session.inputs([(session.open([1, 2]), 2)]), np.empty((2, VOCAB_SIZE), np.float32))


def test_a_level_that_the_cpu_lacks_is_refused_with_those_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"level riscv: this CPU has .*generic"):
        cpu("llama", level="riscv")
    monkeypatch.setenv("SPOLIA_ISA", "mips")
    with pytest.raises(ValueError, match=r"SPOLIA_ISA=mips: this CPU has .*generic"):
        cpu("llama")


def test_the_environment_forces_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOLIA_ISA", "generic")
    executable = CpuExecutable(PROGRAMS["llama"]("Q8_0"), kv_dtype="bf16", num_threads=1)
    assert executable.level == "generic"
    assert "generic" in executable.numerics


@pytest.mark.parametrize("num_threads", [0, -1])
def test_fewer_threads_than_one_are_refused(num_threads: int) -> None:
    with pytest.raises(ValueError, match=f"num_threads={num_threads}: at least 1"):
        cpu("llama", num_threads=num_threads)
    session = cpu("llama")
    with pytest.raises(ValueError, match=f"num_threads={num_threads}"):
        session.executable.set_num_threads(num_threads)
    assert cold(session, random_tokens(3)).shape == (3, VOCAB_SIZE)


def test_more_threads_than_the_system_starts_are_refused() -> None:
    """In a process of its own, whose address space has room for the stacks of a few only."""
    code = f"""
import resource, sys
sys.path[:0] = {sys.path!r}
from kernel_library.programs import PROGRAMS
from spolia.kernels.cpu import CpuExecutable
program = PROGRAMS["llama"]("Q8_0")
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + (256 << 20),) * 2)
try:
    CpuExecutable(program, kv_dtype="bf16", num_threads=10_000)
except ValueError as error:
    print(error)
print(CpuExecutable(program, kv_dtype="bf16", num_threads=2).num_threads)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert re.fullmatch(r"num_threads=10000: the system starts no more than \d+ \(.+\)\n2\n", result.stdout)


def test_a_profile_accounts_for_every_part() -> None:
    session = cpu("gemma")
    assert isinstance(session.executable, CpuExecutable)
    with session.executable.profile() as seconds:
        cold(session, random_tokens(NUM_TOKENS))
    assert all(part > 0 for part in seconds.values())
    assert {"attend window=0", "attend window=21"} <= seconds.keys()


def test_backends_are_found_by_name() -> None:
    assert set(BACKENDS) == {"cpu", "reference"}
    with pytest.raises(ValueError, match="backend 'cuda': there are cpu, reference"):
        get_backend("cuda")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("width", [1, 3, 16, 100, 4_096, 5_000, 49_152])
def test_argmax_is_numpys(level: str, width: int) -> None:
    executable = CpuExecutable(PROGRAMS["llama"]("F32"), kv_dtype="f32", num_threads=2, level=level)
    rng = np.random.default_rng(width)
    rows = rng.standard_normal((9, width)).astype(np.float32)
    rows[1] = 2.5  # all equal: the first
    rows[2] = -np.inf
    rows[3, width // 2] = np.nan
    rows[4, [0, width - 1]] = np.nan
    rows[5, width // 3] = np.inf
    rows[6] = np.round(rows[6])  # many equals
    rows[7] = np.where(rows[7] > 0, -0.0, 0.0)
    assert executable.argmax(rows).tolist() == rows.argmax(axis=1).tolist()
