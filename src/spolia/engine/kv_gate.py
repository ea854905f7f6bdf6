"""What keeping KV in int8 does to a model, measured before anybody relies on it.

The same short text is computed twice by one executable, over KV as it was computed (float32) and over KV as it is to be
kept, and the distributions of the next token are compared. Models differ: where single channels of K are very large,
8 bits for a head are too few.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spolia.errors import InvalidRequest
from spolia.kernels import BLOCK_SIZE, Executable, KvDtype, StepInputs, allocate_pool

__all__ = ["GATE_TEXT", "REFUSE_ABOVE", "WARN_ABOVE", "check_kv_dtype", "kv_divergence"]

logger = logging.getLogger("spolia.engine")

WARN_ABOVE = 0.005
REFUSE_ABOVE = 0.2
"""Nats a token, the mean over `GATE_TEXT`. Models with 4-bit weights come to some 0.003, in part by the rounding
of activations. A model that is warned of lost 0.6 % of perplexity: benchmarks/kv_quality.md."""

_EXACT: KvDtype = "f32"
_CHUNK = 32
_NUM_TOKENS = 96

GATE_TEXT = (
    "The library of the old observatory was moved in 1931, when its instruments had become useless under the lights of "
    "the growing city. Of its 12,480 volumes about a third were lost on the way; what remained was catalogued twice, "
    "first by a clerk who could read no Latin, then by his daughter, who could.\n\n"
    "def mean(values: list[float]) -> float:\n"
    '    """The arithmetic mean of at least one value."""\n'
    "    if not values:\n"
    '        raise ValueError("no values")\n'
    "    return sum(values) / len(values)\n\n"
    "Question: what did the daughter do that the clerk had not been able to do? Answer: she read the Latin titles, and "
    "so found that nine of the books had been entered under the names of their printers.\n"
)


def check_kv_dtype(executable: Executable, num_groups: int, token_ids: Sequence[int], kv_dtype: KvDtype) -> float:
    """Measure what `kv_dtype` costs, and say so in the log. Binds pools of its own: bind others afterwards.

    Returns:
        The divergence, in nats a token.

    Raises:
        InvalidRequest: too much for answers to be worth having.
    """
    divergence = kv_divergence(executable, num_groups, token_ids[:_NUM_TOKENS], kv_dtype)
    if not divergence <= REFUSE_ABOVE:
        raise InvalidRequest(
            f"kv_dtype is {kv_dtype}: with this model that moves the next token's distribution by {divergence:.3g} "
            f"nats (KL, mean over {min(len(token_ids), _NUM_TOKENS)} tokens), more than the {REFUSE_ABOVE:g} that are "
            "allowed; use kv_dtype bf16, and kv_offload_dtype to keep KV small in tiers",
            param="kv_dtype",
        )
    level = logging.WARNING if divergence > WARN_ABOVE else logging.INFO
    verdict = f"more than {WARN_ABOVE:g}: answers may suffer; kv_dtype bf16 is safe" if level > logging.INFO else "fine"
    logger.log(level, "kv_dtype %s: KL divergence %.2e nats a token: %s", kv_dtype, divergence, verdict)
    return divergence


def kv_divergence(executable: Executable, num_groups: int, token_ids: Sequence[int], kv_dtype: KvDtype) -> float:
    """Mean over a text of KL(next token over exact KV || over KV in `kv_dtype`), in nats; NaN where there is one."""
    ids = np.array(token_ids, np.int32)
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    pools: dict[KvDtype, list[NDArray[np.uint8]]] = {}
    divergences = []
    for begin in range(0, len(ids), _CHUNK):
        rows = ids[begin : begin + _CHUNK]
        positions = np.arange(begin, begin + len(rows), dtype=np.int32)
        step = StepInputs(
            token_ids=rows,
            positions=positions,
            row_starts=np.array([0, len(rows)], np.int32),
            block_tables=(np.arange(num_blocks, dtype=np.int32)[None],) * num_groups,
            logit_rows=positions - begin,
        )
        logs = []
        for dtype in (_EXACT, kv_dtype):
            executable.set_kv_dtype(dtype)
            if dtype not in pools:
                pools[dtype] = [allocate_pool(num_blocks, executable.block_bytes(group)) for group in range(num_groups)]
            executable.bind_kv(pools[dtype])
            logits = np.empty((len(rows), executable.vocab_size), np.float32)
            executable.run(step, logits)
            logs.append(_log_softmax(logits))
        divergences.append((np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1))
    return float(np.concatenate(divergences).mean())


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    return result
