"""Small random programs of the shapes that models have, and steps to run them with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spolia.kernels import BLOCK_SIZE, Executable, Program, ProgramBuilder, RopeSpec, StepInputs, Weight, allocate_pool
from spolia.kernels.quants import quantize

VOCAB_SIZE = 77  # no multiple of 16: the last tile of the head is padded
HIDDEN = 64


class Weights:
    """Random weights by shape; matrices in `type`, vectors in float32."""

    def __init__(self, weight_type: str, seed: int = 0) -> None:
        self.type = weight_type
        self.rng = np.random.default_rng(seed)

    def matrix(self, num_rows: int, num_columns: int, *, gain: float = 1.0) -> Weight:
        values = self.rng.standard_normal((num_rows, num_columns)) * gain / np.sqrt(num_columns)
        return quantize(values.astype(np.float32), self.type)

    def vector(self, size: int, *, mean: float = 0.0) -> Weight:
        return quantize((mean + 0.3 * self.rng.standard_normal(size)).astype(np.float32), "F32")


def inv_freq(head_dim: int, base: float = 10_000.0) -> tuple[float, ...]:
    return tuple(base ** (-np.arange(0, head_dim, 2) / head_dim))


def llama(weight_type: str) -> Program:
    """Two layers, 4 query heads on 2 KV heads, tied embeddings."""
    w, b = Weights(weight_type), ProgramBuilder()
    table, rope = w.matrix(VOCAB_SIZE, HIDDEN, gain=8.0), RopeSpec(inv_freq(16))
    x = b.embed(table)
    for _ in range(2):
        h = b.rms_norm(x, w.vector(HIDDEN, mean=1), 1e-5)
        q, k, v = (b.linear(h, w.matrix(width, HIDDEN)) for width in (64, 32, 32))
        q, k = b.rope(q, 16, rope), b.rope(k, 16, rope)
        a = b.attend(q, k, v, num_heads=4, num_kv_heads=2, scale=0.25)
        x = b.add(x, b.linear(a, w.matrix(HIDDEN, 64)))
        h = b.rms_norm(x, w.vector(HIDDEN, mean=1), 1e-5)
        h = b.glu(b.linear(h, w.matrix(96, HIDDEN)), b.linear(h, w.matrix(96, HIDDEN)), "silu")
        x = b.add(x, b.linear(h, w.matrix(HIDDEN, 96)))
    return b.logits(b.rms_norm(x, w.vector(HIDDEN, mean=1), 1e-5), table)


def gemma(weight_type: str) -> Program:
    """Three layers, windows of 21 and full, norms around every block and of each head, two rope bases, soft caps."""
    w, b = Weights(weight_type, seed=1), ProgramBuilder()
    table = w.matrix(VOCAB_SIZE, HIDDEN)
    x = b.embed(table, scale=HIDDEN**0.5)
    for layer in range(3):
        window = None if layer == 1 else 21
        rope = RopeSpec(inv_freq(32, 1e6 if window is None else 1e4))
        h = b.rms_norm(x, w.vector(HIDDEN, mean=1), 1e-6)
        q, k, v = (b.linear(h, w.matrix(width, HIDDEN)) for width in (128, 32, 32))
        q = b.rope(b.rms_norm(q, w.vector(32, mean=1), 1e-6), 32, rope)
        k = b.rope(b.rms_norm(k, w.vector(32, mean=1), 1e-6), 32, rope)
        a = b.attend(q, k, v, num_heads=4, num_kv_heads=1, scale=0.2, window=window, softcap=20.0)
        x = b.add(x, b.rms_norm(b.linear(a, w.matrix(HIDDEN, 128)), w.vector(HIDDEN, mean=1), 1e-6))
        h = b.rms_norm(x, w.vector(HIDDEN, mean=1), 1e-6)
        h = b.glu(b.linear(h, w.matrix(160, HIDDEN)), b.linear(h, w.matrix(160, HIDDEN)), "gelu_tanh")
        x = b.add(x, b.rms_norm(b.linear(h, w.matrix(HIDDEN, 160)), w.vector(HIDDEN, mean=1), 1e-6))
    return b.logits(b.rms_norm(x, w.vector(HIDDEN, mean=1), 1e-6), table, softcap=5.0)


def parallel(weight_type: str) -> Program:
    """One layer, attention and MLP side by side on one layer norm, biases everywhere, half of each head rotated."""
    w, b = Weights(weight_type, seed=2), ProgramBuilder()
    x = b.embed(w.matrix(VOCAB_SIZE, HIDDEN, gain=8.0))
    rope = RopeSpec(inv_freq(8), scale=1.1)
    h = b.layer_norm(x, w.vector(HIDDEN, mean=1), w.vector(HIDDEN), 1e-5)
    up = b.activation(b.linear(h, w.matrix(128, HIDDEN), w.vector(128)), "gelu")
    mlp = b.linear(up, w.matrix(HIDDEN, 128), w.vector(HIDDEN))
    q, k, v = (b.linear(h, w.matrix(64, HIDDEN), w.vector(64)) for _ in range(3))
    a = b.attend(b.rope(q, 16, rope), b.rope(k, 16, rope), v, num_heads=4, num_kv_heads=4, scale=0.25)
    x = b.add(b.add(x, b.linear(a, w.matrix(HIDDEN, 64), w.vector(HIDDEN))), b.scale(mlp, 0.5))
    x = b.layer_norm(x, w.vector(HIDDEN, mean=1), None, 1e-5)
    return b.logits(x, w.matrix(VOCAB_SIZE, HIDDEN), bias=w.vector(VOCAB_SIZE), scale=0.7)


PROGRAMS: dict[str, Callable[[str], Program]] = {"llama": llama, "gemma": gemma, "parallel": parallel}


@dataclass
class OpenSequence:
    """A growing sequence with blocks of its own in every group."""

    tokens: NDArray[np.int32]
    blocks: list[NDArray[np.int32]]  # by group
    num_computed: int = 0


class Session:
    """An executable with pools; hands out scattered blocks and runs chosen pieces of sequences in one step."""

    def __init__(self, executable: Executable, program: Program, num_blocks: int = 200, seed: int = 0) -> None:
        self.executable = executable
        self.groups = program.cache_groups
        self.pools = [allocate_pool(num_blocks, executable.block_bytes(g)) for g in range(len(self.groups))]
        for pool in self.pools:
            pool[:] = 0xFF  # NaN in every KV type: a slot that was never written must not be read
        executable.bind_kv(self.pools)
        rng = np.random.default_rng(seed)
        self.free = [list(rng.permutation(num_blocks)) for _ in self.groups]

    def open(self, tokens: Sequence[int]) -> OpenSequence:
        count = -(-len(tokens) // BLOCK_SIZE)
        blocks = [np.array([free.pop() for _ in range(count)], np.int32) for free in self.free]
        return OpenSequence(np.asarray(tokens, np.int32), blocks)

    def step(self, parts: Sequence[tuple[OpenSequence, int]], *, all_logits: bool = True) -> NDArray[np.float32]:
        """Compute the next `count` tokens of each (sequence, count); logits of all rows, or of each part's last."""
        inputs = self.inputs(parts, all_logits=all_logits)
        logits = np.full((len(inputs.logit_rows), self.executable.vocab_size), np.nan, np.float32)
        self.executable.run(inputs, logits)
        for sequence, count in parts:
            sequence.num_computed += count
        return logits

    def inputs(self, parts: Sequence[tuple[OpenSequence, int]], *, all_logits: bool = True) -> StepInputs:
        positions = [np.arange(s.num_computed, s.num_computed + n, dtype=np.int32) for s, n in parts]
        row_starts = np.cumsum([0, *(n for _, n in parts)], dtype=np.int32)
        width = max(-(-len(s.tokens) // BLOCK_SIZE) for s, _ in parts)
        tables = []
        for g, group in enumerate(self.groups):
            table = np.full((len(parts), width), -1, np.int32)
            for row, (s, _) in enumerate(parts):
                begin = 0 if group.window is None else max(0, s.num_computed - group.window + 1) // BLOCK_SIZE
                table[row, begin : len(s.blocks[g])] = s.blocks[g][begin:]
            tables.append(table)
        return StepInputs(
            token_ids=np.concatenate([s.tokens[p] for (s, _), p in zip(parts, positions, strict=True)]),
            positions=np.concatenate(positions),
            row_starts=row_starts,
            block_tables=tuple(tables),
            logit_rows=np.arange(row_starts[-1], dtype=np.int32) if all_logits else row_starts[1:] - 1,
        )


def random_tokens(count: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, count, dtype=np.int32)
