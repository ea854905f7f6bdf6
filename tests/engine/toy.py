"""A toy model whose KV is the tokens themselves, so that any wrong block, copy or reuse changes the answer.

`ToyExecutable` writes each token's id and position into the slot that the block tables name. Its logits are a hash of
the prefix as read back from the pools through the tables: a slot that was never written, was overwritten, or belongs to
another prompt gives other logits than `toy_logits(prefix)`, and mostly another token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spolia.engine import Admission, Engine, EngineConfig, EngineCore, Request, RequestOutput, SamplingParams
from spolia.engine.draft_model import DraftModel
from spolia.engine.drafter import make_drafter
from spolia.engine.resizing import PoolSizes, fitting_tokens
from spolia.engine.storage import build_cache
from spolia.generation import Depth
from spolia.kernels import BLOCK_SIZE, StepInputs
from spolia.kvcache import GroupSpec, KVCache, namespace_key
from spolia.tiers import FetchPolicy, Tier, TierUse

VOCAB_SIZE = 257
EOS = 256
ROUNDED = 1 << 16
"""Set in the token of a slot whose content `ToyCodec` has brought back."""
_SLOT = np.dtype([("token", "<i4"), ("position", "<i4")])


def toy_logits(
    prefix: Sequence[int] | NDArray[np.int32], windows: Sequence[int | None] = (None,)
) -> NDArray[np.float32]:
    """What the toy answers to a prefix, if all is well."""
    ids = np.asarray(prefix, np.int32)
    return _hash_to_logits([ids if window is None else ids[-window:] for window in windows])


def toy_answer(prompt: Sequence[int], num_tokens: int, windows: Sequence[int | None] = (None,)) -> list[int]:
    """The greedy continuation, alone and cold; the end-of-text token is one like the others."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(toy_logits(ids, windows).argmax()))
    return ids[len(prompt) :]


def _hash_to_logits(views: Sequence[NDArray[np.int32]]) -> NDArray[np.float32]:
    digest = blake2b(digest_size=8)
    for ids in views:
        digest.update(len(ids).to_bytes(4, "little") + ids.astype("<i4").tobytes())
    rng = np.random.Generator(np.random.PCG64(int.from_bytes(digest.digest(), "little")))
    return rng.standard_normal(VOCAB_SIZE, dtype=np.float32)


class ToyExecutable:
    """Honours the `Executable` protocol, and checks what it is given."""

    vocab_size = VOCAB_SIZE
    hidden_size = 8
    packed_bytes = 1000
    num_threads = 1
    num_layers = 6

    def __init__(self, windows: Sequence[int | None] = (None,)) -> None:
        self.windows = tuple(windows)
        self.pools: list[NDArray[Any]] = []
        self.num_computed_tokens = 0
        self.error: Exception | None = None  # raised by the next run
        self.poison: int | None = None  # prefixes with this token have no answer

    def set_num_threads(self, num_threads: int) -> None:
        self.num_threads = num_threads

    def block_bytes(self, group: int) -> int:
        return BLOCK_SIZE * _SLOT.itemsize

    def argmax(self, rows: NDArray[np.float32]) -> NDArray[np.int64]:
        return rows.argmax(axis=1)

    def bind_kv(self, pools: Sequence[NDArray[np.uint8]]) -> None:
        self.pools = [pool.view(_SLOT) for pool in pools]
        for pool in self.pools:
            pool[:] = (-1, -1)

    def run(
        self,
        step: StepInputs,
        logits: NDArray[np.float32] | None,
        hidden: NDArray[np.float32] | None = None,
        layers: NDArray[np.float32] | None = None,
    ) -> None:
        """`hidden` is the beginning of the logits; what layer `i` reads is the same, turned by `i + 1`."""
        if logits is None:
            logits = np.empty((len(step.logit_rows), VOCAB_SIZE), np.float32)
        self._run(step, logits)
        if hidden is not None:
            hidden[:] = logits[:, : self.hidden_size]
        if layers is not None:
            for layer, out in enumerate(layers):
                out[:] = np.roll(logits[:, : self.hidden_size], layer + 1, axis=1)

    def head(self, hidden: NDArray[np.float32], logits: NDArray[np.float32]) -> None:
        for row, out in zip(hidden, logits, strict=True):
            out[:] = _hash_to_logits([row.view(np.int32)])

    def _run(self, step: StepInputs, logits: NDArray[np.float32]) -> None:
        if self.error is not None:
            raise self.error
        assert len(step.block_tables) == len(self.pools)
        assert step.row_starts[-1] == len(step.token_ids) == len(step.positions)
        for copy in step.copies:
            pool = self.pools[copy.group]
            pool[copy.dst, : copy.num_tokens] = pool[copy.src, : copy.num_tokens]
        for pool, table in zip(self.pools, step.block_tables, strict=True):
            assert table.flags.c_contiguous
            assert table.dtype == np.int32
            for sequence, (start, stop) in enumerate(zip(step.row_starts, step.row_starts[1:], strict=False)):
                rows = slice(start, stop)
                positions = step.positions[rows]
                assert (np.diff(positions) == 1).all()
                blocks = table[sequence, positions // BLOCK_SIZE]
                assert (blocks >= 0).all()
                pool["token"][blocks, positions % BLOCK_SIZE] = step.token_ids[rows]
                pool["position"][blocks, positions % BLOCK_SIZE] = positions
        self.num_computed_tokens += len(step.token_ids)
        sequences = np.searchsorted(step.row_starts, step.logit_rows, side="right") - 1
        for out, row, sequence in zip(logits, step.logit_rows, sequences, strict=True):
            length = int(step.positions[row]) + 1
            views = [
                self._read(pool, table[sequence], 0 if window is None else max(0, length - window), length)
                for pool, table, window in zip(self.pools, step.block_tables, self.windows, strict=True)
            ]
            out[:] = np.nan if self.poison is not None and self.poison in views[0] else self.logits_of(views)

    def logits_of(self, views: Sequence[NDArray[np.int32]]) -> NDArray[np.float32]:
        """What follows the tokens that each group can see."""
        return _hash_to_logits(views)

    def _read(self, pool: NDArray[Any], table: NDArray[np.int32], start: int, stop: int) -> NDArray[np.int32]:
        positions = np.arange(start, stop, dtype=np.int32)
        slots = pool[table[positions // BLOCK_SIZE], positions % BLOCK_SIZE]
        assert (slots["position"] == positions).all(), "a slot holds another position's KV"
        return slots["token"] & (ROUNDED - 1)


class ToyCodec:
    """Half the bytes, and nothing lost: a toy's KV must be right. A bit beside each token tells what came from here."""

    name = "int8"

    def payload_bytes(self, group: int) -> int:
        return BLOCK_SIZE * _SLOT.itemsize // 2

    def encode(self, group: int, block: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        return block.view("<i4").astype("<i2").view(np.uint8)

    def decode(self, group: int, payload: NDArray[np.uint8], block: NDArray[np.uint8]) -> None:
        slots = payload.view("<i2").astype("<i4").view(_SLOT)
        slots["token"] |= ROUNDED
        block[:] = slots.view(np.uint8)


class ByteTokenizer:
    """A token is a byte; the end-of-text token has no text."""

    vocab_size = VOCAB_SIZE

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id == EOS else bytes([token_id])


class FakeClock:
    """Each look at it takes a millisecond."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


@dataclass
class ToyModel:
    """As much of a model as the engine's faces look at."""

    name: str = "toy"
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    chat_template: Any = None


def toy_engine(
    *,
    windows: Sequence[int | None] = (None,),
    num_blocks: int | Sequence[int] = 64,
    max_batch_tokens: int = 32,
    max_sequences: int = 8,
    max_context: int = 512,
    observer: Any = None,
    sampler: Any = None,
    eos_token_ids: Sequence[int] = (),
    processors: Mapping[str, Any] | None = None,
    speculation: str = "off",
    draft: ToyExecutable | None = None,
    num_draft_blocks: int = 64,
    executable: ToyExecutable | None = None,
    stream_interval_ms: float = 16.0,
    tiers: Sequence[Tier | TierUse] = (),
    fetch: FetchPolicy = "wait",
    fetch_timeout_s: float = 1.0,
    clock: Callable[[], float] | None = None,
    codec: ToyCodec | None = None,
) -> Engine:
    """An engine on the toy, with the cache checked after each step."""
    executable = executable or ToyExecutable(windows)
    counts = [num_blocks] * len(windows) if isinstance(num_blocks, int) else num_blocks
    pools = [np.zeros((n, executable.block_bytes(0)), np.uint8) for n in counts]
    executable.bind_kv(pools)
    clock = clock or FakeClock()
    groups = [GroupSpec(n, window) for n, window in zip(counts, windows, strict=True)]
    uses = [tier if isinstance(tier, TierUse) else TierUse(tier) for tier in tiers]
    cache, tiering = build_cache(
        groups, pools, uses, layout="toy", codec=codec, clock=clock, fetch=fetch, fetch_timeout_s=fetch_timeout_s
    )
    tokenizer = ByteTokenizer()
    draft_model = None
    if draft is not None:
        draft.bind_kv([np.zeros((num_draft_blocks, draft.block_bytes(0)), np.uint8) for _ in draft.windows])
        own = KVCache([GroupSpec(num_draft_blocks, window) for window in draft.windows], clock=clock)
        draft_model = DraftModel(
            draft, own, vocab_size=VOCAB_SIZE, max_batch_tokens=max_batch_tokens, max_context=max_context
        )
    core = EngineCore(
        executable,
        cache,
        token_bytes=tokenizer.token_bytes,
        max_batch_tokens=max_batch_tokens,
        max_sequences=max_sequences,
        max_context=max_context,
        clock=clock,
        observer=observer,
        sampler=sampler,
        tiering=tiering,
        drafter=make_drafter(speculation, cache, model=draft_model, clock=clock),
        check=True,
    )
    owner = {"model": "toy"} if codec is None else {"model": "toy", "codec": codec.name}
    admission = Admission(
        tokenizer=tokenizer,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset(eos_token_ids),
        max_context=max_context,
        fitting_tokens=fitting_tokens(cache, max_context, max_batch_tokens),
        max_sequences=max_sequences,
        namespace=lambda salt: namespace_key(**owner, salt=salt),
        exact_namespace=None if codec is None else lambda salt: namespace_key(model="toy", salt=salt),
        clock=clock,
        depth=Depth(ToyExecutable.num_layers, has_tied_head=True),
        processors=processors or {},
    )
    config = EngineConfig(
        max_batch_tokens=max_batch_tokens,
        max_sequences=max_sequences,
        max_context=max_context,
        stream_interval_ms=stream_interval_ms,
    )
    sizes = PoolSizes(
        pools=pools,
        windows=windows,
        max_context=max_context,
        max_sequences=max_sequences,
        max_batch_tokens=max_batch_tokens,
    )
    model: Any = ToyModel()
    return Engine(model=model, config=config, admission=admission, core=core, fingerprint="toy", sizes=sizes)


def until(condition: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> None:
    """Wait for what other threads bring about."""
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come true within a minute"
        meanwhile()
        time.sleep(0.001)


GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
_ids = count()


def submit(engine: Engine, prompt: Sequence[int] | str, params: SamplingParams = GREEDY, **options: Any) -> Request:
    """Admit and submit; ids are unique."""
    request = engine.admission.admit(prompt, params, request_id=options.pop("request_id", f"r{next(_ids)}"), **options)
    engine.core.submit(request)
    return request


def run(engine: Engine, max_steps: int = 10_000) -> dict[str, RequestOutput]:
    """Step until nothing is left; outputs by request id."""
    outputs = {}
    for _ in range(max_steps):
        if not engine.core.has_work:
            return outputs
        if engine.core.idle_s != 0:
            time.sleep(0.001)  # others bring what it waits for
        for request_id, delta in engine.core.step():
            if delta.output is not None:
                outputs[request_id] = delta.output
    raise AssertionError(f"not done after {max_steps} steps")


def answer(
    engine: Engine, prompt: Sequence[int] | str, params: SamplingParams = GREEDY, **options: Any
) -> RequestOutput:
    """Submit one request and run it to its end."""
    request = submit(engine, prompt, params, **options)
    return run(engine)[request.request_id]
