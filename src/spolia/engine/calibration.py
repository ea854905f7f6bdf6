"""How fast this machine computes, before it has computed anything."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from spolia.kernels import BLOCK_SIZE, Executable, StepInputs
from spolia.kvcache import KVCache

__all__ = ["NUM_TOKENS", "measure_step_s"]

NUM_TOKENS = 64
_NUM_STEPS = 3
_NAMESPACE = b"calibration"


def measure_step_s(
    executable: Executable, cache: KVCache, clock: Callable[[], float], num_tokens: int = NUM_TOKENS
) -> float | None:
    """Seconds that a step of `num_tokens` prompt tokens takes, the least of three; None if there is no room for them.

    Leaves the cache as it was: nothing is committed.
    """
    ids, num_blocks = np.zeros(num_tokens, np.int32), -(-num_tokens // BLOCK_SIZE)
    with cache.open_restore(_NAMESPACE, ids) as lease:
        if cache.grow(lease, num_tokens) is None:
            return None
        step = StepInputs(
            token_ids=ids,
            positions=np.arange(num_tokens, dtype=np.int32),
            row_starts=np.array([0, num_tokens], np.int32),
            block_tables=tuple(
                lease.block_table(group)[None, :num_blocks].copy() for group in range(len(cache.groups))
            ),
            logit_rows=np.array([num_tokens - 1], np.int32),
        )
        logits = np.empty((1, executable.vocab_size), np.float32)
        times_s = []
        for _ in range(_NUM_STEPS):
            begun_s = clock()
            executable.run(step, logits)
            times_s.append(clock() - begun_s)
    return min(times_s)
