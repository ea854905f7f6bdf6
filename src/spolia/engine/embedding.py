"""Texts to vectors: the last layer's results over a text, pooled.

    step   as many tokens of the inputs as a step may have, in their order
           open a lease each -> grow -> one native call, without the head -> commit -> close

Between two steps of the engine, and no lease outlives one: the scheduler never finds blocks held by somebody whom it
does not know. What was computed stays in the tree, and is found there by the next step, like anything else, but it goes
before what conversations have. So with pooling "last" the beginning that inputs share is computed once, and an input
that was seen before costs one token; "mean" needs the result of each token, which nothing keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from spolia.engine.core import EngineCore
from spolia.errors import InvalidRequest, ModelError
from spolia.kernels import BLOCK_SIZE, BlockCopy, StepInputs
from spolia.kvcache import Lease, Outcome, Wish

__all__ = ["Embedding", "EmbeddingRun", "Pooling", "StatesRun"]

Pooling = Literal["last", "mean"]

Ids = NDArray[np.int32]

_WISHES = (Wish(priority=10),)


class Embedding(NamedTuple):
    """One input's vector.

    Attributes:
        vector: float32 `[hidden_size]`; not of any particular length.
        num_cached_tokens: of the input's tokens, those whose KV was reused.
    """

    vector: NDArray[np.float32]
    num_tokens: int
    num_cached_tokens: int


@dataclass(slots=True)
class _Input:
    """
    Attributes:
        num_done: tokens that have been through the model and, for "mean", are in `total`.
        total: float64 `[hidden_size]`, added up token by token, so that no cut into steps shows in it.
    """

    ids: Ids
    num_done: int = 0
    num_cached: int | None = None
    total: NDArray[np.float64] | None = None
    embedding: Embedding | None = None


class _Part(NamedTuple):
    """Tokens [start, stop) of an input, computed in this step; the results of those from `first` on are wanted."""

    input: _Input
    lease: Lease
    start: int
    stop: int
    first: int


class EmbeddingRun:
    """Inputs on their way. Made anywhere; `step` is called on the engine's thread, between two of its steps.

    Args:
        inputs: token ids, at least one each, that fit the context and the pools.
        namespace: who may share their KV.

    Raises:
        InvalidRequest: there is no such pooling.
    """

    def __init__(self, inputs: Sequence[Ids], *, namespace: bytes, pooling: Pooling = "last") -> None:
        if pooling not in get_args(Pooling):
            raise InvalidRequest(
                f"pooling is {pooling!r}; it must be one of {', '.join(get_args(Pooling))}", param="pooling"
            )
        self._inputs = [_Input(ids) for ids in inputs]
        self._namespace = namespace
        self._pooling = pooling

    @property
    def embeddings(self) -> list[Embedding] | None:
        """One an input, in their order; None as long as there is something to compute."""
        done = [each.embedding for each in self._inputs if each.embedding is not None]
        return done if len(done) == len(self._inputs) else None

    def step(self, core: EngineCore) -> int:
        """Compute a step's worth of tokens; how many, 0 if there is no room in the cache at this moment.

        Raises:
            ModelError: the model's results are not finite.
        """
        parts: list[_Part] = []
        copies: list[BlockCopy] = []
        try:
            self._plan(core, parts, copies)
            if parts:
                self._run(core, parts, copies)
        finally:
            for part in parts:
                part.lease.close(Outcome.BROKEN_OFF)
        num_tokens = sum(part.stop - part.start for part in parts)
        core.note_other_work(num_tokens)
        return num_tokens

    def _plan(self, core: EngineCore, parts: list[_Part], copies: list[BlockCopy]) -> None:
        budget = core.max_batch_tokens
        for each in self._inputs:
            if not budget or len(parts) == core.max_sequences:
                return
            if each.embedding is not None or self._is_being_computed(each, parts):
                continue
            ids = each.ids if self._pooling == "last" else each.ids[: each.num_done + 1]  # it gives all but the last
            lease = core.cache.open(
                self._namespace, ids, resumed=each.num_cached is not None, label="embedding", wishes=_WISHES
            )
            start = lease.num_computed_tokens
            stop = min(len(each.ids), start + budget)
            more = core.cache.grow(lease, -(-stop // BLOCK_SIZE) * BLOCK_SIZE)
            if more is None:
                lease.close(Outcome.BROKEN_OFF)
                return
            if each.num_cached is None:
                each.num_cached = start
            copies += [BlockCopy(copy.group, copy.src, copy.dst, copy.num_tokens) for copy in more]
            first = len(each.ids) - 1 if self._pooling == "last" else each.num_done
            parts.append(_Part(each, lease, start, stop, max(start, first)))
            budget -= stop - start

    def _is_being_computed(self, each: _Input, parts: Sequence[_Part]) -> bool:
        """Whether this step computes a block or more that `each` begins with, and that it could find in the next."""
        return self._pooling == "last" and any(
            part.stop - part.start >= BLOCK_SIZE
            and np.array_equal(each.ids[: part.start + BLOCK_SIZE], part.input.ids[: part.start + BLOCK_SIZE])
            for part in parts
        )

    def _run(self, core: EngineCore, parts: Sequence[_Part], copies: Sequence[BlockCopy]) -> None:
        spans = [(part.start, part.stop) for part in parts]
        row_starts = np.cumsum([0, *(stop - start for start, stop in spans)], dtype=np.int32)
        rows = [
            np.arange(row + part.first - part.start, row + part.stop - part.start, dtype=np.int32)
            for row, part in zip(row_starts, parts, strict=False)
        ]
        logit_rows = np.concatenate(rows)
        hidden = np.empty((len(logit_rows), core.executable.hidden_size), np.float32)
        num_columns = -(-max(part.stop for part in parts) // BLOCK_SIZE)
        tables = []
        for group in range(len(core.cache.groups)):
            table = np.full((len(parts), num_columns), -1, np.int32)
            for row, part in zip(table, parts, strict=True):
                blocks = part.lease.block_table(group)[:num_columns]
                row[: len(blocks)] = blocks
            tables.append(table)
        inputs = StepInputs(
            token_ids=np.concatenate([part.input.ids[part.start : part.stop] for part in parts]),
            positions=np.concatenate([np.arange(*span, dtype=np.int32) for span in spans]),
            row_starts=row_starts,
            block_tables=tuple(tables),
            logit_rows=logit_rows,
            copies=tuple(copies),
        )
        core.executable.run(inputs, None, hidden)
        begin = 0
        for part, wanted in zip(parts, rows, strict=True):
            core.cache.commit(part.lease, part.input.ids[part.start : part.stop])
            self._take(part, hidden[begin : begin + len(wanted)])
            begin += len(wanted)

    def _take(self, part: _Part, hidden: NDArray[np.float32]) -> None:
        """Pool the results of tokens [part.first, part.stop)."""
        each = part.input
        if not np.isfinite(hidden).all():
            raise ModelError("the model's results for an input are not finite numbers: the model file is broken")
        if self._pooling == "mean":
            total = np.zeros(hidden.shape[1]) if each.total is None else each.total
            for row in hidden:
                total += row
            each.total = total
        each.num_done = max(each.num_done, part.stop)
        if each.num_done == len(each.ids):
            vector = hidden[-1].copy() if each.total is None else (each.total / len(each.ids)).astype(np.float32)
            each.embedding = Embedding(vector, len(each.ids), each.num_cached or 0)


class _StatesOfAll(EmbeddingRun):
    """Keeps what is pooled."""

    def __init__(self, inputs: Sequence[Ids], *, namespace: bytes, pooling: Pooling) -> None:
        super().__init__(inputs, namespace=namespace, pooling=pooling)
        self.rows: list[NDArray[np.float32]] = []

    def _take(self, part: _Part, hidden: NDArray[np.float32]) -> None:
        super()._take(part, hidden)
        self.rows.append(hidden.copy())


class StatesRun:
    """As `EmbeddingRun`, for the last layer's result of every token of one text."""

    def __init__(self, ids: Ids, *, namespace: bytes) -> None:
        self._run = _StatesOfAll([ids], namespace=namespace, pooling="mean")

    @property
    def states(self) -> NDArray[np.float32] | None:
        """`[num_tokens, hidden_size]`; None as long as there is something to compute."""
        return None if self._run.embeddings is None else np.concatenate(self._run.rows)

    def step(self, core: EngineCore) -> int:
        """As `EmbeddingRun.step`."""
        return self._run.step(core)
