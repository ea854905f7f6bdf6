"""transformers in float32 on the same dequantised weights, and our executables, driven the same way.

Both sides are asked for the logits of every position, a few hundred rows at a time: a vocabulary of 262,144 makes
whole-prompt logits gigabytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spolia.kernels import BLOCK_SIZE, Executable, Program, StepInputs, allocate_pool

CHUNK = 256


class Oracle:
    """A GGUF file as transformers reads it: its tokenizer, and its model in float32."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
            self.model: Any = AutoModelForCausalLM.from_pretrained(
                path.parent,
                gguf_file=path.name,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
            )

    def logits(self, ids: list[int]) -> Iterator[NDArray[np.float32]]:
        """Logits of all positions, `[<= CHUNK, vocab]` at a time."""
        with torch.no_grad():
            hidden = self.model.model(torch.tensor([ids])).last_hidden_state[0]
            for start in range(0, len(ids), CHUNK):
                yield self.model.lm_head(hidden[start : start + CHUNK]).numpy()


def logits_of(executable: Executable, program: Program, ids: list[int]) -> Iterator[NDArray[np.float32]]:
    """The same from one of our executables: a prefill in chunks of CHUNK rows, in a pool of its own."""
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    executable.bind_kv([allocate_pool(num_blocks, executable.block_bytes(g)) for g in range(len(program.cache_groups))])
    tables = tuple(np.arange(num_blocks, dtype=np.int32)[None] for _ in program.cache_groups)
    for start in range(0, len(ids), CHUNK):
        chunk = np.array(ids[start : start + CHUNK], dtype=np.int32)
        logits = np.empty((len(chunk), program.vocab_size), dtype=np.float32)
        executable.run(
            StepInputs(
                token_ids=chunk,
                positions=np.arange(start, start + len(chunk), dtype=np.int32),
                row_starts=np.array([0, len(chunk)], dtype=np.int32),
                block_tables=tables,
                logit_rows=np.arange(len(chunk), dtype=np.int32),
            ),
            logits,
        )
        yield logits


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """In float64, over the last axis."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted
