"""Promise 1, on the real kernels: no schedule changes a bit of any answer.

Each request's logits, at every token it generates, must equal to the bit those of the same request run alone, cold and
in one piece. The schedules submit requests with shared prefixes at random moments, change the budget (so prompts are
cut anywhere) and the number of threads, speculate, abort, clear the cache, and have pools so small that they preempt
and evict; some offload to memory or a folder, restore from it, also after a restart, or compute a prompt's front while
its end is read.
2,000 schedules in all, over the ISA levels that the machine has.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from spolia.engine import Admission, EngineCore, RequestOutput, SamplingParams
from spolia.engine.drafter import make_drafter
from spolia.engine.storage import build_cache
from spolia.generation import Depth, RowSampling, Sampler, Samples
from spolia.kernels import BLOCK_SIZE, Executable, KvDtype, allocate_pool
from spolia.kernels.cpu import CpuExecutable, levels
from spolia.kvcache import GroupSpec, namespace_key
from spolia.tiers import FetchPolicy, FolderBackend, HostBackend, Tier, TierUse

from .tiny import VOCAB_SIZE, tiny_program
from .toy import ByteTokenizer, FakeClock

NUM_SCHEDULES, MIN_SCHEDULES = 2_000, 125
NUM_REQUESTS = 60
MAX_CONTEXT = 144
MAX_BATCH_TOKENS = 128
MAX_SEQUENCES = 6
FOLDER_BYTES = 300_000  # some dozens of blocks: it evicts, too
HOST_BYTES = 100_000

# Weights, KV and windows of each layer: all paths through the kernels and the cache that matter here.
VARIANTS: dict[str, tuple[str, KvDtype, tuple[int | None, ...]]] = {
    "full attention": ("Q4_1", "bf16", (None, None)),
    "windows and full": ("Q8_0", "f16", (20, None, 20)),
    "windows only": ("BF16", "f32", (37, 37)),
    "int8": ("Q8_0", "int8", (None, 20)),
}


class CheckedSampler(Sampler):
    """Compares each row of logits with the one expected at its seed (one a request) and position, or records it."""

    def __init__(self, expected: dict[tuple[int, int], bytes], *, record: bool = False) -> None:
        super().__init__(VOCAB_SIZE)
        self.expected = expected
        self.record = record

    def sample(self, logits: NDArray[np.float32], rows: Sequence[RowSampling]) -> Samples:
        for row_logits, row in zip(logits, rows, strict=True):
            if self.record:
                self.expected[row.seed, row.position] = row_logits.tobytes()
            else:
                assert row_logits.tobytes() == self.expected[row.seed, row.position], f"at position {row.position}"
        return super().sample(logits, rows)


@dataclass
class Setting:
    """A model at one ISA level, the requests that schedules draw from, and what each answers alone."""

    executable: Executable
    windows: tuple[int | None, ...]
    requests: list[tuple[list[int], SamplingParams]]
    expected: dict[tuple[int, int], bytes]
    answers: list[RequestOutput]

    def engine(
        self,
        num_blocks: int,
        sampler: Sampler,
        tiers: Sequence[TierUse] = (),
        speculation: str = "off",
        fetch: FetchPolicy = "wait",
    ) -> tuple[Admission, EngineCore]:
        """An engine with an empty cache, on pools that hold NaN wherever nothing was written."""
        pools = [allocate_pool(num_blocks, self.executable.block_bytes(g)) for g in range(len(self.windows))]
        for pool in pools:
            pool[:] = 0xFF
        self.executable.bind_kv(pools)
        clock = FakeClock()
        groups = [GroupSpec(num_blocks, window) for window in self.windows]
        kv, tiering = build_cache(groups, pools, tiers, layout=self.executable.numerics, clock=clock, fetch=fetch)
        core = EngineCore(
            self.executable,
            kv,
            token_bytes=ByteTokenizer().token_bytes,
            max_batch_tokens=MAX_BATCH_TOKENS,
            max_sequences=MAX_SEQUENCES,
            max_context=MAX_CONTEXT,
            clock=clock,
            sampler=sampler,
            tiering=tiering,
            drafter=make_drafter(speculation, kv),
        )
        admission = Admission(
            tokenizer=ByteTokenizer(),
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(),
            max_context=MAX_CONTEXT,
            fitting_tokens=MAX_CONTEXT,
            max_sequences=8,
            namespace=lambda salt: namespace_key(salt=salt),
            clock=clock,
            depth=Depth(self.executable.num_layers, has_tied_head=False),
        )
        return admission, core


@cache
def setting(level: str, variant: str) -> Setting:
    weight_type, kv_dtype, windows = VARIANTS[variant]
    program = tiny_program(weight_type, windows)
    executable = CpuExecutable(program, kv_dtype=kv_dtype, num_threads=1, level=level)
    rng = random.Random(variant)
    trunks = [[rng.randrange(VOCAB_SIZE) for _ in range(120)] for _ in range(4)]
    requests = []
    for seed in range(NUM_REQUESTS):
        # Long prompts with short answers, and the other way round, which is what outgrows a pool.
        most_prompt, answers = (110, range(1, 8)) if seed % 2 else (30, range(20, 60))
        prompt = rng.choice(trunks)[: rng.randrange(1, most_prompt)] + [
            rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(10))
        ]
        options = {"temperature": 0.0} if seed % 3 else {"temperature": 1.2, "top_k": 40}
        if seed % 5 == 4:
            options["dola_layers"] = "low"
        requests.append((prompt, SamplingParams(max_tokens=rng.choice(answers), seed=seed, **options)))
    made = Setting(executable, tuple(group.window for group in program.cache_groups), requests, {}, [])
    for prompt, params in requests:
        admission, core = made.engine(-(-MAX_CONTEXT // 16), CheckedSampler(made.expected, record=True))
        core.submit(admission.admit(prompt, params))
        made.answers += [delta.output for _ in range(params.max_tokens) for _, delta in core.step() if delta.output]
    return made


def let_ends_meet(core: EngineCore, happened: Counter[str]) -> None:
    """Believe reading to take five times as long as computing, and compute little a step; count what met."""
    tiering = core.tiering
    for _ in range(50):
        tiering.note_step(1_000, 1.0)
    tiering.note_step = lambda *_: None
    for tier in tiering.tiers.mover.tiers:
        tier._read_bytes_per_s = 1_000 * sum(tiering.blocks.usual.payload_bytes) / BLOCK_SIZE / 5
        tier._note_read = lambda *_: None
    tiering.tiers.mover._run_blocks = 1
    core._scheduler.max_batch_tokens = 2 * BLOCK_SIZE
    take_met = tiering.take_met

    def counted() -> Counter[str]:
        met = take_met()
        happened["met tokens"] += met.total()
        return met

    tiering.take_met = counted


def run_schedule(
    made: Setting, rng: random.Random, tiers: Sequence[TierUse] = (), *, ends_meet: bool = False
) -> Counter[str]:
    """One schedule; counts what happened in it. Tiers that an earlier schedule filled make it a restart."""
    sampler = CheckedSampler(made.expected)
    num_blocks, speculation = rng.choice([9, 10, 12, 30]), rng.choice(["off", "auto"])
    admission, core = made.engine(num_blocks, sampler, tiers, speculation, "planned" if ends_meet else "wait")
    waiting = [rng.randrange(NUM_REQUESTS) for _ in range(rng.randrange(2, 8))]
    waiting += waiting[:2]  # what is asked for again is what speculation foresees
    submitted: dict[str, int] = {}
    happened: Counter[str] = Counter()
    if ends_meet:
        let_ends_meet(core, happened)
    most_tokens = 2 * BLOCK_SIZE if ends_meet else MAX_BATCH_TOKENS
    while waiting or core.has_work:
        while waiting and (not core.has_work or rng.random() < 0.4):
            index = waiting.pop()
            request = admission.admit(*made.requests[index], request_id=f"{len(submitted)}")
            submitted[request.request_id] = index
            core.submit(request)
        event = rng.random() if core.idle_s == 0 else 1.0
        if core.idle_s != 0:
            time.sleep(0.0005)  # a restore is under way
        for meeting in core.tiering.meetings._meetings.values():
            while rng.random() < 0.9 and not meeting.restore.is_done:  # readers come early, late, or in between
                time.sleep(0.0005)
        if event < 0.3:
            core._scheduler.max_batch_tokens = rng.randrange(MAX_SEQUENCES, most_tokens + 1)
        elif event < 0.35:
            made.executable.set_num_threads(rng.randrange(1, 4))
        elif event < 0.37:
            core.abort(rng.choice(list(submitted)))
        elif event < 0.38:
            core.cache.clear()
        for request_id, delta in core.step():
            if delta.output is None:
                continue
            happened[delta.output.finish_reason] += 1
            happened["reused tokens"] += delta.output.num_cached_tokens
            happened["accepted drafts"] += delta.output.num_accepted_tokens
            happened["restored tokens"] += sum(delta.output.num_restored_tokens.values())
            if delta.output.finish_reason != "abort":
                assert delta.output.token_ids == made.answers[submitted[request_id]].token_ids
    core.close()
    core.cache.check()
    assert all(ledger.leased == 0 for ledger in core.cache.ledger())
    happened["preemptions"] += core.stats.counters.num_preemptions
    happened["evicted tokens"] += core.cache.stats.num_evicted_tokens
    happened["copied blocks"] += core.cache.stats.num_copied_blocks
    return happened


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("level", levels())
def test_no_schedule_changes_a_bit_of_any_answer(level, variant, tmp_path):
    made = setting(level, variant)
    assert len(made.answers) == NUM_REQUESTS
    happened: Counter[str] = Counter()
    for seed in range(max(MIN_SCHEDULES, NUM_SCHEDULES // (len(levels()) * len(VARIANTS)))):
        # Half have other tiers: memory, or a folder where it finds what the one before has left, or both.
        host = TierUse(Tier("host", HostBackend(HOST_BYTES)), "write_back", is_exclusive=True)
        disk = TierUse(
            Tier("disk", FolderBackend(tmp_path, FOLDER_BYTES)), "write_back" if seed % 16 else "write_through"
        )
        tiers = [[host], [], [disk], [], [disk], [], [disk], [], [host, disk], [], [disk], []][seed % 12]
        try:
            happened += run_schedule(made, random.Random(seed), tiers, ends_meet=seed % 12 in (2, 6, 10))
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
    # What the schedules are for did happen, often.
    assert happened["length"] > 500
    assert happened["abort"] > 20
    assert happened["preemptions"] > 8
    assert happened["evicted tokens"] > 1_000
    assert happened["copied blocks"] > 50
    assert happened["accepted drafts"] > 100
    assert happened["reused tokens"] > 5_000
    assert happened["restored tokens"] > 500
    assert happened["met tokens"] > 0  # how often, 200 to 900 times here, depends on how soon the readers come


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prompt_resumed_at_any_split_point_is_the_prompt_in_one_piece(variant):
    """Its first tokens are computed by another request, of each length; the rest when it comes, mid-block mostly."""
    made = setting(levels()[0], variant)
    rng = random.Random(1)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(120)]
    sampler = CheckedSampler({}, record=True)
    for split in range(len(prompt)):
        admission, core = made.engine(40, sampler)
        if split:
            sampler.record = True
            core.submit(admission.admit(prompt[:split], SamplingParams(max_tokens=1, seed=1)))
            core.step()
            sampler.record = False
        core.submit(admission.admit(prompt, SamplingParams(max_tokens=3, seed=0)))
        outputs = [delta.output for _ in range(4) for _, delta in core.step()]
        assert outputs[-1] is not None
        assert outputs[-1].num_cached_tokens == split


def test_the_check_can_fail(monkeypatch):
    """The oracle distinguishes: with one bit of one expected row flipped, a schedule that samples it fails."""
    made = setting(levels()[0], "full attention")
    broken = {key: bytes([row[0] ^ 1]) + row[1:] for key, row in made.expected.items()}
    monkeypatch.setattr(made, "expected", broken)
    with pytest.raises(AssertionError):
        run_schedule(made, random.Random(0))
