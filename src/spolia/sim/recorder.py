"""Recording a running engine's traffic as a trace that holds no text.

Each token of each request gets a number that stands for all tokens up to it: the same number for the same beginning, a
new one for a new beginning, in order. So a conversation of a hundred turns is a hundred short lines, and nobody can
read in them what was said.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spolia.kvcache import GroupSpec, KVCache, Outcome

__all__ = ["Recorder", "TraceWriter"]


class Recorder:
    """Requests to lines of a trace; see `trace`. One thread.

    Its memory is a cache of its own, in which each token is a block: what has not been seen among the last
    `memory_tokens` tokens counts as new.
    """

    def __init__(self, memory_tokens: int = 1 << 20) -> None:
        self._tick = 0.0
        self._cache = KVCache([GroupSpec(memory_tokens)], clock=self._next_tick, block_size=1, event_capacity=1)
        self._memory_tokens = memory_tokens
        self._numbers = np.zeros(memory_tokens, np.int64)  # by block, of the token that it stands for
        self._num_numbers = 0
        self._tenants: dict[bytes, int] = {}

    def line(
        self,
        *,
        start_s: float,
        duration_s: float,
        namespace: bytes,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        outcome: Outcome,
    ) -> dict[str, Any]:
        """A request that has ended, as a line of a trace."""
        # The last token of an answer has no KV.
        ids = np.array([*prompt_ids, *output_ids[:-1]], np.int32)[: self._memory_tokens]
        return {
            "timestamp": round(1e3 * start_s, 3),
            "duration": round(1e3 * duration_s, 3),
            "input_length": len(prompt_ids),
            "output_length": len(output_ids),
            "block": 1,
            "tenant": self._tenants.setdefault(namespace, len(self._tenants)),
            "stop_reason": outcome.value,
            "runs": _runs(self._number(namespace, ids)),
        }

    def _number(self, namespace: bytes, ids: np.ndarray[Any, np.dtype[np.int32]]) -> list[int]:
        with self._cache.open(namespace, np.append(ids, np.int32(-1))) as lease:
            num_known = lease.num_computed_tokens
            self._cache.grow(lease, len(ids))
            blocks = lease.block_table(0)[: len(ids)].copy()
            num_new = len(ids) - num_known
            self._numbers[blocks[num_known:]] = np.arange(self._num_numbers, self._num_numbers + num_new)
            self._num_numbers += num_new
            numbers: list[int] = self._numbers[blocks].tolist()
            self._cache.commit(lease, ids[num_known:])
        return numbers

    def _next_tick(self) -> float:
        self._tick += 1
        return self._tick


class TraceWriter:
    """A recorder that appends to a file; any thread may call, and each line is written whole.

    Raises:
        OSError: the file cannot be written to.
    """

    def __init__(self, path: Path, recorder: Recorder | None = None) -> None:
        self._recorder = recorder or Recorder()
        self._lock = threading.Lock()
        self._file = path.open("a", encoding="utf-8")

    def write(self, **request: Any) -> None:
        """Take a request that has ended; see `Recorder.line`."""
        with self._lock:
            self._file.write(json.dumps(self._recorder.line(**request), separators=(",", ":")) + "\n")
            self._file.flush()

    def close(self) -> None:
        with self._lock:
            self._file.close()


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """[3, 4, 5, 9] -> [[3, 3], [9, 1]]."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return runs
