"""Small real models with random weights: what the toy is to the scheduler, they are to the whole engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spolia.kernels import Program, ProgramBuilder, RopeSpec, Weight
from spolia.kernels.quants import quantize

VOCAB_SIZE = 256
_HIDDEN, _HEAD_DIM, _NUM_HEADS, _NUM_KV_HEADS, _MLP = 64, 32, 2, 1, 96


def tiny_program(weight_type: str, windows: Sequence[int | None], seed: int = 0) -> Program:
    """A llama-like decoder with one layer an entry of `windows`."""
    rng = np.random.default_rng(seed)

    def matrix(num_rows: int, num_columns: int, gain: float = 1.0) -> Weight:
        values = rng.standard_normal((num_rows, num_columns)) * gain / np.sqrt(num_columns)
        return quantize(values.astype(np.float32), weight_type)

    def norm() -> Weight:
        return quantize((1 + 0.2 * rng.standard_normal(_HIDDEN)).astype(np.float32), "F32")

    b = ProgramBuilder()
    rope = RopeSpec(tuple(10_000.0 ** (-np.arange(0, _HEAD_DIM, 2) / _HEAD_DIM)))
    x = b.embed(matrix(VOCAB_SIZE, _HIDDEN, gain=8.0))
    for window in windows:
        h = b.rms_norm(x, norm(), 1e-5)
        q = b.rope(b.linear(h, matrix(_NUM_HEADS * _HEAD_DIM, _HIDDEN, gain=3.0)), _HEAD_DIM, rope)
        k = b.rope(b.linear(h, matrix(_NUM_KV_HEADS * _HEAD_DIM, _HIDDEN, gain=3.0)), _HEAD_DIM, rope)
        v = b.linear(h, matrix(_NUM_KV_HEADS * _HEAD_DIM, _HIDDEN))
        a = b.attend(q, k, v, num_heads=_NUM_HEADS, num_kv_heads=_NUM_KV_HEADS, scale=_HEAD_DIM**-0.5, window=window)
        x = b.add(x, b.linear(a, matrix(_HIDDEN, _NUM_HEADS * _HEAD_DIM)))
        h = b.rms_norm(x, norm(), 1e-5)
        h = b.glu(b.linear(h, matrix(_MLP, _HIDDEN)), b.linear(h, matrix(_MLP, _HIDDEN)), "silu")
        x = b.add(x, b.linear(h, matrix(_HIDDEN, _MLP)))
    return b.logits(b.rms_norm(x, norm(), 1e-5), matrix(VOCAB_SIZE, _HIDDEN, gain=3.0))
