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
from spolia.kvcache import Explanation, History, Lease, Outcome, TokenRange, Wish, attribute

__all__ = ["Embedding", "EmbeddingRun", "Pooling", "StatesRun"]

Pooling = Literal["last", "mean"]

Ids = NDArray[np.int32]

_WISHES = (Wish(priority=10),)


class Embedding(NamedTuple):
    """One input's vector.

    Attributes:
        vector: float32 `[hidden_size]`; not of any particular length.
        num_cached_tokens: of the input's tokens, those whose KV was reused.
        explanation, ranges: why the others were not; every token with its source and reason.
    """

    vector: NDArray[np.float32]
    num_tokens: int
    num_cached_tokens: int
    explanation: Explanation
    ranges: tuple[TokenRange, ...]


@dataclass(slots=True)
class _Input:
    """
    Attributes:
        num_done: tokens that have been through the model and, for "mean", are in `total`.
        explanation, ranges: what the first look-up found; None before it.
        total: float64 `[hidden_size]`, added up token by token, so that no cut into steps shows in it.
    """

    ids: Ids
    num_done: int = 0
    explanation: Explanation | None = None
    ranges: tuple[TokenRange, ...] = ()
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
        is_part: the inputs are a part of another request, and not counted as prompts.

    Raises:
        InvalidRequest: there is no such pooling.
    """

    def __init__(
        self,
        inputs: Sequence[Ids],
        *,
        namespace: bytes,
        pooling: Pooling = "last",
        is_part: bool = False,
        history: History | None = None,
    ) -> None:
        if pooling not in get_args(Pooling):
            raise InvalidRequest(
                f"pooling is {pooling!r}; it must be one of {', '.join(get_args(Pooling))}", param="pooling"
            )
        self._inputs = [_Input(ids) for ids in inputs]
        self._namespace = namespace
        self._pooling = pooling
        self._is_part = is_part
        self._history = history

    @property
    def embeddings(self) -> list[Embedding] | None:
        """One an input, in their order; None as long as there is something to compute."""
        done = [each.embedding for each in self._inputs if each.embedding is not None]
        return done if len(done) == len(self._inputs) else None

    @property
    def num_done_tokens(self) -> int:
        """Of all inputs, those that need no more computing."""
        return sum(each.num_done for each in self._inputs)

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
            lease = core.cache.open(
                self._namespace,
                each.ids,
                resumed=each.explanation is not None,
                label="embedding",
                wishes=_WISHES,
                most=None if self._pooling == "last" else each.num_done,
                history=self._history,
            )
            start = lease.num_computed_tokens
            stop = min(len(each.ids), start + budget)
            more = core.cache.grow(lease, -(-stop // BLOCK_SIZE) * BLOCK_SIZE)
            if more is None:
                lease.close(Outcome.BROKEN_OFF)
                return
            if each.explanation is None:
                self._note_start(core, each, lease)
            copies += [BlockCopy(copy.group, copy.src, copy.dst, copy.num_tokens) for copy in more]
            first = len(each.ids) - 1 if self._pooling == "last" else each.num_done
            parts.append(_Part(each, lease, start, stop, max(start, first)))
            budget -= stop - start

    def _note_start(self, core: EngineCore, each: _Input, lease: Lease) -> None:
        each.explanation = lease.hit.explanation
        each.ranges = attribute(
            lease.hit.explanation,
            num_shared=min(lease.num_shared_tokens, lease.num_computed_tokens),
            num_reused=lease.num_computed_tokens,
            num_prompt_tokens=len(each.ids),
        )
        if not self._is_part:
            core.count_prompt(each.explanation, each.ranges)

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
        if each.num_done == len(each.ids) and each.explanation is not None:
            vector = hidden[-1].copy() if each.total is None else (each.total / len(each.ids)).astype(np.float32)
            num_cached = sum(part.stop - part.start for part in each.ranges if part.reason is None)
            each.embedding = Embedding(vector, len(each.ids), num_cached, each.explanation, each.ranges)


class _StatesOfAll(EmbeddingRun):
    """Keeps what is pooled."""

    def __init__(self, inputs: Sequence[Ids], *, namespace: bytes, pooling: Pooling, history: History | None) -> None:
        super().__init__(inputs, namespace=namespace, pooling=pooling, history=history)
        self.rows: list[NDArray[np.float32]] = []
        self.found: tuple[Explanation | None, tuple[TokenRange, ...]] = (None, ())

    def _take(self, part: _Part, hidden: NDArray[np.float32]) -> None:
        super()._take(part, hidden)
        self.rows.append(hidden.copy())
        self.found = part.input.explanation, part.input.ranges


class StatesRun:
    """As `EmbeddingRun`, for the last layer's result of every token of one text."""

    def __init__(self, ids: Ids, *, namespace: bytes, history: History | None = None) -> None:
        self._run = _StatesOfAll([ids], namespace=namespace, pooling="mean", history=history)

    @property
    def states(self) -> NDArray[np.float32] | None:
        """`[num_tokens, hidden_size]`; None as long as there is something to compute."""
        return None if self._run.embeddings is None else np.concatenate(self._run.rows)

    @property
    def found(self) -> tuple[Explanation | None, tuple[TokenRange, ...]]:
        """As `Embedding.explanation` and `ranges`."""
        return self._run.found

    def step(self, core: EngineCore) -> int:
        """As `EmbeddingRun.step`."""
        return self._run.step(core)
