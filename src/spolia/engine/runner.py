"""A plan as arrays, and the one native call that runs it."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from spolia.engine.scheduler import MAX_EXTRA_LOGITS, StepPlan
from spolia.errors import Bug
from spolia.kernels import BLOCK_SIZE, BlockCopy, Executable, StepInputs

__all__ = ["Runner"]


class Runner:
    """Owns the arrays that steps are described in; allocated once, so that a step allocates almost nothing.

    Block tables are kept by lane, from step to step: a lane's row changes only where its sequence grew.

    Args:
        num_groups: cache groups of the program.
        max_tokens: most rows of a step.
        max_sequences: lanes.
        max_context: most tokens of a sequence.
    """

    def __init__(
        self, executable: Executable, *, num_groups: int, max_tokens: int, max_sequences: int, max_context: int
    ) -> None:
        self._executable = executable
        self._arange = np.arange(max_context, dtype=np.int32)
        self._token_ids = np.zeros(max_tokens, np.int32)
        self._positions = np.zeros(max_tokens, np.int32)
        self._tables = [
            np.full((max_sequences, math.ceil(max_context / BLOCK_SIZE) + 1), -1, np.int32) for _ in range(num_groups)
        ]
        self._layers: NDArray[np.float32] | None = None  # of the last step: what each layer read in wanted rows
        # Untouched rows take no memory. A sequence has at most one row beyond the budget of extra ones.
        self._logits = np.zeros((2 * max_sequences + MAX_EXTRA_LOGITS, executable.vocab_size), np.float32)

    def run(self, plan: StepPlan) -> NDArray[np.float32]:
        """Run a step; float32 `[num_wanted, vocab_size]`, in the order of the plan, valid until the next call."""
        inputs = self._inputs(plan)
        logits = self._logits[: len(inputs.logit_rows)]
        self._layers = None
        if any(sequence.request.params.dola_layers is not None for sequence, _, _ in plan.entries):
            shape = self._executable.num_layers, len(logits), self._executable.hidden_size
            self._layers = np.empty(shape, np.float32)
            self._executable.run(inputs, logits, None, self._layers)
        else:
            self._executable.run(inputs, logits)
        return logits

    def early_logits(self, row: int, layers: Seq[int]) -> NDArray[np.float32]:
        """What some layers would have said in a row of the last step, `[len(layers), vocab_size]`.

        Only of steps with a sequence that contrasts layers.
        """
        if self._layers is None:
            raise Bug("no sequence of the last step asked for its layers")
        logits = np.empty((len(layers), self._executable.vocab_size), np.float32)
        self._executable.head(self._layers[list(layers), row], logits)
        return logits

    def _inputs(self, plan: StepPlan) -> StepInputs:
        token_ids, positions, arange = self._token_ids, self._positions, self._arange
        row = 0
        row_starts = [0]
        logit_rows = []
        lanes = []
        for sequence, start, stop in plan.entries:
            end = row + stop - start
            token_ids[row:end] = sequence.token_ids[start:stop]
            positions[row:end] = arange[start:stop]
            row = end
            row_starts.append(row)
            lanes.append(sequence.lane)
            if stop == sequence.num_tokens and plan.is_plain:
                logit_rows.append(row - 1)
            elif not plan.is_plain and (num_logits := stop - sequence.first_logit(start)) > 0:
                logit_rows.extend(range(row - num_logits, row))
        return StepInputs(
            token_ids=token_ids[:row],
            positions=positions[:row],
            row_starts=np.array(row_starts, np.int32),
            block_tables=self._block_tables(plan, lanes),
            logit_rows=np.array(logit_rows, np.int32),
            copies=tuple(BlockCopy(copy.group, copy.src, copy.dst, copy.num_tokens) for copy in plan.copies),
        )

    def _block_tables(self, plan: StepPlan, lanes: Seq[int]) -> tuple[NDArray[np.int32], ...]:
        num_columns = 1
        for sequence, _, stop in plan.entries:
            num_columns = max(num_columns, -(-stop // BLOCK_SIZE))
            if sequence.table_changed:
                sequence.table_changed = False
                for group, table in enumerate(self._tables):
                    blocks = sequence.held_lease.block_table(group)
                    table[sequence.lane, : len(blocks)] = blocks
        return tuple(table[lanes, :num_columns] for table in self._tables)
